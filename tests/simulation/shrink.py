"""Makes a failing world small: leaves out whatever it fails without."""

from simulation.world import World


def fails(seed, faults, clients):
    """The world of a seed with these faults and so many clients, if it breaks a promise."""
    world = World(seed, faults, clients)
    return world if world.run() is not None else None


def shrink(seed, tell=lambda text: None):
    """The smallest world found that still fails; (world, faults, clients).

    Faults are left out in halves, then quarters and so on (delta debugging), then clients one by one. Random numbers belong to
    each thing by its name, so what is left out does not change what the others do until they feel its absence.
    """
    world = World(seed)
    clients, faults = len(world.clients), list(world.faults)
    if world.run() is None:
        return None, faults, clients
    size = max(1, len(faults) // 2)
    while faults:
        for start in range(0, len(faults), size):
            fewer = faults[:start] + faults[start + size :]
            found = fails(seed, fewer, clients)
            if found is not None:
                world, faults = found, fewer
                tell(f"{len(faults)} faults are enough")
                break
        else:
            if size == 1:
                break
            size = max(1, size // 2)
            continue
        size = min(size, max(1, len(faults)))
    while clients > 1:
        found = fails(seed, faults, clients - 1)
        if found is None:
            break
        world, clients = found, clients - 1
    return world, faults, clients
