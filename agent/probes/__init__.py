"""What a site has: a probe looks, the agent records. A simulated one here; NVML, sysfs and Slurm come with their own parts."""

from typing import Protocol

from fedpool.records import Inventory


class DeviceProbe(Protocol):
    """Finds a site's nodes and devices."""

    def snapshot(self) -> Inventory:
        """What is there now. A device keeps its UUID for ever; its index may change."""
        ...
