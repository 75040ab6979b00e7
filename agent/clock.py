"""The machine's clocks: CLOCK_BOOTTIME for everything that expires (it counts suspended time), the wall clock for people."""

import functools
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path


def now() -> float:
    """Seconds since boot, suspended time included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@functools.cache
def boot() -> str:
    """An id of this boot: CLOCK_BOOTTIME readings compare only within one."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def unix() -> float:
    """The time of day in seconds since 1970."""
    return time.time()


def wall(later_s: float = 0.0) -> str:
    """The time of day, or so many seconds later, in ISO 8601, UTC, whole seconds."""
    return (datetime.now(UTC) + timedelta(seconds=later_s)).replace(microsecond=0).isoformat().replace("+00:00", "Z")
