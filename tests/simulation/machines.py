"""Machines of the simulated world: clocks that differ and jump, disks, processes that are killed and started again, and jobs."""

import asyncio
from datetime import UTC, datetime, timedelta

from agent.hub import Hub
from agent.probes.simulated import SimulatedProbe
from agent.site import SiteAgent
from fedpool.errors import IbshellError, StorageFailed
from simulation.audit import WHOLE, Broken, SiteAudit
from simulation.disk import Disk, Store
from simulation.loop import Process
from simulation.network import Dialler

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


class Clock:
    """See `agent.ports.Clock`: boot time that runs a little fast or slow, and a wall clock that jumps."""

    def __init__(self, loop, name, rate, uptime_s):
        self.loop = loop
        self.name = name
        self.rate = rate
        self.booted = loop.time() - uptime_s
        self.boots = 1
        self.offset_s = 0.0

    def now(self):
        return (self.loop.time() - self.booted) * self.rate

    def boot(self):
        return f"{self.name}-{self.boots}"

    def unix(self):
        return EPOCH.timestamp() + self.loop.time() + self.offset_s

    def wall(self, later_s=0.0):
        time = EPOCH + timedelta(seconds=self.loop.time() + self.offset_s + later_s)
        return time.replace(microsecond=0).isoformat().replace("+00:00", "Z")

    def rebooted(self):
        self.booted = self.loop.time()
        self.boots += 1


class Machine:
    """A machine and the one service on it, which is started again whenever it ends."""

    def __init__(self, world, name):
        self.world = world
        self.name = name
        self.chance = world.chance(name)
        chance = self.chance
        self.clock = Clock(world.loop, name, 1 + chance.uniform(-0.004, 0.004), chance.uniform(50, 5000))
        self.disk = Disk(world.loop, world.chance(f"{name}/disk"))
        self.service = None
        self.process = None
        self.quietly = False
        self.kill_after_steps = []

    def start(self):
        self.service = None
        process = self.process = Process(self.world.loop, self.name, self.killed)
        if self.kill_after_steps:
            process.killed_at_step = self.kill_after_steps.pop(0)
        process.store = Store(self.disk, self.clock, self.written)
        process.spawn(self.run(process))

    async def run(self, process):
        self.world.say(self.name, "starts")
        try:
            service = self.make(process)
            async with asyncio.TaskGroup() as tasks:
                await service.start(tasks)
                if process is self.process:
                    self.service = service
        except* StorageFailed:
            process.kill()  # its supervisor starts it again
        except* Exception as group:
            if process.alive and not self.world.over:
                self.world.fail(group)

    def killed(self, process):
        world = self.world
        world.say(self.name, f"ends at step {process.steps}")
        process.store.fence()
        world.network.process_ended(process, self.quietly)
        if process is not self.process:
            return  # another has been started meanwhile
        self.service = None
        self.ended()
        world.loop.outside(self.chance.uniform(0.1, 4.0), self.start)

    def ended(self):
        """What else ends with the process."""

    def power_lost(self):
        """The whole machine is gone and comes back with a new boot."""
        self.quietly = self.chance.random() < 0.5
        if self.process.alive:
            self.process.kill()
        self.quietly = False
        self.disk.power_lost()
        self.clock.rebooted()
        self.world.say(self.name, "lost power")


class HubMachine(Machine):
    """The hub's machine."""

    def make(self, process):
        world = self.world
        dialler = Dialler(world.network, process, self.find)
        chance = world.chance(f"hub/{self.clock.boots}/{len(self.disk.rows)}")
        return Hub(world.hub_config, world.directory / "hub", process.store, self.clock, dialler, chance)

    def written(self, rows):
        self.world.checked(self.world.hub_audit.written, rows)

    def power_lost(self):
        lost = self.disk.volatile
        super().power_lost()
        if lost:
            self.world.hub_audit.forget_volatile(self.disk.rows)

    def find(self, name):
        site = self.world.sites[name]
        return site.process, site.service.serve if site.service is not None else None


class SiteMachine(Machine):
    """A site's machine: its agent, and the jobs on its devices."""

    def __init__(self, world, described):
        super().__init__(world, described.name)
        self.described = described
        self.inventory = described.inventory()
        self.audit = SiteAudit(world, self.name, [device.uuid for device in self.inventory.devices()])
        self.jobs = []  # (mark, {uuid: thousandths})
        self.guarded = {}  # mark -> when the watchdog ends what bears it

    def make(self, process):
        config = self.world.site_configs[self.name]
        probe = SimulatedProbe(self.described)
        return SiteAgent(config, self.world.directory / self.name, probe, process.store, self.clock, self)

    def written(self, rows):
        self.world.checked(self.audit.written, rows)

    def ended(self):
        if self.chance.random() < 0.7:
            self.jobs.clear()  # programs die with their agent; some have wandered off

    def power_lost(self):
        super().power_lost()
        self.jobs.clear()
        self.audit.forget_volatile(self.disk.rows)

    def cordoned(self):
        """Devices that nothing is granted on."""
        cordons = self.service.leases.machine.cordons
        return [device for device in self.inventory.devices() if cordons.keys() & {"", device.node, device.uuid}]

    # --- the launcher

    async def marks(self, site):
        await asyncio.sleep(0.003)
        return [mark for mark, _ in self.jobs if mark.startswith(f"{site}/")]

    async def warn(self, mark, devices=()):
        await asyncio.sleep(0.003)
        if self.chance.random() < 0.5:
            self.without(mark, devices)

    async def uses(self, mark, devices):
        await asyncio.sleep(0.003)
        return any(job[0] == mark and not job[1].keys().isdisjoint(devices) for job in self.jobs)

    async def end(self, mark, devices=()):
        while True:
            await asyncio.sleep(self.chance.uniform(0.003, 0.02))
            if not self.without(mark, devices):
                return

    def without(self, mark, devices):
        """End the jobs under a mark that use one of these devices; returns whether there were any."""
        left = [job for job in self.jobs if job[0] != mark or (devices and job[1].keys().isdisjoint(devices))]
        ended, self.jobs = len(self.jobs) - len(left), left
        return bool(ended)

    def guard(self, mark, deadline):
        if deadline is None:
            self.guarded.pop(mark, None)
            return
        self.guarded[mark] = deadline
        self.world.loop.outside(max(0.0, deadline - self.clock.now()) * 1.01 + 2.0, self.watch, mark, deadline)

    def watch(self, mark, deadline):
        """The watchdog, which lives whatever becomes of the agent."""
        if self.guarded.get(mark) == deadline:
            self.jobs = [job for job in self.jobs if job[0] != mark]

    async def start_job(self, agent, lease_id, grants):
        """Somebody starts a program under a lease and shows the latest token he knows."""
        try:
            async with agent.leases.binding(lease_id, max(grant.token for grant in grants)) as lease:
                devices = {grant.uuid: grant.milli for grant in lease.grants}
                await asyncio.sleep(self.chance.uniform(0.001, 0.3))
                self.jobs.append((agent.leases.mark(lease_id), devices))
                self.world.say(self.name, f"runs a job of {lease_id}")
                self.check_jobs()
        except IbshellError as error:
            self.world.say(self.name, f"refuses a job of {lease_id}: {error.message}")

    def check_jobs(self):
        used = {}
        for mark, devices in self.jobs:
            for uuid, milli in devices.items():
                used.setdefault(uuid, {})[mark] = milli
        for uuid, by in used.items():
            if sum(by.values()) > WHOLE:
                self.world.fail(Broken(f"jobs of {' and '.join(by)} use {uuid}"))
