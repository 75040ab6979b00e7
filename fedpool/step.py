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
