"""The hub's link to one site: what the site tells while it is still describing itself is later than the description."""

import asyncio
import random
from contextlib import asynccontextmanager

from agent import clock
from agent.config import SiteEntry
from agent.links import SiteLink
from fedpool.identity.keys import public_line
from fedpool.records import Inventory
from fedpool.transport import ssh
from fedpool.transport.peer import Peer
from fedpool.wire.messages import DescriptionWanted, Nothing, SiteDescription
from fedpool.wire.session import from_body

KEY = bytes(range(32))


class Pipe:
    """One end of a stream in memory."""

    def __init__(self):
        self.inbox = asyncio.Queue()
        self.other = None

    async def read(self):
        return await self.inbox.get()

    async def write(self, data):
        self.other.inbox.put_nowait(data)

    def close(self):
        self.inbox.put_nowait(b"")
        self.other.inbox.put_nowait(b"")


def pipes():
    ours, theirs = Pipe(), Pipe()
    ours.other, theirs.other = theirs, ours
    return ours, theirs


class Zurich:
    """A site that is cordoned between its describing itself and its saying so; it dials by itself what is asked of it."""

    def __init__(self):
        self.cordons = {}
        self.terms = []
        self.peer = None

    @asynccontextmanager
    async def connect(self, entry, subsystem):
        if subsystem == ssh.BULK:
            await asyncio.Event().wait()
        ours, theirs = pipes()
        self.peer = Peer(theirs, "site", entry.name, serve=self.answer)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.peer.run())
            tasks.create_task(self.peer.start())
            yield ours, {}

    async def answer(self, request):
        self.terms.append(from_body(request.body, DescriptionWanted, request.method).term)
        said = SiteDescription("zurich", KEY, "1", Inventory((), ""), [], {}, False, 1, 1.0, dict(self.cordons))
        if not self.cordons:
            self.cordons = {"": "maintenance"}
            await self.peer.notify("site.changed", Nothing())
        return said


def test_a_notice_that_overtakes_the_description_is_not_lost():
    async def scene():
        site, told, tasks = Zurich(), [], set()
        up = asyncio.Event()

        async def is_up(link):
            told.append(link.description.cordons)
            if len(told) == 2:
                up.set()

        def noticed(link, notice):
            tasks.add(asyncio.create_task(link.describe()))

        entry = SiteEntry("zurich", public_line(KEY), address="127.0.0.1:1")
        link = SiteLink(
            entry,
            site,
            clock,
            random.Random(1),
            None,
            lambda name: DescriptionWanted(7),
            is_up,
            lambda link: None,
            noticed,
        )
        running = asyncio.create_task(link.run())
        await asyncio.wait_for(up.wait(), 10)
        running.cancel()
        await asyncio.wait([running])
        assert told == [{}, {"": "maintenance"}], "the latest word is the last"
        assert site.terms == [7, 7], "the hub says its term before anything else"

    asyncio.run(scene())
