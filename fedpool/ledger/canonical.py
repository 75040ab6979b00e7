"""Canonical JSON (RFC 8785) of what entries are made of: one value has one encoding, so everybody computes one hash.

Numbers are integers that every JSON reader holds exactly; there are no fractions, since their text is where implementations differ.
"""

import json
from typing import TypeAlias

from fedpool.errors import IntegrityError, UsageError

Value: TypeAlias = "bool | int | str | list[Value] | dict[str, Value] | None"

INTEGER_MAX = (1 << 53) - 1  # RFC 7493, 2.2
DEPTH_MAX = 32


def encode(value: Value) -> bytes:
    """The canonical encoding, UTF-8.

    Raises:
        UsageError: a value that has none: a fraction, a larger integer, half a surrogate pair, or deeper than `DEPTH_MAX`.
    """
    try:
        return json.dumps(_sorted(value, "entry", DEPTH_MAX), ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"half a surrogate pair in an entry: {error.reason}") from None


def _sorted(value: Value, where: str, depth: int) -> Value:
    if depth == 0:
        raise UsageError(f"{where} is nested deeper than {DEPTH_MAX}")
    match value:
        case None | bool() | str():
            return value
        case int():
            if abs(value) > INTEGER_MAX:
                raise UsageError(f"{where} is {value}; the limit is {INTEGER_MAX}", "write it as text")
            return value
        case list():
            return [_sorted(item, f"{where}[{number}]", depth - 1) for number, item in enumerate(value)]
        case dict():
            # By UTF-16 code units, which differs from code points beyond U+FFFF.
            names = sorted(value, key=lambda name: name.encode("utf-16-be"))
            return {name: _sorted(value[name], f"{where}.{name}", depth - 1) for name in names}
        case _:
            raise UsageError(f"{where} is a {type(value).__name__}, which has no canonical form", "write it as text")


def decode(data: bytes) -> Value:
    """Read a canonical encoding, and nothing that is not one.

    Raises:
        IntegrityError: it is none.
    """
    try:
        value: Value = json.loads(data, parse_float=_refused, parse_constant=_refused, object_pairs_hook=_once)
        again = encode(value)
    except (ValueError, RecursionError, UsageError) as error:
        raise IntegrityError(f"an entry is no canonical JSON: {error}") from None
    if again != data:
        raise IntegrityError("an entry is JSON, and not in its canonical form")
    return value


def _refused(text: str) -> Value:
    raise ValueError(f"the number {text[:40]}")


def _once(pairs: list[tuple[str, Value]]) -> dict[str, Value]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name that occurs twice")
    return found
