"""Entries in etcd, for an agent with stand-bys: one of several holds the leadership and writes, the others wait for it.

Keys, under a prefix of the agent's own:

    leader                     the id of the run that may write, bound to an etcd lease that it keeps alive
    e/STREAM/NUMBER            a group of entries of one stream, numbered across all streams; compressed JSON
    c/STREAM/NUMBER/RUN/PIECE  pieces of a group that is too large for one transaction
    r/FIRST                    records, from number FIRST on

Every write is one transaction on two conditions: this run is still the leader, and nothing is written under the group's number.
So a predecessor that has lost the leadership writes nothing more however late its request arrives, and a request whose answer
was lost is repeated without doubling anything. A run counts the leadership as lost earlier than etcd does: from when it last
asked to keep it, not from when it was answered. What lies before a stream's latest snapshot is deleted with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import aetcd
import msgspec
from aetcd.exceptions import ClientError

from agent.ports import Clock, instant
from fedpool.errors import IntegrityError, NotFound, StorageFailed, UsageError
from fedpool.step import Instant

log = logging.getLogger(__name__)

PIECE_BYTES = 900_000  # etcd refuses a request of more than 1.5 MiB
RECORDS_BYTES = 400_000  # in one transaction, before they are compressed
PORT = 2379
OPTIONS = {"grpc.max_receive_message_length": -1}

Result = TypeVar("Result")


class Timing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long what takes, in seconds; in the address as `?ttl=6&renew=0.5&request=1&retry=0.2`.

    Attributes:
        ttl: of the leadership; what etcd stores decides, whatever a stand-by believes.
        renew: how often it is renewed.
        request: how long one member may take to answer.
        retry: between two attempts.
        margin: so much earlier than etcd a run counts its leadership as lost.
    """

    ttl: int = 6
    renew: float = 0.5
    request: float = 1.0
    retry: float = 0.2
    margin: float = 0.5

    def check(self) -> None:
        """Refuse what would let two be active at once.

        Raises:
            UsageError: a renewal that fails at the first attempt would come too late; the sum is told.
        """
        total = self.renew + self.request + self.retry
        if min(self.ttl, self.renew, self.request, self.retry, self.margin) <= 0 or total >= self.ttl - self.margin:
            raise UsageError(
                f"renew {self.renew:g} + request {self.request:g} + retry {self.retry:g} = {total:g} s is not less than "
                f"ttl {self.ttl:g} - margin {self.margin:g} = {self.ttl - self.margin:g} s",
                "the active agent would still work when another one starts: choose a longer ttl or shorter times",
            )


class _Entry(msgspec.Struct, array_like=True):
    at: float
    boot: str
    unix: float
    body: msgspec.Raw


class _Group(msgspec.Struct):
    """The value of one group's key; `writer` tells whose it is, so that a repeated request knows its own."""

    writer: str
    entries: list[_Entry] = []
    snapshot: bool = False
    pieces: int = 0


class _Records(msgspec.Struct, array_like=True):
    """The value of a key of records; `writer` as in a group."""

    writer: str
    records: list[bytes]


class _Waiting:
    """What one `append` wants written."""

    def __init__(
        self, stream: str, basis: int, entries: list[_Entry], snapshot: bool, records: Sequence[bytes]
    ) -> None:
        self.stream = stream
        self.basis = basis
        self.entries = entries
        self.snapshot = snapshot
        self.records = records
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


def parse(url: str) -> tuple[list[tuple[str, int]], str, Timing]:
    """`etcd://HOST[:PORT][,HOST[:PORT]…][/PREFIX][?ttl=…]` as ([(host, port)], prefix, timing).

    Raises:
        UsageError: it is none.
    """
    parts = urlsplit(url)
    members = []
    for member in parts.netloc.split(","):
        host, _, port = member.rpartition(":") if ":" in member else (member, "", str(PORT))
        if parts.scheme != "etcd" or not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise UsageError(
                f"store = {url!r} is no address", 'for example store = "etcd://10.0.0.1:2379,10.0.0.2:2379"'
            )
        members.append((host, int(port)))
    try:
        timing = msgspec.convert(dict(parse_qsl(parts.query, strict_parsing=bool(parts.query))), Timing, strict=False)
    except (ValueError, msgspec.ValidationError) as error:
        raise UsageError(f"store = {url!r}: {error}", "it may name ttl, renew, request, retry, margin") from None
    timing.check()
    return members, parts.path.strip("/"), timing


class EtcdStore:
    """One agent's durable entries in etcd; see `agent.ports.Store`. Made by `lead`, which waits for the leadership.

    Args:
        url: see `parse`.
        name: of the agent: what stands under it belongs to it and its stand-bys alone.
        clock: the machine's.
    """

    def __init__(self, url: str, name: str, clock: Clock) -> None:
        self._url = url
        self._members, prefix, self._timing = parse(url)
        self._prefix = f"{prefix or 'ibshell'}/{name}/"
        self._clock = clock
        self._run = secrets.token_hex(8)
        self._client: aetcd.Client | None = None
        self._used: list[aetcd.Client] = []
        self._lease: Any = None
        self._kept = 0.0
        self._number = 0
        self._recorded = 0
        self._firsts: list[int] = []  # of the keys that hold records
        self._waiting: list[_Waiting] = []
        self._wanted = asyncio.Event()
        self._in_flight: Counter[str] = Counter()
        self._basis: Counter[str] = Counter()
        self._failed: set[tuple[str, int]] = set()
        self._why_lost = ""
        self._lost = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def _key(self, name: str) -> bytes:
        return (self._prefix + name).encode()

    def _stream_key(self, stream: str, number: int | None = None, kind: str = "e") -> bytes:
        return self._key(f"{kind}/{quote(stream, safe='')}/{'' if number is None else f'{number:020}'}")

    # --- the members

    async def _ask(self, question: Callable[[aetcd.Client], Awaitable[Result]]) -> Result:
        """Put a question to one of the members, the next if one does not answer.

        Raises:
            StorageFailed: none answers.
        """
        error: Exception | None = None
        for _ in range(len(self._members)):
            if self._client is None:
                host, port = self._members[0]
                self._client = aetcd.Client(host, port, timeout=self._timing.request, options=OPTIONS)
            try:
                return await question(self._client)
            except ClientError as found:
                error = found
                # Others may still be waiting for the client's answer: it is closed at the end.
                if self._client is not None:
                    self._used.append(self._client)
                    self._client = None
                    self._members = [*self._members[1:], self._members[0]]
        raise StorageFailed(f"etcd at {self._url} does not answer: {error!r}", "are its members running?")

    # --- the leadership

    async def lead(self) -> None:
        """Wait until this run is the leader; then it may write."""
        said = False
        while not await self._tried():
            if not said:
                log.info("another agent of this name is active; standing by")
                said = True
            await asyncio.sleep(self._timing.retry)
        groups = await self._ask(lambda client: client.get_prefix(self._key("e/"), keys_only=True))
        self._number = max((int(kv.key.rpartition(b"/")[2]) for kv in groups), default=0)
        held = await self._ask(lambda client: client.get_prefix(self._key("r/"), keys_only=True))
        self._firsts = sorted(int(kv.key.rpartition(b"/")[2]) for kv in held)
        if self._firsts:
            self._recorded = self._firsts[-1] + len(await self._records_at(self._firsts[-1]))
        self._tasks = [asyncio.create_task(self._keep()), asyncio.create_task(self._write_all())]

    async def _tried(self) -> bool:
        asked = self._clock.now()
        try:
            if self._lease is None:
                self._lease = await self._ask(lambda client: client.lease(self._timing.ttl))
            lease = self._lease

            async def take(client: aetcd.Client) -> bool:
                put = client.transactions.put(self._key("leader"), self._run.encode(), lease.id)
                free = client.transactions.version(self._key("leader")) == 0
                taken, _ = await client.transaction(compare=[free], success=[put], failure=[])
                if not taken:
                    await client.refresh_lease(lease.id)
                    holder = await client.get(self._key("leader"))
                    return holder is not None and bool(holder.value == self._run.encode())
                return True

            self._kept = asked
            return await self._ask(take)
        except StorageFailed as error:
            log.warning("%s", error)
            self._lease = None
            await asyncio.sleep(self._timing.retry)
            return False

    async def _keep(self) -> None:
        """Keep the leadership; give up before etcd gives it to another."""
        timing = self._timing
        while True:
            await asyncio.sleep(timing.renew)
            asked = self._clock.now()
            left = timing.ttl - timing.margin - (asked - self._kept)
            try:
                async with asyncio.timeout(max(0.0, left)):
                    answer = await self._ask(lambda client: client.refresh_lease(self._lease.id))
            except StorageFailed as error:
                log.warning("%s", error)
                continue
            except TimeoutError:
                self._give_up("etcd has not answered for so long that another may be active now")
                return
            if answer.TTL <= 0:
                self._give_up("the leadership has lapsed")
                return
            self._kept = asked

    def _give_up(self, why: str) -> None:
        self._why_lost = self._why_lost or why
        self._lost.set()
        self._wanted.set()

    async def lost(self) -> None:
        """See `Store.lost`."""
        await self._lost.wait()
        raise self._refusal("")

    def _refusal(self, stream: str) -> StorageFailed:
        if self._why_lost:
            return StorageFailed(f"this agent is not the active one any more: {self._why_lost}", "it stands by again")
        return StorageFailed(f"{self._url}: what came before in {stream} was not written", "ask again")

    # --- writing

    async def append(
        self,
        stream: str,
        entries: Sequence[msgspec.Struct],
        *,
        snapshot: bool = False,
        records: Sequence[bytes] = (),
    ) -> None:
        """See `Store.append`. What waits to be written is written in one transaction.

        Raises:
            StorageFailed: this agent is not the active one any more.
        """
        basis = self._basis[stream]
        if self._why_lost or (stream, basis) in self._failed:
            raise self._refusal(stream)
        if not entries and not records and not self._in_flight[stream]:
            return
        now = instant(self._clock)
        made = [_Entry(now.at, now.boot or "", now.unix, msgspec.Raw(msgspec.json.encode(entry))) for entry in entries]
        one = _Waiting(stream, basis, made, snapshot, records)
        self._in_flight[stream] += 1
        self._waiting.append(one)
        self._wanted.set()
        try:
            await one.done
        finally:
            self._in_flight[stream] -= 1

    async def _write_all(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            waiting, self._waiting = self._waiting, []
            while waiting:
                count = _fit(waiting)
                await self._write(waiting[:count])
                waiting = waiting[count:]

    async def _write(self, group: list[_Waiting]) -> None:
        refused = [one for one in group if self._why_lost or (one.stream, one.basis) in self._failed]
        for one in refused:
            _settle(one, self._refusal(one.stream))
        group = [one for one in group if one not in refused]
        streams: dict[str, list[_Waiting]] = {}
        for one in group:
            if one.entries:
                streams.setdefault(one.stream, []).append(one)
        try:
            records = [record for one in group for record in one.records]
            if streams or records:
                await self._transact(streams, records)
        except StorageFailed as error:
            self._failed.update((one.stream, one.basis) for one in group if one.entries or one.records)
            for one in group:
                _settle(one, StorageFailed(error.message, error.hint))
            return
        for one in group:
            _settle(one, None)

    async def _transact(self, streams: dict[str, list[_Waiting]], records: list[bytes]) -> None:
        values: list[tuple[bytes, bytes]] = []
        deleted: list[tuple[bytes, bytes]] = []
        for stream, parts in streams.items():
            self._number += 1
            snapshot = parts[0].snapshot
            entries = [entry for part in parts for entry in part.entries]
            value = zlib.compress(msgspec.json.encode(_Group(self._run, entries, snapshot)), 1)
            if len(value) > PIECE_BYTES:
                value = await self._in_pieces(stream, value, snapshot)
            values.append((self._stream_key(stream, self._number), value))
            if snapshot:
                for kind in ("e", "c"):
                    before = self._stream_key(stream, self._number, kind)
                    deleted.append((self._stream_key(stream, kind=kind), before))
        if records:
            packed = zlib.compress(msgspec.msgpack.encode(_Records(self._run, records)), 1)
            values.append((self._record_key(self._recorded), packed))
        await self._put(values, deleted)
        if records:
            self._firsts.append(self._recorded)
            self._recorded += len(records)

    def _record_key(self, first: int) -> bytes:
        return self._key(f"r/{first:020}")

    def _piece_key(self, stream: str, number: int, writer: str, index: str = "") -> bytes:
        return self._stream_key(stream, number, "c") + f"/{writer}/{index}".encode()

    async def _in_pieces(self, stream: str, value: bytes, snapshot: bool) -> bytes:
        pieces = [value[at : at + PIECE_BYTES] for at in range(0, len(value), PIECE_BYTES)]
        for index, piece in enumerate(pieces):
            await self._put([(self._piece_key(stream, self._number, self._run, f"{index:06}"), piece)], [])
        return zlib.compress(msgspec.json.encode(_Group(self._run, [], snapshot, len(pieces))), 1)

    async def _put(
        self, values: list[tuple[bytes, bytes]], deleted: list[tuple[bytes, bytes]], *, in_place: bool = False
    ) -> None:
        """Write keys that are not there yet (or are, `in_place`), as the leader, until it is known whether they stand.

        Raises:
            StorageFailed: the leadership is lost; then nothing of it is written ever.
        """

        async def transaction(client: aetcd.Client) -> bool:
            t = client.transactions
            leads = t.value(self._key("leader")) == self._run.encode()
            new = [] if in_place else [t.version(key) == 0 for key, _ in values]
            puts = [t.put(key, value) for key, value in values]
            deletes = [t.delete(start, end) for start, end in deleted]
            done, _ = await client.transaction(compare=[leads, *new], success=[*deletes, *puts], failure=[])
            if done:
                return True
            # Either an earlier try of this very request has been carried out, or another leads.
            found = await client.get(values[0][0])
            return found is not None and bool(found.value == values[0][1])

        while not self._why_lost:
            try:
                if await self._ask(transaction):
                    return
                self._give_up("another has taken over")
            except StorageFailed as error:
                log.warning("%s", error)
                await asyncio.sleep(self._timing.retry)
        raise self._refusal("")

    # --- reading

    async def read(self, stream: str, kinds: Any) -> list[Any]:
        """See `Store.read`.

        Raises:
            IntegrityError: an entry is not what was written.
            StorageFailed: etcd does not answer.
        """
        self._basis[stream] += 1
        decoder = msgspec.json.Decoder(kinds)
        found: list[Any] = []
        keys = await self._ask(lambda client: client.get_prefix(self._stream_key(stream), sort_order="ascend"))
        for kv in keys:
            group = await self._group(kv.key, kv.value)
            if group.snapshot:
                found.clear()
            try:
                found += [decoder.decode(entry.body) for entry in group.entries]
            except msgspec.MsgspecError as error:
                raise IntegrityError(f"{self._url}: an entry of {stream} cannot be read: {error}") from None
        return found

    async def _group(self, key: bytes, value: bytes) -> _Group:
        try:
            group = msgspec.json.decode(zlib.decompress(value), type=_Group)
            if group.pieces:
                stream, _, number = key.decode().removeprefix(self._prefix + "e/").rpartition("/")
                prefix = self._piece_key(unquote(stream), int(number), group.writer)
                pieces = await self._ask(lambda client: client.get_prefix(prefix, sort_order="ascend"))
                whole = b"".join(kv.value for kv in pieces)
                group = msgspec.json.decode(zlib.decompress(whole), type=_Group)
        except (zlib.error, msgspec.MsgspecError) as error:
            raise IntegrityError(f"{self._url}: {key.decode()} is damaged: {error}") from None
        return group

    async def streams(self, prefix: str) -> list[str]:
        """See `Store.streams`."""
        keys = await self._ask(lambda client: client.get_prefix(self._key("e/"), keys_only=True))
        first: dict[str, int] = {}
        for kv in keys:
            name, _, number = kv.key.decode().removeprefix(self._prefix + "e/").rpartition("/")
            stream = unquote(name)
            if stream.startswith(prefix):
                first[stream] = min(first.get(stream, int(number)), int(number))
        return sorted(first, key=lambda stream: first[stream])

    async def recorded(self) -> int:
        """See `Store.recorded`."""
        return self._recorded

    async def records(self, first: int, count: int) -> list[bytes]:
        """See `Store.records`.

        Raises:
            IntegrityError: one is missing or damaged.
            StorageFailed: etcd does not answer.
        """
        found: list[bytes] = []
        last = min(first + count, self._recorded)
        while first + len(found) < last:
            here = first + len(found)
            begins = self._firsts[bisect_right(self._firsts, here) - 1]
            more = (await self._records_at(begins))[here - begins : last - begins]
            if not more:
                raise IntegrityError(f"{self._url}: record {here} of the ledger is missing")
            found += more
        return found

    async def replace_records(self, first: int, records: Sequence[bytes]) -> None:
        """See `Store.replace_records`; all or none of each key.

        Raises:
            StorageFailed: etcd does not answer, or another leads.
        """
        last = first + len(records)
        for begins in self._firsts[bisect_right(self._firsts, first) - 1 : bisect_right(self._firsts, last - 1)]:
            there = await self._records_at(begins)
            new = [
                records[number - first] if first <= number < last else record
                for number, record in enumerate(there, begins)
            ]
            packed = zlib.compress(msgspec.msgpack.encode(_Records(self._run, new)), 1)
            await self._put([(self._record_key(begins), packed)], [], in_place=True)

    async def _records_at(self, first: int) -> list[bytes]:
        key = self._record_key(first)
        kv = await self._ask(lambda client: client.get(key))
        try:
            return msgspec.msgpack.decode(zlib.decompress(b"" if kv is None else kv.value), type=_Records).records
        except (zlib.error, msgspec.MsgspecError) as error:
            raise IntegrityError(f"{self._url}: {key.decode()} is damaged: {error}") from None

    async def last_written(self) -> Instant:
        """See `Store.last_written`."""
        keys = await self._ask(lambda client: client.get_prefix(self._key("e/"), keys_only=True))
        latest = max((kv.key for kv in keys), key=lambda key: int(key.rpartition(b"/")[2]), default=None)
        if latest is None:
            return Instant()
        found = await self._ask(lambda client: client.get(latest))
        if found is None:
            raise NotFound(f"{self._url}: {latest.decode()} has just been deleted")
        entry = (await self._group(latest, found.value)).entries[-1]
        return Instant(entry.at, entry.boot, entry.unix)

    async def close(self) -> None:
        """See `Store.close`; gives the leadership up, so that a stand-by need not wait."""
        waiting = [one.done for one in self._waiting]
        if waiting and not self._why_lost:
            await asyncio.wait(waiting, timeout=self._timing.ttl)
        for task in self._tasks:
            task.cancel()
        if self._lease is not None and not self._why_lost:
            with contextlib.suppress(StorageFailed, ClientError):
                await self._ask(lambda client: client.revoke_lease(self._lease.id))
        self._give_up("it has ended")
        for client in (self._client, *self._used):
            if client is not None:
                with contextlib.suppress(ClientError):
                    await client.close()


def _fit(waiting: Sequence[_Waiting]) -> int:
    """How many of these go into one transaction; a snapshot begins one: its stream's entries before it are deleted with it."""
    size = 0
    for number, one in enumerate(waiting):
        size += sum(len(record) for record in one.records)
        if number and (one.snapshot or size > RECORDS_BYTES):
            return number
    return len(waiting)


def _settle(one: _Waiting, error: StorageFailed | None) -> None:
    if one.done.done():
        return
    if error is None:
        one.done.set_result(None)
    else:
        one.done.set_exception(error)
