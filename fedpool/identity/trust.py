"""Whom a party believes: the pool's certificate authorities, less what they have denied again."""

from collections import OrderedDict
from datetime import UTC, datetime

import msgspec

from fedpool.errors import NotAuthorised, UsageError
from fedpool.identity import certificates
from fedpool.identity.certificates import Certificate
from fedpool.identity.keys import fingerprint

_KEPT = 4096  # certificates whose signature has been checked


class Denied(msgspec.Struct, frozen=True):
    """What is believed no longer, although it has not expired.

    Attributes:
        number: of the list; a later one has a larger number.
        serials: of certificates.
        keys: fingerprints, of keys in whatever certificate.
    """

    number: int = 0
    serials: frozenset[int] = frozenset()
    keys: frozenset[str] = frozenset()


class Trust:
    """What one party believes.

    Args:
        pool: the pool's identity, by which its requests are told from another pool's.
        authorities: the 32 bytes of each certificate authority; two while it changes.

    Attributes:
        denied: the latest list of what is believed no longer.
    """

    def __init__(self, pool: str, authorities: tuple[bytes, ...]) -> None:
        self.pool = pool
        self.authorities = authorities
        self.denied = Denied()
        self._parsed: OrderedDict[bytes, Certificate] = OrderedDict()

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
                f"{who} is of an authority that is not this pool's: {fingerprint(certificate.authority)}",
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
        if certificate.serial in self.denied.serials or fingerprint(certificate.public) in self.denied.keys:
            raise NotAuthorised(f"{who} has been revoked", "the pool's operator says why")
        if principal not in certificate.principals:
            roles = ", ".join(certificate.principals) or "nobody"
            raise NotAuthorised(
                f"{who} is for {roles}, not for {principal}", "ask the pool's operator for an invitation as that"
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
