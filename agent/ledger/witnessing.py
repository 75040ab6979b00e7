"""The hub takes every site's checkpoint to that site's witnesses and brings back their cosignatures.

It is believed in nothing: witnesses check the proof, the site checks the cosignatures, and a hub that carries nothing is noticed by
whoever verifies, since the cosigned checkpoint stays behind.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from agent.links import SiteLink
from fedpool.errors import IbshellError, IntegrityError
from fedpool.ledger import notes
from fedpool.ledger.witnesses import witnesses_of
from fedpool.wire.messages import (
    Cosigned,
    LedgerAsked,
    LedgerHead,
    LedgerProof,
    Nothing,
    ProofWanted,
    WitnessedCheckpoint,
    WitnessWanted,
)

log = logging.getLogger(__name__)

EVERY_S = 5.0  # a site's checkpoint is witnessed at most so often
REST = 9.0  # times what one site took: so leases have most of the hub however many sites there are
ROUND_S = 200.0  # but all are witnessed in so long, since sites do not wait for ever
TIMEOUT_S = 5.0


class Witnessing:
    """Carries checkpoints and cosignatures between sites.

    Args:
        links: {site: link}.
    """

    def __init__(self, links: Mapping[str, SiteLink]) -> None:
        self._links = links
        self._known: dict[tuple[str, str], int] = {}  # (ledger, witness) -> size that it cosigned last
        self._grown: dict[str, None] = {}  # sites with a checkpoint to be witnessed, the first that said so first
        self._wanted = asyncio.Event()

    def grew(self, site: str) -> None:
        """A site has a new checkpoint, or has come back."""
        self._grown[site] = None
        self._wanted.set()

    async def run(self) -> None:
        """Carry, until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            sites, self._grown = list(self._grown), {}
            for site in sites:
                await self._carry(site, ROUND_S / len(sites))
            await asyncio.sleep(EVERY_S)

    async def _carry(self, site: str, longest_s: float) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            await self._witnessed(self._links[site])
        except IbshellError as error:
            log.info("the ledger of %s is not witnessed now: %s", site, error)
        took_s = loop.time() - started
        await asyncio.sleep(max(0.0, min(EVERY_S, REST * took_s, longest_s - took_s)))

    async def _witnessed(self, link: SiteLink) -> None:
        head = await link.call("ledger.head", LedgerAsked(link.name), LedgerHead, TIMEOUT_S)
        note, origin = notes.decode(head.note), notes.parse_key(head.key).name
        size = notes.parse_checkpoint(note, origin).size
        signatures = []
        for name in witnesses_of(link.name, self._links):
            if self._links[name].is_up:
                try:
                    line = await self._cosignature(link, self._links[name], head.note, origin, size)
                    signatures += [notes.parse_signature(line)] if line else []
                except IntegrityError as error:
                    log.error("%s does not cosign the ledger of %s: %s", name, link.name, error)
                except IbshellError as error:
                    log.info("%s does not cosign the ledger of %s now: %s", name, link.name, error)
        if signatures:
            cosigned = note.signed(*signatures).encode()
            await link.call("ledger.witnessed", WitnessedCheckpoint(cosigned), Nothing, TIMEOUT_S)

    async def _cosignature(self, link: SiteLink, witness: SiteLink, note: bytes, origin: str, size: int) -> str:
        """A witness's line; "" where it has cosigned a longer ledger already."""
        old = self._known.get((origin, witness.name), 0)
        for _ in range(2):  # the second time from where the witness says
            if old > size:
                break
            proof: list[bytes] = []
            if 0 < old < size:
                asked = ProofWanted(link.name, size, old=old)
                proof = (await link.call("ledger.proof", asked, LedgerProof, TIMEOUT_S)).hashes
            wanted = WitnessWanted(link.name, note, old, proof)
            cosigned = await witness.call("ledger.witness", wanted, Cosigned, TIMEOUT_S)
            old = self._known[origin, witness.name] = cosigned.size
            if cosigned.line:
                return cosigned.line
        return ""
