"""A hub's members: lets in whom the operator has let in, passes the roster on, and carries new certificates to sites."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec

from agent.config import SiteEntry
from agent.joins import Joins
from agent.links import SiteLink
from agent.ports import Clock, Store
from agent.rosters import Rosters
from agent.tenancy import digest_of_signed
from fedpool.errors import IbshellError, NotFound, Refused, UsageError
from fedpool.identity import certificates
from fedpool.identity.principals import site_principal
from fedpool.identity.roster import Roster, read, signer_of
from fedpool.identity.trust import Trust
from fedpool.names import NAME
from fedpool.records import Signed
from fedpool.wire.membership import (
    CertificateGiven,
    InviteWanted,
    JoinApproved,
    JoinAsked,
    JoinsAsked,
    JoinState,
    JoinWanted,
    MembersAsked,
    RosterGiven,
    RosterShown,
    RosterWanted,
    SiteCertificate,
    SiteNamed,
    TenantsGiven,
)
from fedpool.wire.messages import Nothing
from fedpool.wire.session import Request, from_body

log = logging.getLogger(__name__)

TENANTS_AT_ONCE = 20  # in one message: each may have as much as a request


class Membership:
    """See the module.

    Args:
        trust: whom the hub believes.
        store: where it is kept.
        clock: the machine's.
        links: {site: link}.
        hub_sites: where sites dial in, or "".
        joined: makes a link to a site that has joined.
        left: gives one up.
        begin: runs something in the background.
        tenants: gives {name: what an operator has signed about a tenant last}.
        first: file with a roster to begin with, or None.
    """

    def __init__(
        self,
        trust: Trust,
        store: Store,
        clock: Clock,
        links: Mapping[str, SiteLink],
        hub_sites: str,
        joined: Callable[[SiteEntry], None],
        left: Callable[[str], None],
        begin: Callable[[Coroutine[Any, Any, None]], None],
        tenants: Callable[[], Mapping[str, Signed]],
        first: Path | None,
    ) -> None:
        self._first = first
        self._trust = trust
        self._joins = Joins(store, clock)
        self._rosters = Rosters(trust, store, self._adopted)
        self._clock = clock
        self._links = links
        self._hub_sites = hub_sites
        self._joined = joined
        self._left = left
        self._begin = begin
        self._tenants = tenants

    async def recover(self) -> None:
        """Read everything back; sites that joined are linked again."""
        await self._rosters.recover()
        if self._first is not None and self._first.exists():
            first = msgspec.json.decode(self._first.read_bytes(), type=Signed)
            if read(first).number > self._trust.number:
                await self._rosters.take(first)
        await self._joins.recover()
        for entry in self._joins.sites.values():
            if entry.name not in self._links:
                self._joined(entry)

    # --- whoever may connect

    def roster(self, wanted: RosterWanted) -> RosterShown:
        """The roster, if it is newer than the one that is known there."""
        return RosterShown(self._rosters.since(wanted.number))

    def waiting(self) -> JoinsAsked:
        """Those who ask to join."""
        return JoinsAsked(self._joins.waiting())

    def members(self) -> MembersAsked:
        """The sites, and until when their certificates hold."""
        return MembersAsked(
            {
                link.name: SiteCertificate(link.description.certificate_until, link.description.certificate_authority)
                for link in self._links.values()
                if link.is_up and link.description is not None
            }
        )

    # --- guests

    async def answer_guest(self, public: bytes, request: Request) -> JoinState:
        """Answer somebody who has proved a key and nothing else.

        Raises:
            UsageError: it asks for more than guests may.
        """
        if request.method != "join.ask":
            raise UsageError(f"{request.method[:40]!r} is nothing for a guest", "join the pool first")
        state = self._joins.ask(public, from_body(request.body or {}, JoinWanted, request.method))
        return JoinState(state.state, state.certificates, self._rosters.since(0), self._hub_sites, state.reason)

    # --- operators

    async def invite(self, wanted: InviteWanted, signed: Signed | None) -> Nothing:
        """Let somebody ask to join."""
        await self._joins.invite(wanted)
        return Nothing()

    async def approve(self, approved: JoinApproved, signed: Signed | None) -> Nothing:
        """Let somebody in, or refuse them.

        Raises:
            NotFound: nobody asks so.
            UsageError, NotAuthorised: the certificates are not what they should be.
        """
        asked = self._joins.require(approved)
        for line in approved.certificates:
            found = certificates.parse(line, "the certificate")
            if not found.principals:
                raise UsageError("a certificate for nobody")
            if found.public_line != approved.key:
                raise UsageError("the certificate is for another key than asked")
            self._trust.require(found, found.kind, found.principals[0], self._clock.unix())
        entry = self._entry(asked) if approved.certificates else None
        known = self._links.get(entry.name) if entry is not None else None
        if known is not None and known.entry.key != approved.key:
            raise Refused(
                f"there is a site {known.name} already, with another key", f"ibshell site remove {known.name} first"
            )
        if approved.roster is not None:
            await self._rosters.take(approved.roster)
        if entry is not None and entry.name not in self._trust.sites:
            raise UsageError(f"the roster does not name {entry.name}")
        await self._joins.decide(approved, entry)
        if entry is not None:
            self._left(entry.name)
            self._joined(entry)
        return Nothing()

    def _entry(self, asked: JoinAsked) -> SiteEntry | None:
        if not asked.role.startswith("site/"):
            return None
        if asked.role != site_principal(asked.name) or not NAME.fullmatch(asked.name):
            raise UsageError(f"{asked.name[:80]!r} asks with an invitation for {asked.role}")
        mode = "dial" if asked.address else "reverse"
        return SiteEntry(asked.name, asked.key, mode, asked.address)

    async def adopt(self, given: RosterGiven, signed: Signed | None) -> Nothing:
        """Go by a new roster, and let the sites."""
        await self._rosters.take(given.roster)
        return Nothing()

    async def remove(self, wanted: SiteNamed, signed: Signed | None) -> Nothing:
        """A site belongs to the pool no longer.

        Raises:
            Refused: the roster still names it.
        """
        if wanted.name in self._trust.sites:
            raise Refused(f"the roster still names {wanted.name}", "ibshell site remove changes both")
        await self._joins.remove(wanted.name)
        self._left(wanted.name)
        return Nothing()

    async def certificate(self, given: CertificateGiven, signed: Signed | None) -> Nothing:
        """Carry a new certificate to a site."""
        link = self._links.get(given.site)
        if link is None:
            raise NotFound(f"no site {given.site!r}", "ibshell site list shows them")
        await link.call("identity.install", given, Nothing)
        await link.describe()
        return Nothing()

    # --- sites

    async def site_up(self, link: SiteLink) -> None:
        """A site has connected: it goes by the latest roster, and by what was signed about tenants."""
        await self._send(link)
        signed = list(self._tenants().values())
        if link.description is not None and link.description.tenants != digest_of_signed(signed):
            for at in range(0, len(signed), TENANTS_AT_ONCE):
                await self._tell(link, signed[at : at + TENANTS_AT_ONCE])

    def tenant_changed(self, signed: Signed) -> None:
        """Something was signed about a tenant: the sites go by it, those that are away when they are back."""
        for link in list(self._links.values()):
            if link.is_up:
                self._begin(self._tell(link, [signed]))

    async def _tell(self, link: SiteLink, signed: list[Signed]) -> None:
        try:
            await link.call("tenants.adopt", TenantsGiven(signed), Nothing)
        except IbshellError as error:  # it is told again when the site is back
            log.warning("%s does not go by what was signed about tenants: %s", link.name, error)

    async def _adopted(self, roster: Roster, digest: str) -> None:
        for link in list(self._links.values()):
            if link.is_up:
                self._begin(self._send(link))

    async def _send(self, link: SiteLink) -> None:
        known, authority = 0, ""
        if link.description is not None:
            known, authority = link.description.roster, link.description.certificate_authority
        rosters = self._rosters.since(known)
        if not known and authority:  # who has none yet believes the authority that let them in, not those before it
            rosters = list(itertools.dropwhile(lambda signed: signer_of(signed) != authority, rosters))
        for signed in rosters:
            try:
                await link.call("roster.adopt", RosterGiven(signed), Nothing)
            except Refused:  # it has a later one
                continue
            except IbshellError as error:  # it is sent again when the site is back
                log.warning("%s does not go by the roster: %s", link.name, error)
