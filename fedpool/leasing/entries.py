"""What is durable of a site's leases: the state is the fold of these entries."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from fedpool.records import SiteLease


class LeaseChanged(msgspec.Struct, frozen=True, tag="lease.changed"):
    """A lease took a new state; the whole record, so that the fold is an assignment."""

    lease: SiteLease
    epoch: int
    term: int


class LeasesForgotten(msgspec.Struct, frozen=True, tag="leases.forgotten"):
    """Leases that have been over for long are no longer remembered."""

    ids: tuple[str, ...]


class CordonChanged(msgspec.Struct, frozen=True, tag="cordon.changed"):
    """Something may be granted no longer, or again (reason None)."""

    what: str
    reason: str | None
    term: int
    asked_ms: int = 0


class TermObeyed(msgspec.Struct, frozen=True, tag="term.obeyed"):
    """A hub of this term has connected."""

    term: int


class Restarted(msgspec.Struct, frozen=True, tag="site.restarted"):
    """The agent started: epochs jump; after a reboot of the machine its clock began anew and deadlines shift with it."""

    epoch: int
    shift_s: float
    boot: str


class SiteState(msgspec.Struct, frozen=True, tag="site.state"):
    """Everything at once: a snapshot."""

    leases: tuple[SiteLease, ...]
    cordons: dict[str, str]
    epoch: int
    term: int
    asked_ms: int = 0


GrantEntry: TypeAlias = LeaseChanged | LeasesForgotten | CordonChanged | TermObeyed | Restarted | SiteState
