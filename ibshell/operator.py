"""What a pool's operator does: invites, lets in, denies, renews, changes the authority. All of it rests on the authority's key.

What only the operator knows lies beside that key: the secrets of open invitations, and whom they have let in.
"""

from __future__ import annotations

import hmac
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from fedpool.client.acting import act
from fedpool.client.connection import Connection
from fedpool.errors import Failed, NotAuthorised, NotFound, Refused, UsageError
from fedpool.identity import certificates, roster
from fedpool.identity.authorities import authority_fingerprint, authority_line, parse_authority
from fedpool.identity.certificates import Certificate
from fedpool.identity.keys import fingerprint, parse_public
from fedpool.identity.principals import HUB, OPERATOR, site_principal
from fedpool.identity.roster import Roster
from fedpool.identity.tokens import SECRET_BYTES, Token
from fedpool.identity.trust import Trust
from fedpool.records import Signed
from fedpool.transport.identity import Identity
from fedpool.transport.keygen import keygen
from fedpool.wire.membership import (
    CertificateGiven,
    InviteWanted,
    JoinApproved,
    JoinAsked,
    JoinsAsked,
    MembersAsked,
    RosterGiven,
    RosterShown,
    RosterWanted,
    SiteNamed,
)
from fedpool.wire.messages import Nothing
from ibshell.authority import Authority

SITE_S = HUB_S = 24 * 3600.0  # how long certificates hold; they are renewed at half of it
PERSON_S = 12 * 3600.0
INVITE_S = 24 * 3600.0

T = TypeVar("T")


class Member(msgspec.Struct, frozen=True):
    """Somebody who was let in.

    Attributes:
        role: what they are.
        name: in lists.
        serials: of their certificates.
    """

    role: str
    name: str
    serials: tuple[int, ...] = ()


class Invitation(msgspec.Struct, frozen=True):
    """What was handed over, and what the invited is called."""

    token: Token
    name: str


class Operator:
    """One pool's.

    Args:
        directory: the authority's.
        pool: the pool's identity.

    Raises:
        NotFound: the authority is not on this machine.
    """

    def __init__(self, directory: Path, pool: str) -> None:
        self.directory = directory
        self.pool = pool
        self.authority = Authority(directory)

    # --- what is kept beside the authority's key

    def _keep(self, name: str, data: bytes) -> None:
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        temporary = path.with_name(path.name + ".new")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        temporary.replace(path)

    def members(self) -> dict[str, Member]:
        """{public key line: who it is} of those who were let in."""
        try:
            return msgspec.json.decode((self.directory / "members.json").read_bytes(), type=dict[str, Member])
        except FileNotFoundError:
            return {}

    def _remember(self, key: str, role: str, name: str, certificate: Certificate) -> None:
        members = self.members()
        known = members.get(key)
        serials = (*(known.serials if known else ()), certificate.serial)[-20:]
        self._keep("members.json", msgspec.json.encode({**members, key: Member(role, name, serials)}))

    def roster(self) -> Roster:
        """The latest roster that was signed here, or what stands before the first."""
        try:
            return roster.read(msgspec.json.decode((self.directory / "roster.json").read_bytes(), type=Signed))
        except FileNotFoundError:
            return Roster(roster.FORMAT, self.pool, 0, 0, (authority_line(self.authority.public),))

    def begin(self, sites: Mapping[str, str]) -> None:
        """Sign the first roster.

        Args:
            sites: {name: public key line} of those that belong to the pool from the beginning.
        """
        self._keep_roster(self._signed(self.roster(), sites=dict(sites)))

    def _signed(self, known: Roster, **changes: object) -> Signed:
        """A changed roster; it counts once the hub has it."""
        number, now_ms = known.number + 1, time.time_ns() // 1_000_000
        return self.authority.sign(msgspec.structs.replace(known, number=number, time_ms=now_ms, **changes))

    def _keep_roster(self, signed: Signed) -> None:
        self._keep("roster.json", msgspec.json.encode(signed))

    def _latest(self, hub: Connection) -> Roster:
        """The pool's roster: the hub's, where that is newer than the one kept here (an answer was lost) and was signed here."""
        known = self.roster()
        trust = Trust(self.pool, known.authority_keys())
        trust.number = known.number
        for signed in hub.call("pool.roster", RosterWanted(known.number), RosterShown).rosters:
            known = trust.adopt(signed)
            self._keep_roster(signed)
        return known

    def _publish(self, hub: Connection, known: Roster, **changes: object) -> None:
        """Change the roster, here and everywhere."""
        signed = self._signed(known, **changes)
        act(hub, "pool.adopt", RosterGiven(signed), Nothing)
        self._keep_roster(signed)

    def certify_self(self, client: Path) -> None:
        """See that the operator's own key has a certificate that holds for another hour."""
        identity = Identity.load(client / "identity")
        own = identity.certificate(certificates.USER)
        if own is not None and own.authority == self.authority.public and own.valid_before > time.time() + 3600:
            return
        identity.install(self.authority.issue(certificates.USER, identity.public, (OPERATOR,), "operator", PERSON_S))

    # --- letting in

    def invite(self, hub: Connection, address: str, role: str, name: str, for_s: float = INVITE_S) -> Token:
        """Invite somebody.

        Args:
            hub: a channel to the hub.
            address: of the hub, as the invited reach it.
            role: what they become.
            name: what they are called.
            for_s: how long it may be used.
        """
        token = Token(
            self.pool,
            address,
            self.authority.public,
            secrets.token_hex(8),
            secrets.token_bytes(SECRET_BYTES),
            role,
            int(time.time() + for_s),
        )
        self._keep(f"invites/{token.invite}", msgspec.msgpack.encode(Invitation(token, name)))
        act(hub, "pool.invite", InviteWanted(token.invite, role, name, for_s), Nothing)
        return token

    def _invitation(self, invite: str) -> Invitation | None:
        """An invitation of this operator's; the number comes from the hub, so it is no path before it is looked at."""
        if not invite.isalnum():
            return None
        try:
            return msgspec.msgpack.decode((self.directory / "invites" / invite).read_bytes(), type=Invitation)
        except FileNotFoundError:
            return None

    def proved(self, asked: JoinAsked) -> bool:
        """Whether somebody who asks to join has the token of the invitation, and so this very key and address are theirs."""
        invitation = self._invitation(asked.id)
        if invitation is None or invitation.token.role != asked.role or time.time() > invitation.token.until:
            return False
        token = invitation.token
        public = parse_public(asked.key, "the key")
        return hmac.compare_digest(token.proof(public, asked.name, asked.address), asked.proof)

    def asking(self, hub: Connection, name: str) -> JoinAsked:
        """Who asks to join under a name, or with an invitation's number.

        Raises:
            NotFound: nobody.
            NotAuthorised: what is shown was not made with the invitation's secret, or several were.
        """
        waiting = hub.call("pool.joins", Nothing(), JoinsAsked).items
        named = [one for one in waiting if name in (one.name, one.id, one.invited) and one.role != "renewal"]
        if not named:
            raise NotFound(f"nobody asks to join as {name!r}", "it appears when ibshell-agent join has been run there")
        proved = [one for one in named if self.proved(one)]
        if not proved:
            raise NotAuthorised(
                f"whoever asks to join as {name!r} does not have the token of the invitation",
                "somebody else asks, or the hub has put another key in its place: invite again",
            )
        if len(proved) > 1:
            prints = ", ".join(fingerprint(parse_public(one.key, "the key")) for one in proved)
            raise NotAuthorised(
                f"{len(proved)} keys ask to join as {name!r} with one token: {prints}",
                "somebody else has the token: invite again",
            )
        return proved[0]

    def let_in(self, hub: Connection, asked: JoinAsked, for_s: float | None = None) -> Certificate:
        """Vouch for somebody who asks, and tell the hub."""
        public, site = parse_public(asked.key, "the key"), asked.role.startswith("site/")
        if site and asked.role != site_principal(asked.name):
            raise NotAuthorised(f"{asked.name!r} asks with an invitation for {asked.role}")
        kind = certificates.HOST if site else certificates.USER
        invitation = self._invitation(asked.id)
        name = asked.name if site or invitation is None else invitation.name
        found = self.authority.issue(kind, public, (asked.role,), name, for_s or (SITE_S if site else PERSON_S))
        signed = None
        if site:
            known = self._latest(hub)
            signed = self._signed(known, sites={**known.sites, asked.name: asked.key})
        act(hub, "pool.approve", JoinApproved(asked.id, asked.key, [found.line], signed), Nothing)
        if signed is not None:
            self._keep_roster(signed)
        self._remember(asked.key, asked.role, name, found)
        (self.directory / "invites" / asked.id).unlink(missing_ok=True)
        return found

    def refuse(self, hub: Connection, asked: JoinAsked, reason: str) -> None:
        """Do not let somebody in."""
        act(hub, "pool.approve", JoinApproved(asked.id, asked.key, [], None, reason or "refused"), Nothing)

    def remove_site(self, hub: Connection, name: str) -> None:
        """A site belongs to the pool no longer, and its key is believed no longer.

        Raises:
            NotFound: it is none of the roster's.
        """
        known = self._latest(hub)
        if name not in known.sites:
            raise NotFound(f"no site {name!r} in the roster", "ibshell site list shows the sites")
        key = fingerprint(parse_public(known.sites[name], name))
        sites = {other: line for other, line in known.sites.items() if other != name}
        self._publish(hub, known, sites=sites, denied_keys=_with(known.denied_keys, key))
        act(hub, "site.remove", SiteNamed(name), Nothing)

    # --- believing no longer

    def deny(self, hub: Connection, who: str) -> str:
        """Believe a key, a certificate or a member no longer.

        Args:
            who: a fingerprint, a serial number, or a member's name.

        Returns:
            What is denied now.

        Raises:
            NotFound: no member is called so.
        """
        known = self._latest(hub)
        if who.isdigit():
            self._publish(hub, known, denied_serials=_with(known.denied_serials, int(who)))
            return who
        keys = [who] if who.startswith("SHA256:") else []
        for line, member in self.members().items():
            if member.name == who:
                keys.append(fingerprint(parse_public(line, who)))
        if not keys:
            raise NotFound(f"no member is called {who!r}", "ibshell pool members shows them")
        self._publish(hub, known, denied_keys=_with(known.denied_keys, *keys))
        return ", ".join(keys)

    # --- renewing

    def renew(self, hub: Connection) -> list[str]:
        """Issue new certificates to sites whose own are half over or another authority's, and to members who ask.

        Returns:
            To whom.
        """
        now, renewed, known = time.time(), [], self._latest(hub)
        own = authority_fingerprint(self.authority.public)
        for site, has in hub.call("pool.members", Nothing(), MembersAsked).sites.items():
            line = known.sites.get(site)
            if line is None or (has.until - now > SITE_S / 2 and has.authority == own):
                continue
            public = parse_public(line, site)
            if fingerprint(public) in known.denied_keys:
                continue
            found = self.authority.issue(certificates.HOST, public, (site_principal(site),), site, SITE_S)
            act(hub, "pool.certificate", CertificateGiven(site, found.line), Nothing)
            renewed.append(site)
        members = self.members()
        for asked in hub.call("pool.joins", Nothing(), JoinsAsked).items:
            member = members.get(asked.key)
            if asked.role != "renewal" or member is None:
                continue
            public = parse_public(asked.key, asked.name)
            if fingerprint(public) in known.denied_keys:
                self.refuse(hub, asked, "this key has been revoked")
                continue
            found = self.authority.issue(certificates.USER, public, (member.role,), member.name, PERSON_S)
            act(hub, "pool.approve", JoinApproved(asked.id, asked.key, [found.line]), Nothing)
            self._remember(asked.key, member.role, member.name, found)
            renewed.append(member.name)
        return renewed

    def certify_hub(self, directory: Path) -> None:
        """See that a hub on this machine has certificates of the authority of now of which more than half is left."""
        identity = Identity.load(directory / "identity")
        for kind in (certificates.USER, certificates.HOST):
            has = identity.certificate(kind)
            if has is None or has.authority != self.authority.public or has.valid_before < time.time() + HUB_S / 2:
                identity.install(self.authority.issue(kind, identity.public, (HUB,), "hub", HUB_S))

    # --- another authority

    def rotate(self, hub: Connection, key: Path | None) -> str:
        """Begin to change the authority: from now on both are believed, and the new one certifies.

        Args:
            key: public key of the new one, where ssh-agent has it; None makes one in a file.

        Returns:
            The new one's fingerprint.

        Raises:
            Refused: a change is under way.
        """
        known = self._latest(hub)
        if len(known.authorities) > 1:
            raise Refused("the authority is being changed already", "ibshell pool rotate --finish ends that")
        new = self.directory / "next"
        shutil.rmtree(new, ignore_errors=True)
        if key is None:
            Identity.create(new / "identity")
        else:
            line = authority_line(parse_authority(key.read_text(), str(key)))
            new.mkdir(mode=0o700)
            (new / "identity.pub").write_text(line + "\n")
        self._publish(hub, known, authorities=(*known.authorities, authority_line(Authority(new).public)))
        old = self.directory / "before"
        shutil.rmtree(old, ignore_errors=True)
        old.mkdir(mode=0o700)
        for name in ("identity", "identity.pub"):
            if (self.directory / name).exists():
                (self.directory / name).replace(old / name)
            if (new / name).exists():
                (new / name).replace(self.directory / name)
        shutil.rmtree(new)
        self.authority = Authority(self.directory)
        return authority_fingerprint(self.authority.public)

    def finish_rotation(self, hub: Connection, regardless: bool) -> str:
        """Believe the old authority no longer; returns its fingerprint.

        Args:
            regardless: whether sites that have no certificate of the new one yet are left outside.

        Raises:
            Refused: no change is under way, or there are such sites.
        """
        known, own = self._latest(hub), authority_line(self.authority.public)
        others = [line for line in known.authorities if line != own]
        if not others:
            raise Refused("the authority is not being changed", "ibshell pool rotate begins that")
        have = hub.call("pool.members", Nothing(), MembersAsked).sites
        new = authority_fingerprint(self.authority.public)
        left = [site for site in known.sites if site not in have or have[site].authority != new]
        if left and not regardless:
            raise Refused(
                f"without a certificate of the new authority: {', '.join(left[:10])}",
                "ibshell pool renew gives one to those that are up; --yes leaves them outside",
            )
        self._publish(hub, known, authorities=(own,), former=(*known.former, *others))
        shutil.rmtree(self.directory / "before", ignore_errors=True)
        return ", ".join(authority_fingerprint(parse_authority(line, "authorities")) for line in others)

    def krl(self, path: Path) -> None:
        """Write what is denied as a key revocation list for a stock sshd (`RevokedKeys`).

        Raises:
            UsageError: the file cannot be written.
        """
        known = self.roster()
        lines = [f"serial: {serial}" for serial in known.denied_serials]
        lines += [f"hash: {key}" for key in known.denied_keys]
        with tempfile.NamedTemporaryFile("w", suffix=".krl") as spec:
            spec.write("\n".join(lines) + "\n")
            spec.flush()
            try:
                keygen(["-k", "-f", str(path), "-s", str(self.directory / "identity.pub"), spec.name])
            except Failed as error:
                raise UsageError(f"{path} cannot be written: {error.message}", error.hint) from None


def _with(known: Sequence[T], *more: T) -> tuple[T, ...]:
    """With further ones, each once."""
    return tuple(dict.fromkeys((*known, *more)))
