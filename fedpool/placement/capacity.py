"""The pool as the hub sees it: what every site has, what of it is free, in flat arrays; hints, since the sites decide.

Rows are sites, columns are kinds of device. What the hub has just asked a site for counts as taken until the site's word
about it arrives. A silent site has nothing free.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fedpool.placement import policies
from fedpool.records import EPOCH_JUMP, WHOLE_MILLI, Device, Inventory, Shape, SiteLease

# So many ends of leases are remembered, over all sites, against reports that come late. A report is under way for seconds at most,
# and a hub ends some hundreds of leases in one.
ENDS_MAX = 20_000
Counts = NDArray[np.int64]


class Ends:
    """Leases that are over, with the version of the report that said so, the earliest forgotten first."""

    def __init__(self) -> None:
        self._versions: dict[tuple[str, str], int] = {}
        self._order: deque[tuple[str, str]] = deque()

    def version(self, site: str, lease: str) -> int:
        """The version with which a lease was over at a site; 0 where that is not remembered."""
        return self._versions.get((site, lease), 0)

    def note(self, site: str, lease: SiteLease) -> None:
        """A lease is over at a site."""
        key = (site, lease.id)
        if key not in self._versions:
            self._order.append(key)
        self._versions[key] = lease.version
        if len(self._order) > ENDS_MAX:
            del self._versions[self._order.popleft()]


class SitePicture:
    """One site, from its own words.

    Args:
        name: of the site.
        ends: of leases, at all sites.

    Attributes:
        up: whether it answers.
        leases: {id: lease that occupies devices}.
        total: {kind: devices}.
        free: {kind: devices that are wholly free}.
        closed: {kind: devices of which nothing new is granted}.
        version: grows with every change.
    """

    def __init__(self, name: str, ends: Ends) -> None:
        self.name = name
        self._ends = ends
        self.up = False
        self.inventory = Inventory((), "")
        self.devices: list[Device] = []
        self.leases: dict[str, SiteLease] = {}
        self.cordons: dict[str, str] = {}
        self.closed: dict[str, int] = {}
        self._closed: frozenset[str] = frozenset()
        self.used: dict[str, int] = {}
        self.version = 0
        self._epoch: int | None = None
        self._kinds: dict[str, str] = {}
        self.total: dict[str, int] = {}
        self.free: dict[str, int] = {}

    def describe(
        self,
        inventory: Inventory,
        leases: Sequence[SiteLease],
        cordons: Mapping[str, str],
        epoch: int = 0,
        known: Mapping[str, int] | None = None,
    ) -> None:
        """Everything anew; what was said later and has come before stays, unless the site has restarted since.

        Args:
            inventory: what there is.
            leases: those that occupy devices, and those of `known` that are over.
            cordons: where nothing new is granted.
            epoch: the site's.
            known: {lease: version} the site was asked about: what it does not describe of them it no longer knows.
        """
        self.inventory, self.devices = inventory, inventory.devices()
        self.cordons = dict(cordons)
        described = {lease.id: lease for lease in leases}
        if self._epoch is None or epoch < self._epoch + EPOCH_JUMP:
            said, asked = described, known or {}
            described = {key: lease for key, lease in said.items() if not self.is_stale(lease)}
            for key, lease in self.leases.items():
                if key not in described and (key in said or lease.version > asked.get(key, 0)):
                    described[key] = lease  # it has come, or moved on, since the site was asked
        self._epoch = epoch
        for lease in described.values():
            if not lease.occupies:
                self._ends.note(self.name, lease)
        self.leases = {key: lease for key, lease in described.items() if lease.occupies}
        self._kinds = {device.uuid: device.kind for device in self.devices}
        self._count()

    def _count(self) -> None:
        self.used = {}
        self.total = dict(Counter(device.kind for device in self.devices))
        self.free = dict(self.total)
        for lease in self.leases.values():
            for grant in lease.grants:
                self._use(grant.uuid, grant.milli)
        where = self.cordons.keys()
        closed = [d for d in self.devices if where & {"", d.node, d.uuid}] if where else []
        self.closed = dict(Counter(device.kind for device in closed))
        self._closed = frozenset(device.uuid for device in closed)
        for uuid in self._closed:
            self._use(uuid, WHOLE_MILLI)
        self.version += 1

    def _use(self, uuid: str, milli: int) -> str:
        """Count more or less of a device as taken; returns its kind."""
        before = self.used.get(uuid, 0)
        self.used[uuid] = after = before + milli
        kind = self._kinds.get(uuid, "")
        if kind and bool(before) != bool(after):
            self.free[kind] += -1 if after else 1
        return kind

    def is_stale(self, lease: SiteLease) -> bool:
        """Whether a newer report about this lease has come before."""
        known = self.leases.get(lease.id)
        return lease.version < (self._ends.version(self.name, lease.id) if known is None else known.version)

    def note(self, lease: SiteLease) -> set[str]:
        """Take in the latest word about one lease; returns the kinds of which more or less is free now."""
        known = self.leases.pop(lease.id, None)
        if known is not None and lease.occupies and known.grants == lease.grants:
            self.leases[lease.id] = lease  # nothing has come free and nothing has been taken
            self.version += 1 if known.tenant != lease.tenant else 0
            return set()
        touched = {self._use(old.uuid, -old.milli) for old in known.grants} if known else set()
        if lease.occupies:
            self.leases[lease.id] = lease
            touched |= {self._use(grant.uuid, grant.milli) for grant in lease.grants}
        else:
            self._ends.note(self.name, lease)
        self.version += 1
        return touched

    def returns(self, lease: str, gpus: int) -> int:
        """How many of the devices of a lease can be granted again once it has ended."""
        held = self.leases.get(lease) if self._closed else None
        return gpus - (sum(grant.uuid in self._closed for grant in held.grants) if held else 0)

    def kind_of(self, uuid: str) -> str | None:
        """The kind of a device, or None where the site has no such device."""
        return self._kinds.get(uuid)

    def obtainable(self, shape: Shape) -> dict[str, int]:
        """{kind: devices that could be had together}, for a shape that a count does not describe."""
        nodes = {device.uuid: device.node for device in self.devices} if shape.avoid else {}
        avoided = {
            nodes[grant.uuid]
            for lease in self.leases.values()
            if lease.tenant in shape.avoid
            for grant in lease.grants
            if grant.uuid in nodes
        }
        candidates = policies.usable(self.devices, self.used, shape, avoided)
        kinds = {device.kind for device in candidates}
        return {kind: policies.most([d for d in candidates if d.kind == kind], shape) for kind in kinds}


class Capacity:
    """All sites.

    Attributes:
        sites: {name: picture}.
        names: row -> site.
        kinds: column -> kind.
        free: [site, kind] devices wholly free and not spoken for; a silent site has none.
        total: [site, kind] devices.
        closed: [site, kind] devices of which nothing new is granted.
        silent: [site, kind] devices of sites that do not answer.
    """

    def __init__(self) -> None:
        self.sites: dict[str, SitePicture] = {}
        self.names: list[str] = []
        self.kinds: list[str] = []
        self.row: dict[str, int] = {}
        self.column: dict[str, int] = {}
        self.free: Counts = np.zeros((0, 0), np.int64)
        self.total: Counts = np.zeros((0, 0), np.int64)
        self.closed: Counts = np.zeros((0, 0), np.int64)
        self.silent: Counts = np.zeros((0, 0), np.int64)
        self._ends = Ends()
        self._pending: dict[tuple[str, str], tuple[str, int]] = {}  # (lease, site) -> (kind, devices)
        self._obtainable: dict[tuple[str, Shape], tuple[int, dict[str, int]]] = {}
        self._available: dict[tuple[Shape, int], Counts] = {}  # as of the latest change

    def add(self, name: str) -> SitePicture:
        """A site, known from now on."""
        if name not in self.sites:
            self.sites[name] = SitePicture(name, self._ends)
            self.row[name] = len(self.names)
            self.names.append(name)
            self._grow(len(self.names), len(self.kinds))
        return self.sites[name]

    def _grow(self, rows: int, columns: int) -> None:
        for key in ("free", "total", "closed", "silent"):
            old: Counts = getattr(self, key)
            if old.shape != (rows, columns):
                new = np.zeros((rows, columns), np.int64)
                new[: old.shape[0], : old.shape[1]] = old
                setattr(self, key, new)

    def refresh(self, name: str) -> None:
        """Bring the arrays' row of a site up to its picture."""
        self._available.clear()
        site, row = self.sites[name], self.row[name]
        total = site.total
        for kind in total:
            if kind not in self.column:
                self.column[kind] = len(self.kinds)
                self.kinds.append(kind)
        self._grow(len(self.names), len(self.kinds))
        for counts in (self.total, self.free, self.closed, self.silent):
            counts[row] = 0
        for kind, count in total.items():
            self.total[row, self.column[kind]] = count
        if not site.up:
            self.silent[row] = self.total[row]
        else:
            for kind, count in site.closed.items():
                self.closed[row, self.column[kind]] = count
            for kind, count in site.free.items():
                self.free[row, self.column[kind]] = count
            for (_, where), (kind, count) in self._pending.items():
                if where == name and kind in self.column:
                    self.free[row, self.column[kind]] -= count
            np.maximum(self.free[row], 0, out=self.free[row])

    def speak_for(self, lease: str, site: str, kind: str, count: int) -> None:
        """Devices that the site is about to be asked for."""
        self._available.clear()
        self._pending[lease, site] = (kind, count)
        if kind in self.column:
            self.free[self.row[site], self.column[kind]] -= count

    def settle(self, lease: str, site: str) -> bool:
        """The site has spoken about them, or they are no longer wanted; returns whether there were any."""
        self._available.clear()
        return self._pending.pop((lease, site), None) is not None

    def settle_all(self) -> None:
        """Nothing is wanted any more of all that sites were to be asked for."""
        self._pending.clear()
        for name in self.names:
            self.refresh(name)

    def columns(self, shape: Shape) -> list[int]:
        """The columns of the kinds that will do."""
        if shape.kinds:
            return [self.column[kind] for kind in shape.kinds if kind in self.column]
        return [column for kind, column in self.column.items() if shape.devices or "/" not in kind]

    def available(self, shape: Shape, column: int, rows: Sequence[int] | None = None) -> Counts:
        """[site] devices of one kind that could be had now.

        Args:
            shape: what is wanted.
            column: of the kind.
            rows: only these sites matter, or None for all.
        """
        if shape.is_plain:
            return self.free[:, column].copy()
        if rows is None:
            if (shape, column) not in self._available:
                self._available[shape, column] = self._count(shape, column, range(len(self.names)))
            return self._available[shape, column].copy()
        return self._count(shape, column, rows)

    def _count(self, shape: Shape, column: int, rows: Iterable[int]) -> Counts:
        found = np.zeros(len(self.names), np.int64)
        kind = self.kinds[column]
        for row in rows:
            site = self.sites[self.names[row]]
            if site.up and self.total[row, column]:
                pending = sum(n for (_, where), (k, n) in self._pending.items() if where == site.name and k == kind)
                found[row] = max(0, self._cached(site, shape).get(kind, 0) - pending)
        return found

    def _cached(self, site: SitePicture, shape: Shape) -> dict[str, int]:
        known = self._obtainable.get((site.name, shape))
        if known is None or known[0] != site.version:
            if len(self._obtainable) > 100_000:
                self._obtainable.clear()
            known = (site.version, site.obtainable(shape))
            self._obtainable[site.name, shape] = known
        return known[1]
