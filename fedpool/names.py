"""What may be a name or an id: they end up in file names, host names, environments and terminals, and come from other parties."""

import re

from fedpool.errors import UsageError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
RULE = "letters, digits, '.', '_', '-', beginning with a letter or digit, at most 63"
_ID = re.compile(r"[0-9a-f]{8,64}")


def require_id(text: str, what: str) -> str:
    """An id of a lease, run or upload, as it may stand in a path.

    Raises:
        UsageError: it is none; `what` names it.
    """
    if not _ID.fullmatch(text):
        raise UsageError(f"{text[:70]!r} is no {what} id", "8 to 64 hexadecimal digits")
    return text


def scope_of(site: str, public: bytes) -> str:
    """What the marks of a site's processes begin with: another pool's site of that name on the same machine has another key."""
    return f"{site}.{public.hex()[:8]}"


def mark_of(scope: str, lease: str) -> str:
    """The mark that the processes of a lease bear."""
    return f"{scope}/{lease}"
