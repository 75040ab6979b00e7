"""Pick devices at one site: under the fewest leaf switches, then on the fewest nodes, leaving whole nodes whole.

Both sides use it: the site to grant, the hub to tell what a site could grant.
"""

import itertools
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence

from fedpool.records import WHOLE_MILLI, Device, Shape


def suits(device: Device, shape: Shape) -> bool:
    """Whether a device will do, taken or not."""
    if "/" in device.kind and shape.milli < WHOLE_MILLI:
        return False  # a slice is the smallest part
    if shape.devices:
        return device.uuid in shape.devices
    if shape.kinds:
        if device.kind not in shape.kinds:
            return False
    elif "/" in device.kind:
        return False  # a slice is taken only by who names its kind
    return device.memory_bytes >= shape.memory_min_bytes and (
        not shape.memory_max_bytes or device.memory_bytes <= shape.memory_max_bytes
    )


def usable(
    devices: Iterable[Device], used: Mapping[str, int], shape: Shape, avoided: Collection[str] = ()
) -> list[Device]:
    """The devices that will do and have enough left, in the order given.

    Args:
        devices: of the site, node by node.
        used: {UUID: thousandths taken}, 1000 for a device that must not be given.
        shape: what is wanted.
        avoided: nodes that are not wanted.
    """
    return with_room([device for device in devices if device.node not in avoided and suits(device, shape)], used, shape)


def with_room(devices: Iterable[Device], used: Mapping[str, int], shape: Shape) -> list[Device]:
    """The devices, all of which will do, that have enough left."""
    most = WHOLE_MILLI - shape.milli
    return [device for device in devices if used.get(device.uuid, 0) <= most]


def choose(candidates: Sequence[Device], used: Mapping[str, int], shape: Shape, count: int) -> list[Device] | None:
    """Choose `count` of the candidates.

    Args:
        candidates: as `usable` found them, node by node.
        used: {UUID: thousandths taken}.
        shape: what is wanted.
        count: devices wanted, >= 1.

    Returns:
        The devices, all of one kind unless named one by one, or None where there are not enough that fit together.
    """
    if shape.devices:
        return list(candidates) if len(candidates) == count else None
    best: tuple[int, int, int, list[Device]] | None = None
    for kind in sorted({device.kind for device in candidates}):
        found = _of_one_kind([d for d in candidates if d.kind == kind], used, shape, count)
        if found is not None and (best is None or found[:3] < best[:3]):
            best = found
    return None if best is None else best[3]


def most(candidates: Sequence[Device], shape: Shape) -> int:
    """How many of the candidates can be had together."""
    if shape.devices:
        return len(candidates)
    found = 0
    for kind in {device.kind for device in candidates}:
        alike = [device for device in candidates if device.kind == kind]
        if shape.spread:
            count = len({(d.leaf, d.node) if shape.spread == "node" else d.leaf for d in alike})
        elif shape.same_leaf:
            leaves = [device.leaf for device in alike]
            count = max(map(leaves.count, set(leaves)))
        else:
            count = len(alike)
        found = max(found, count)
    return found


def _of_one_kind(
    candidates: list[Device], used: Mapping[str, int], shape: Shape, count: int
) -> tuple[int, int, int, list[Device]] | None:
    if shape.spread:
        return _spread(candidates, used, shape.spread, count)
    if shape.milli < WHOLE_MILLI:
        return _fractions(candidates, used, shape, count)
    return _pack(candidates, count, shape.same_leaf)


def _cost(chosen: list[Device], spare: int) -> tuple[int, int, int, list[Device]]:
    nodes = {(device.leaf, device.node) for device in chosen}
    return len({leaf for leaf, _ in nodes}), len(nodes), spare, chosen


def _spread(
    candidates: list[Device], used: Mapping[str, int], over: str, count: int
) -> tuple[int, int, int, list[Device]] | None:
    """One device a node or leaf; those with the fewest candidates first, so that big nodes stay whole."""
    groups: dict[str, list[Device]] = {}
    for device in candidates:
        groups.setdefault(device.node if over == "node" else device.leaf, []).append(device)
    if len(groups) < count:
        return None
    order = sorted(groups, key=lambda name: (len(groups[name]), name))[:count]
    chosen = [max(groups[name], key=lambda device: used.get(device.uuid, 0)) for name in order]
    return _cost(chosen, sum(len(groups[name]) - 1 for name in order))


def _fractions(
    candidates: list[Device], used: Mapping[str, int], shape: Shape, count: int
) -> tuple[int, int, int, list[Device]] | None:
    """Best fit: the cards that have the least left, so that whole cards stay whole."""
    if shape.same_leaf:
        leaves: dict[str, list[Device]] = {}
        for device in candidates:
            leaves.setdefault(device.leaf, []).append(device)
        fitting = [leaf for leaf in leaves if len(leaves[leaf]) >= count]
        if not fitting:
            return None
        candidates = leaves[min(fitting, key=lambda leaf: (len(leaves[leaf]), leaf))]
    if len(candidates) < count:
        return None
    chosen = sorted(candidates, key=lambda device: -used.get(device.uuid, 0))[:count]
    return _cost(chosen, sum(WHOLE_MILLI - used.get(device.uuid, 0) - shape.milli for device in chosen))


def _pack(candidates: list[Device], count: int, one_leaf: bool) -> tuple[int, int, int, list[Device]] | None:
    """The choice with its cost: leaves used, nodes used, devices left over on touched nodes."""
    if len(candidates) < count:
        return None
    leaves: dict[str, list[list[Device]]] = {}
    for (leaf, _), alike in itertools.groupby(candidates, operator.attrgetter("leaf", "node")):
        leaves.setdefault(leaf, []).append(list(alike))
    sizes = {leaf: sum(map(len, nodes)) for leaf, nodes in leaves.items()}
    fitting = [leaf for leaf, size in sizes.items() if size >= count]
    if fitting:
        order = [min(fitting, key=lambda leaf: (sizes[leaf], leaf))]  # the tightest leaf that fits
    elif one_leaf:
        return None
    else:
        order = sorted(leaves, key=lambda leaf: (-sizes[leaf], leaf))
    chosen: list[Device] = []
    spare = touched = used_leaves = 0
    for leaf in order:
        used_leaves += 1
        machines = leaves[leaf]
        while machines and len(chosen) < count:
            missing = count - len(chosen)
            # A node that fits exactly, else the smallest that covers the rest, else the largest.
            machine = min(machines, key=lambda gpus: (len(gpus) < missing, abs(len(gpus) - missing)))
            machines.remove(machine)
            touched += 1
            spare += max(0, len(machine) - missing)
            chosen.extend(machine[:missing])
        if len(chosen) == count:
            break
    return used_leaves, touched, spare, chosen
