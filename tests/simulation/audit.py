"""What must hold after every step, checked against what stands on the disks and runs on the devices, not against the machines."""

import msgspec

from agent.ledger.site_ledger import CHECKPOINT_STREAM, CheckpointSigned
from fedpool.leasing import lease as life
from fedpool.leasing.coverage import Coverage
from fedpool.leasing.entries import GrantEntry, LeaseChanged, LeasesForgotten, SiteState
from fedpool.leasing.gang import LeaseRecorded
from fedpool.leasing.grants import SiteGrants
from fedpool.leasing.holdings import Holdings, over_limits
from fedpool.leasing.pool import Pool, PoolEntry, PoolState
from fedpool.leasing.recorded import Replay
from fedpool.ledger.merkle import Frontier, leaf_hash
from fedpool.ledger.records import LeaseSaid, decode
from simulation.disk import RECORDS

WHOLE = 1000
_SITE = msgspec.json.Decoder(GrantEntry)
_HUB = msgspec.json.Decoder(PoolEntry)


class Broken(AssertionError):
    """A promise of the pool was broken."""


class SiteAudit:
    """Folds what a site has written."""

    def __init__(self, world, name, uuids):
        self.world = world
        self.name = name
        self.leases = {}
        self.latest = dict.fromkeys(uuids, 0)  # the largest token ever given for each device
        self.was_active = set()
        self.spans = {}  # lease -> (deadline, when it was set, how long it then had)

    def written(self, rows):
        for row in rows:
            if row.stream == "leases":
                entry = _SITE.decode(row.body)
                if isinstance(entry, LeaseChanged):
                    self.changed(entry.lease, row.at)
                elif isinstance(entry, LeasesForgotten):
                    for lease_id in entry.ids:
                        self.leases.pop(lease_id, None)
                elif isinstance(entry, SiteState):
                    self.leases = {lease.id: lease for lease in entry.leases}

    def changed(self, lease, at):
        now = self.world.loop.time()
        self.world.say(self.name, f"wrote {lease.id} {lease.state} {lease.reason} attempt {lease.attempt & 0xFFFFF}")
        before = self.leases.get(lease.id)
        if before and before.state in life.FINAL and lease.state not in life.FINAL and lease.attempt <= before.attempt:
            raise Broken(f"{lease.id} was {before.state} at {self.name} and is {lease.state} again")
        known = {(grant.uuid, grant.token) for grant in before.grants} if before else set()
        for grant in lease.grants:
            if (grant.uuid, grant.token) not in known:
                if grant.token <= self.latest[grant.uuid]:
                    raise Broken(
                        f"{self.name} gives {grant.uuid} under token {grant.token}; it gave {self.latest[grant.uuid]} before"
                    )
                self.latest[grant.uuid] = grant.token
        self.leases[lease.id] = lease
        self.check_devices()
        if lease.state == "active":
            self.was_active.add((lease.id, lease.attempt))
            if lease.id not in self.spans or self.spans[lease.id][0] != lease.deadline:
                clock = self.world.sites[self.name].clock
                decided = now - (clock.now() - at) / clock.rate
                self.spans[lease.id] = (lease.deadline, decided, lease.deadline - at)
        at_hub = self.world.hub_audit.leases.get(lease.id)
        told = at_hub is not None and at_hub.state not in ("held", "active")  # a gang ends with the first of its parts
        if lease.state == "ending" and lease.reason == "expired" and lease.id in self.spans and not told:
            _, since, span = self.spans[lease.id]
            if now - since < 0.99 * span - 2:
                raise Broken(f"{lease.id} expired at {self.name} after {now - since:.1f} s; it had {span:.1f} s")

    def check_devices(self):
        used = {}
        for lease in self.leases.values():
            if lease.occupies:
                for grant in lease.grants:
                    if grant.uuid not in self.latest:
                        raise Broken(f"{self.name} gave {grant.uuid}, which it does not have")
                    used[grant.uuid] = used.get(grant.uuid, 0) + grant.milli
        for uuid, milli in used.items():
            if milli > WHOLE:
                holders = [
                    lease.id for x in self.leases.values() if (lease := x).occupies for g in x.grants if g.uuid == uuid
                ]
                raise Broken(f"{uuid} at {self.name} is given to {' and '.join(holders)}")

    def held(self, tenant):
        """Devices of a tenant's leases, without those it has been asked to give back and has a grace for; a hold is no lease."""
        live = [x for x in self.leases.values() if x.state in ("active", "ending") and x.tenant == tenant]
        return sum(len(lease.grants) - len(lease.leaving) for lease in live)

    def forget_volatile(self, rows):
        """The disk has lost its latest rows: fold what is left; tokens that were given stay given, renewals are forgotten."""
        self.leases = {}
        self.spans = {}
        for row in rows:
            if row.stream == "leases":
                entry = _SITE.decode(row.body)
                if isinstance(entry, LeaseChanged):
                    self.leases[entry.lease.id] = entry.lease
                elif isinstance(entry, LeasesForgotten):
                    for lease_id in entry.ids:
                        self.leases.pop(lease_id, None)
                elif isinstance(entry, SiteState):
                    self.leases = {lease.id: lease for lease in entry.leases}


class HubAudit:
    """Folds what the hub has written."""

    def __init__(self, world, limits):
        self.world = world
        self.limits = limits  # tenant -> most devices
        self.leases = {}
        self.states = {}  # lease -> every state that stands on disk

    def written(self, rows):
        for row in rows:
            if row.stream == "leases":
                entry = _HUB.decode(row.body)
                if isinstance(entry, LeaseRecorded):
                    self.recorded(entry.lease)

    def recorded(self, lease):
        self.world.say("hub", f"wrote {lease.id} {lease.state} {lease.reason} attempt {lease.attempt & 0xFFFFF}")
        before = self.leases.get(lease.id)
        if lease.state == "active" and (before is None or before.state != "active"):
            for part in lease.parts:
                if (lease.id, lease.attempt) not in self.world.sites[part.site].audit.was_active:
                    raise Broken(f"the hub calls {lease.id} active and {part.site} never had it")
            if sum(part.gpus for part in lease.parts) < lease.demand.gpus:
                raise Broken(f"{lease.id} is active with fewer devices than asked for")
        self.leases[lease.id] = lease
        self.states.setdefault(lease.id, set()).add(lease.state)
        self.check_limits()

    def check_limits(self):
        for tenant, limit in self.limits.items():
            held = sum(site.audit.held(tenant) for site in self.world.sites.values())
            if held > limit:
                raise Broken(f"tenant {tenant} holds {held} devices; its limit is {limit}")

    def forget_volatile(self, rows):
        """The disk has lost its latest rows: what the hub has forgotten it cannot count, so limits hold no longer."""
        self.leases = {}
        self.limits = {}
        for row in rows:
            if row.stream == "leases":
                entry = _HUB.decode(row.body)
                if isinstance(entry, LeaseRecorded):
                    self.leases[entry.lease.id] = entry.lease
                elif isinstance(entry, PoolState):
                    self.leases = {lease.id: lease for lease in entry.leases}

    def answered(self, view):
        """A client was told this: it must stand on the hub's disk."""
        lease = view.lease
        if lease.state not in self.states.get(lease.id, ()):
            raise Broken(f"a client was told that {lease.id} is {lease.state}; the hub's disk has never heard of it")


def same_after_a_restart(fresh, machine, rows, decoder):
    """What a restart would fold is, to the byte, what the running machine says it is."""
    entries = [(decoder.decode(row.body), row.snapshot) for row in rows if row.stream == "leases"]
    latest = max((number for number, (_, snapshot) in enumerate(entries) if snapshot), default=0)
    for entry, _ in entries[latest:]:
        fresh.apply(entry)
    if msgspec.json.encode(fresh.state()) != msgspec.json.encode(machine.state()):
        raise Broken(f"a restart would find another state: {fresh.state()} instead of {machine.state()}")


def hub_restarts_to_the_same(world):
    machine = world.hub.service.gangs.machine
    same_after_a_restart(Pool(world.sites), machine, world.hub.disk.rows, _HUB)


def site_restarts_to_the_same(site):
    machine = site.service.leases.machine
    same_after_a_restart(SiteGrants(site.name, site.inventory), machine, site.disk.rows, _SITE)


def site_ledger_says_the_same(site):
    """One record for every change of a lease, none that breaks a rule, and a checkpoint that is of these records."""
    rows = site.disk.rows
    records = [row.body for row in rows if row.stream == RECORDS]
    signatures = site.world.signatures
    coverage = Coverage(signatures.trust() if signatures is not None else None)
    replay, holdings, time, said = Replay(), Holdings(), 0, []
    for number, body in enumerate(records):
        record = decode(body)
        found = [*replay.take(record), *coverage.take(record)]
        if found or record.time < time:
            raise Broken(f"record {number} of {site.name}'s ledger is wrong: {found or 'it goes back in time'}: {body}")
        time = record.time
        holdings.take(number, record)
        if isinstance(record, LeaseSaid):
            said.append((record.lease, record.version, record.state))
    if over := over_limits({site.name: holdings}):
        raise Broken(f"{site.name}'s ledger: {over}")
    if coverage.finish():
        raise Broken(f"{site.name}'s ledger: {coverage.finish()}")
    entries = [_SITE.decode(row.body) for row in rows if row.stream == "leases"]
    changed = [(e.lease.id, e.lease.version, e.lease.state) for e in entries if isinstance(e, LeaseChanged)]
    if said != changed:
        raise Broken(f"{site.name}'s ledger says {said} and its leases went through {changed}")
    for row in rows:
        if row.stream == CHECKPOINT_STREAM:
            signed = msgspec.json.decode(row.body, type=CheckpointSigned)
            frontier = Frontier()
            for body in records[: signed.size]:
                frontier.append(leaf_hash(body))
            if (frontier.size, frontier.root()) != (signed.size, signed.root):
                raise Broken(f"{site.name} has signed {signed.size} records that are not those on its disk")
