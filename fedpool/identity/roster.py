"""The roster of a pool: its authorities, its sites and their keys, and what is believed no longer, in one text.

An authority signs it, and the hub passes it on. A party takes one that is signed by an authority it believes and has a larger
number than the one it has. So a change of authority is two rosters: one that names both, signed by the old; then one that names
only the new.
"""

from __future__ import annotations

import re

import msgspec

from fedpool.errors import NotAuthorised, Refused, UsageError
from fedpool.identity import sshsig
from fedpool.identity.authorities import authority_fingerprint, parse_authority
from fedpool.identity.keys import parse_public
from fedpool.names import NAME
from fedpool.records import Signed

NAMESPACE = "roster@ibshell"
FORMAT = 1
BYTES_MAX = 4 << 20
AUTHORITIES_MAX = 4
_FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")


class Roster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an authority signs, as JSON.

    Attributes:
        format: of the text.
        pool: its identity.
        number: larger than any roster's before.
        time_ms: when it was signed, Unix milliseconds.
        authorities: public key lines of those who may certify.
        sites: {name: public key line}.
        denied_serials: of certificates that are believed no longer.
        denied_keys: fingerprints of keys that are believed no longer, in whatever certificate.
        former: public key lines of authorities that certify no longer; what they vouched for in its time stays true.
    """

    format: int
    pool: str
    number: int
    time_ms: int
    authorities: tuple[str, ...]
    sites: dict[str, str] = {}
    denied_serials: tuple[int, ...] = ()
    denied_keys: tuple[str, ...] = ()
    former: tuple[str, ...] = ()

    def authority_keys(self) -> tuple[bytes, ...]:
        """The authorities' keys, as they travel."""
        return tuple(parse_authority(line, "authorities") for line in self.authorities)

    def former_keys(self) -> tuple[bytes, ...]:
        """The keys of authorities before them."""
        return tuple(parse_authority(line, "former") for line in self.former)

    def site_keys(self) -> dict[str, bytes]:
        """{site: its key}."""
        return {name: parse_public(line, f"sites.{name}") for name, line in self.sites.items()}


_ENCODER = msgspec.json.Encoder(order="sorted")
_DECODER = msgspec.json.Decoder(Roster)


def encode(roster: Roster) -> bytes:
    """The bytes that are to be signed."""
    return _ENCODER.encode(roster)


def read(signed: Signed) -> Roster:
    """What a roster says, its signature not checked.

    Raises:
        UsageError: it cannot be read.
    """
    if len(signed.payload) > BYTES_MAX:
        raise UsageError(f"a roster of {len(signed.payload)} bytes; the limit is {BYTES_MAX}")
    try:
        roster = _DECODER.decode(signed.payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"a roster cannot be read: {error}") from None
    if roster.format != FORMAT:
        raise UsageError(
            f"a roster of format {roster.format}; format {FORMAT} is known here", "bring both to one release"
        )
    if not 1 <= len(roster.authorities) <= AUTHORITIES_MAX:
        raise UsageError(f"a roster with {len(roster.authorities)} authorities; 1 to {AUTHORITIES_MAX} are possible")
    roster.authority_keys()
    roster.former_keys()
    roster.site_keys()
    for name in roster.sites:
        if not NAME.fullmatch(name):
            raise UsageError(f"a roster with a site {name[:80]!r}")
    for fingerprint in roster.denied_keys:
        if not _FINGERPRINT.fullmatch(fingerprint):
            raise UsageError(f"a roster that denies the key {fingerprint[:80]!r}", "write SHA256:…")
    return roster


def signer_of(signed: Signed) -> str:
    """Fingerprint of the key that is said to have signed a roster; not checked."""
    return authority_fingerprint(sshsig.parse(signed.signature).key)


def open_(signed: Signed, pool: str, authorities: tuple[bytes, ...], number: int) -> Roster:
    """A roster that one of these authorities has signed and that is newer than the one that is known.

    Args:
        pool: whose it is to be.
        authorities: that are believed now.
        number: of the roster that is known.

    Raises:
        NotAuthorised: another pool's, or signed by nobody who is believed.
        Refused: an older one.
        UsageError: it cannot be read.
    """
    roster = read(signed)
    if roster.pool != pool:
        raise NotAuthorised(f"a roster of the pool {roster.pool[:80]!r}; this is {pool!r}")
    signature = sshsig.parse(signed.signature)
    if signature.key not in authorities:
        raise NotAuthorised("a roster that no authority of this pool has signed")
    sshsig.check_by_authority(signature, signature.key, NAMESPACE, signed.payload)
    if roster.number <= number:
        raise Refused(f"roster {roster.number}; {number} is known already", "the hub may be an old copy")
    return roster
