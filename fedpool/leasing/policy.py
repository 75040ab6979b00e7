"""A site's policy: who may have what here, how long and when, which programs may run, which federations its data may join.

It is the site's own file, in TOML; a change takes effect at once, stands in the ledger, and takes nothing from leases that are
there.
"""

from __future__ import annotations

import fnmatch
import hashlib
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import msgspec

from fedpool.errors import Forbidden, UsageError
from fedpool.names import NAME, RULE
from fedpool.toml import TomlText
from fedpool.units import format_duration, parse_duration

TEXT_BYTES_MAX = 24 * 1024  # a record has to hold it, with what escapes add
EVERYBODY = "*"
NEVER = "never"
WITNESSED_WITHIN_S = 600.0
# With two witnesses a majority is both of them, and one site that is away would hold up the others: those have to want it.
WITNESSED_SITES = 4
_DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_HOURS = re.compile(r"(?:([a-z]{3})(?:-([a-z]{3}))?\s+)?(\d\d):(\d\d)-(\d\d):(\d\d)")


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one tenant may.

    Attributes:
        gpus: devices at once, None for as many as there are.
        types: of devices, empty for any.
        max_duration: longest lease and longest renewal, "" for what the site allows.
        hours: when leases may begin and be renewed, `mon-fri 18:00-08:00`; empty for always.
    """

    gpus: int | None = None
    types: tuple[str, ...] = ()
    max_duration: str = ""
    hours: tuple[str, ...] = ()


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A site's policy.

    Attributes:
        tenants: {name, or `*` for every other: rule}; where there are any, nobody else may have anything.
        types: of devices that may be leased at all, empty for any.
        max_duration: longest lease and longest renewal.
        timezone: in which hours are given.
        programs: patterns (`*` and `?`) of programs with their arguments that may run; None for any.
        data_tags: of data that federations may use here; None: what a plan says of data does not matter.
        minimum_cohort: fewest sites whose sum this site lets anybody see; 0: what its configuration says.
        fabric_isolation: whether leases have to be apart from each other on the fabric.
        witnessed_within: for how long nothing new is granted or shown without a majority of witnesses having cosigned what
            the ledger says; "never" goes on without them.
    """

    tenants: dict[str, Rule] = {}
    types: tuple[str, ...] = ()
    max_duration: str = "30d"
    timezone: str = "UTC"
    programs: tuple[str, ...] | None = None
    data_tags: tuple[str, ...] | None = None
    minimum_cohort: int = 0
    fabric_isolation: bool = False
    witnessed_within: str = ""

    def rule(self, tenant: str) -> Rule | None:
        """What a tenant may; None where it may nothing."""
        return self.tenants.get(tenant, self.tenants.get(EVERYBODY, None if self.tenants else Rule()))

    def unwitnessed_s(self, sites: int) -> float:
        """How long this site waits for its witnesses at most before it grants nothing new, in a pool of so many sites."""
        if self.witnessed_within:
            return math.inf if self.witnessed_within == NEVER else parse_duration(self.witnessed_within)
        return WITNESSED_WITHIN_S if sites >= WITNESSED_SITES else math.inf

    def lease_problems(
        self, tenant: str, gpus: int, kinds: Iterable[str], duration_s: float, unix: float
    ) -> Iterator[str]:
        """Everything that forbids a lease.

        Args:
            tenant: who would hold it.
            gpus: all devices the tenant would have here then.
            kinds: of the devices, as far as they are known.
            duration_s: how long.
            unix: when, Unix seconds.
        """
        rule = self.rule(tenant)
        if rule is None:
            allowed = ", ".join(sorted(self.tenants))
            yield f"tenant {tenant} may have nothing here; allowed are: {allowed}"
            return
        if rule.gpus is not None and gpus > rule.gpus:
            yield f"tenant {tenant} would have {gpus} devices here; {rule.gpus} are allowed"
        for kind in kinds:
            for types, whose in ((self.types, "here"), (rule.types, f"to tenant {tenant}")):
                if types and not any(fnmatch.fnmatchcase(kind, pattern) for pattern in types):
                    yield f"{kind} is not leased {whose}; allowed are: {', '.join(types)}"
        longest = min(parse_duration(text) for text in (self.max_duration, rule.max_duration) if text)
        if duration_s > longest:
            yield f"{format_duration(duration_s)} for tenant {tenant}; {format_duration(longest)} are allowed"
        if rule.hours and not any(_within(hours, unix, self.timezone) for hours in rule.hours):
            at = datetime.fromtimestamp(unix, ZoneInfo(self.timezone)).strftime("%a %H:%M").lower()
            yield f"it is {at} ({self.timezone}); tenant {tenant} may begin: {'; '.join(rule.hours)}"
        if self.fabric_isolation:
            yield "leases have to be apart on the fabric, and this site's agent has no control of the fabric"

    def program_problems(self, program: Sequence[str], data_tags: Sequence[str]) -> Iterator[str]:
        """Everything that forbids a program, and what data it is for."""
        line = " ".join(program)
        if self.programs is not None and not any(fnmatch.fnmatchcase(line, pattern) for pattern in self.programs):
            yield f"the program {line[:200]!r} may not run here; allowed are: {'; '.join(self.programs) or 'none'}"
        if self.data_tags is not None:
            if not data_tags:
                yield f"the plan does not say what data it is for; allowed here are: {', '.join(self.data_tags) or 'none'}"
            for tag in data_tags:
                if tag not in self.data_tags:
                    allowed = ", ".join(self.data_tags) or "none"
                    yield f"data tagged {tag!r} joins no federation here; allowed are: {allowed}"


def require(site: str, problems: Iterable[str]) -> None:
    """Refuse what a policy forbids.

    Raises:
        Forbidden: with everything that forbids it.
    """
    found = list(problems)
    if found:
        raise Forbidden(f"the policy of {site}: {'; '.join(found)}", f"ibshell site policy show {site}")


def digest(text: str) -> str:
    """What stands for a policy: SHA-256, hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def parse(text: str, where: str) -> Policy:
    """Read a policy.

    Raises:
        UsageError: it is malformed; line, key, value and remedy are named.
    """
    if len(text.encode()) > TEXT_BYTES_MAX:
        raise UsageError(f"{where} has {len(text.encode())} bytes; the limit is {TEXT_BYTES_MAX}")
    toml = TomlText(text, where)
    policy = toml.convert(Policy)
    try:
        ZoneInfo(policy.timezone)
    except (KeyError, ValueError, OSError):
        raise toml.wrong("timezone", f"no time zone {policy.timezone!r}", 'for example "Europe/Zurich"') from None
    durations = [("max_duration", policy.max_duration)]
    if policy.witnessed_within not in ("", NEVER):
        durations.append(("witnessed_within", policy.witnessed_within))
    for name, rule in policy.tenants.items():
        if name != EVERYBODY and not NAME.fullmatch(name):
            raise toml.wrong("tenants", f"{name!r} is no name: {RULE}", "* stands for every other tenant")
        durations += [("max_duration", rule.max_duration)] if rule.max_duration else []
        if rule.gpus is not None and rule.gpus < 0:
            raise toml.wrong("gpus", f"gpus = {rule.gpus} for {name}", "0 or more")
        for hours in rule.hours:
            if not _readable(hours):
                raise toml.wrong("hours", f"hours {hours!r} for {name}", 'write "mon-fri 18:00-08:00" or "09:00-17:00"')
    for key, value in durations:
        try:
            parse_duration(value)
        except UsageError as error:
            raise toml.wrong(key, f"{key} = {error.message}", error.hint) from None
    if policy.minimum_cohort < 0:
        raise toml.wrong("minimum_cohort", f"minimum_cohort = {policy.minimum_cohort}", "2 or more")
    return policy


def _readable(hours: str) -> bool:
    found = _HOURS.fullmatch(hours.strip().lower())
    if found is None:
        return False
    first, last, *times = found.groups()
    values = [int(value) for value in times]
    in_a_day = all(60 * values[i] + values[i + 1] <= 24 * 60 and values[i + 1] < 60 for i in (0, 2))
    return in_a_day and all(day is None or day in _DAYS for day in (first, last))


def _within(hours: str, unix: float, timezone: str) -> bool:
    """Whether a moment lies in hours; those that end before they begin go on after midnight."""
    found = _HOURS.fullmatch(hours.strip().lower())
    assert found is not None, "the policy was read"
    first, last, *times = found.groups()
    begin, end = (60 * int(times[i]) + int(times[i + 1]) for i in (0, 2))
    now = datetime.fromtimestamp(unix, UTC).astimezone(ZoneInfo(timezone))
    minute, day = 60 * now.hour + now.minute, now.weekday()
    if begin < end:
        return begin <= minute < end and _on(day, first, last)
    return (minute >= begin and _on(day, first, last)) or (minute < end and _on((day - 1) % 7, first, last))


def _on(day: int, first: str | None, last: str | None) -> bool:
    if first is None:
        return True
    begin, end = _DAYS.index(first), _DAYS.index(last or first)
    return begin <= day <= end if begin <= end else day >= begin or day <= end
