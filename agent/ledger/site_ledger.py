"""A site's ledger: what the store has of records becomes a Merkle log, of which the site signs how far it has come.

Records are written by whoever decides, in the transaction of the decision (`agent.ports.Store`). This service follows behind: it
hashes what is durable, keeps the hashes of every 256 records, and signs a checkpoint. So nothing is signed that could be taken
back, and hashing holds up no lease. Hashes that were lost are made again from the records; that they are still the same the latest
checkpoint tells.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from agent.ledger.unwitnessed import Unwitnessed
from agent.ports import Clock, Store
from fedpool.errors import IntegrityError, StorageFailed, UsageError
from fedpool.ledger import merkle, notes, tiles
from fedpool.ledger.records import FORMAT, LedgerOpened, Record, encode_at, time_of
from fedpool.ledger.retention import leaf_of
from fedpool.ledger.verification import read_checkpoint
from fedpool.ledger.witnesses import majority, size_by_majority, witnesses_of
from fedpool.transport.identity import Identity
from fedpool.wire.messages import LedgerHead, LedgerProof, ProofWanted, RecordsPage, RecordsWanted

log = logging.getLogger(__name__)

STREAM = "ledger"
CHECKPOINT_STREAM = "checkpoint"
WITNESSED_STREAM = "witnessed"
EVERY_S = 5.0  # a checkpoint is signed at most so often, but for whoever asks for one
PAGE = 16 * tiles.WIDTH  # records read at once
ANSWER_BYTES = 2 << 20  # of records in one answer


class TileRoots(msgspec.Struct, frozen=True, tag="tile.roots"):
    """The hashes of so many further lots of 256 records."""

    hashes: tuple[bytes, ...]


class CheckpointSigned(msgspec.Struct, frozen=True, tag="checkpoint.signed"):
    """The latest checkpoint."""

    size: int
    root: bytes
    note: bytes


class CheckpointWitnessed(msgspec.Struct, frozen=True, tag="checkpoint.witnessed"):
    """The latest checkpoint that others have cosigned."""

    size: int
    note: bytes


class SiteLedger:
    """The ledger of one site.

    Args:
        site: its name.
        identity: signs.
        store: has the records.
        clock: the machine's.
        witnesses: {site: public key} of the pool's sites; the cosignatures of `witnesses_of` count.
        grew: told of every new checkpoint.

    Attributes:
        unwitnessed: how long witnesses have been waited for; told when hubs come and go.
    """

    def __init__(
        self,
        site: str,
        identity: Identity,
        store: Store,
        clock: Clock,
        witnesses: Mapping[str, bytes],
        grew: Callable[[int], None],
    ) -> None:
        self.site = site
        self.key = notes.key_of(site, identity.public)
        self.origin = self.key.name
        self._grew = grew
        self._witnesses = witnesses
        self._witnessed: CheckpointWitnessed | None = None
        self._cosigned: dict[str, int] = {}  # {witness's origin: records of the largest checkpoint it has cosigned}
        self.on_the_way: list[bytes] = []  # handed to be written and not hashed yet, the first being number `size`
        self.unwitnessed = Unwitnessed(clock)
        self._identity = identity
        self._store = store
        self._clock = clock
        self._frontier = merkle.Frontier()
        self._above: list[list[bytes]] = []  # hashes of level 8, 16, …
        self._checkpoint: CheckpointSigned | None = None
        self._last_ms = 0
        self._wanted = asyncio.Event()
        self._advancing = asyncio.Lock()

    def _cosigners(self) -> list[notes.Key]:
        """Whose cosignatures count now."""
        return [
            msgspec.structs.replace(notes.key_of(name, self._witnesses[name]), kind=notes.COSIGNATURE)
            for name in witnesses_of(self.site, self._witnesses)
        ]

    # --- writing

    def at(self, records: Iterable[Record]) -> list[bytes]:
        """Records as they are to be written now: handed to the store before anything else is awaited."""
        self._last_ms = max(self._last_ms, int(self._clock.unix() * 1000))
        self.unwitnessed.wrote()
        written = encode_at(records, self._last_ms)
        self.on_the_way.extend(written)
        return written

    def wrote(self) -> None:
        """There is something new."""
        self._wanted.set()

    def opening(self) -> LedgerOpened:
        """The first record."""
        return LedgerOpened(format=FORMAT, site=self.site, key=base64.b64encode(self._identity.public).decode())

    # --- following

    async def recover(self) -> int:
        """Read how far the ledger has come; returns how many records it has.

        Raises:
            IntegrityError: it is not what this site signed.
        """
        roots = [root for entry in await self._store.read(STREAM, TileRoots) for root in entry.hashes]
        signed = await self._store.read(CHECKPOINT_STREAM, CheckpointSigned)
        witnessed = await self._store.read(WITNESSED_STREAM, CheckpointWitnessed)
        self._witnessed = witnessed[-1] if witnessed else None
        size = await self._store.recorded()
        if len(roots) * tiles.WIDTH > size:
            raise self._changed(f"{len(roots) * tiles.WIDTH} records were hashed, and {size} are there")
        self._frontier, self._above, self.on_the_way = merkle.Frontier(), [], []
        for root in roots:
            self._note_root(root)
        nodes = tiles.nodes(self._above_tile, len(roots) * tiles.WIDTH)
        self._frontier = merkle.Frontier.of(nodes, len(roots) * tiles.WIDTH)
        await self._hash()
        if signed:
            self._checkpoint = signed[-1]
            await self._require_signed(self._checkpoint)
        if size:
            (last,) = await self._store.records(size - 1, 1)
            self._last_ms = max(self._last_ms, time_of(last))
        if self._witnessed is not None:
            self._note_cosigners(self._witnessed)
        self.unwitnessed.witnessed(self.witnessed_by_majority, size)
        return size

    async def _require_signed(self, checkpoint: CheckpointSigned) -> None:
        size = self._frontier.size
        if checkpoint.size > size:
            raise self._changed(f"{checkpoint.size} records were signed, and {size} are there")
        if merkle.root(await self._nodes(size, checkpoint.size), checkpoint.size) != checkpoint.root:
            raise self._changed(f"the first {checkpoint.size} records are not those that were signed")

    def _changed(self, how: str) -> IntegrityError:
        return IntegrityError(
            f"the ledger of {self.site} is not what it was: {how}",
            "somebody changed the database: stop the agent and restore a backup (ibshell-agent restore --help)",
        )

    async def run(self) -> None:
        """Hash and sign what is written, until cancelled."""
        while True:
            await self._wanted.wait()
            await asyncio.sleep(EVERY_S)
            self._wanted.clear()
            try:
                await self.advance()
            except StorageFailed as error:
                log.error("no checkpoint was signed: %s", error)
                await self._again()

    async def _again(self) -> None:
        """What could not be written may be tried once what stands has been read."""
        self._wanted.set()
        try:
            async with self._advancing:
                await self.recover()
        except StorageFailed as error:
            log.error("the ledger cannot be read: %s", error)

    async def advance(self) -> CheckpointSigned:
        """Take in everything that is durable now, and sign it."""
        async with self._advancing:
            await self._hash()
            size, root = self._frontier.size, self._frontier.root()
            if self._checkpoint is None or self._checkpoint.size < size:
                text = notes.Checkpoint(self.origin, size, root).text()
                note = notes.Note(text).signed(notes.sign(text, self.origin, self._identity.signing))
                signed = CheckpointSigned(size, root, note.encode())
                await self._store.append(CHECKPOINT_STREAM, [signed], snapshot=True)
                self._checkpoint = signed
                self.unwitnessed.signed(size)
                self._grew(size)
            return self._checkpoint

    async def witnessed(self, note: bytes) -> None:
        """Keep a checkpoint of this ledger with what others have cosigned; cosignatures of strangers are left out.

        Raises:
            IntegrityError: it is no checkpoint of this site, or a cosignature is forged.
        """
        checkpoint = read_checkpoint(note, self.key)
        found = notes.decode(note)
        cosigners = notes.signers(found, self._cosigners())
        if not cosigners or (self._witnessed is not None and checkpoint.size < self._witnessed.size):
            return
        kept = tuple(one for one in found.signatures if one.name in cosigners or one.name == self.origin)
        witnessed = CheckpointWitnessed(checkpoint.size, notes.Note(found.text, kept).encode())
        try:
            await self._store.append(WITNESSED_STREAM, [witnessed], snapshot=True)
        except StorageFailed:
            await self._store.read(WITNESSED_STREAM, CheckpointWitnessed)
            raise
        self._witnessed = witnessed
        self._note_cosigners(witnessed)
        self.unwitnessed.witnessed(self.witnessed_by_majority, await self._store.recorded())

    def _note_cosigners(self, witnessed: CheckpointWitnessed) -> None:
        for name in notes.signers(notes.decode(witnessed.note), self._cosigners()):
            self._cosigned[name] = max(self._cosigned.get(name, 0), witnessed.size)

    @property
    def witnessed_by_majority(self) -> int:
        """For how many records a majority of the witnesses vouches; for all where there are none."""
        origins = [key.name for key in self._cosigners()]
        return size_by_majority(self._cosigned, origins, majority(len(origins) + 1)) if origins else self.size

    @property
    def size(self) -> int:
        """How many records are durable and hashed."""
        return self._frontier.size

    @property
    def sites(self) -> int:
        """How many sites the pool has, as far as this one knows."""
        return len(self._witnesses) + (self.site not in self._witnesses)

    def unwitnessed_s(self) -> float:
        """For how long there has been something in the ledger that no majority of the witnesses vouches for; 0 for not at all."""
        return self.unwitnessed.seconds if self.sites > 1 else 0.0

    async def _hash(self) -> None:
        """Append to the tree what the store has beyond it."""
        while records := await self._store.records(self._frontier.size, PAGE):
            complete = []
            for record in records:
                for level, _, found in self._frontier.append(leaf_of(record)):
                    if level == tiles.HEIGHT:
                        complete.append(found)
            del self.on_the_way[: len(records)]
            for root in complete:
                self._note_root(root)
            if complete:
                await self._store.append(STREAM, [TileRoots(tuple(complete))])

    def _note_root(self, root: bytes) -> None:
        """One more hash of level 8, and of the levels above where it completes one."""
        for level in range(len(self._above) + 1):
            if level == len(self._above):
                self._above.append([])
            self._above[level].append(root)
            if len(self._above[level]) % tiles.WIDTH:
                return
            hashes: Sequence[bytes] = self._above[level][-tiles.WIDTH :]
            while len(hashes) > 1:
                hashes = [merkle.node_hash(*pair) for pair in zip(hashes[::2], hashes[1::2], strict=True)]
            root = hashes[0]

    # --- reading

    async def head(self) -> LedgerHead:
        """A checkpoint that covers everything that is durable now."""
        note = (await self.advance()).note
        return LedgerHead(self.site, note, self.key.line(), self._witnessed.note if self._witnessed else b"")

    async def page(self, wanted: RecordsWanted) -> RecordsPage:
        """Records as they were written, as many as go into one answer.

        Raises:
            UsageError: there can be no such records.
        """
        if wanted.first < 0 or wanted.count < 1:
            raise UsageError(f"{wanted.count} records from {wanted.first} on", "ask for at least one, from 0 on")
        records = await self._store.records(wanted.first, min(wanted.count, PAGE))
        sizes = itertools.accumulate(len(record) for record in records)
        return RecordsPage(records[: max(1, sum(size <= ANSWER_BYTES for size in sizes))])

    async def proof(self, wanted: ProofWanted) -> LedgerProof:
        """The proof that is wanted.

        Raises:
            IntegrityError: it cannot be given.
        """
        if wanted.index is not None:
            return LedgerProof(await self.inclusion(wanted.index, wanted.size))
        return LedgerProof(await self.consistency(wanted.old, wanted.size))

    def _above_tile(self, level: int, index: int, width: int) -> bytes:
        start = index * tiles.WIDTH
        return b"".join(self._above[level - 1][start : start + width])

    async def _nodes(self, size: int, *around: int) -> merkle.Nodes:
        """The tree's nodes; single records' only near some of them, which are read for it."""
        wanted = {max(0, min(at, size - 1)) // tiles.WIDTH for number in (*around, size) for at in (number - 1, number)}
        leaves = {
            index: b"".join(leaf_of(record) for record in await self._store.records(index * tiles.WIDTH, tiles.WIDTH))
            for index in (wanted if size else ())
        }

        def tile(level: int, index: int, width: int) -> bytes:
            return leaves[index][: width * merkle.HASH_BYTES] if level == 0 else self._above_tile(level, index, width)

        return tiles.nodes(tile, size)

    async def inclusion(self, index: int, size: int) -> list[bytes]:
        """The proof that a record is among the first `size`.

        Raises:
            IntegrityError: it is not.
        """
        self._require_size(size)
        return merkle.inclusion_proof(await self._nodes(size, index), index, size)

    async def consistency(self, old: int, new: int) -> list[bytes]:
        """The proof that the first `old` of the first `new` records are what they were.

        Raises:
            IntegrityError: there are not so many.
        """
        self._require_size(new)
        return merkle.consistency_proof(await self._nodes(new, old), old, new)

    def _require_size(self, size: int) -> None:
        if not 0 <= size <= self._frontier.size:
            raise IntegrityError(f"the ledger of {self.site} has {self._frontier.size} records, not {size}")
