"""Distribute a gang over sites: as few sites as will do, or so many, or exactly those; as evenly as what is free allows."""

from collections.abc import Mapping

import numpy as np

from fedpool.placement.capacity import Counts
from fedpool.records import Demand


def spread(free: Counts, demand: Demand, gpus: int, rows: list[int] | None) -> dict[int, int] | None:
    """Choose sites and how many devices at each.

    Args:
        free: [site] devices that could be had.
        demand: what is asked for.
        gpus: devices wanted.
        rows: exactly these sites, or None.

    Returns:
        {row: devices}, or None where it cannot be.
    """
    if rows is not None:
        return _evenly(free, rows, gpus, demand.per_site_min)
    if demand.sites:
        return _over(free, demand.sites, gpus, demand.per_site_min)
    enough = np.flatnonzero(free >= gpus)
    if len(enough):  # the tightest site that fits
        return {int(enough[np.argmin(free[enough])]): gpus}
    if demand.shape.same_leaf:
        return None
    return _fewest(free, gpus, demand.per_site_min)


def resized(have: Mapping[str, int], gpus: int, free: Mapping[str, int], least: int) -> dict[str, int]:
    """What a gang is to have at its sites once it has more or fewer devices, changed as little as possible.

    Args:
        have: {site: devices} now.
        gpus: how many it is to have.
        free: {site: devices that could be added}.
        least: it keeps at least so many at every site.

    Returns:
        {site: devices}; more in all than `gpus` where `least` forbids fewer, fewer where no more are free.
    """
    shares = dict(have)
    while sum(shares.values()) > gpus:
        most = max(shares, key=lambda site: (shares[site], site))
        if shares[most] <= least:
            break
        shares[most] -= 1
    while sum(shares.values()) < gpus:
        room = [site for site in shares if shares[site] < have[site] + free.get(site, 0)]
        if not room:
            break
        shares[min(room, key=lambda site: (shares[site], site))] += 1
    return shares


def _evenly(free: Counts, rows: list[int], gpus: int, least: int) -> dict[int, int] | None:
    """At all of these sites; where one has less than its even part, the others have more."""
    have = {row: int(free[row]) for row in rows}
    if sum(have.values()) < gpus or any(count < least for count in have.values()):
        return None
    shares: dict[int, int] = {}
    missing, left = gpus, sorted(rows, key=lambda row: (have[row], row))
    for position, row in enumerate(left):
        shares[row] = min(have[row], missing // (len(left) - position))
        missing -= shares[row]
    return None if missing or any(count < least for count in shares.values()) else shares


def _over(free: Counts, sites: int, gpus: int, least: int) -> dict[int, int] | None:
    """Over so many sites: those that can bear an even part, the tightest first, then those with most."""
    part = max(least, -(-gpus // sites))
    bearing = np.flatnonzero(free >= part)
    if len(bearing) >= sites:
        rows = bearing[np.argsort(free[bearing], kind="stable")[:sites]]
    else:
        usable = np.flatnonzero(free >= least)
        if len(usable) < sites:
            return None
        rows = usable[np.argsort(-free[usable], kind="stable")[:sites]]
    return _evenly(free, [int(row) for row in rows], gpus, least)


def _fewest(free: Counts, gpus: int, least: int) -> dict[int, int] | None:
    """The largest sites first, the rest at the tightest site that holds it."""
    usable = np.flatnonzero(free >= least)
    order = usable[np.argsort(-free[usable], kind="stable")]
    sums = np.cumsum(free[order])
    if not len(sums) or sums[-1] < gpus:
        return None
    count = int(np.searchsorted(sums, gpus)) + 1
    shares = {int(row): int(free[row]) for row in order[: count - 1]}
    rest = gpus - sum(shares.values())
    if rest < least:  # the last site is to have its least as well
        donor = max(shares, key=lambda row: shares[row])
        shares[donor] -= least - rest
        rest = least
        if shares[donor] < least:
            return None
    others = [int(row) for row in usable if int(row) not in shares and free[row] >= rest]
    if not others:
        return None
    shares[min(others, key=lambda row: (int(free[row]), row))] = rest
    return shares
