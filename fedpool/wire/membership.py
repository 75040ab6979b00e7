"""The bodies of the methods about who belongs to a pool. The first words of a docstring name the method and its answer."""

from __future__ import annotations

import msgspec

from fedpool.records import Signed


class InviteWanted(msgspec.Struct, frozen=True):
    """pool.invite -> Nothing: let somebody ask to join.

    Attributes:
        id: of the invitation.
        role: what they become.
        name: as whom a site joins, or what a person is called in lists.
        for_s: how long it may be used.
    """

    id: str
    role: str
    name: str
    for_s: float


class JoinApproved(msgspec.Struct, frozen=True):
    """pool.approve -> Nothing: let somebody in.

    Attributes:
        certificates: lines, of the key; none where it is refused.
        roster: that names a site which joins.
        reason: why it is refused.
    """

    id: str
    key: str
    certificates: list[str] = []
    roster: Signed | None = None
    reason: str = ""


class JoinAsked(msgspec.Struct, frozen=True):
    """Somebody who wants to join, for the operator.

    Attributes:
        key: public key line that was proved.
    """

    id: str
    role: str
    invited: str
    name: str
    address: str
    key: str
    proof: bytes


class JoinState(msgspec.Struct, frozen=True):
    """What has become of it: waiting, approved or refused; with certificates and roster once it is approved."""

    state: str
    certificates: list[str] = []
    rosters: list[Signed] = []
    hub_sites: str = ""
    reason: str = ""


class JoinWanted(msgspec.Struct, frozen=True):
    """join.ask, join.state -> JoinState: by whoever has connected with the key that is to be vouched for.

    Attributes:
        id: of the invitation.
        name: as whom.
        address: where a site's agent listens, or "" where it dials out.
        proof: see `fedpool.identity.tokens.Token.proof`.
        renew: whether it has joined before and wants a new certificate.
    """

    id: str
    name: str = ""
    address: str = ""
    proof: bytes = b""
    renew: bool = False


class JoinsAsked(msgspec.Struct, frozen=True):
    """pool.joins -> those who wait."""

    items: list[JoinAsked]


class RosterGiven(msgspec.Struct, frozen=True):
    """pool.adopt, roster.adopt -> Nothing: go by this roster; an authority has signed it."""

    roster: Signed


class TenantsGiven(msgspec.Struct, frozen=True):
    """tenants.adopt -> Nothing: what operators have signed about tenants."""

    signed: list[Signed]


class RosterShown(msgspec.Struct, frozen=True):
    """The latest roster, after those before it without which it would not be believed; empty where there is nothing newer."""

    rosters: list[Signed]


class RosterWanted(msgspec.Struct, frozen=True):
    """pool.roster -> RosterShown: if there is a newer one than `number`."""

    number: int


class SiteNamed(msgspec.Struct, frozen=True):
    """site.remove -> Nothing: it belongs to the pool no longer. site.policy -> PolicyText."""

    name: str


class CertificateGiven(msgspec.Struct, frozen=True):
    """pool.certificate, identity.install -> Nothing: a new certificate for a site's key."""

    site: str
    certificate: str


class MembersAsked(msgspec.Struct, frozen=True):
    """pool.members -> the certificates of the sites that are up."""

    sites: dict[str, SiteCertificate]


class SiteCertificate(msgspec.Struct, frozen=True):
    """Until when a site's certificate holds, Unix seconds (0 where it has none), and the fingerprint of who issued it."""

    until: int
    authority: str
