"""A site's part in rounds: fetches the model, has the program train, masks the update, answers the hub's questions.

What is revealed and when is decided by `fedpool.secagg.client`; here are its files, its threads and its journal.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from agent import clock, files, masking
from agent.ledger.site_ledger import SiteLedger
from agent.ports import Store
from agent.programs import Task
from fedpool import parallel
from fedpool.errors import IbshellError, NotFound, Refused, UsageError
from fedpool.federation import parameters, schedule
from fedpool.federation.messages import Phase, PhaseAnswer, RoundOver, RoundWanted
from fedpool.ledger.records import Record, RoundSaid
from fedpool.names import require_id
from fedpool.secagg.client import (
    AgreeSurvivors,
    BeginMasking,
    ConfirmPairs,
    DealShares,
    MaskVector,
    ReleaseShares,
    SharesReleased,
    SiteEvent,
    SiteRound,
    VectorSent,
)
from fedpool.secagg.manifest import SitePolicy
from fedpool.secagg.messages import KeyMessage
from fedpool.transport.bulk import Source
from fedpool.transport.identity import Identity
from fedpool.wire.bulk import object_id
from fedpool.wire.messages import NextRound, Submission

log = logging.getLogger(__name__)

STREAM = "rounds"
QUESTIONS: dict[str, Any] = {
    "shares": DealShares,
    "confirm": ConfirmPairs,
    "input": BeginMasking,
    "survivors": AgreeSurvivors,
    "release": ReleaseShares,
}


class _Open:
    """One attempt at one round, in progress at this site."""

    def __init__(self, wanted: RoundWanted, machine: SiteRound, directory: Path, model: Path) -> None:
        self.wanted = wanted
        self.machine = machine
        self.directory = directory
        self.model = model
        self.deadline = clock.now() + wanted.deadline_s
        self.lock = asyncio.Lock()
        self.masking_for: BeginMasking | None = None
        self.masking: MaskVector | None = None
        self.loading: asyncio.Task[None] | None = None

    @property
    def vector(self) -> Path:
        """Where the masked vector is kept until the round is over."""
        return self.directory / "masked"

    @property
    def update(self) -> Path:
        """Where the program writes its update."""
        return self.directory / "update.safetensors"


class SiteRounds:
    """All rounds of one site.

    Args:
        policy: what the site demands of a round.
        identity: its signing key.
        store: where releases are recorded.
        directory: for models and vectors.
        fetch: gets an object from the hub into a file.
        task: finds the program of a run.
        ledger: the site's, which says what left it.
    """

    def __init__(
        self,
        policy: SitePolicy,
        identity: Identity,
        store: Store,
        directory: Path,
        fetch: Callable[[bytes, Path], Awaitable[None]],
        task: Callable[[str], Task],
        ledger: SiteLedger,
    ) -> None:
        self._policy = policy
        self._identity = identity
        self._store = store
        self._directory = directory
        self._fetch = fetch
        self._task = task
        self._ledger = ledger
        self._open: dict[str, _Open] = {}
        self._opening: dict[str, asyncio.Lock] = {}
        self._released: dict[str, int] = {}

    def demand(self, minimum_cohort: int) -> None:
        """From now on no sum of fewer sites is taken part in."""
        self._policy = msgspec.structs.replace(self._policy, minimum_cohort=minimum_cohort)

    async def recover(self) -> None:
        """Read back which rounds' shares were released: none is released for an earlier round."""
        for entry in await self._store.read(STREAM, SharesReleased):
            self._released[entry.federation] = max(self._released.get(entry.federation, 0), entry.round)

    async def open(self, wanted: RoundWanted) -> KeyMessage:
        """Take part in a round: fetch and check its model, let the program train, present this site's keys.

        Raises:
            Refused, UsageError: this site does not take part.
            IntegrityError: the model is not the one the manifest names.
        """
        manifest = wanted.manifest
        run = require_id(manifest.federation, "run")
        task = self._task(run)
        async with self._opening.setdefault(run, asyncio.Lock()):
            current = self._open.get(run)
            if current is not None and current.machine.manifest.digest() == manifest.digest():
                return current.machine.key_message
            if task.wanted.plan != manifest.plan:
                raise Refused(f"the round names another plan than the program at {self._policy.name} was started with")
            directory = self._directory / run
            model = directory / f"model-{manifest.model.hex()[:32]}.safetensors"
            released = self._released.get(run, 0)
            machine = SiteRound(manifest, self._policy, self._identity.signing, os.urandom, released)
            if current is not None:
                self._forget(current, keep=model)
                if current.loading is not None:  # two transfers must not write to one file
                    await asyncio.wait([current.loading])
            attempt = directory / f"round-{manifest.round}-{manifest.attempt}"
            attempt.mkdir(parents=True, exist_ok=True, mode=0o700)
            opened = _Open(wanted, machine, attempt, model)
            self._open[run] = opened
            # Keys and shares are exchanged while the model arrives; nothing is masked before it is there and is the right one.
            opened.loading = asyncio.get_running_loop().create_task(self._load(opened, task))
            opened.loading.add_done_callback(_loaded)
            return machine.key_message

    async def _load(self, opened: _Open, task: Task) -> None:
        """Fetch the round's global parameters, see that they are those the manifest names, and let the program train.

        Raises:
            IntegrityError, Refused, UsageError: they are not, or this site does not send what the vector would hold.
        """
        manifest, model = opened.machine.manifest, opened.model
        if not model.exists():
            arriving = model.with_suffix(".part")
            await self._fetch(object_id(f"model/{manifest.federation}/{manifest.model.hex()}"), arriving)
            arriving.rename(model)
        try:
            opened.machine.hold(await asyncio.to_thread(files.sha256, model))
        except Refused:
            model.unlink()  # fetched anew by whoever asks again
            raise
        with files.mapped(model) as mapped:
            held = parameters.layout(mapped, "the model", manifest.exclude).parameters
        if held != manifest.parameters:
            raise Refused(f"the round names {manifest.parameters} parameters, the model has {held}")
        kind = schedule.TRAIN if manifest.parameters else schedule.EVALUATE
        offered = NextRound(
            manifest.round, str(model), str(opened.update), "", kind, opened.wanted.step, opened.wanted.config
        )
        await task.offer(offered)

    async def step(self, phase: Phase) -> PhaseAnswer:
        """Answer one question of a round.

        Raises:
            NotFound: this site is not in that attempt (any more).
            Refused, IntegrityError: it does not answer that.
            ProgramFailed, TimedOut: there is no update to mask.
        """
        opened = self._open.get(phase.run)
        manifest = opened.machine.manifest if opened else None
        if opened is None or manifest is None or (manifest.round, manifest.attempt) != (phase.round, phase.attempt):
            raise NotFound(f"{self._policy.name} is not in round {phase.round} of run {phase.run}")
        kind = QUESTIONS.get(phase.phase)
        if kind is None:
            raise UsageError(f"a round has no phase {phase.phase!r}")
        try:
            event: SiteEvent = msgspec.msgpack.decode(phase.question, type=kind)
        except msgspec.MsgspecError as error:
            raise UsageError(f"the question of phase {phase.phase} is malformed: {error}") from None
        async with opened.lock:
            if isinstance(event, BeginMasking) and opened.machine.state == "masking" and event == opened.masking_for:
                # The connection broke while the program was training: nothing was sent, so the same masks serve.
                effect = opened.masking
            else:
                if isinstance(event, BeginMasking) and opened.loading is not None:
                    await asyncio.shield(opened.loading)
                decision = opened.machine.step(event)
                effect = decision.effects[0] if decision.effects else None
            if effect is not None:
                assert isinstance(event, BeginMasking)
                opened.masking_for, opened.masking = event, effect
                decision = opened.machine.step(VectorSent(await self._mask(opened, effect)))
                opened.machine.remember(event, decision.replies[0])
            said = self._said(opened, decision.entries, effect is not None)
            try:
                await self._store.append(STREAM, decision.entries, records=self._ledger.at(said))
            except IbshellError:
                # What cannot be recorded must not be revealed: this site is out of the round.
                self._open.pop(phase.run, None)
                await self.recover()
                raise
            if said:
                self._ledger.wrote()
            for entry in decision.entries:
                self._released[entry.federation] = max(self._released.get(entry.federation, 0), entry.round)
            return PhaseAnswer(msgspec.msgpack.encode(decision.replies[0]))

    def _said(self, opened: _Open, entries: Sequence[SharesReleased], sent: bool) -> list[Record]:
        """What the ledger says about a step: what of this site's left it, in what form."""
        manifest = opened.machine.manifest
        lease = self._task(manifest.federation).wanted.lease

        def record(event: str, cohort: Iterable[str], size: int, form: str) -> RoundSaid:
            return RoundSaid(
                run=manifest.federation,
                lease=lease,
                round=manifest.round,
                attempt=manifest.attempt,
                event=event,
                plan=manifest.plan.hex(),
                model=manifest.model.hex(),
                cohort=tuple(cohort),
                bytes=size,
                form=form,
            )

        found: list[Record] = []
        if sent:
            names = (site.name for site in manifest.participants)
            form = f"doubly masked, {manifest.ring_bits}-bit ring"
            found.append(record("sent", names, manifest.vector.size, form))
        found += [record("released", entry.survivors, 0, "shares of masks") for entry in entries]
        return found

    async def _mask(self, opened: _Open, effect: MaskVector) -> bytes:
        """Wait for the program's update, encode and mask it into a file, and hash that."""
        manifest = opened.machine.manifest
        task = self._task(manifest.federation)
        work = masking.Masking(manifest, effect, opened.vector, parallel.threads())
        preparing = asyncio.get_running_loop().create_task(asyncio.to_thread(work.prepare))
        try:
            submission = await task.update(manifest.round, max(0.1, opened.deadline - clock.now()))
        finally:
            work.stop()
            await asyncio.shield(preparing)
        return await asyncio.to_thread(work.finish, opened.model, opened.update, submission)

    async def check_update(self, submission: Submission, model: Path, update: Path) -> None:
        """Check a program's update before it is accepted.

        Raises:
            UsageError: weight, metrics, tensors or values cannot be used; the message names them.
        """
        opened = next((o for o in self._open.values() if o.update == update), None)
        if opened is None:
            raise Refused(f"round {submission.round} is closed", "ask for the next round")
        manifest = opened.machine.manifest
        if not 1 <= submission.weight <= manifest.max_weight:
            raise UsageError(
                f"weight {submission.weight} in round {submission.round}; the plan allows 1 to {manifest.max_weight}",
                "the weight is the number of samples; raise max_weight in the plan if it is right",
            )
        missing = [name for name in manifest.metrics if name not in submission.metrics]
        if missing:
            raise UsageError(
                f"metrics {', '.join(missing)} are missing in round {submission.round}",
                "the plan names them: submit every one",
            )
        for name in manifest.metrics:
            if not np.isfinite(submission.metrics[name]):
                raise UsageError(f"metric {name} is {submission.metrics[name]} in round {submission.round}")
        if not manifest.parameters:
            return
        if not update.exists():
            raise UsageError(f"the program wrote no update to {update}")
        found = await asyncio.to_thread(masking.check, model, update, manifest.exclude, parallel.threads())
        if found is not None:
            value, place = found
            raise UsageError(
                f"the update holds {value} at {place}",
                "training has diverged: lower the learning rate; nothing was sent",
            )

    async def source(self, wanted: bytes) -> Source:
        """A masked vector of this site, for the hub to fetch.

        Raises:
            NotFound: there is none of that id.
        """
        for opened in self._open.values():
            manifest = opened.machine.manifest
            if opened.machine.state not in ("opened", "dealt", "confirmed", "masking") and wanted == object_id(
                f"vector/{manifest.digest().hex()}/{opened.machine.index}"
            ):
                return files.FileSource(opened.vector)
        raise NotFound("no such vector")

    def close(self, over: RoundOver) -> None:
        """A round is over: forget its secrets and its files."""
        opened = self._open.get(over.run)
        if opened is not None and (opened.machine.manifest.round, opened.machine.manifest.attempt) == (
            over.round,
            over.attempt,
        ):
            self._forget(opened)
            del self._open[over.run]

    def end_run(self, run: str) -> None:
        """A run is over: nothing of it stays but what was recorded."""
        opened = self._open.pop(run, None)
        if opened is not None:
            self._forget(opened)
        shutil.rmtree(self._directory / run, ignore_errors=True)

    def _forget(self, opened: _Open, keep: Path | None = None) -> None:
        if opened.loading is not None:
            opened.loading.cancel()
        shutil.rmtree(opened.directory, ignore_errors=True)
        if opened.model != keep:
            opened.model.unlink(missing_ok=True)


def _loaded(loading: asyncio.Task[None]) -> None:
    """What went wrong with a model is told to the hub when it asks for the vector; here it is noted."""
    if not loading.cancelled() and (error := loading.exception()) is not None:
        log.info("the round's global parameters: %s", error)
