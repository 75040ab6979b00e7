"""Which sites witness a site's ledger, and how many of them make a majority: by names alone, so that all parties agree."""

import hashlib
from collections.abc import Iterable, Mapping

# Of a site; in a larger pool they are chosen by a hash of the names, so that the work grows with the sites.
WITNESSES_MAX = 8


def witnesses_of(site: str, names: Iterable[str]) -> list[str]:
    """Who witnesses a site: all the others, or in a large pool `WITNESSES_MAX` of them, the same ones always."""
    others = sorted(name for name in names if name != site)
    if len(others) <= WITNESSES_MAX:
        return others
    return sorted(others, key=lambda name: hashlib.sha256(f"{site}/{name}".encode()).digest())[:WITNESSES_MAX]


def majority(sites: int) -> int:
    """How many cosigners a site needs in a pool of so many sites: more than half of its witnesses, none where it is alone."""
    return min(sites - 1, WITNESSES_MAX) // 2 + 1 if sites > 1 else 0


def size_by_majority(cosigned: Mapping[str, int], witnesses: Iterable[str], needed: int) -> int:
    """How many records a majority vouches for.

    Args:
        cosigned: {witness: records of the largest checkpoint it has cosigned}.
        witnesses: whose word counts.
        needed: how many of them.
    """
    sizes = sorted((cosigned.get(name, 0) for name in witnesses), reverse=True)
    return sizes[needed - 1] if 0 < needed <= len(sizes) else 0
