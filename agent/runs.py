"""The hub's federated runs: each a fold of durable entries, driven to its end, resumable after anything."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from agent import clock, files
from agent.aggregate import Aggregate, Optimiser, aggregate, measure
from agent.gangs import Gangs
from agent.links import SiteLink
from agent.ports import Store
from agent.run_rounds import RoundDriver
from fedpool import parallel
from fedpool.errors import (
    Failed,
    IbshellError,
    NotFound,
    ProgramFailed,
    Refused,
    RoundFailed,
    StorageFailed,
    TimedOut,
    UsageError,
)
from fedpool.federation import opening, parameters, schedule
from fedpool.federation import plan as plans
from fedpool.federation.messages import RoundWanted
from fedpool.federation.rounds import (
    RoundEnded,
    RoundJournal,
    RoundLost,
    RoundOpened,
    Run,
    RunCreated,
    RunEnded,
    RunEntry,
    RunLeased,
    RunResumed,
)
from fedpool.leasing import lease as life
from fedpool.names import require_id
from fedpool.records import Part, Signed
from fedpool.secagg import masks
from fedpool.secagg.manifest import Manifest
from fedpool.transport.bulk import Source
from fedpool.wire.bulk import object_id
from fedpool.wire.messages import (
    BestModel,
    Events,
    HubView,
    ModelPiece,
    Nothing,
    RunAgain,
    RunView,
    RunWanted,
    TaskEnded,
    TaskWanted,
)

log = logging.getLogger(__name__)

EVENTS_KEPT = 5000
GATHER_S = 10.0


class _Live:
    """What a run has in this process beside its durable state."""

    def __init__(self, run: Run, directory: Path) -> None:
        self.run = run
        self.directory = directory
        self.driver: asyncio.Task[None] | None = None
        self.round: RoundDriver | None = None
        self.events: list[dict[str, Any]] = []
        self.first_event = 0
        self.changed = asyncio.Condition()
        self._notices: set[asyncio.Task[None]] = set()

    @property
    def state(self) -> str:
        """The run's state as people see it: over only when its lease is given back, interrupted when nobody drives it."""
        if self.driver is not None and not self.driver.done():
            return "running"
        return self.run.state if self.run.is_over else "interrupted"

    def model(self, number: int) -> Path:
        """The global parameters after a round; 0 are the initial ones."""
        return self.directory / f"model-{number}.safetensors"

    def memory(self, number: int) -> Path:
        """What the strategy remembers after a round."""
        return self.directory / f"memory-{number}.f32"

    def tell(self, kind: str, **details: Any) -> None:
        """Add an event for whoever watches."""
        number = self.first_event + len(self.events)
        self.events.append({"n": number, "time": clock.wall(), "kind": kind, "round": self.run.next_round, **details})
        if len(self.events) > EVENTS_KEPT:
            del self.events[: EVENTS_KEPT // 2]
            self.first_event += EVENTS_KEPT // 2
        self.wake()

    def wake(self) -> None:
        """Let whoever waits for news look again."""
        task = asyncio.get_running_loop().create_task(self._notify())
        self._notices.add(task)  # the loop itself holds a task only weakly
        task.add_done_callback(self._notices.discard)

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()


class Runs:
    """All runs of the hub.

    Args:
        store: where entries go.
        gangs: the leases.
        links: {site: link}.
        directory: for models and vectors.
    """

    def __init__(self, store: Store, gangs: Gangs, links: Mapping[str, SiteLink], directory: Path) -> None:
        self._store = store
        self._gangs = gangs
        self._links = links
        self._directory = directory
        self._live: dict[str, _Live] = {}
        self._tasks: asyncio.TaskGroup | None = None

    async def recover(self, tasks: asyncio.TaskGroup) -> None:
        """Read every run back; one that was going on waits to be resumed."""
        self._tasks = tasks
        for stream in await self._store.streams("run/"):
            entries = await self._store.read(stream, RunEntry)
            created = entries[0]
            assert isinstance(created, RunCreated)
            run = Run(created.run, plans.parse(created.plan_text, f"the plan of run {created.run}"))
            for entry in entries:
                run.apply(entry)
            self._live[run.id] = _Live(run, self._directory / run.id)
            held = self._gangs.get(run.lease)
            if run.is_over and held is not None and held.state not in life.FINAL:
                tasks.create_task(self._give_back(run.lease))

    async def _give_back(self, lease: str) -> None:
        try:
            await self._gangs.end(self._gangs.find(lease), "released")
        except IbshellError as error:
            log.info("lease %s: %s", lease, error)

    async def _record(self, live: _Live, entry: RunEntry) -> None:
        stream = f"run/{live.run.id}"
        try:
            await self._store.append(stream, [entry])
        except StorageFailed:
            await self._store.read(stream, RunEntry)  # nothing rests on it: the stream may take the next
            raise
        live.run.apply(entry)

    def find(self, prefix: str) -> _Live:
        """A run by id, unique prefix, or name (the latest of that name).

        Raises:
            NotFound: none or several.
        """
        matching = [live for key, live in self._live.items() if key.startswith(prefix)]
        if not matching:
            matching = [live for live in self._live.values() if live.run.plan.name == prefix][-1:]
        if not matching:
            raise NotFound(f"no run {prefix}", "ibshell fed list shows them")
        if len(matching) > 1:
            raise NotFound(f"{prefix} could be {', '.join(live.run.id for live in matching[:5])}", "give more digits")
        return matching[0]

    def view(self, live: _Live) -> RunView:
        """A run as people see it."""
        run = live.run
        best, named = run.best, run.plan.best
        sites = list(run.sites) or (run.plan.sites if isinstance(run.plan.sites, list) else [])
        return RunView(
            run.id,
            run.plan.name,
            run.plan.tenant,
            live.state,
            run.round,
            run.plan.all_rounds,
            run.lease,
            sites,
            run.reason,
            run.history,
            list(run.requests.values())[-1] if run.requests else None,
            BestModel(best.model, named.metric, best.value) if best is not None and named is not None else None,
        )

    def views(self) -> list[RunView]:
        """All runs, oldest first."""
        return [self.view(live) for live in self._live.values()]

    async def create(self, wanted: RunWanted, initial: Path, signed: Signed | None = None) -> RunView:
        """Start a run from a plan and its initial parameters, with what was signed about it.

        Raises:
            PlanError, UsageError: they cannot be used.
        """
        plan = plans.parse(wanted.plan)
        with files.mapped(initial) as mapped:
            layout = parameters.layout(mapped, f"the initial parameters {plan.initial!r}", plan.exclude)
            digest = hashlib.sha256(mapped.data if mapped.size else b"").hexdigest()
        if wanted.lease is not None and wanted.lease.tenant != plan.tenant:
            raise UsageError(f"a lease of {wanted.lease.tenant} for a plan of {plan.tenant}")
        if not layout.parameters:
            raise UsageError(f"the initial parameters {plan.initial!r} hold no tensor of floating point")
        run = Run(self._new_id(wanted), plan)
        live = _Live(run, self._directory / run.id)
        live.directory.mkdir(parents=True, mode=0o700)
        shutil.copyfile(initial, live.model(0))
        await self._record(live, RunCreated(run.id, wanted.plan, digest, wanted.lease, signed))
        self._live[run.id] = live
        self._drive(live)
        return self.view(live)

    def _new_id(self, wanted: RunWanted) -> str:
        """The run's id: as chosen by who asks, if nothing has it.

        Raises:
            Refused: there is such a run.
        """
        new = require_id(wanted.id, "run") if wanted.id else secrets.token_hex(4)
        if new in self._live:
            raise Refused(f"run {new} is there already", "ask again: a new id is taken")
        return new

    async def resume(self, live: _Live, again: RunAgain, signed: Signed | None = None) -> RunView:
        """Go on with a run that failed, was stopped, or whose hub restarted.

        Raises:
            Refused: it is going on, or finished.
        """
        if live.state == "running":
            raise Refused(
                f"run {live.run.id} is going on in round {live.run.next_round}",
                f"watch it: ibshell fed show {live.run.id} --watch",
            )
        was_over = live.run.is_over
        if was_over:
            live.run.may_resume()
        await self._record(live, RunResumed(again.lease, signed))
        if was_over:
            live.round = None
        live.tell("resumed")
        self._drive(live)
        return self.view(live)

    async def stop(self, live: _Live) -> RunView:
        """Stop a run; its programs end and its lease is released."""
        if live.driver is not None:
            if not live.run.is_over:
                live.driver.cancel()
            await asyncio.wait([live.driver])
        if live.run.is_over:
            return self.view(live)
        await self._end(live, "stopped", "stopped by request")
        return self.view(live)

    def _drive(self, live: _Live) -> None:
        assert self._tasks is not None
        live.driver = self._tasks.create_task(self._run(live))
        live.driver.add_done_callback(lambda _: live.wake())

    async def _run(self, live: _Live) -> None:
        try:
            while (action := live.run.next_action()) != "nothing":
                if action == "finish":
                    plan = live.run.plan
                    reason = schedule.ended_early(plan.best, plan.evaluation, live.run.history)
                    await self._end(live, "finished", reason)
                    return
                lease = await self._lease(live)
                if action == "round":
                    await self._round(live, lease)
        except IbshellError as error:
            log.info("run %s failed: %s", live.run.id, error)
            await self._fail(live, error)
        except OSError as error:
            await self._fail(live, Failed(f"the hub's disk: {error.strerror}"))

    async def _fail(self, live: _Live, error: IbshellError) -> None:
        try:
            await self._end(live, "failed", str(error))
        except IbshellError as second:
            log.error("the end of run %s could not be recorded: %s", live.run.id, second)

    async def _end(self, live: _Live, state: str, reason: str) -> None:
        if live.run.manifest:
            await self._lost(live, reason)
        await self._record(live, RunEnded(state, reason))

        async def stop(link: SiteLink) -> None:
            try:
                await link.call("task.stop", TaskEnded(live.run.id, state), Nothing, 15.0)
            except IbshellError as error:
                log.info("%s: %s", link.name, error)

        async with asyncio.TaskGroup() as tasks:
            for site in live.run.sites:
                if self._links[site].is_up:
                    tasks.create_task(stop(self._links[site]))
        if live.run.lease:
            await self._give_back(live.run.lease)
        live.tell("ended", state=state, reason=reason)

    async def _lease(self, live: _Live) -> str:
        """The run's active lease: taken, or renewed when half of it is over."""
        run = live.run
        held = self._gangs.get(run.lease)
        if held is not None:
            if held.state == "active":
                left = held.deadline - clock.now()
                if left < run.plan.lease_s / 2:
                    try:
                        await self._gangs.renew(held, run.plan.lease_s)
                    except IbshellError as error:
                        if left <= 0:
                            raise
                        log.info("%s", error)  # tried again at the next round
                return run.lease
            if held.state in life.FINAL and live.round is not None:
                raise Refused(f"lease {held.id} is {held.state}: {held.reason}", "ibshell fed resume takes a new one")
        plan = run.plan
        live.tell("leasing", sites=plan.cohort, gpus=plan.cohort * plan.gpus_per_site)
        wanted = run.wanted or plan.lease_wanted(self._lease_id(run.id), run.sites)
        lease = await self._gangs.request(wanted, run.requests.get(wanted.id))
        await self._record(live, RunLeased(lease.id, tuple(sorted(part.site for part in lease.parts))))
        live.tell("leased", lease=lease.id, sites=len(lease.parts), gpus=lease.gpus)
        return lease.id

    def _lease_id(self, run: str) -> str:
        """The same until that lease is over: a hub that died before it had noted the run's lease finds it again."""
        number = 0
        while True:
            new = hashlib.sha256(f"{run}/{number}".encode()).hexdigest()[:8]
            known = self._gangs.get(new)
            if known is None or known.state not in life.FINAL:
                return new
            number += 1

    async def _round(self, live: _Live, lease: str) -> None:
        run, started = live.run, clock.now()
        traffic = {site: self._links[site].traffic for site in run.sites}
        ready, out = await self._programs(live, lease)
        if run.manifest:
            manifest = msgspec.msgpack.decode(run.manifest, type=Manifest)
        else:
            manifest = self._manifest(live, ready)
            await self._record(live, RoundOpened(manifest.round, manifest.attempt, msgspec.msgpack.encode(manifest)))
        kind = schedule.TRAIN if manifest.parameters else schedule.EVALUATE
        driver = self._driver(live, manifest, kind)
        live.round = driver
        live.tell(
            "round", attempt=manifest.attempt, cohort=len(manifest.participants), rounds=run.plan.all_rounds, does=kind
        )
        try:
            unmask = await driver.run()
            result = await asyncio.to_thread(self._result, live, driver, unmask.removal)
        except (RoundFailed, IbshellError) as error:
            await self._lost(live, error.message)
            await driver.close("failed")
            raise
        now = {site: self._links[site].traffic for site in run.sites}
        summary = {
            "round": manifest.round,
            "does": kind,
            "model_round": run.model_round if kind == schedule.EVALUATE else manifest.round,
            "attempt": manifest.attempt,
            "survivors": [driver.machine.name(index) for index in unmask.survivors],
            "lost": out
            | {driver.machine.name(i): f"{phase}: {why}" for i, (phase, why) in driver.machine.lost.items()},
            "weight": result.weight,
            "saturated": result.saturated,
            "error_bound": result.error_bound,
            "metrics": result.metrics,
            "seconds": round(clock.now() - started, 4),
            "bytes_up": sum(now[site][0] - traffic[site][0] for site in run.sites),
            "bytes_down": sum(now[site][1] - traffic[site][1] for site in run.sites),
            "model": result.model,
        }
        for name in result.negative:
            log.warning("run %s round %d: %s is negative", run.id, manifest.round, name)
            live.tell("warning", what=f"{name} is negative: a site's update was not a running variance")
        await self._record(live, RoundEnded(manifest.round, result.model, summary))
        await driver.close("aggregated")
        self._tidy(live)
        live.tell("aggregated", **{**summary, "round": manifest.round})

    def _driver(self, live: _Live, manifest: Manifest, kind: str) -> RoundDriver:
        """What drives an attempt at a round."""
        run = live.run

        async def record(event: bytes) -> None:
            await self._record(live, RoundJournal(event))

        path = live.model(run.model_round)
        step = run.step if kind == schedule.TRAIN else run.step - 1
        wanted = RoundWanted(manifest, path.stat().st_size, run.plan.deadline_s, step, run.plan.settings(max(1, step)))
        directory = live.directory / f"round-{manifest.round}-{manifest.attempt}"
        return RoundDriver(wanted, run.journal, run.plan.stragglers, self._links, directory, record, live.tell)

    @staticmethod
    def _result(live: _Live, driver: RoundDriver, removal: masks.Masks) -> Aggregate:
        """What a round came to: the next global parameters, or what the sites measured of these."""
        run, manifest = live.run, driver.machine.manifest
        if not manifest.parameters:
            return measure(manifest, driver.total, removal, run.model)
        model, new_model = live.model(run.model_round), live.model(manifest.round)
        memory, new_memory = live.memory(run.model_round), live.memory(manifest.round)
        optimiser = Optimiser(run.plan.optimiser(), run.step, memory, new_memory, tuple(run.plan.buffers))
        return aggregate(manifest, driver.total, removal, optimiser, model, new_model, parallel.threads())

    async def _lost(self, live: _Live, reason: str) -> None:
        """Record that the attempt in progress came to nothing."""
        manifest = msgspec.msgpack.decode(live.run.manifest, type=Manifest)
        # Without a driver (the hub has restarted since) the phase is not known: be on the safe side.
        released = live.round is None or live.round.may_have_released
        await self._record(live, RoundLost(manifest.round, manifest.attempt, reason, released))

    def _tidy(self, live: _Live) -> None:
        """Keep the models that may be asked for, and the latest round's vectors."""
        for path in live.directory.glob("round-*"):
            if int(path.name.split("-")[1]) < live.run.round:
                shutil.rmtree(path)
        kept = live.run.models_kept
        for path in [*live.directory.glob("model-*.safetensors"), *live.directory.glob("memory-*.f32")]:
            if int(path.stem.split("-")[1]) not in kept:
                path.unlink()

    def _manifest(self, live: _Live, ready: list[str]) -> Manifest:
        run = live.run
        with files.mapped(live.model(run.model_round)) as mapped:
            layout = parameters.layout(mapped, "the model", run.plan.exclude)
        return opening.manifest(run, layout, {name: self._links[name].key for name in opening.cohort(run, ready)})

    async def _programs(self, live: _Live, lease_id: str) -> tuple[list[str], dict[str, str]]:
        """See that the program runs at every site of the lease.

        Returns:
            The sites where it does, and why not at the others.

        Raises:
            ProgramFailed, TimedOut: at too few of them.
        """
        run = live.run
        lease = self._gangs.find(lease_id)
        needed = run.plan.minimum_cohort
        deadline = clock.now() + GATHER_S
        while True:
            problems: dict[str, IbshellError] = {}

            async with asyncio.TaskGroup() as tasks:
                for part in lease.parts:
                    tasks.create_task(self._start_program(run, part, lease_id, problems))
            ready = [part.site for part in lease.parts if part.site not in problems]
            if len(ready) >= needed:
                for site, problem in problems.items():
                    live.tell("site_out", site=site, phase="start", reason=problem.message)
                return sorted(ready), {site: f"start: {problem.message}" for site, problem in problems.items()}
            first = next(iter(problems.values()))
            if all(isinstance(error, ProgramFailed | Refused) for error in problems.values()):
                raise ProgramFailed(
                    f"the program runs at {len(ready)} of {needed} sites needed: {first.message}", first.hint
                )
            if clock.now() > deadline:
                raise TimedOut(
                    f"{len(ready)} of {needed} sites needed are there: {first.message}", "ibshell site list says why"
                )
            await asyncio.sleep(0.5)

    async def _start_program(self, run: Run, part: Part, lease: str, problems: dict[str, IbshellError]) -> None:
        token = part.grants[0].token
        wanted = TaskWanted(run.id, lease, token, run.plan.program, plans.digest(run.plan_text), run.plan.settings())
        wanted = msgspec.structs.replace(wanted, request=run.requests.get(lease))
        try:
            await self._links[part.site].call("task.start", wanted, Nothing)
        except IbshellError as error:
            problems[part.site] = error

    async def events(self, live: _Live, after: int, wait_s: float) -> Events:
        """Events after number `after`, waiting for something new if there is none."""
        end = live.first_event + len(live.events)
        if after >= end and live.state == "running":
            try:
                async with asyncio.timeout(min(wait_s, 30.0)), live.changed:
                    await live.changed.wait_for(
                        lambda: live.first_event + len(live.events) > after or live.state != "running"
                    )
            except TimeoutError:
                log.debug("nothing new in run %s", live.run.id)
        items = live.events[max(0, after - live.first_event) :]
        return Events(items, live.first_event + len(live.events), live.state)

    def model(self, live: _Live, number: int | None, offset: int, size: int) -> ModelPiece:
        """A piece of a round's global parameters.

        Raises:
            NotFound: that round's are not kept.
        """
        chosen = live.run.model_round if number is None else number
        path = live.model(chosen)
        if not path.exists():
            raise NotFound(
                f"run {live.run.id} keeps no model of round {chosen}",
                "the initial one, the two latest and the best by the plan's [best] are kept",
            )
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(min(size, 512 * 1024))
        digest = live.run.model if chosen == live.run.model_round else files.sha256(path).hex()
        return ModelPiece(data, path.stat().st_size, digest, chosen)

    def hub_view(self, live: _Live, site: str) -> HubView:
        """The first words of what the hub last got from a site: what an auditor may see of an update.

        Raises:
            NotFound: nothing is kept of it.
        """
        driver = live.round
        if driver is not None:
            for index in driver.machine.survivors:
                if driver.machine.name(index) == site and (head := driver.total.head(index)):
                    words = [int.from_bytes(head[i : i + 4], "little") for i in range(0, len(head), 4)]
                    return HubView(site, driver.machine.manifest.round, words)
        raise NotFound(f"the hub holds no vector of {site} in run {live.run.id}")

    async def source(self, wanted: bytes) -> Source:
        """A global model, for a site to fetch.

        Raises:
            NotFound: no run has it.
        """
        for live in self._live.values():
            if wanted == object_id(f"model/{live.run.id}/{live.run.model}"):
                return files.FileSource(live.model(live.run.model_round))
        raise NotFound("no such model")
