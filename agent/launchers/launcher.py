"""Finds, warns, watches and ends the processes of leases on this machine."""

from agent.launchers import local
from agent.launchers.watchdog import Watchdog


class LocalLauncher:
    """See `agent.ports.Launcher`."""

    def __init__(self) -> None:
        self._watchdog = Watchdog()

    async def marks(self, site: str) -> list[str]:
        """See `Launcher.marks`."""
        return await local.marks(site)

    async def warn(self, mark: str) -> None:
        """See `Launcher.warn`."""
        await local.warn(mark)

    async def end(self, mark: str) -> None:
        """See `Launcher.end`."""
        await local.end(mark)

    def guard(self, mark: str, deadline: float | None) -> None:
        """See `Launcher.guard`."""
        self._watchdog.guard(mark, deadline)
