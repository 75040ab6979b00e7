"""The hub's machine and its sites' machines in one thread."""

import contextlib
import itertools

from fedpool.errors import IbshellError, Unreachable
from fedpool.leasing.gang import EndAsked, PartFailed, Reported
from fedpool.leasing.grants import SiteGrants
from fedpool.leasing.pool import ForLease, PlanWanted, Pool, Submitted
from fedpool.leasing.requests import ProcessesGone, Tick
from fedpool.records import Demand, Lease
from fedpool.sim.scenario import SimulatedSite

HOUR = 3600.0


class World:
    """A hub's machine and its sites' machines; messages are delivered one by one, in an order a test may choose."""

    def __init__(self, sites=3, gpus=4, rng=None):
        self.now = 1000.0
        self.sites = {}
        for number in range(sites):
            name = f"s{number}"
            self.sites[name] = SiteGrants(name, SimulatedSite(name, nodes=1, gpus_per_node=gpus).inventory())
            self.sites[name].recovering = False
        self.hub = Pool(self.sites)
        self.hub.term = 1
        self.asks = []
        self.rng = rng
        self.lost = 0.0
        self.entries = []
        self.ids = itertools.count(1)
        for name in self.sites:
            self.describe(name)

    def describe(self, name):
        site = self.sites[name]
        self.hub.site_described(name, site.inventory, list(site.leases.values()), site.cordons)
        for gang in list(self.hub.gangs.values()):
            if any(part.site == name for part in gang.lease.parts) and not gang.placing:
                self.put(ForLease(gang.lease.id, Reported(name, site.leases.get(gang.lease.id))))

    def put(self, event):
        decision = self.hub.step(event, self.now)
        for entry in decision.entries:
            self.entries.append(entry)
            self.hub.apply(entry)
        self.asks += decision.effects
        self.hub.check()

    def at_site(self, name, event):
        site = self.sites[name]
        decision = site.step(event, self.now)
        for entry in decision.entries:
            site.apply(entry)
        site.check()
        for effect in decision.effects:
            if type(effect).__name__ == "EndProcesses":
                ended = self.at_site(name, ProcessesGone(effect.lease, effect.devices))
                self.put(ForLease(effect.lease, Reported(name, ended)))
        return decision.replies[-1] if decision.replies else None

    def deliver(self):
        ask = self.asks.pop(self.rng.randrange(len(self.asks)) if self.rng else 0)
        if self.rng and self.rng.random() < self.lost:
            if self.rng.random() < 0.5:  # the answer is lost, not the question
                with contextlib.suppress(IbshellError):
                    self.at_site(ask.site, ask.what)
            self.put(ForLease(ask.lease, PartFailed(ask.site, ask.what, Unreachable("lost"))))
            return
        try:
            report = self.at_site(ask.site, ask.what)
        except IbshellError as error:
            self.put(ForLease(ask.lease, PartFailed(ask.site, ask.what, error)))
        else:
            self.put(ForLease(ask.lease, Reported(ask.site, report)))

    def settle(self):
        """Plan and deliver until nothing moves."""
        for _ in range(10_000):
            if self.asks:
                self.deliver()
            elif self.hub.queue.is_dirty:
                self.put(PlanWanted())
            else:
                return
        raise AssertionError("it never comes to rest")

    def ask(self, gpus, tenant="a", hours=1.0, wait=None, settle=True, **more):
        lease_id = f"{next(self.ids):08x}"
        demand = Demand(gpus, max_wait_s=wait, **more)
        lease = Lease(lease_id, tenant, "requested", demand, hours * HOUR, "now", submitted=self.now)
        self.put(Submitted(lease))
        if settle:
            self.settle()
        return lease_id

    def pass_time(self, seconds):
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 60)
            for name in self.sites:
                self.at_site(name, Tick())
            self.hub.queue.mark()
            self.settle()

    def end(self, lease_id):
        self.put(ForLease(lease_id, EndAsked("released")))
        self.settle()

    def state(self, lease_id):
        return self.hub.gangs[lease_id].lease.state

    def lease(self, lease_id):
        return self.hub.gangs[lease_id].lease

    def held(self):
        return sum(len(x.grants) for site in self.sites.values() for x in site.leases.values() if x.occupies)
