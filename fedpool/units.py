"""Durations and sizes as people write them: `90s 30m 4h 2d`, `80GiB`. The one module that parses and prints them."""

import re

from fedpool.errors import UsageError

GIB = 2**30
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_BYTES = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": GIB, "TiB": 2**40,
}  # fmt: skip
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B?)")


def parse_duration(text: str) -> float:
    """Read `90s`, `1h30m`, `2d` as seconds.

    Raises:
        UsageError: the text is no duration, or it is zero.
    """
    position, seconds = 0, 0.0
    for match in _DURATION.finditer(text):
        if match.start() != position:
            break
        seconds += float(match[1]) * _SECONDS[match[2]]
        position = match.end()
    if position != len(text) or seconds <= 0:
        raise UsageError(f"{text!r} is not a duration", "write a number and a unit: 90s, 30m, 4h, 2d or 1h30m")
    return seconds


def format_duration(seconds: float) -> str:
    """Print seconds in at most two units: `42s`, `3m 5s`, `2h 10m`, `4d 3h`; under ten seconds with one decimal."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    parts: list[str] = []
    for unit in ("d", "h", "m", "s"):
        count, whole = divmod(whole, _SECONDS[unit])
        if count or parts:
            parts.append(f"{count}{unit}")
    return " ".join(part for part in parts[:2] if not part.startswith("0"))


def parse_size(text: str) -> int:
    """Read `80GiB`, `500MB`, `1024` as bytes.

    Raises:
        UsageError: the text is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if not match or match[2] not in _BYTES:
        raise UsageError(f"{text!r} is not a size", "write a number and a unit: 80GiB, 500MB, 1024")
    return int(float(match[1]) * _BYTES[match[2]])


def format_size(size_bytes: float) -> str:
    """Print bytes with a decimal unit and three significant digits: `1.25 MB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.3g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.4g} TB"


def format_memory(size_bytes: int) -> str:
    """Print a device's memory in whole binary gigabytes: `80 GiB`."""
    return f"{size_bytes / GIB:.0f} GiB"
