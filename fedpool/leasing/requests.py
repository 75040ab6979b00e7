"""What a site's lease machine is asked and told; the tag of each is its method on the wire, `lease.hold` and so on.

Only durations are in them, never times of day. `term` is the hub's: a site obeys no smaller one than it has seen. `request` is what
whoever asked has signed; `mandate` is what the site's own gate made of it, and whatever the hub puts there is ignored.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from fedpool.records import Mandate, Shape, Signed


class Hold(msgspec.Struct, frozen=True, tag="hold", omit_defaults=True):
    """Set devices aside for `ttl_s` seconds; a later attempt replaces an earlier one of the same lease."""

    lease: str
    tenant: str
    gpus: int
    ttl_s: float
    term: int
    shape: Shape = Shape()
    duration_s: float = 0.0
    attempt: int = 0
    request: Signed | None = None
    mandate: Mandate | None = None


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """Turn a hold into a lease of `duration_s` seconds."""

    lease: str
    duration_s: float
    term: int
    attempt: int = 0


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Give up a hold."""

    lease: str
    term: int
    attempt: int = 0


class Renew(msgspec.Struct, frozen=True, tag="renew", omit_defaults=True):
    """Let an active lease end `duration_s` seconds from now."""

    lease: str
    duration_s: float
    term: int
    request: Signed | None = None
    mandate: Mandate | None = None


class Resize(msgspec.Struct, frozen=True, tag="resize", omit_defaults=True):
    """Let an active lease have `gpus` devices here: more are added at once, those too many are given back within `grace_s`.

    It is obeyed only while the lease is as the hub saw it when it decided, at `version`; granted or not, the lease has a later
    one then. So of two resizes on their way, whatever way they come, one is obeyed, and the hub knows what became of both.
    """

    lease: str
    gpus: int
    grace_s: float
    term: int
    version: int
    request: Signed | None = None
    mandate: Mandate | None = None


class Notify(msgspec.Struct, frozen=True, tag="notify", omit_defaults=True):
    """Give an active lease notice: it ends in `grace_s` seconds at the latest and cannot be renewed; its processes are told."""

    lease: str
    grace_s: float
    reason: str
    term: int
    request: Signed | None = None
    mandate: Mandate | None = None


class Transfer(msgspec.Struct, frozen=True, tag="transfer", omit_defaults=True):
    """Give an active lease to another tenant: the old one's processes end, then its devices get new tokens."""

    lease: str
    tenant: str
    term: int
    offer: Signed | None = None
    request: Signed | None = None
    mandate: Mandate | None = None


class Release(msgspec.Struct, frozen=True, tag="release", omit_defaults=True):
    """End a lease: its processes are killed, then its devices are free."""

    lease: str
    term: int
    reason: str = ""
    request: Signed | None = None
    mandate: Mandate | None = None


class Cordon(msgspec.Struct, frozen=True, tag="cordon", omit_defaults=True):
    """Grant nothing new on a node or device, or, with `what` empty, at the whole site; what runs goes on."""

    what: str
    reason: str
    term: int
    request: Signed | None = None
    asked_ms: int = 0


class Uncordon(msgspec.Struct, frozen=True, tag="uncordon", omit_defaults=True):
    """Grant on it again."""

    what: str
    term: int
    request: Signed | None = None
    asked_ms: int = 0


class Obey(msgspec.Struct, frozen=True, tag="obey"):
    """A hub of this term has connected: no earlier one is obeyed from now on."""

    term: int


class Tick(msgspec.Struct, frozen=True, tag="tick"):
    """Time has passed."""


class ProcessesGone(msgspec.Struct, frozen=True, tag="gone"):
    """The driver has seen that no process of a lease is left on these devices (all of them, where none is named)."""

    lease: str
    devices: tuple[str, ...] = ()


LeaseEvent: TypeAlias = Hold | Commit | Abort | Renew | Resize | Notify | Transfer | Release
SiteEvent: TypeAlias = Cordon | Uncordon | Obey
GrantEvent: TypeAlias = LeaseEvent | SiteEvent | Tick | ProcessesGone
