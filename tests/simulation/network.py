"""Connections between processes over a network that delays, reorders, repeats, loses and parts.

A connection carries whole frames, each with its own fate. As under TCP what is lost is noticed: nothing sent after it in that
direction arrives, and within the keepalive the connection is broken at both ends.
"""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass

from fedpool.errors import Unreachable

KEEPALIVE_S = 20.0
LOGIN_TIMEOUT_S = 10.0


@dataclass
class Weather:
    """How bad the network is; probabilities are by frame."""

    delay_s: float = 0.005
    late: float = 0.0
    late_s: float = 3.0
    lost: float = 0.0
    twice: float = 0.0


class Network:
    """Who reaches whom.

    Attributes:
        cut: (from, to) machines between which nothing arrives.
    """

    def __init__(self, loop, chances):
        self.loop = loop
        self.chances = chances  # name -> its own random numbers
        self.weather = Weather()
        self.cut = set()
        self.connections = []

    def reaches(self, a, b):
        return (a.name, b.name) not in self.cut and (b.name, a.name) not in self.cut

    def part(self, a, b, one_way):
        """Cut machine a from machine b; what is connected breaks within the keepalive unless they are joined before."""
        self.cut.add((a, b))
        if not one_way:
            self.cut.add((b, a))

    def join(self):
        self.cut.clear()

    def connect(self, client, server):
        """A new connection between two processes; returns their ends."""
        self.connections = [one for one in self.connections if not one.broken]
        connection = Connection(self, client, server)
        self.connections.append(connection)
        return connection.ends[client], connection.ends[server]

    def process_ended(self, process, quietly):
        """A process is gone. Its kernel says so at once, or (quietly) its whole machine is gone and nobody says anything."""
        for connection in self.connections:
            if process in connection.ends:
                self.loop.outside(KEEPALIVE_S if quietly else 0.01, connection.end)


class Connection:
    def __init__(self, network, client, server):
        self.network = network
        self.broken = False
        self.ends = {client: Stream(self, client), server: Stream(self, server)}
        self.ends[client].other, self.ends[server].other = self.ends[server], self.ends[client]
        self.chance = network.chances(f"{client.name} > {server.name}")

    def end(self):
        if not self.broken:
            self.broken = True
            for stream in self.ends.values():
                stream.arrived.set()


class Stream:
    """One end; see `fedpool.transport.stream.Stream`."""

    def __init__(self, connection, process):
        self.connection = connection
        self.process = process
        self.other = None
        self.inbox = []
        self.arrived = asyncio.Event()
        self.stalled = False
        self.sent = 0
        self.due = 0.0

    async def read(self):
        while not self.inbox and not self.connection.broken:
            self.arrived.clear()
            await self.arrived.wait()
        return self.inbox.pop(0) if self.inbox else b""

    async def write(self, data):
        connection = self.connection
        if connection.broken:
            raise Unreachable("the connection broke")
        self.sent += 1
        if self.stalled:
            return
        network, chance = connection.network, connection.chance
        weather = network.weather
        hello = self.sent == 1
        if (self.process.name, self.other.process.name) in network.cut or (
            not hello and chance.random() < weather.lost
        ):
            self.stalled = True
            network.loop.outside(chance.uniform(0.1, KEEPALIVE_S), connection.end)
            return
        for _ in range(2 if not hello and chance.random() < weather.twice else 1):
            delay = chance.uniform(0.2, 1.0) * weather.delay_s
            if chance.random() < weather.late:
                delay += chance.uniform(0.0, weather.late_s)
            if hello:
                self.due = network.loop.time() + delay
            # What comes after the hello may overtake anything but the hello.
            else:
                delay = max(delay, self.due + 1e-6 - network.loop.time())
            network.loop.outside(delay, self.deliver, data)

    def deliver(self, data):
        if not self.connection.broken and self.other.process.alive:
            self.other.inbox.append(data)
            self.other.arrived.set()

    def close(self):
        self.connection.network.loop.outside(0.0, self.connection.end)


class Dialler:
    """See `agent.ports.Dialler`.

    Args:
        network: the network.
        process: who dials.
        find: site's name -> (its process, what serves a stream), or None where nobody listens.
    """

    def __init__(self, network, process, find):
        self.network = network
        self.process = process
        self.find = find

    @asynccontextmanager
    async def connect(self, entry, subsystem):
        if subsystem != "fedpool":
            await asyncio.Event().wait()  # no bulk in this world
        await asyncio.sleep(self.network.weather.delay_s)
        server, serve = self.find(entry.name)
        if not self.network.reaches(self.process, server):
            await asyncio.sleep(LOGIN_TIMEOUT_S)
            raise Unreachable(f"{entry.name} did not answer within {LOGIN_TIMEOUT_S} s")
        if serve is None or not server.alive:
            raise Unreachable(f"nobody listens at {entry.name}")
        mine, theirs = self.network.connect(self.process, server)
        server.spawn(serve("fedpool", theirs, "hub"))
        try:
            yield mine, {}
        finally:
            mine.close()
