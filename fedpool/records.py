"""The words of the domain, as frozen records. They know nothing of how they are stored, sent or shown."""

import msgspec

LeaseId = str
SiteName = str


class Gpu(msgspec.Struct, frozen=True):
    """One device. Its identity is the UUID; the index is for display and may change at a reboot.

    Attributes:
        uuid: `GPU-…`, unique in the world.
        index: position on its node.
        type: lower-case model name, `h100`.
        memory_bytes: device memory.
        nvlink_domain: devices of one domain reach each other without the fabric.
    """

    uuid: str
    index: int
    type: str
    memory_bytes: int
    nvlink_domain: int


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
        """All devices, in node order."""
        return [gpu for node in self.nodes for gpu in node.gpus]


class Grant(msgspec.Struct, frozen=True):
    """One device in a lease, with the fencing token that must accompany every use of it."""

    uuid: str
    token: int


class SiteLease(msgspec.Struct, frozen=True):
    """A lease as the site that granted it knows it.

    Attributes:
        id: the lease's id, the same at every site of a gang.
        tenant: who holds it.
        state: held, active, ending, released, expired, aborted.
        grants: the devices, with their tokens.
        deadline: CLOCK_BOOTTIME seconds at which a hold lapses or a lease expires.
        reason: why it is ending or ended, or "".
    """

    id: LeaseId
    tenant: str
    state: str
    grants: tuple[Grant, ...]
    deadline: float
    reason: str = ""

    @property
    def occupies(self) -> bool:
        """Whether its devices are taken."""
        return self.state in ("held", "active", "ending")


class Part(msgspec.Struct, frozen=True):
    """One site's part of a cross-site lease, as the hub knows it."""

    site: SiteName
    gpus: int
    state: str = "requested"
    grants: tuple[Grant, ...] = ()
    reason: str = ""


class Lease(msgspec.Struct, frozen=True):
    """A lease as the hub knows it: a gang over one or more sites.

    Attributes:
        id: eight hexadecimal digits; commands accept a unique prefix.
        tenant: who asked.
        state: requested, held, active, releasing, released, expired, failed, aborted.
        parts: one a site.
        duration_s: length asked for, from activation or the latest renewal.
        requested_at: wall clock, ISO 8601, for people.
        deadline: CLOCK_BOOTTIME seconds at the hub, an estimate; the sites decide.
        reason: why it ended, or "".
    """

    id: LeaseId
    tenant: str
    state: str
    parts: tuple[Part, ...]
    duration_s: float
    requested_at: str
    deadline: float = 0.0
    reason: str = ""

    @property
    def gpus(self) -> int:
        """Devices over all sites."""
        return sum(part.gpus for part in self.parts)
