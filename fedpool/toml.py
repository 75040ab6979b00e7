"""TOML texts that people write: every error names the file, the line, the key, the value and the remedy."""

import difflib
import re
import tomllib
from typing import Any, TypeVar, get_args

import msgspec

from fedpool.errors import UsageError

Kind = TypeVar("Kind", bound=msgspec.Struct)
_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")


class TomlText:
    """One text.

    Args:
        text: what somebody wrote.
        where: what to call it, its path for instance.
        error: raised for whatever is wrong with it.

    Raises:
        UsageError: it is not TOML.
    """

    def __init__(self, text: str, where: str, error: type[UsageError] = UsageError) -> None:
        self.where = where
        self._lines = text.splitlines()
        self._error = error
        try:
            self.raw: dict[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as wrong:
            raise error(f"{where} is not TOML: {wrong}") from None

    def wrong(self, key: str, message: str, hint: str = "", table: str = "", number: int = 0) -> UsageError:
        """An error about a key: of the text, of a table, or of the table with this index among those of its name."""
        return self._error(f"{self.where}{self._line(key, table, number)}: {message}", hint)

    def convert(self, kind: type[Kind], hints: dict[str, str] | None = None) -> Kind:
        """The text as a record.

        Args:
            kind: of the record; unknown keys are errors.
            hints: {key: remedy}.

        Raises:
            UsageError: a key is missing, unknown or of the wrong type.
        """
        try:
            return msgspec.convert(self.raw, kind)
        except msgspec.ValidationError as wrong:
            message, _, path = str(wrong).partition(" - at `$")
        table, number, key = _place(path.rstrip("`"))
        unknown, missing = (re.search(rf"{what} field `([^`]+)`", message) for what in ("unknown", "required"))
        if unknown or missing:
            table, key = key or table, ""
        if unknown:
            known = _fields(kind, table)
            near = difflib.get_close_matches(unknown[1], known, 1)
            raise self.wrong(
                unknown[1],
                f"unknown key {unknown[1]!r}",
                f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}",
                table,
                number,
            )
        if missing:
            raise self.wrong("", f"the key {missing[1]!r} is missing", (hints or {}).get(missing[1], ""), table, number)
        name = key or table
        says = f"{name}: {message[0].lower()}{message[1:]}" if name else message
        raise self.wrong(name, says, (hints or {}).get(name, ""), table if key else "", number)

    def _line(self, key: str, table: str, number: int) -> str:
        first, last = 0, len(self._lines)
        heads: list[int] = []
        if table:
            heads = [i for i, line in enumerate(self._lines) if re.match(rf"\s*\[+\s*{re.escape(table)}\s*\]", line)]
            if number < len(heads):
                first = heads[number]
                after = (i for i in range(first + 1, last) if self._lines[i].lstrip().startswith("["))
                last = next(after, last)
        for i in range(first, last):
            if key and re.match(rf"\s*(\[+\s*)?[\"']?{re.escape(key)}[\"']?\s*[=\]]", self._lines[i]):
                return f", line {i + 1}"
        if table and not heads:  # it is written on one line, as a value
            return self._line(table, "", 0)
        return f", line {first + 1}" if table and first < len(self._lines) else ""


def _place(path: str) -> tuple[str, int, str]:
    """(table, index among those of its name, key) of a path such as `.site[1].nodes`; a key of the text has no table."""
    steps = [(name, int(index) if index else 0) for name, index in _STEP.findall(path)]
    names = [name for name, _ in steps if name]
    index = next((i for name, i in steps if not name), 0)
    return (names[0], index, names[1]) if len(names) > 1 else (names[0] if names else "", index, "")


def _fields(kind: type[msgspec.Struct], table: str) -> list[str]:
    """The keys a record, or its table of this name, may have."""
    fields = msgspec.structs.fields(kind)
    for field in fields:
        if field.encode_name == table:
            kinds = [kind for kind in (field.type, *get_args(field.type)) if isinstance(kind, type)]
            inner = next((kind for kind in kinds if issubclass(kind, msgspec.Struct)), None)
            return [inside.encode_name for inside in msgspec.structs.fields(inner)] if inner is not None else []
    return [field.encode_name for field in fields]
