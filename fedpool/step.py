"""The contract of everything that decides: leases at a site, gangs at the hub, rounds on both sides.

    decision = machine.step(event, now)

The driver makes `entries` durable (fsync), applies them to the machine, then sends `replies`, then starts `effects`; the
result of an effect is the next event. An illegal event raises and changes nothing. That order is the crash safety of the
whole pool: whatever was answered or started stands on disk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Entry = TypeVar("Entry")
Reply = TypeVar("Reply")
Effect = TypeVar("Effect")


@dataclass(frozen=True)
class Decision(Generic[Entry, Reply, Effect]):
    """What one step decided.

    Attributes:
        entries: to be made durable first.
        replies: to be sent next.
        effects: to be started last.
        wake_at: when the machine wants to be stepped again if nothing happens, in the clock's seconds, or None.
    """

    entries: Sequence[Entry] = ()
    replies: Sequence[Reply] = ()
    effects: Sequence[Effect] = ()
    wake_at: float | None = None


@dataclass(frozen=True)
class Instant:
    """A moment as a machine's clocks show it.

    Attributes:
        at: CLOCK_BOOTTIME in seconds; readings compare only within one boot.
        boot: id of the boot, None where nothing was ever written.
        unix: the time of day in seconds since 1970, which may be wrong.
    """

    at: float = 0.0
    boot: str | None = None
    unix: float = 0.0

    def shift(self, now: "Instant") -> float:
        """What to add to times of this moment's boot, so that they mean the same in the boot of `now`.

        How long the machine was away only the time of day can tell; where that went backwards, no time has passed.
        """
        if self.boot is None or self.boot == now.boot:
            return 0.0
        return now.at - self.at - max(0.0, now.unix - self.unix)
