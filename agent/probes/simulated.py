"""A probe of devices that exist in a scenario only."""

from fedpool.records import Inventory
from fedpool.sim.scenario import SimulatedSite


class SimulatedProbe:
    """Finds what a scenario describes.

    Args:
        site: the description.
    """

    def __init__(self, site: SimulatedSite) -> None:
        self._site = site

    def snapshot(self) -> Inventory:
        """See `DeviceProbe.snapshot`."""
        return self._site.inventory()
