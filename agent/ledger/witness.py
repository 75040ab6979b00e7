"""A site as witness of other sites' ledgers: it cosigns a checkpoint only if it continues what it cosigned before.

So a site that shows one history here and another there is found out: it cannot have both cosigned by one witness, and two
witnesses that were shown different ones hold, in the site's own signature, the proof (`ibshell ledger verify` compares them). What
was cosigned is durable before it is said. The semantics are those of c2sp.org/tlog-witness.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from agent.ledger.site_ledger import SiteLedger
from agent.ports import Clock, Store
from fedpool.errors import IntegrityError, NotAuthorised, StorageFailed
from fedpool.ledger import merkle, notes
from fedpool.ledger.records import TEXT_MAX, WitnessRefused
from fedpool.ledger.verification import read_checkpoint
from fedpool.transport.identity import Identity
from fedpool.wire.messages import Cosigned, SeenCheckpoints, WitnessWanted

STREAM = "witness"
SNAPSHOT_EVERY = 1000


class Witnessed(msgspec.Struct, frozen=True, tag="witnessed"):
    """The latest checkpoint of a site's ledger that was cosigned here, with that site's signature."""

    site: str
    size: int
    root: bytes
    note: bytes

    @property
    def origin(self) -> str:
        """Of the ledger: the first line of its checkpoints."""
        return self.note.partition(b"\n")[0].decode()


class WitnessState(msgspec.Struct, frozen=True, tag="witness.state"):
    """All of them: a snapshot."""

    seen: tuple[Witnessed, ...]


WitnessEntry: TypeAlias = Witnessed | WitnessState


class Witness:
    """What one site has seen of others' ledgers.

    Args:
        peers: {site: its public key}.
        identity: cosigns.
        ledger: this site's own, in which refusals are recorded.
        store: where it is kept.
        clock: the machine's.
    """

    def __init__(
        self, peers: Mapping[str, bytes], identity: Identity, ledger: SiteLedger, store: Store, clock: Clock
    ) -> None:
        self._peers = peers
        self._identity = identity
        self._ledger = ledger
        self._store = store
        self._clock = clock
        self._seen: dict[str, Witnessed] = {}  # by the ledger's origin: a site with a new key has a new ledger
        self._entries = 0
        self._one = asyncio.Lock()

    async def recover(self) -> None:
        """Read what was cosigned."""
        for entry in await self._store.read(STREAM, WitnessEntry):
            self._seen |= {one.origin: one for one in (entry.seen if isinstance(entry, WitnessState) else (entry,))}
            self._entries += 1

    def seen(self) -> SeenCheckpoints:
        """The checkpoints that were cosigned last."""
        origins = {site: notes.key_of(site, public).name for site, public in self._peers.items()}
        return SeenCheckpoints({s: self._seen[origin].note for s, origin in origins.items() if origin in self._seen})

    async def cosign(self, wanted: WitnessWanted) -> Cosigned:
        """Cosign a checkpoint, or say from what size on its consistency is to be shown.

        Raises:
            NotAuthorised: the site is none of those that are witnessed here.
            IntegrityError: it is not that site's, or does not continue what was cosigned before; that is recorded.
            StorageFailed: it could not be kept, so it is not cosigned.
        """
        public = self._peers.get(wanted.site)
        if public is None or wanted.site == self._ledger.site:
            raise NotAuthorised(f"{self._ledger.site} is no witness of {wanted.site!r}", "add it to [peers]")
        key = notes.key_of(wanted.site, public)
        checkpoint = read_checkpoint(wanted.note, key)
        async with self._one:
            known = self._seen.get(key.name)
            old = known.size if known is not None else 0
            if wanted.old != old or checkpoint.size < old:
                return Cosigned("", old)
            before = known.root if known is not None else merkle.EMPTY_ROOT
            try:
                merkle.require_consistency(old, checkpoint.size, before, checkpoint.root, wanted.proof)
            except IntegrityError as error:
                await self._refuse(wanted, checkpoint, error)
                raise
            note = notes.decode(wanted.note)
            own = [one for one in note.signatures if one.key_id == key.id and one.name == key.name]
            await self._keep(
                Witnessed(wanted.site, checkpoint.size, checkpoint.root, notes.Note(note.text, tuple(own)).encode())
            )
            time_s = int(self._clock.unix())
            line = notes.cosign(note.text, self._ledger.origin, self._identity.signing, time_s).line()
            return Cosigned(line, checkpoint.size)

    async def _keep(self, seen: Witnessed) -> None:
        after = {**self._seen, seen.origin: seen}
        whole = self._entries >= SNAPSHOT_EVERY
        try:
            entry: WitnessEntry = WitnessState(tuple(after.values())) if whole else seen
            await self._store.append(STREAM, [entry], snapshot=whole)
        except StorageFailed:
            await self._store.read(STREAM, WitnessEntry)  # the stream takes nothing before
            raise
        self._seen, self._entries = after, 1 if whole else self._entries + 1

    async def _refuse(self, wanted: WitnessWanted, checkpoint: notes.Checkpoint, error: IntegrityError) -> None:
        refusal = WitnessRefused(
            site=wanted.site,
            size=checkpoint.size,
            root=checkpoint.root.hex(),
            known=wanted.old,
            reason=error.message[:TEXT_MAX],
        )
        await self._store.append(STREAM, (), records=self._ledger.at([refusal]))
        self._ledger.wrote()
