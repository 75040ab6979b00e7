"""What a pool's operator does: invites, lets in, denies, renews, changes the authority. All of it rests on the authority's key.

What only the operator knows lies beside that key: the secrets of open invitations, and whom they have let in.
"""

from __future__ import annotations

import hmac
import os
import secrets
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fedpool.client.acting import act
from fedpool.client.connection import Connection
from fedpool.errors import NotAuthorised, NotFound, Refused, UsageError
from fedpool.identity import certificates, roster
from fedpool.identity.certificates import Certificate
from fedpool.identity.keys import fingerprint, parse_public, public_line
from fedpool.identity.principals import OPERATOR, site_principal
from fedpool.identity.roster import Roster
from fedpool.identity.tokens import SECRET_BYTES, Token
from fedpool.records import Signed
from fedpool.transport.identity import Identity
from fedpool.wire.messages import (
    CertificateGiven,
    InviteWanted,
    JoinApproved,
    JoinAsked,
    JoinsAsked,
    MembersAsked,
    Nothing,
    RosterGiven,
    SiteNamed,
)
from ibshell.authority import Authority

SITE_S = 24 * 3600.0  # how long certificates hold; they are renewed at half of it
PERSON_S = 12 * 3600.0
INVITE_S = 24 * 3600.0


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
            return Roster(roster.FORMAT, self.pool, 0, 0, (public_line(self.authority.public),))

    def amend(self, by: Authority | None = None, **changes: object) -> Signed:
        """Sign a changed roster and keep it; it counts once the hub has it.

        Args:
            by: who signs, where it is not the authority of now.
        """
        known = self.roster()
        new = msgspec.structs.replace(known, number=known.number + 1, time_ms=time.time_ns() // 1_000_000, **changes)
        signed = (by or self.authority).sign(new)
        self._keep("roster.json", msgspec.json.encode(signed))
        return signed

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
        signed = self.amend(sites={**self.roster().sites, asked.name: asked.key}) if site else None
        approved = JoinApproved(asked.id, asked.key, [found.line], signed)
        act(hub, "pool.approve", approved, Nothing)
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
        known = self.roster()
        if name not in known.sites:
            raise NotFound(f"no site {name!r} in the roster", "ibshell site list shows the sites")
        key = fingerprint(parse_public(known.sites[name], name))
        sites = {other: line for other, line in known.sites.items() if other != name}
        signed = self.amend(sites=sites, denied_keys=_with(known.denied_keys, key))
        act(hub, "pool.adopt", RosterGiven(signed), Nothing)
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
        known = self.roster()
        if who.startswith("SHA256:"):
            signed = self.amend(denied_keys=_with(known.denied_keys, who))
        elif who.isdigit():
            signed = self.amend(denied_serials=_with(known.denied_serials, int(who)))
        else:
            keys = [key for key, member in self.members().items() if member.name == who]
            if not keys:
                raise NotFound(f"no member is called {who!r}", "ibshell pool members shows them")
            who = ", ".join(fingerprint(parse_public(key, who)) for key in keys)
            denied = known.denied_keys
            for key in who.split(", "):
                denied = _with(denied, key)
            signed = self.amend(denied_keys=denied)
        act(hub, "pool.adopt", RosterGiven(signed), Nothing)
        return who

    # --- renewing

    def renew(self, hub: Connection) -> list[str]:
        """Issue new certificates to sites whose own are half over, and to members who ask; returns to whom."""
        now, renewed, known = time.time(), [], self.roster()
        for site, until in hub.call("pool.members", Nothing(), MembersAsked).sites.items():
            line = known.sites.get(site)
            if line is None or until - now > SITE_S / 2:
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
        known = self.roster()
        if len(known.authorities) > 1:
            raise Refused("the authority is being changed already", "ibshell pool rotate --finish ends that")
        new = self.directory / "next"
        shutil.rmtree(new, ignore_errors=True)
        if key is None:
            public = Identity.create(new / "identity").public
        else:
            public = parse_public(key.read_text(), str(key))
            new.mkdir(mode=0o700)
            (new / "identity.pub").write_text(public_line(public) + "\n")
        signed = self.amend(authorities=(*known.authorities, public_line(public)))
        act(hub, "pool.adopt", RosterGiven(signed), Nothing)
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
        return fingerprint(public)

    def finish_rotation(self, hub: Connection) -> str:
        """Believe the old authority no longer; returns its fingerprint.

        Raises:
            Refused: no change is under way, or a site would be left without a certificate that is believed.
        """
        known, own = self.roster(), public_line(self.authority.public)
        others = [line for line in known.authorities if line != own]
        if not others:
            raise Refused("the authority is not being changed", "ibshell pool rotate begins that")
        signed = self.amend(authorities=(own,), former=(*known.former, *others))
        act(hub, "pool.adopt", RosterGiven(signed), Nothing)
        shutil.rmtree(self.directory / "before", ignore_errors=True)
        return ", ".join(fingerprint(parse_public(line, "authorities")) for line in others)

    def krl(self, path: Path) -> None:
        """Write what is denied as a key revocation list for a stock sshd (`RevokedKeys`)."""
        import subprocess
        import tempfile

        known = self.roster()
        if not known.denied_serials and not known.denied_keys:
            lines = []
        lines = [f"serial: {serial}" for serial in known.denied_serials]
        lines += [f"hash: {key}" for key in known.denied_keys]
        with tempfile.NamedTemporaryFile("w", suffix=".krl") as spec:
            spec.write("\n".join(lines) + "\n")
            spec.flush()
            done = subprocess.run(
                ["ssh-keygen", "-q", "-k", "-f", str(path), "-s", str(self.directory / "identity.pub"), spec.name],
                capture_output=True,
                text=True,
            )
        if done.returncode:
            raise UsageError(f"{path} cannot be written: {done.stderr.strip()}")


def _with(known: Sequence, more: object) -> tuple:  # type: ignore[type-arg]
    return (*known, *(() if more in known else (more,)))
