"""What may be asked for: contradictions are refused before anything is queued, with the nearest thing that would do."""

from collections.abc import Collection, Iterable
from difflib import get_close_matches

from fedpool.errors import NotFound, UsageError
from fedpool.records import PRIORITIES, WHOLE_MILLI, Demand, Device, Shape
from fedpool.units import format_duration
from fedpool.wire.messages import LeaseWanted

DURATION_MAX_S = 365 * 86400.0
GPUS_MAX = 1_000_000


def nearest(name: str, known: Iterable[str], otherwise: str) -> str:
    """A hint for a name that is not known: the nearest that is, or `otherwise`."""
    near = get_close_matches(name, list(known), 1, 0.5)
    return f"did you mean {near[0]}?" if near else otherwise


def shape_of(wanted: LeaseWanted, devices: tuple[str, ...] = ()) -> Shape:
    """Which devices a request is for.

    Args:
        wanted: the request.
        devices: those it names, by UUID.
    """
    return Shape(
        kinds=tuple(wanted.gpu_type.split(",")) if wanted.gpu_type else (),
        memory_min_bytes=wanted.memory_min_bytes,
        memory_max_bytes=wanted.memory_max_bytes,
        milli=wanted.milli,
        devices=devices,
        same_leaf=wanted.same_leaf,
        spread=wanted.spread,
        avoid=tuple(wanted.avoid),
    )


def is_named(device: Device, site: str, name: str) -> bool:
    """Whether a name is a device's: its UUID, or SITE:NODE/INDEX."""
    return name in (device.uuid, f"{site}:{device.node}/{device.label}")


def rank(priority: str) -> int:
    """How high a priority is, 0 the lowest."""
    return PRIORITIES.index(priority)


def require_known(demand: Demand, kinds: Collection[str], sites: Collection[str]) -> None:
    """Refuse kinds and sites that the pool does not have.

    Raises:
        NotFound: naming it and the nearest.
    """
    for name in demand.site_names:
        if name not in sites:
            raise NotFound(
                f"no site {name!r}", nearest(name, sites, f"the pool's sites: {', '.join(sorted(sites)) or 'none'}")
            )
    for kind in demand.shape.kinds:
        if kind not in kinds:
            raise NotFound(
                f"no site has a {kind!r} GPU",
                nearest(kind, kinds, f"the pool's types: {', '.join(sorted(kinds)) or 'none yet'}"),
            )


def require_sound(demand: Demand, duration_s: float) -> None:
    """Refuse numbers that cannot be and constraints that contradict each other.

    Raises:
        UsageError: naming the thing, the value and the limit.
    """
    shape = demand.shape
    if not 1 <= demand.gpus <= GPUS_MAX:
        raise UsageError(f"{demand.gpus} GPUs", f"ask for 1 to {GPUS_MAX}")
    if demand.gpus_max and demand.gpus_max < demand.gpus:
        raise UsageError(
            f"{demand.gpus}..{demand.gpus_max} GPUs", "the first number is the fewest, the second the most"
        )
    if not 0 < duration_s <= DURATION_MAX_S:
        raise UsageError(
            f"a lease of {duration_s:g} s", f"name a positive duration up to {format_duration(DURATION_MAX_S)}"
        )
    if demand.priority not in PRIORITIES:
        raise UsageError(
            f"no priority {demand.priority!r}", nearest(demand.priority, PRIORITIES, f"one of {', '.join(PRIORITIES)}")
        )
    if demand.max_wait_s is not None and demand.max_wait_s < 0:
        raise UsageError(f"a wait of {demand.max_wait_s:g} s", "a positive duration, or none")
    if not 1 <= shape.milli <= WHOLE_MILLI:
        raise UsageError(
            f"{shape.milli} thousandths of a GPU", f"a fraction is 1 to {WHOLE_MILLI} thousandths of one card"
        )
    if shape.memory_max_bytes and shape.memory_max_bytes < shape.memory_min_bytes:
        raise UsageError(
            f"memory of {shape.memory_min_bytes} to {shape.memory_max_bytes} bytes",
            "the first number is the smaller one",
        )
    if shape.spread not in ("", "node", "leaf"):
        raise UsageError(f"spread over {shape.spread!r}", "node or leaf")
    _require_consistent(demand)


def _require_consistent(demand: Demand) -> None:
    shape, gpus = demand.shape, demand.gpus
    sites = len(demand.site_names) or demand.sites
    if demand.sites and demand.site_names and demand.sites != len(demand.site_names):
        raise UsageError(f"{demand.sites} sites with {len(demand.site_names)} named", "leave the number out")
    if len(set(demand.site_names)) < len(demand.site_names):
        raise UsageError(f"sites {', '.join(demand.site_names)}", "name each once")
    if demand.per_site_min < 1:
        raise UsageError(f"at least {demand.per_site_min} GPUs a site", "at least one")
    if gpus < sites * demand.per_site_min:
        raise UsageError(
            f"{gpus} GPUs over {sites} sites",
            f"each site needs at least {demand.per_site_min}: ask for more or fewer sites",
        )
    if shape.same_leaf and shape.spread == "leaf":
        raise UsageError("devices under one leaf and on different leaves", "ask for one of the two")
    if shape.same_leaf and sites > 1:
        raise UsageError(f"devices under one leaf at {sites} sites", "a leaf switch belongs to one site")
    if shape.devices:
        if len(shape.devices) != gpus or demand.most != gpus:
            raise UsageError(f"{gpus} GPUs and {len(shape.devices)} devices by name", "leave the number out")
        if len(set(shape.devices)) < len(shape.devices):
            raise UsageError("a device named twice", "name each once; ask for a fraction to share one")
        if shape.kinds or shape.memory_min_bytes or shape.memory_max_bytes or shape.spread or shape.same_leaf:
            raise UsageError(
                "devices by name together with other wishes about them", "name the devices or describe them"
            )
    if shape.milli < WHOLE_MILLI and any("/" in kind for kind in shape.kinds):
        raise UsageError("a fraction of a MIG slice", "a slice is the smallest part: ask for a smaller profile")
