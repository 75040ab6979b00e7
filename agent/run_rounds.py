"""One round at the hub: puts the machine's questions to the sites, gathers vectors, journals every step."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import msgspec

from agent import clock
from agent.accumulator import Accumulator
from agent.links import SiteLink
from fedpool import parallel
from fedpool.errors import IbshellError, IntegrityError, RoundFailed, Unreachable
from fedpool.federation import schedule
from fedpool.federation.messages import Phase, PhaseAnswer, RoundOver, RoundWanted
from fedpool.federation.schedule import Stragglers
from fedpool.secagg.manifest import Manifest
from fedpool.secagg.messages import KeyMessage, VectorMessage
from fedpool.secagg.server import Answered, Ask, Fail, HubEvent, HubRound, Lost, PhaseEnded, Unmask
from fedpool.wire.bulk import object_id
from fedpool.wire.messages import Nothing

log = logging.getLogger(__name__)

PHASE_TIMEOUT_S = 60.0
# A site whose link breaks may come back to the same round within this time; answers are repeated, nothing is lost.
RECONNECT_GRACE_S = 3.0
# Vectors that are gathered at a time: each takes a file as long as the model until it is added to the sum.
GATHERED_MAX = 16


class RoundDriver:
    """Drives one attempt at one round.

    Args:
        wanted: the round, as its sites are asked to take part.
        journal: encoded events of an attempt that a restart interrupted, or nothing.
        stragglers: when it goes on without the slow ones; None: at its deadline.
        links: {site: link}.
        directory: for the vectors.
        record: makes an accepted event durable.
        tell: takes progress for people.
    """

    def __init__(
        self,
        wanted: RoundWanted,
        journal: list[bytes],
        stragglers: Stragglers | None,
        links: Mapping[str, SiteLink],
        directory: Path,
        record: Callable[[bytes], Awaitable[None]],
        tell: Callable[..., None],
    ) -> None:
        manifest = wanted.manifest
        self.machine = HubRound(manifest)
        self._wanted = wanted
        self._manifest = manifest
        self._stragglers = stragglers
        self._links = links
        self._directory = directory
        self._record = record
        self._tell = tell
        self._events: asyncio.Queue[HubEvent] = asyncio.Queue()
        self._asking: dict[int, asyncio.Task[None]] = {}
        self._phase_ends = 0.0
        self._is_enough = False
        self._result: Unmask | Fail | None = None
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.total = Accumulator(directory, manifest.vector, parallel.threads())
        self._gathering = asyncio.Semaphore(GATHERED_MAX)
        self._adding: list[asyncio.Task[None]] = []
        self._phases = {self.machine.phase}
        self.resumed = bool(journal)
        for encoded in journal:
            decision = self.machine.step(msgspec.msgpack.decode(encoded, type=HubEvent))
            self._phases.add(self.machine.phase)
            self._finish([effect for effect in decision.effects if not isinstance(effect, Ask)])

    @property
    def may_have_released(self) -> bool:
        """Whether a site may have released shares in this attempt."""
        return "release" in self._phases

    async def run(self) -> Unmask:
        """Bring the round to its end.

        Raises:
            RoundFailed: it came to nothing; nobody's update was revealed.
        """
        async with asyncio.TaskGroup() as tasks:
            self._begin_phase(tasks, self.machine.outstanding())
            while self._result is None:
                try:
                    async with asyncio.timeout(max(0.0, self._phase_ends - clock.now())):
                        event = await self._events.get()
                except TimeoutError:
                    event = PhaseEnded(self.machine.phase)
                await self._take(tasks, event)
            for task in self._asking.values():
                task.cancel()
            if isinstance(self._result, Fail):
                for task in self._adding:
                    task.cancel()
            else:
                await self._complete(self._result)
        if isinstance(self._result, Fail):
            raise RoundFailed(
                f"round {self._manifest.round} failed in its {self._result.phase} phase: {self._result.reason}",
                "no mask share was revealed and the global parameters are as before; ibshell fed resume tries again",
            )
        return self._result

    async def _take(self, tasks: asyncio.TaskGroup, event: HubEvent) -> None:
        phase, lost = self.machine.phase, dict(self.machine.lost)
        decision = self.machine.step(event)
        self._phases.add(self.machine.phase)
        for entry in decision.entries:
            await self._record(msgspec.msgpack.encode(entry))
            if isinstance(entry, Answered) and entry.phase == "input":
                self._adding.append(tasks.create_task(self.total.add(entry.index)))
        for index in self.machine.lost.keys() - lost.keys():
            where, reason = self.machine.lost[index]
            log.info("round %d: %s is out: %s", self._manifest.round, self.machine.name(index), reason)
            self._tell("site_out", site=self.machine.name(index), phase=where, reason=reason)
        self._finish([effect for effect in decision.effects if not isinstance(effect, Ask)])
        if self.machine.phase == "input":
            self._leave_stragglers()
        if self.machine.phase != phase and self._result is None:
            self._begin_phase(tasks, [effect for effect in decision.effects if isinstance(effect, Ask)])

    def _leave_stragglers(self) -> None:
        """Where the updates are enough, give the others no more than their grace."""
        if self._stragglers is None or self._is_enough:
            return
        enough = max(schedule.count(self._stragglers.enough, len(self._manifest.participants)), self._manifest.quorum)
        if len(self.machine.vectors) >= enough:
            self._is_enough = True
            self._phase_ends = min(self._phase_ends, clock.now() + self._stragglers.grace_s)
            self._tell("enough", sites=len(self.machine.vectors), left_s=self._phase_ends - clock.now())

    async def _complete(self, result: Unmask) -> None:
        """See that every survivor's vector is in the sum.

        Raises:
            RoundFailed: one was lost with the hub's machine, and its site cannot be reached.
        """
        if self._adding:
            await asyncio.wait(self._adding)
        for index in result.survivors:
            if index in self.total.added:
                continue
            link = self._links[self.machine.name(index)]
            try:
                await self._gather(link, index, self.machine.vectors[index])
                await self.total.add(index)
            except IbshellError as error:
                raise RoundFailed(
                    f"round {self._manifest.round}: the vector of {link.name} is lost and cannot be had again: {error.message}",
                    "the global parameters are as before; ibshell fed resume goes on with the next round",
                ) from None

    def _finish(self, effects: list[Unmask | Fail]) -> None:
        for effect in effects:
            self._result = effect

    def _begin_phase(self, tasks: asyncio.TaskGroup, asks: list[Ask]) -> None:
        phase = self.machine.phase
        self._phase_ends = clock.now() + (self._wanted.deadline_s if phase == "input" else PHASE_TIMEOUT_S)
        self._tell("phase", phase=phase, members=len(self.machine.members), left_s=self._phase_ends - clock.now())
        for task in self._asking.values():
            task.cancel()
        self._asking = {ask.index: tasks.create_task(self._put(ask)) for ask in asks}

    async def _put(self, ask: Ask) -> None:
        """Put a question until it is answered, the site is gone, or the phase ends."""
        name = self.machine.name(ask.index)
        link = self._links[name]
        while True:
            try:
                event: HubEvent = await self._question(link, ask)
            except Unreachable as error:
                if await self._is_back(link):
                    continue
                event = Lost(ask.index, ask.phase, error.message)
            except (IbshellError, OSError) as error:
                event = Lost(ask.index, ask.phase, getattr(error, "message", str(error)))
            await self._events.put(event)
            if isinstance(event, Answered):
                self._tell("answered", phase=ask.phase, site=name)
            return

    @staticmethod
    async def _is_back(link: SiteLink) -> bool:
        deadline = clock.now() + RECONNECT_GRACE_S
        while clock.now() < deadline:
            await asyncio.sleep(0.1)
            if link.is_up:
                return True
        return False

    async def _question(self, link: SiteLink, ask: Ask) -> Answered:
        m = self._manifest
        left = max(1.0, self._phase_ends - clock.now())
        if isinstance(ask.question, Manifest):
            return Answered.of(ask.phase, await link.call("round.open", self._wanted, KeyMessage, left))
        question = msgspec.msgpack.encode(ask.question)
        phase = Phase(m.federation, m.round, m.attempt, ask.phase, question)
        answer = await link.call("round.step", phase, PhaseAnswer, left)
        if ask.phase == "input":
            await self._gather(link, ask.index, msgspec.msgpack.decode(answer.message, type=VectorMessage))
        return Answered(ask.phase, ask.index, answer.message)

    async def _gather(self, link: SiteLink, index: int, message: VectorMessage) -> None:
        """Fetch a masked vector and check it against its signed digest."""
        if index in self.total.added:
            return
        path, layout = self.total.vector(index), self._manifest.vector
        async with self._gathering:
            await link.fetch(object_id(f"vector/{self._manifest.digest().hex()}/{index}"), path)
            size = path.stat().st_size
            found = await asyncio.to_thread(self.total.digest, index) if size == layout.size else b""
        if found != message.vector:
            path.unlink()
            raise IntegrityError(
                f"the vector of {link.name} is not the one it signed: {size} bytes of {layout.size}, digest "
                f"{found.hex()[:16] or 'none'}, {message.vector.hex()[:16]} expected"
            )

    async def close(self, outcome: str) -> None:
        """Tell every site that can be reached that the round is over."""
        over = RoundOver(self._manifest.federation, self._manifest.round, self._manifest.attempt, outcome)

        async def tell(link: SiteLink) -> None:
            try:
                await link.call("round.close", over, Nothing, 5.0)
            except IbshellError as error:
                log.info("%s was not told that the round is over: %s", link.name, error)

        async with asyncio.TaskGroup() as tasks:
            for site in self._manifest.participants:
                if self._links[site.name].is_up:
                    tasks.create_task(tell(self._links[site.name]))
