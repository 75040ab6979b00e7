"""The words of the domain, as frozen records. They know nothing of how they are stored, sent or shown."""

import math

import msgspec

LeaseId = str
SiteName = str


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """A MIG slice of a GPU, leased on its own: `MIG-…`, its profile (`1g.10gb`), its memory."""

    uuid: str
    profile: str
    memory_bytes: int


class Gpu(msgspec.Struct, frozen=True, array_like=True):
    """One card. Its identity is the UUID; the index is for display and may change at a reboot.

    Attributes:
        uuid: `GPU-…`, unique in the world.
        index: position on its node.
        type: lower-case model name, `h100`.
        memory_bytes: device memory.
        nvlink_domain: devices of one domain reach each other without the fabric.
        slices: its MIG slices; a card that is cut is leased by slice, never whole.
    """

    uuid: str
    index: int
    type: str
    memory_bytes: int
    nvlink_domain: int
    slices: tuple[Slice, ...] = ()


class Device(msgspec.Struct, frozen=True):
    """What can be leased: a whole card, or one slice of a card that is cut.

    Attributes:
        uuid: the card's or the slice's.
        kind: `h100` for a card, `h100/1g.10gb` for a slice.
        label: position on its node: `3`, or `3.1` for the second slice of the fourth card.
    """

    uuid: str
    kind: str
    memory_bytes: int
    node: str
    leaf: str
    label: str


class Node(msgspec.Struct, frozen=True):
    """One machine of a site, with the leaf switch it hangs on."""

    name: str
    leaf: str
    gpus: tuple[Gpu, ...]


class Inventory(msgspec.Struct, frozen=True):
    """What a probe found at a site."""

    nodes: tuple[Node, ...]
    backend: str

    def gpus(self) -> list[Gpu]:
        """All cards, in node order."""
        return [gpu for node in self.nodes for gpu in node.gpus]

    def devices(self) -> list[Device]:
        """What can be leased, in node order."""
        found = []
        for node in self.nodes:
            for gpu in node.gpus:
                if not gpu.slices:
                    found.append(Device(gpu.uuid, gpu.type, gpu.memory_bytes, node.name, node.leaf, str(gpu.index)))
                found += [
                    Device(s.uuid, f"{gpu.type}/{s.profile}", s.memory_bytes, node.name, node.leaf, f"{gpu.index}.{i}")
                    for i, s in enumerate(gpu.slices)
                ]
        return found


WHOLE_MILLI = 1000

# How far a site's tokens jump when its agent restarts: whoever sees such a jump knows that it has.
EPOCH_JUMP = 1000


class Shape(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which devices will do, at one site.

    Attributes:
        kinds: any of these, all devices of one of them; empty: any kind of whole card.
        memory_min_bytes: at least so much memory a device.
        memory_max_bytes: at most so much, 0 for no limit.
        milli: how much of each device, in thousandths of one card; 1000 is the whole.
        devices: exactly these UUIDs, or empty.
        same_leaf: all under one leaf switch.
        spread: "node" or "leaf": no two devices on one; or "".
        avoid: tenants on whose nodes nothing is to be placed.
    """

    kinds: tuple[str, ...] = ()
    memory_min_bytes: int = 0
    memory_max_bytes: int = 0
    milli: int = WHOLE_MILLI
    devices: tuple[str, ...] = ()
    same_leaf: bool = False
    spread: str = ""
    avoid: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether a count of free devices of its kinds says everything."""
        return not (
            self.memory_min_bytes
            or self.memory_max_bytes
            or self.devices
            or self.same_leaf
            or self.spread
            or self.avoid
            or self.milli != WHOLE_MILLI
        )


class Demand(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a tenant asks for; see `fedpool.leasing.demand` for what is refused.

    Attributes:
        gpus: devices over all sites, the fewest that will do.
        gpus_max: the most that are of use; 0 or `gpus` for a rigid gang, more for an elastic one.
        shape: which devices.
        sites: over how many sites, 0 for as few as possible.
        site_names: exactly these sites, or empty.
        per_site_min: at least so many devices at every site that takes part.
        priority: one of `PRIORITIES`.
        not_before: hub's CLOCK_BOOTTIME at which it is to start, 0 for as soon as possible.
        max_wait_s: how long it may wait, 0 for not at all, None for ever.
    """

    gpus: int
    gpus_max: int = 0
    shape: Shape = Shape()
    sites: int = 0
    site_names: tuple[str, ...] = ()
    per_site_min: int = 1
    priority: str = "normal"
    not_before: float = 0.0
    max_wait_s: float | None = 0.0

    @property
    def most(self) -> int:
        """The most devices that are of use."""
        return max(self.gpus, self.gpus_max)


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """One device in a lease, with the fencing token that must accompany every use of it, and how much of it."""

    uuid: str
    token: int
    milli: int = WHOLE_MILLI


class Signed(msgspec.Struct, frozen=True):
    """A request as it travels: the bytes that are signed and the SSHSIG over them, not armoured.

    `fedpool.identity.requests` says what is in it.
    """

    payload: bytes
    signature: bytes


class Mandate(msgspec.Struct, frozen=True, array_like=True):
    """Which signed request a lease at a site rests on.

    Attributes:
        request: its digest; see `fedpool.leasing.gate.digest`.
        asked_ms: when the latest request that the site obeyed for this lease was signed; an older one is obeyed no more.
        until: CLOCK_BOOTTIME until which the request could be shown again; so long the lease is remembered.
        duration_s: the longest it may be committed for.
        grant: digest of the request under which it was granted to its holder, where a later one has taken its place.
    """

    request: str
    asked_ms: int
    until: float
    duration_s: float = 0.0
    grant: str = ""


class SiteLease(msgspec.Struct, frozen=True, omit_defaults=True):
    """A lease as the site that granted it knows it.

    Attributes:
        id: the lease's id, the same at every site of a gang.
        tenant: who holds it.
        state: held, active, ending, released, expired, revoked, failed, aborted.
        grants: the devices, with their tokens.
        deadline: CLOCK_BOOTTIME seconds at which a hold lapses or a lease expires; once it is over, when it ended.
        reason: why it is ending or ended, or "".
        attempt: which attempt of the hub to place it; a later one replaces an earlier one.
        shape: which devices may be added to it.
        leaving: devices it has been asked to give back, and has until `leave_by` to stop using.
        notice: why it will end at its deadline and cannot be renewed, or "".
        next_tenant: to whom it goes once its processes are gone, or "".
        version: grows with every change, so that of two reports the newer is known whatever way they came.
        mandate: what it rests on, where requests are signed.
    """

    id: LeaseId
    tenant: str
    state: str
    grants: tuple[Grant, ...]
    deadline: float
    reason: str = ""
    attempt: int = 0
    shape: Shape = Shape()
    leaving: tuple[str, ...] = ()
    leave_by: float = 0.0
    notice: str = ""
    next_tenant: str = ""
    version: int = 0
    mandate: Mandate | None = None

    @property
    def token(self) -> int:
        """The latest fencing token of its devices; 0 where it has none."""
        return max((grant.token for grant in self.grants), default=0)

    @property
    def occupies(self) -> bool:
        """Whether its devices are taken."""
        return self.state in ("held", "active", "ending")


class Part(msgspec.Struct, frozen=True, omit_defaults=True):
    """One site's part of a cross-site lease, as the hub knows it: devices of one kind, or those named."""

    site: SiteName
    gpus: int
    state: str = "requested"
    grants: tuple[Grant, ...] = ()
    reason: str = ""
    kind: str = ""
    devices: tuple[str, ...] = ()

    @property
    def is_live(self) -> bool:
        """Whether its devices count as taken."""
        return self.state in ("requested", "held", "active")


class Lease(msgspec.Struct, frozen=True, omit_defaults=True):
    """A lease as the hub knows it: a gang over one or more sites.

    Attributes:
        id: eight hexadecimal digits; commands accept a unique prefix.
        tenant: who asked.
        state: requested, queued, held, active, ending, released, expired, revoked, failed, aborted.
        demand: what was asked for.
        duration_s: length asked for, from activation or the latest renewal.
        requested_at: wall clock, ISO 8601, for people.
        parts: one a site, once it is placed.
        submitted: CLOCK_BOOTTIME seconds at the hub when it was asked for.
        started: the same when it became active, 0 before.
        deadline: an estimate of when it expires; the sites decide.
        ended: when it was over, 0 before.
        attempt: how often it has been placed.
        starts_at: wall clock of an advance reservation, for people.
        reason: why it ended or waits, or "".
        notice: why it is about to be ended, or "".
        offered_to: the tenant it is offered to, or "".
        next_tenant: the tenant that has taken the offer, until every site has handed over, or "".
    """

    id: LeaseId
    tenant: str
    state: str
    demand: Demand
    duration_s: float
    requested_at: str
    parts: tuple[Part, ...] = ()
    submitted: float = 0.0
    started: float = 0.0
    deadline: float = 0.0
    ended: float = 0.0
    attempt: int = 0
    starts_at: str = ""
    reason: str = ""
    notice: str = ""
    offered_to: str = ""
    next_tenant: str = ""

    @property
    def gpus(self) -> int:
        """Devices over all sites; before it is placed, the fewest asked for."""
        return sum(part.gpus for part in self.parts) if self.parts else self.demand.gpus

    @property
    def waits_until(self) -> float:
        """When it has waited for as long as it may, by the hub's CLOCK_BOOTTIME."""
        wait = self.demand.max_wait_s
        return math.inf if wait is None else max(self.submitted, self.demand.not_before) + wait


class Quota(msgspec.Struct, frozen=True):
    """How much of the pool belongs to a tenant.

    Attributes:
        kind: of device, `*` for all.
        site: `*` for all.
        gpus: guaranteed devices: idle ones may be borrowed by others and are taken back by preemption.
        limit: the most it may hold with what it borrows, None for no limit.
    """

    kind: str
    site: str
    gpus: int
    limit: int | None = None


class Tenant(msgspec.Struct, frozen=True):
    """Who may lease.

    Attributes:
        weight: its part in the fair share, relative to the others'.
        highest: the highest priority it may ask for.
        quotas: at most one for each kind and site.
    """

    name: str
    weight: float = 1.0
    highest: str = "high"
    quotas: tuple[Quota, ...] = ()


PRIORITIES = ("scavenger", "normal", "high", "urgent")
