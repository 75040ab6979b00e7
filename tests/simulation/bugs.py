"""Bugs to plant, each a mistake somebody could make: the simulation must find every one of them."""

from contextlib import contextmanager
from unittest.mock import patch

import msgspec

from agent.gangs import Gangs
from agent.leases import SiteLeases
from fedpool.leasing.grants import SiteGrants
from simulation.disk import Store


@contextmanager
def missing_fsync():
    """Entries are acknowledged before they are durable."""
    append = Store.append

    async def careless(self, stream, entries, *, snapshot=False):
        if entries and not self.fenced:
            self.disk.loop.create_task(append(self, stream, entries, snapshot=snapshot))

    with patch.object(Store, "append", careless):
        yield


@contextmanager
def lost_fencing_check():
    """A site looks at the lease's id only when somebody wants to use its devices."""
    with patch.object(SiteGrants, "require", lambda self, lease_id, token=None: self._find(lease_id)):
        yield


@contextmanager
def ttl_on_wall_time():
    """A site lets leases expire by the time of day."""
    made = SiteLeases.__init__

    class WallClock:
        def __init__(self, clock):
            ahead = clock.unix() - clock.now()
            self.now = lambda: clock.unix() - ahead
            self.boot, self.unix, self.wall = clock.boot, clock.unix, clock.wall

    def careless(self, site, inventory, limits, store, changed, clock, launcher):
        made(self, site, inventory, limits, store, changed, WallClock(clock), launcher)

    with patch.object(SiteLeases, "__init__", careless):
        yield


@contextmanager
def commit_after_lapse():
    """A site commits a hold whose time is over and whose devices it has already given back."""
    commit = SiteGrants._commit

    def careless(self, event, now):
        lease = self.leases.get(event.lease)
        if lease is not None and lease.state == "aborted":
            deadline = now + event.duration_s
            return self._change(
                msgspec.structs.replace(lease, state="active", deadline=deadline, version=lease.version + 1)
            )
        return commit(self, event, now)

    with patch.object(SiteGrants, "_commit", careless):
        yield


@contextmanager
def doubled_retry():
    """A request that is asked again is another request."""
    lease_of = Gangs.lease_of

    def careless(self, wanted):
        lease = lease_of(self, wanted)
        return msgspec.structs.replace(lease, id=self._new_id()) if lease.id in self.machine.gangs else lease

    with patch.object(Gangs, "lease_of", careless):
        yield


BUGS = {
    "missing-fsync": missing_fsync,
    "lost-fencing-check": lost_fencing_check,
    "ttl-on-wall-time": ttl_on_wall_time,
    "commit-after-lapse": commit_after_lapse,
    "doubled-retry": doubled_retry,
}
