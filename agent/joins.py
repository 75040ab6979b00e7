"""Who is invited to a pool, who asks to join it, and the sites that did: kept at the hub, decided by its operator.

The hub is told nothing that it could use: it knows of an invitation its number and its role, not its secret, and whoever joins
proves its key to the operator with that secret.
"""

from __future__ import annotations

import re
from collections import deque
from typing import TypeAlias

import msgspec

from agent.config import SiteEntry
from agent.ports import Clock, Store
from fedpool.errors import NotAuthorised, NotFound, Refused, UsageError
from fedpool.identity.keys import public_line
from fedpool.identity.principals import require_principal
from fedpool.names import NAME, RULE
from fedpool.transport.ssh import parse_address
from fedpool.wire.membership import InviteWanted, JoinApproved, JoinAsked, JoinState, JoinWanted

STREAM = "members"
INVITES_MAX = 10_000
INVITE_MAX_S = 30 * 86400.0
ASKING_MAX = 8  # keys that ask with one invitation: the operator sees which one has its secret
ASKED_A_MINUTE = 30  # over all who have no certificate yet
KEPT_S = 90 * 86400.0  # a decision, for whoever asked and was away, or asks for a new certificate
_ID = re.compile(r"[0-9a-f]{16}")


class Invited(msgspec.Struct, frozen=True, tag="invited"):
    """Somebody may ask to join until a time of day."""

    id: str
    role: str
    name: str
    until: float


class Decided(msgspec.Struct, frozen=True, tag="decided"):
    """An invitation is used up: a key was let in, or refused."""

    id: str
    key: str
    certificates: tuple[str, ...]
    reason: str
    until: float


class SiteJoined(msgspec.Struct, frozen=True, tag="site.joined"):
    """A site belongs to the pool."""

    entry: SiteEntry


class SiteLeft(msgspec.Struct, frozen=True, tag="site.left"):
    """It does no longer."""

    name: str


MemberEntry: TypeAlias = Invited | Decided | SiteJoined | SiteLeft


class Joins:
    """All of them.

    Args:
        store: where they are kept.
        clock: the machine's.

    Attributes:
        sites: {name: how it is reached} of those that joined.
    """

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self.sites: dict[str, SiteEntry] = {}
        self._invites: dict[str, Invited] = {}
        self._decided: dict[tuple[str, str], Decided] = {}
        self._asking: dict[str, dict[str, JoinAsked]] = {}
        self._asked: deque[float] = deque(maxlen=ASKED_A_MINUTE)

    async def recover(self) -> None:
        """Read them back."""
        for entry in await self._store.read(STREAM, MemberEntry):
            self._apply(entry)

    def _apply(self, entry: MemberEntry) -> None:
        match entry:
            case Invited():
                self._invites[entry.id] = entry
            case Decided():
                self._decided[entry.id, entry.key] = entry
                if entry.certificates:
                    self._invites.pop(entry.id, None)
                    self._asking.pop(entry.id, None)
                else:
                    self._asking.get(entry.id, {}).pop(entry.key, None)
            case SiteJoined():
                self.sites[entry.entry.name] = entry.entry
            case SiteLeft():
                self.sites.pop(entry.name, None)

    async def _record(self, *entries: MemberEntry) -> None:
        await self._store.append(STREAM, entries)
        for entry in entries:
            self._apply(entry)

    async def invite(self, wanted: InviteWanted) -> None:
        """Let somebody ask.

        Raises:
            UsageError, Refused: it is malformed, or one of that number is there.
        """
        if not _ID.fullmatch(wanted.id) or not NAME.fullmatch(wanted.name):
            raise UsageError(f"an invitation {wanted.id[:40]!r} for {wanted.name[:80]!r}", f"a name is {RULE}")
        require_principal(wanted.role)
        if not 0 < wanted.for_s <= INVITE_MAX_S:
            raise UsageError(f"an invitation for {wanted.for_s:g} s", f"it may hold for up to {INVITE_MAX_S:.0f} s")
        now = self._clock.unix()
        self._invites = {key: one for key, one in self._invites.items() if one.until > now}
        self._decided = {key: one for key, one in self._decided.items() if one.until > now}
        self._asking = {
            key: asking
            for key, asking in self._asking.items()
            if key in self._invites or any(one.role == "renewal" for one in asking.values())
        }
        if wanted.id in self._invites or len(self._invites) >= INVITES_MAX:
            raise Refused(f"invitation {wanted.id} is there already", "make another")
        await self._record(Invited(wanted.id, wanted.role, wanted.name, now + wanted.for_s))

    def ask(self, public: bytes, wanted: JoinWanted) -> JoinState:
        """Somebody asks to join, with the key that it has proved.

        Raises:
            NotAuthorised: there is no such invitation, or it is over.
            Refused: too many ask.
        """
        key = public_line(public)
        known = self.state(public, wanted)
        if known is not None and not (wanted.renew and known.state == "approved"):
            return known
        now = self._clock.now()
        if len(self._asked) == ASKED_A_MINUTE and now - self._asked[0] < 60.0:
            raise Refused("too many ask to join at this moment", "try again in a minute")
        self._asked.append(now)
        if known is not None:
            self._decided.pop((wanted.id, key))
            self._asking.setdefault(wanted.id, {})[key] = JoinAsked(wanted.id, "renewal", "", wanted.name, "", key, b"")
            return JoinState("waiting")
        invite = self._invites.get(wanted.id)
        if invite is None or invite.until <= self._clock.unix():
            raise NotAuthorised(
                "no such invitation: it was used, withdrawn, or is over", "ask the operator for another"
            )
        if not NAME.fullmatch(wanted.name):
            raise UsageError(f"{wanted.name[:80]!r} is no name: {RULE}")
        if wanted.address:
            parse_address(wanted.address)
        asking = self._asking.setdefault(wanted.id, {})
        if key not in asking and len(asking) >= ASKING_MAX:
            raise Refused("too many keys ask with this invitation", "the operator has to look at it")
        asking[key] = JoinAsked(
            wanted.id, invite.role, invite.name, wanted.name, wanted.address[:300], key, wanted.proof[:64]
        )
        return JoinState("waiting")

    def state(self, public: bytes, wanted: JoinWanted) -> JoinState | None:
        """What has become of somebody who asked; None where it has not."""
        key = public_line(public)
        decided = self._decided.get((wanted.id, key))
        if decided is not None:
            state = "approved" if decided.certificates else "refused"
            return JoinState(state, list(decided.certificates), reason=decided.reason)
        return JoinState("waiting") if key in self._asking.get(wanted.id, {}) else None

    def waiting(self) -> list[JoinAsked]:
        """Those who wait."""
        return [one for asking in self._asking.values() for one in asking.values()]

    def require(self, approved: JoinApproved) -> JoinAsked:
        """Who it is that is to be let in, or refused.

        Raises:
            NotFound: nobody asks so.
        """
        found = self._asking.get(approved.id, {}).get(approved.key)
        if found is None:
            raise NotFound(f"nobody asks to join with invitation {approved.id}", "ibshell pool joins shows who does")
        return found

    async def decide(self, approved: JoinApproved, entry: SiteEntry | None) -> None:
        """Somebody was let in, or refused; a site is known from now on."""
        until = self._clock.unix() + KEPT_S
        decided = Decided(approved.id, approved.key, tuple(approved.certificates), approved.reason[:500], until)
        await self._record(decided, *(() if entry is None else (SiteJoined(entry),)))

    async def remove(self, name: str) -> None:
        """A site belongs to the pool no longer.

        Raises:
            NotFound: it never joined.
        """
        if name not in self.sites:
            raise NotFound(f"no site {name!r} has joined", "one that stands in hub.toml is removed there")
        await self._record(SiteLeft(name))
