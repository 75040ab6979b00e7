"""Pick devices at one site: under the fewest leaf switches, then on the fewest nodes, leaving whole nodes whole."""

from collections.abc import Collection

from fedpool.records import Gpu, Inventory


def pack(inventory: Inventory, free: Collection[str], count: int, gpu_type: str | None) -> list[Gpu] | None:
    """Choose `count` free devices.

    Args:
        inventory: the site's nodes.
        free: UUIDs that may be taken.
        count: devices wanted, >= 1.
        gpu_type: only devices of this type, or None for any (all of one type all the same).

    Returns:
        The devices in node order, or None where there are not enough of one type.
    """
    types = {gpu.type for gpu in inventory.gpus()} if gpu_type is None else {gpu_type}
    best: tuple[int, int, int, list[Gpu]] | None = None
    for wanted in sorted(types):
        chosen = _pack_type(inventory, free, count, wanted)
        if chosen is not None and (best is None or chosen[:3] < best[:3]):
            best = chosen
    return None if best is None else best[3]


def _pack_type(
    inventory: Inventory, free: Collection[str], count: int, wanted: str
) -> tuple[int, int, int, list[Gpu]] | None:
    """The choice with its cost: leaves used, nodes used, devices left over on touched nodes."""
    leaves: dict[str, list[list[Gpu]]] = {}
    for node in inventory.nodes:
        usable = [gpu for gpu in node.gpus if gpu.uuid in free and gpu.type == wanted]
        if usable:
            leaves.setdefault(node.leaf, []).append(usable)
    sizes = {leaf: sum(len(node) for node in nodes) for leaf, nodes in leaves.items()}
    if sum(sizes.values()) < count:
        return None
    fitting = [leaf for leaf, size in sizes.items() if size >= count]
    if fitting:
        order = [min(fitting, key=lambda leaf: (sizes[leaf], leaf))]  # the tightest leaf that fits
    else:
        order = sorted(leaves, key=lambda leaf: (-sizes[leaf], leaf))
    chosen: list[Gpu] = []
    touched = spare = used_leaves = 0
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
    return used_leaves, touched, spare, chosen
