"""What people see of the hub: rows and sums over what the sites last said, with what is missing and how old it is."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from agent.gangs import Gangs
from agent.links import SiteLink
from agent.runs import Runs
from fedpool import __version__
from fedpool.errors import NotFound
from fedpool.identity.keys import fingerprint
from fedpool.leasing import lease as life
from fedpool.leasing import policy as policies
from fedpool.leasing.demand import nearest
from fedpool.records import Device, Gpu, Grant, Node, SiteLease
from fedpool.wire.messages import Listing, SiteDescription, SiteError, TenantView


class PoolStatus(msgspec.Struct, frozen=True):
    """pool.status -> a pool in a few numbers."""

    pool: str
    hub_pid: int
    software: str
    uptime_s: float
    sites: int
    sites_up: int
    gpus: int
    gpus_free: int
    leases: int
    runs: int


def _missing(links: Mapping[str, SiteLink]) -> list[SiteError]:
    return [SiteError(link.name, link.error.code, link.error.message) for link in links.values() if not link.is_up]


def _as_of(gangs: Gangs, links: Mapping[str, SiteLink]) -> dict[str, str]:
    now = gangs.clock.wall()
    return {link.name: now if link.is_up else link.seen for link in links.values() if link.seen}


class _Uses:
    """Who has what of a site's devices, and what is cordoned."""

    def __init__(self, gangs: Gangs, link: SiteLink) -> None:
        assert link.description is not None
        self._up = link.is_up
        self._cordons = link.description.cordons
        self._of: dict[str, list[tuple[SiteLease, Grant]]] = {}
        for lease in gangs.machine.capacity.sites[link.name].leases.values():
            for grant in lease.grants:
                self._of.setdefault(grant.uuid, []).append((lease, grant))

    def of(self, uuid: str) -> list[tuple[SiteLease, Grant]]:
        """The leases on a device, with their part of it."""
        return self._of.get(uuid, [])

    def cordon(self, node: str, uuid: str = "") -> str:
        """Why nothing new is granted on a node or device, or ""."""
        return next((self._cordons[what] for what in (uuid, node, "") if what in self._cordons), "")

    def is_free(self, node: str, gpu: Gpu) -> bool:
        """Whether the whole card could be had: no part and no slice of it is used or cordoned."""
        devices = (gpu.uuid, *(piece.uuid for piece in gpu.slices))
        return self._up and not any(self.of(uuid) or self.cordon(node, uuid) for uuid in devices)

    def free(self, nodes: Iterable[Node]) -> int:
        """How many cards are free."""
        return sum(self.is_free(node.name, gpu) for node in nodes for gpu in node.gpus)

    def state(self, device: Device) -> str:
        """free, cordoned, or the state of what is on it; unknown where the site is silent."""
        if not self._up:
            return "unknown"
        states = [lease.state for lease, _ in self.of(device.uuid)]
        return (
            max(states, key=life.progress)
            if states
            else "cordoned"
            if self.cordon(device.node, device.uuid)
            else "free"
        )


def _described(links: Mapping[str, SiteLink]) -> Iterator[SiteLink]:
    return (link for link in links.values() if link.description is not None)


def status(pool: str, pid: int, uptime_s: float, links: Mapping[str, SiteLink], gangs: Gangs, runs: Runs) -> PoolStatus:
    """The pool in a few numbers; a silent site's devices count as taken."""
    total = free = 0
    for link in _described(links):
        assert link.description is not None
        total += len(link.description.inventory.gpus())
        free += _Uses(gangs, link).free(link.description.inventory.nodes)
    return PoolStatus(
        pool=pool,
        hub_pid=pid,
        software=__version__,
        uptime_s=round(uptime_s, 1),
        sites=len(links),
        sites_up=sum(link.is_up for link in links.values()),
        gpus=total,
        gpus_free=free,
        leases=sum(lease.state in life.LIVE for lease in gangs.leases()),
        runs=sum(view.state in ("running", "interrupted") for view in runs.views()),
    )


def sites(gangs: Gangs, links: Mapping[str, SiteLink]) -> Listing:
    """One row a site."""
    items = []
    for link in links.values():
        d = link.description
        gpus = d.inventory.gpus() if d else []
        state = (
            "unknown"
            if d is None
            else "silent"
            if not link.is_up
            else "recovering"
            if d.recovering
            else "drained"
            if "" in d.cordons
            else "up"
        )
        items.append(
            {
                "name": link.name,
                "state": state,
                "mode": link.entry.mode,
                "nodes": len(d.inventory.nodes) if d else None,
                "gpus": len(gpus) if d else None,
                "gpus_free": _Uses(gangs, link).free(d.inventory.nodes) if d else None,
                "types": ",".join(sorted({gpu.type for gpu in gpus})),
                "since_s": round(gangs.clock.now() - link.since, 1),
                "seen": link.seen,
                "address": link.entry.address,
                "identity": fingerprint(link.key),
                "software": d.software if d else "",
                "backend": d.inventory.backend if d else "",
                "epoch": d.epoch if d else None,
                "cipher": link.negotiated.get("cipher", ""),
                "policy": policies.digest(d.policy)[:16] if d and d.policy else "",
                "certificate_expires_in_s": _left(d, gangs),
                "key_exchange": link.negotiated.get("key_exchange", ""),
                "error": "" if link.is_up else link.error.message,
            }
        )
    return Listing(items, _missing(links), _as_of(gangs, links))


def _left(described: SiteDescription | None, gangs: Gangs) -> float | None:
    """How long a site's certificate holds; None where it has none."""
    if described is None or not described.certificate_until:
        return None
    left: float = max(0.0, described.certificate_until - gangs.clock.unix())
    return round(left, 1)


def nodes(gangs: Gangs, links: Mapping[str, SiteLink]) -> Listing:
    """One row a node."""
    items = []
    for link in _described(links):
        assert link.description is not None
        uses = _Uses(gangs, link)
        for node in link.description.inventory.nodes:
            cordon = uses.cordon(node.name)
            items.append(
                {
                    "node": f"{link.name}:{node.name}",
                    "site": link.name,
                    "leaf": node.leaf,
                    "state": "unknown" if not link.is_up else "cordoned" if cordon else "up",
                    "gpus": len(node.gpus),
                    "gpus_free": uses.free([node]),
                    "type": ",".join(sorted({gpu.type for gpu in node.gpus})),
                    "cordon": cordon,
                }
            )
    return Listing(items, _missing(links), _as_of(gangs, links))


def gpus(gangs: Gangs, links: Mapping[str, SiteLink]) -> Listing:
    """One row a device: a card, or a slice of a card that is cut."""
    items = []
    for link in _described(links):
        assert link.description is not None
        uses = _Uses(gangs, link)
        inventory = link.description.inventory
        domains = {gpu.uuid: gpu.nvlink_domain for gpu in inventory.gpus()}
        for device in inventory.devices():
            on_it = uses.of(device.uuid)
            items.append(
                {
                    "gpu": f"{link.name}:{device.node}/{device.label}",
                    "type": device.kind,
                    "memory_bytes": device.memory_bytes,
                    "state": uses.state(device),
                    "used_milli": sum(grant.milli for _, grant in on_it),
                    "lease": ",".join(lease.id for lease, _ in on_it),
                    "tenant": ",".join(dict.fromkeys(lease.tenant for lease, _ in on_it)),
                    "site": link.name,
                    "node": device.node,
                    "index": int(device.label.partition(".")[0]),
                    "leaf": device.leaf,
                    "nvlink_domain": domains.get(device.uuid),
                    "uuid": device.uuid,
                    "token": max((grant.token for _, grant in on_it), default=None),
                    "cordon": uses.cordon(device.node, device.uuid),
                    "shares": [
                        {"lease": lease.id, "tenant": lease.tenant, "milli": grant.milli, "token": grant.token}
                        for lease, grant in on_it
                    ],
                }
            )
    return Listing(items, _missing(links), _as_of(gangs, links))


def _orphan(site: str, lease: SiteLease) -> dict[str, Any]:
    return {
        "id": lease.id,
        "tenant": lease.tenant,
        "state": f"orphan ({lease.state})",
        "gpus": len(lease.grants),
        "sites": 1,
        "expires_in_s": None,
        "requested_at": "",
        "reason": "the hub does not know it",
        "site_names": [site],
    }


def leases(gangs: Gangs, links: Mapping[str, SiteLink]) -> Listing:
    """One row a lease; what a site holds and the hub does not know is an orphan, shown until it is gone."""
    items: list[dict[str, Any]] = []
    for lease in gangs.leases():
        view = gangs.summary(lease)
        state = lease.state
        if view.silent_sites and lease.state in life.LIVE:
            since = min(view.silent_sites.values()) or lease.requested_at
            state = f"unknown since {since}"
        items.append(
            {
                "id": lease.id,
                "tenant": lease.tenant,
                "state": state,
                "gpus": lease.gpus,
                "sites": len(lease.parts),
                "expires_in_s": None if view.expires_in_s is None else round(view.expires_in_s, 1),
                "requested_at": lease.requested_at,
                "reason": lease.reason or lease.notice or view.waits_for,
                "site_names": [part.site for part in lease.parts],
            }
        )
    items += [_orphan(link.name, lease) for link in _described(links) for lease in gangs.orphans(link.name)]
    return Listing(items, _missing(links), _as_of(gangs, links))


def tenant(gangs: Gangs, name: str) -> TenantView:
    """One tenant.

    Raises:
        NotFound: there is none of that name.
    """
    tenants = gangs.machine.tenants
    if name not in tenants.known:
        raise NotFound(f"no tenant {name!r}", nearest(name, tenants.known, "ibshell tenant list shows them"))
    kinds = {kind for who, kind, _ in tenants.held if who == name}
    return TenantView(
        tenants.known[name],
        tenants.holds(name),
        sum(tenants.borrowed(name, kind) for kind in kinds),
        round(tenants.used(name, gangs.clock.now()) / 3600, 2),
    )


def tenants(gangs: Gangs) -> Listing:
    """One row a tenant."""
    items = []
    for name in gangs.machine.tenants.known:
        view = tenant(gangs, name)
        items.append(
            {
                "name": name,
                "gpus_held": view.gpus_held,
                "gpus_guaranteed": sum(quota.gpus for quota in view.tenant.quotas),
                "gpus_borrowed": view.gpus_borrowed,
                "device_hours": view.device_hours,
                "weight": view.tenant.weight,
                "highest": view.tenant.highest,
                "quotas": [f"{q.kind}@{q.site}={q.gpus}" for q in view.tenant.quotas],
            }
        )
    return Listing(items)


def runs(all_runs: Runs) -> Listing:
    """One row a run."""
    items = []
    for view in all_runs.views():
        last = view.history[-1] if view.history else {}
        items.append(
            {
                "id": view.id,
                "name": view.name,
                "tenant": view.tenant,
                "state": view.state,
                "round": view.round,
                "rounds": view.rounds,
                "sites": len(view.sites),
                "metrics": last.get("metrics", {}),
                "lease": view.lease,
                "reason": view.reason,
            }
        )
    return Listing(items)
