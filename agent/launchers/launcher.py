"""Finds, warns, watches and ends the processes of leases on this machine."""

from collections.abc import Collection

from agent.launchers import local
from agent.launchers.watchdog import Watchdog


class LocalLauncher:
    """See `agent.ports.Launcher`."""

    def __init__(self) -> None:
        self._watchdog = Watchdog()
        self._scanner = local.Scanner()

    async def marks(self, scope: str) -> list[str]:
        """See `Launcher.marks`."""
        return sorted(mark for mark in await self._scanner.scan() if mark.startswith(f"{scope}/"))

    async def warn(self, mark: str, devices: Collection[str] = ()) -> None:
        """See `Launcher.warn`."""
        await local.warn(mark, self._scanner, devices)

    async def uses(self, mark: str, devices: Collection[str]) -> bool:
        """See `Launcher.uses`."""
        return bool(local.users(await self._scanner.scan(), mark, devices))

    async def end(self, mark: str, devices: Collection[str] = ()) -> None:
        """See `Launcher.end`."""
        await local.end(mark, self._scanner, devices)

    def guard(self, mark: str, deadline: float | None) -> None:
        """See `Launcher.guard`."""
        self._watchdog.guard(mark, deadline)
