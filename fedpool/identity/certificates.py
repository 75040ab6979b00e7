"""OpenSSH certificates (PROTOCOL.certkeys): who vouches for a key, as what, and until when.

The principals of a user certificate are the roles in which its holder may ask: `operator`, `auditor`, `tenant/NAME`, and `hub` for
the hub towards the sites. Those of a host certificate are `hub` and `site/NAME`.
"""

import base64
import re
from collections.abc import Sequence

import msgspec
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    SSHCertificate,
    SSHCertificateBuilder,
    SSHCertificateType,
    load_ssh_public_identity,
)

from fedpool.errors import UsageError
from fedpool.identity.keys import public_line
from fedpool.identity.principals import require_principal

USER, HOST = "user", "host"
CERTIFICATE_TYPE = "ssh-ed25519-cert-v01@openssh.com"
BLOB_BYTES_MAX = 8192
# A certificate holds from so much earlier on, for clocks that are behind.
BACKDATED_S = 120
_REMEDY = "the pool's operator issues certificates: ibshell pool invite, ibshell site invite"


class Certificate(msgspec.Struct, frozen=True):
    """A certificate whose signature fits the authority it names; whether that one is trusted is another question.

    Attributes:
        kind: USER or HOST.
        public: the 32 bytes of the key that is vouched for.
        authority: the 32 bytes of the key that vouches.
        serial: unique among the authority's certificates.
        key_id: what it was issued for, for logs.
        principals: roles.
        valid_after: Unix seconds.
        valid_before: Unix seconds, exclusive.
        blob: as it travels.
    """

    kind: str
    public: bytes
    authority: bytes
    serial: int
    key_id: str
    principals: tuple[str, ...]
    valid_after: int
    valid_before: int
    blob: bytes

    @property
    def public_line(self) -> str:
        """The key that is vouched for, as a file `….pub` has it."""
        return public_line(self.public)

    @property
    def line(self) -> str:
        """As a file `…-cert.pub` has it."""
        return f"{CERTIFICATE_TYPE} {base64.b64encode(self.blob).decode()}"


def issue(
    authority: Ed25519PrivateKey,
    kind: str,
    public: bytes,
    principals: Sequence[str],
    key_id: str,
    serial: int,
    valid: tuple[int, int],
) -> Certificate:
    """Vouch for a key.

    Args:
        authority: who vouches.
        kind: USER or HOST.
        public: 32 bytes.
        principals: its roles.
        key_id: what it is issued for.
        serial: never used before.
        valid: Unix seconds from and before which it holds.
    """
    signed = (
        SSHCertificateBuilder()
        .public_key(Ed25519PublicKey.from_public_bytes(public))
        .serial(serial)
        .type(SSHCertificateType.USER if kind == USER else SSHCertificateType.HOST)
        .key_id(key_id.encode())
        .valid_principals([require_principal(principal).encode() for principal in principals])
        .valid_after(valid[0])
        .valid_before(valid[1])
        .sign(authority)
    )
    return parse(signed.public_bytes().decode(), "the new certificate")


def parse(line: str, where: str) -> Certificate:
    """Read a certificate and check that its signature is its authority's.

    Args:
        line: `ssh-ed25519-cert-v01@openssh.com AAAA… comment`.
        where: what to call it in messages.

    Raises:
        UsageError: it is none, or of another kind than is used here.
    """
    fields = line.split()
    try:
        if len(fields) < 2 or fields[0] != CERTIFICATE_TYPE or len(fields[1]) > 2 * BLOB_BYTES_MAX:
            raise ValueError("no certificate of an Ed25519 key")
        blob = base64.b64decode(fields[1], validate=True)
        found = load_ssh_public_identity(f"{fields[0]} {fields[1]}".encode())
        if not isinstance(found, SSHCertificate):
            raise ValueError("no certificate")
        found.verify_cert_signature()
        return _checked(found, blob)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm) as error:
        reason = str(error) or "its signature is wrong"
        raise UsageError(f"{where}: {reason}", _REMEDY) from None


def from_blob(blob: bytes, where: str) -> Certificate:
    """Read a certificate in the form that travels; see `parse`."""
    return parse(f"{CERTIFICATE_TYPE} {base64.b64encode(blob).decode()}", where)


def _checked(found: SSHCertificate, blob: bytes) -> Certificate:
    key, authority = found.public_key(), found.signature_key()
    if not isinstance(key, Ed25519PublicKey) or not isinstance(authority, Ed25519PublicKey):
        raise ValueError("key and authority have to be Ed25519")
    # What narrows a certificate down (a forced command, addresses) is not understood here, so it is not ignored either.
    if found.critical_options:
        names = ", ".join(option.decode(errors="replace") for option in found.critical_options)
        raise ValueError(f"the critical option {names} is not supported")
    return Certificate(
        kind=USER if found.type is SSHCertificateType.USER else HOST,
        public=key.public_bytes_raw(),
        authority=authority.public_bytes_raw(),
        serial=found.serial,
        key_id=re.sub(r"[^\x20-\x7e]", "?", found.key_id.decode(errors="replace"))[:200],
        principals=tuple(principal.decode() for principal in found.valid_principals),
        valid_after=found.valid_after,
        valid_before=found.valid_before,
        blob=blob,
    )
