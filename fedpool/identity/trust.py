"""Whom a party believes: the pool's certificate authorities, less what they have denied again."""

from collections import OrderedDict
from collections.abc import Iterable
from datetime import UTC, datetime

import msgspec

from fedpool.errors import NotAuthorised, UsageError
from fedpool.identity import certificates
from fedpool.identity.authorities import authority_fingerprint
from fedpool.identity.certificates import Certificate
from fedpool.identity.keys import fingerprint
from fedpool.identity.roster import Roster, open_, read
from fedpool.records import Signed

_KEPT = 4096  # certificates whose signature has been checked


class Denied(msgspec.Struct, frozen=True):
    """What is believed no longer, although it has not expired.

    Attributes:
        serials: of certificates.
        keys: fingerprints, of keys in whatever certificate.
    """

    serials: frozenset[int] = frozenset()
    keys: frozenset[str] = frozenset()


class Trust:
    """What one party believes.

    Args:
        pool: the pool's identity, by which its requests are told from another pool's.
        authorities: the key of each certificate authority that is believed before any roster is known, as it travels.

    Attributes:
        number: of the latest roster.
        signed_ms: when that was signed, Unix milliseconds.
        denied: what is believed no longer.
        sites: {name: key} of the pool's sites; the same object whatever roster comes.
    """

    def __init__(self, pool: str, authorities: tuple[bytes, ...]) -> None:
        self.pool = pool
        self.authorities = authorities
        self.number = self.signed_ms = 0
        self.denied = Denied()
        self.sites: dict[str, bytes] = {}
        self._former: tuple[bytes, ...] = ()
        self._parsed: OrderedDict[bytes, Certificate] = OrderedDict()

    def adopt(self, signed: Signed) -> Roster:
        """Go by a roster from now on.

        Raises:
            NotAuthorised, Refused, UsageError: see `roster.open_`; nothing has changed.
        """
        found = open_(signed, self.pool, self.authorities, self.number)
        self._go_by(found)
        return found

    def follow(self, rosters: Iterable[Signed]) -> list[Signed]:
        """Go by rosters in their order; returns those that were adopted.

        What was signed by authorities from before anybody who is believed here is not for this party to judge, and is passed over.

        Raises:
            NotAuthorised: the last of them is not believed.
            Refused, UsageError: see `roster.open_`.
        """
        adopted: list[Signed] = []
        stranger: NotAuthorised | None = None
        for signed in rosters:
            try:
                self.adopt(signed)
            except NotAuthorised as error:
                stranger = error
            else:
                adopted.append(signed)
                stranger = None
        if stranger is not None:
            raise stranger
        return adopted

    def restore(self, signed: Signed) -> None:
        """Go by a roster that was adopted before and kept; who has signed it may be believed no longer."""
        self._go_by(read(signed))

    def _go_by(self, found: Roster) -> None:
        self.authorities, self.number, self.signed_ms = found.authority_keys(), found.number, found.time_ms
        self._former = found.former_keys()
        self.denied = Denied(frozenset(found.denied_serials), frozenset(found.denied_keys))
        sites = found.site_keys()
        for gone in self.sites.keys() - sites.keys():
            del self.sites[gone]
        self.sites.update(sites)

    def of_the_past(self) -> "Trust":
        """Whom somebody believes who looks at what was done: every authority in its time, and who was not revoked then."""
        return Trust(self.pool, (*self.authorities, *self._former))

    def certificate(self, blob: bytes) -> Certificate:
        """A certificate whose own signature is right; checked once.

        Raises:
            UsageError: it is none.
        """
        found = self._parsed.get(blob)
        if found is None:
            found = certificates.from_blob(blob, "the certificate")
            self._parsed[blob] = found
            if len(self._parsed) > _KEPT:
                self._parsed.popitem(last=False)
        return found

    def require(self, certificate: Certificate, kind: str, principal: str, now: float) -> None:
        """Believe that the holder of a certificate's key has a role, now.

        Args:
            certificate: shown by the holder.
            kind: certificates.USER or HOST.
            principal: the role.
            now: Unix seconds.

        Raises:
            NotAuthorised: not so, and why.
        """
        who = f"the certificate {certificate.serial} of {fingerprint(certificate.public)}"
        if certificate.authority not in self.authorities:
            raise NotAuthorised(
                f"{who} is of an authority that is not this pool's: {authority_fingerprint(certificate.authority)}",
                "join the pool: ibshell pool join, ibshell-agent join",
            )
        if certificate.kind != kind:
            raise NotAuthorised(f"{who} is a {certificate.kind} certificate; a {kind} certificate is needed")
        if now < certificate.valid_after:
            raise NotAuthorised(
                f"{who} holds from {_when(certificate.valid_after)} on; here it is {_when(now)}", "compare the clocks"
            )
        if now >= certificate.valid_before:
            raise NotAuthorised(
                f"{who} expired at {_when(certificate.valid_before)}; here it is {_when(now)}",
                "ibshell pool renew gets a new one",
            )
        self.require_not_denied(certificate)
        if principal not in certificate.principals:
            roles = ", ".join(certificate.principals) or "nobody"
            raise NotAuthorised(
                f"{who} is for {roles}, not for {principal}", "ask the pool's operator for an invitation as that"
            )

    def require_host(self, certificate: Certificate, principal: str, now: float) -> None:
        """Believe a host, as `require`.

        That a site's certificate has ended does not matter to who has a roster that names its key: only so can a pool that was
        switched off for longer than certificates hold come back and have them renewed. Whose key is denied stays out.

        Raises:
            NotAuthorised: not so.
        """
        name = principal.partition("/")[2]
        if principal.startswith("site/") and self.sites.get(name) == certificate.public:
            now = min(now, certificate.valid_before - 1)
        self.require(certificate, certificates.HOST, principal, now)

    def require_not_denied(self, certificate: Certificate) -> None:
        """Believe that a certificate, or its key, has not been revoked.

        Raises:
            NotAuthorised: it has.
        """
        key = fingerprint(certificate.public)
        if certificate.serial in self.denied.serials or key in self.denied.keys:
            raise NotAuthorised(
                f"the certificate {certificate.serial} of {key} has been revoked", "the pool's operator says why"
            )

    def require_blob(self, blob: bytes, kind: str, principal: str, now: float) -> Certificate:
        """As `require`, of a certificate as it was shown.

        Raises:
            NotAuthorised: not so.
        """
        try:
            certificate = self.certificate(blob)
        except UsageError as error:
            raise NotAuthorised(error.message, error.hint) from None
        self.require(certificate, kind, principal, now)
        return certificate


def _when(unix: float) -> str:
    try:
        return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return str(unix)
