"""The hub's links to its sites: connected in one of three ways, re-connected for ever, described anew each time."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import asyncssh

from agent import files
from agent.backoff import LAST_S, delay
from agent.config import SiteEntry
from agent.ports import Clock, Dialler
from fedpool.errors import IbshellError, NotAuthorised, NotFound, PeerProtocolError, Unreachable
from fedpool.identity.keys import parse_public
from fedpool.identity.principals import site_principal
from fedpool.transport import openssh, ssh
from fedpool.transport.bulk import BulkChannel, Source
from fedpool.transport.identity import Identity
from fedpool.transport.peer import Answer, Peer
from fedpool.transport.stream import Stream
from fedpool.wire.messages import DescriptionWanted, SiteDescription
from fedpool.wire.session import Notice

log = logging.getLogger(__name__)

DESCRIBE = "site.describe"


class SshDialler:
    """Reaches sites over SSH: their agent itself, or a stock sshd that starts a bridge to it.

    Args:
        identity: the hub's key.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    @asynccontextmanager
    async def connect(self, entry: SiteEntry, subsystem: str) -> AsyncIterator[tuple[Stream, dict[str, str]]]:
        """See `Dialler.connect`."""
        if entry.mode == "ssh":
            words = [*entry.command, subsystem]
            async with openssh.connect(
                entry.address, entry.ssh_config, words, entry.allow_revoked_other_port
            ) as connected:
                yield connected
            return
        stdio = entry.mode == "stdio"
        key = parse_public(
            entry.host_key if stdio else entry.key, f"site {entry.name}: {'host_key' if stdio else 'key'}"
        )
        user = entry.user if stdio else ssh.USERNAME
        role = "" if stdio else site_principal(entry.name)
        connection = await ssh.dial(entry.address, key, self._identity, entry.name, user, role)
        try:
            stream: Stream
            if stdio:
                stream = await ssh.open_command(connection, [*entry.command, subsystem])
            else:
                stream = await ssh.open_channel(connection, subsystem)
            yield stream, ssh.negotiated(connection)
        finally:
            connection.abort()


class SiteLink:
    """The link to one site.

    Args:
        entry: how it is reached.
        dialler: reaches it.
        clock: the machine's.
        chance: spreads attempts.
        source: finds objects the site fetches from the hub.
        description_wanted: the site's name -> how it is asked to describe itself; the first it hears, and with it the hub's term.
        up: told when the site has connected and described itself.
        down: told when it is silent.
        notice: takes what the site tells by itself.

    Attributes:
        description: the site's latest word about itself, or None before the first.
        since: the hub's clock when the link went up or down.
        seen: wall clock of the latest word, "" before the first.
        error: why it is down.
        negotiated: what the SSH link agreed on.
    """

    def __init__(
        self,
        entry: SiteEntry,
        dialler: Dialler,
        clock: Clock,
        chance: random.Random,
        source: Callable[[bytes], Awaitable[Source]],
        description_wanted: Callable[[str], DescriptionWanted],
        up: Callable[[SiteLink], Awaitable[None]],
        down: Callable[[SiteLink], None],
        notice: Callable[[SiteLink, Notice], None],
    ) -> None:
        self.entry = entry
        self.name = entry.name
        self.key = parse_public(entry.key, f"site {entry.name}")
        self.description: SiteDescription | None = None
        self._dialler = dialler
        self._clock = clock
        self._chance = chance
        self.since = clock.now()
        self.seen = ""
        self.error: IbshellError = Unreachable(f"{entry.name} has not connected yet")
        self.negotiated: dict[str, str] = {}
        self._source = source
        self._description_wanted = description_wanted
        self._up = up
        self._down = down
        self._notice = notice
        self._peer: Peer | None = None
        self._bulk: BulkChannel | None = None
        self._bulk_changed = asyncio.Condition()
        self._describing = asyncio.Lock()
        self._bytes_in = self._bytes_out = 0

    @property
    def is_up(self) -> bool:
        """Whether the site answers."""
        return self._peer is not None and self.description is not None

    @property
    def traffic(self) -> tuple[int, int]:
        """Bulk payload bytes (from the site, to the site)."""
        bulk = self._bulk
        return self._bytes_in + (bulk.received if bulk else 0), self._bytes_out + (bulk.sent if bulk else 0)

    def close(self) -> None:
        """Give up what is connected now."""
        if self._peer is not None:
            self._peer.close()
        if self._bulk is not None:
            self._bulk.close()

    async def run(self) -> None:
        """Keep the link up until cancelled; a site that dials in comes through `accept` instead."""
        if self.entry.mode == "reverse":
            await asyncio.Event().wait()
        async with asyncio.TaskGroup() as tasks:
            for subsystem in ssh.SUBSYSTEMS:
                tasks.create_task(self._keep(subsystem))

    async def _keep(self, subsystem: str) -> None:
        attempt = 0
        while True:
            started = self._clock.now()
            try:
                async with self._dialler.connect(self.entry, subsystem) as (stream, negotiated):
                    if subsystem == ssh.CONTROL:
                        self.negotiated = negotiated
                    await self._serve_stream(subsystem, stream)
            except IbshellError as error:
                if subsystem == ssh.CONTROL:
                    self.error = error
                log.info("%s: %s", self.name, error)
            attempt = 0 if self._clock.now() - started > 2 * LAST_S else attempt + 1
            await asyncio.sleep(delay(attempt, self._chance))

    async def accept(self, connection: asyncssh.SSHClientConnection) -> None:
        """Serve a connection that the site dialled; it says what it is for by what it lets the hub open."""
        for subsystem in ssh.SUBSYSTEMS:
            try:
                stream = await ssh.open_channel(connection, subsystem)
            except Unreachable:
                continue
            try:
                if subsystem == ssh.CONTROL:
                    self.negotiated = ssh.negotiated(connection)
                await self._serve_stream(subsystem, stream)
            except IbshellError as error:
                self.error = error if subsystem == ssh.CONTROL else self.error
                log.info("%s: %s", self.name, error)
            return
        log.warning("%s dialled in and lets nothing be opened", self.name)

    async def _serve_stream(self, subsystem: str, stream: Stream) -> None:
        try:
            if subsystem == ssh.BULK:
                await self._serve_bulk(stream)
            else:
                await self._serve_control(stream)
        except BaseExceptionGroup as group:
            known, others = group.split(IbshellError)
            if others is not None or known is None:
                raise
            error = known.exceptions[0]
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise error from None

    async def _serve_control(self, stream: Stream) -> None:
        early: list[Notice] = []

        def noticed(notice: Notice) -> None:
            if self._peer is peer:
                self._notice(self, notice)
            else:
                early.append(notice)  # later than what the site says about itself, which is still on its way

        peer = Peer(stream, "hub", "hub", notice=noticed)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(peer.run())
            hello = await peer.start()
            if hello.role != "site" or hello.name != self.name:
                peer.close()
                raise PeerProtocolError(
                    f"{self.name} introduces itself as {hello.role} {hello.name}", "check its configuration"
                )
            description = await peer.call(DESCRIBE, self._description_wanted(self.name), SiteDescription)
            if description.identity != self.key:
                peer.close()
                raise NotAuthorised(f"{self.name} has another identity key than the hub's configuration names")
            if self._peer is not None:
                self._peer.close()  # the site is back before the hub noticed that it was gone
            self._peer, self.description = peer, description
            self.since, self.seen = self._clock.now(), self._clock.wall()
            log.info("%s is up", self.name)
            await self._up(self)
            for notice in early:
                self._notice(self, notice)
            try:
                await running
            finally:
                if self._peer is peer:
                    self._peer = None
                    self.since = self._clock.now()
                    self.error = Unreachable(f"{self.name} has been silent since {self._clock.wall()}")
                    log.info("%s is down", self.name)
                    self._down(self)

    async def _serve_bulk(self, stream: Stream) -> None:
        channel = BulkChannel(stream, self._source)
        async with self._bulk_changed:
            if self._bulk is not None:
                self._bulk.close()
            self._bulk = channel
            self._bulk_changed.notify_all()
        try:
            await channel.run()
        finally:
            self._bytes_in += channel.received
            self._bytes_out += channel.sent
            if self._bulk is channel:
                self._bulk = None

    async def call(self, method: str, body: object, expect: type[Answer], timeout_s: float | None = 30.0) -> Answer:
        """Ask the site.

        Raises:
            Unreachable: it is down, or goes down before it answers.
            IbshellError: whatever it answers.
        """
        peer = self._peer
        if peer is None:
            raise Unreachable(f"{self.name} cannot be reached: {self.error.message}", self.error.hint)
        try:
            answer = await peer.call(method, body, expect, timeout_s)
        except Unreachable as error:
            raise type(error)(f"{self.name}: {error.message}", error.hint) from None
        self.seen = self._clock.wall()
        return answer

    async def describe(self) -> None:
        """Have the site describe itself again.

        Raises:
            Unreachable: it is down; it does so when it is back.
        """
        async with self._describing:  # one after the other, so that the latest is the last
            self.description = await self.call(DESCRIBE, self._description_wanted(self.name), SiteDescription)
            await self._up(self)

    async def fetch(self, object_id: bytes, path: Path, patience_s: float = 30.0) -> None:
        """Get an object from the site into a file, over as many bulk connections as it takes.

        Raises:
            Unreachable: no bulk connection for `patience_s` seconds.
            NotFound: the site no longer has it.
        """
        sink = files.FileSink(path)
        try:
            while True:
                channel = await self._bulk_channel(patience_s)
                try:
                    await channel.fetch(object_id, sink)
                    return
                except Unreachable:
                    log.info("%s: a transfer goes on after %d bytes", self.name, sink.received)
        finally:
            sink.close()

    async def _bulk_channel(self, patience_s: float) -> BulkChannel:
        try:
            async with asyncio.timeout(patience_s), self._bulk_changed:
                await self._bulk_changed.wait_for(lambda: self._bulk is not None)
        except TimeoutError:
            raise Unreachable(f"{self.name} has had no bulk connection for {patience_s:.0f} s") from None
        if self._bulk is None:
            raise NotFound(f"{self.name} has just lost its bulk connection")
        return self._bulk
