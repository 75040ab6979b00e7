"""Drives a site's lease machine: entries to disk first, then the answer, then the killing."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from agent import clock
from agent.launchers import local
from agent.store.sqlite import SqliteStore
from fedpool.errors import IbshellError
from fedpool.leasing.grants import (
    EndProcesses,
    GrantDecision,
    GrantEntry,
    LeaseChanged,
    SiteGrants,
    SiteLimits,
    WarnProcesses,
)
from fedpool.leasing.requests import Cordon, LeaseEvent, ProcessesGone, Tick, Uncordon
from fedpool.records import Inventory, SiteLease

log = logging.getLogger(__name__)

STREAM = "leases"


class SiteLeases:
    """The leases of this site.

    Args:
        site: its name.
        inventory: its devices.
        limits: what the site allows.
        store: where entries go.
        changed: told of every change, after it is durable.
    """

    def __init__(
        self,
        site: str,
        inventory: Inventory,
        limits: SiteLimits,
        store: SqliteStore,
        changed: Callable[[SiteLease], None],
    ) -> None:
        self.machine = SiteGrants(site, inventory, limits)
        self._store = store
        self._changed = changed
        self._lock = asyncio.Lock()
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._under_way: set[EndProcesses | WarnProcesses] = set()

    async def recover(self) -> None:
        """Read the entries back, end what a dead run of this agent left behind, then open for grants."""
        for entry in self._store.read(STREAM, GrantEntry):
            self.machine.apply(entry)
        at, boot = self._store.last_written()
        await self._commit([self.machine.restarted(clock.now(), at, clock.boot(), boot)])
        # A program does not outlive its agent: what is left of one belongs to a lease whose task must be started anew.
        for lease_id in self.machine.leases:
            await local.end(local.mark_of(self.machine.site, lease_id))
        self.machine.recovering = False
        for lease in list(self.machine.leases.values()):
            if lease.state == "ending" or lease.next_tenant:
                await self.step(ProcessesGone(lease.id))

    async def run(self) -> None:
        """Let holds lapse and leases expire, until cancelled."""
        while True:
            wake_at = await self._tick()
            self._wake.clear()
            try:
                await asyncio.wait_for(self._wake.wait(), None if wake_at is None else max(0.0, wake_at - clock.now()))
            except TimeoutError:
                continue

    async def _tick(self) -> float | None:
        try:
            async with self._lock:
                decision = self.machine.step(Tick(), clock.now())
                await self._commit(decision.entries)
        except IbshellError as error:
            log.error("expiry could not be recorded: %s", error)
            return clock.now() + 1.0
        self._start(decision.effects)
        return decision.wake_at

    async def step(self, event: LeaseEvent | ProcessesGone) -> SiteLease:
        """Put an event to the machine; the answer is durable.

        Raises:
            IbshellError: see `SiteGrants.step`; nothing has changed.
        """
        decision = await self._step(event)
        said = [reply for reply in decision.replies if isinstance(reply, SiteLease)]
        return said[-1] if said else self.machine.leases[event.lease]

    async def cordon(self, event: Cordon | Uncordon) -> None:
        """Grant nothing new on something, or again.

        Raises:
            IbshellError: see `SiteGrants.step`; nothing has changed.
        """
        await self._step(event)

    async def _step(self, event: LeaseEvent | ProcessesGone | Cordon | Uncordon) -> GrantDecision:
        async with self._lock:
            decision = self.machine.step(event, clock.now())
            await self._commit(decision.entries)
        self._start(decision.effects)
        self._wake.set()
        return decision

    async def _commit(self, entries: Sequence[GrantEntry]) -> None:
        await self._store.append(STREAM, entries)
        for entry in entries:
            self.machine.apply(entry)
        for entry in entries:
            if isinstance(entry, LeaseChanged):
                self._changed(entry.lease)

    def _start(self, effects: Sequence[EndProcesses | WarnProcesses]) -> None:
        for effect in effects:
            if effect in self._under_way:
                continue
            self._under_way.add(effect)
            task = asyncio.get_running_loop().create_task(self._carry_out(effect))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry_out(self, effect: EndProcesses | WarnProcesses) -> None:
        try:
            mark = local.mark_of(self.machine.site, effect.lease)
            if isinstance(effect, WarnProcesses):
                await local.warn(mark)
            else:
                await self._end(effect, mark)
        finally:
            self._under_way.discard(effect)

    async def _end(self, effect: EndProcesses, mark: str) -> None:
        """Kill, confirm, free; a process that does not die keeps its devices occupied."""
        while True:
            try:
                await local.end(mark)
                await self.step(ProcessesGone(effect.lease, effect.devices))
                return
            except IbshellError as error:
                log.error("lease %s is not free yet: %s", effect.lease, error)
                await asyncio.sleep(1.0)
