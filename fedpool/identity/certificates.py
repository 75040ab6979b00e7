"""OpenSSH certificates (PROTOCOL.certkeys): who vouches for a key, as what, and until when.

The principals of a user certificate are the roles in which its holder may ask: `operator`, `auditor`, `tenant/NAME`, and `hub` for
the hub towards the sites. Those of a host certificate are `hub` and `site/NAME`.
"""

import base64
import binascii
import re
import struct
from collections.abc import Iterator, Sequence

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import SSHCertificateBuilder, SSHCertificateType

from fedpool.errors import NotAuthorised, UsageError
from fedpool.identity.authorities import require_signed
from fedpool.identity.keys import public_line, take_string
from fedpool.identity.principals import require_principal

USER, HOST = "user", "host"
CERTIFICATE_TYPE = "ssh-ed25519-cert-v01@openssh.com"
BLOB_BYTES_MAX = 8192
# A certificate holds from so much earlier on, for clocks that are behind.
BACKDATED_S = 120
PUBLIC_BYTES = 32
_SERIAL_AND_KIND, _VALID = struct.Struct(">QI"), struct.Struct(">QQ")
_KINDS = {1: USER, 2: HOST}
_REMEDY = "the pool's operator issues certificates: ibshell pool invite, ibshell site invite"


class Certificate(msgspec.Struct, frozen=True):
    """A certificate whose signature fits the authority it names; whether that one is trusted is another question.

    Attributes:
        kind: USER or HOST.
        public: the 32 bytes of the key that is vouched for.
        authority: the key that vouches, as it travels; see `fedpool.identity.authorities`.
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
        if len(fields) < 2 or fields[0] != CERTIFICATE_TYPE:
            raise ValueError("no certificate of an Ed25519 key")
        blob = base64.b64decode(fields[1], validate=True)
    except (ValueError, binascii.Error) as error:
        raise UsageError(f"{where}: {error}", _REMEDY) from None
    return from_blob(blob, where)


def from_blob(blob: bytes, where: str) -> Certificate:
    """Read a certificate in the form that travels; see `parse`."""
    try:
        if len(blob) > BLOB_BYTES_MAX:
            raise ValueError(f"a certificate of {len(blob)} bytes; the limit is {BLOB_BYTES_MAX}")
        return _checked(blob)
    except (ValueError, NotAuthorised) as error:
        raise UsageError(f"{where}: {getattr(error, 'message', error)}", _REMEDY) from None


def _checked(blob: bytes) -> Certificate:
    """Take a certificate apart, field by field, and check its signature."""
    kind, at = take_string(blob, 0)
    if kind != CERTIFICATE_TYPE.encode():
        raise ValueError("no certificate of an Ed25519 key")
    _, at = take_string(blob, at)  # nonce
    public, at = take_string(blob, at)
    serial, number = _SERIAL_AND_KIND.unpack_from(_part(blob, at, _SERIAL_AND_KIND.size))
    at += _SERIAL_AND_KIND.size
    key_id, at = take_string(blob, at)
    principals, at = take_string(blob, at)
    valid = _VALID.unpack_from(_part(blob, at, _VALID.size))
    at += _VALID.size
    options, at = take_string(blob, at)
    _, at = take_string(blob, at)  # extensions: what sshd may grant, nothing here
    _, at = take_string(blob, at)  # reserved
    authority, at = take_string(blob, at)
    signature, end = take_string(blob, at)
    if end != len(blob) or len(public) != PUBLIC_BYTES or number not in _KINDS:
        raise ValueError("the certificate is malformed")
    # What narrows a certificate down (a forced command, addresses) is not understood here, so it is not ignored either.
    if options:
        name = take_string(options, 0)[0].decode(errors="replace")
        raise ValueError(f"the critical option {name[:80]} is not supported")
    require_signed(authority, signature, blob[:at])
    return Certificate(
        kind=_KINDS[number],
        public=public,
        authority=authority,
        serial=serial,
        key_id=re.sub(r"[^\x20-\x7e]", "?", key_id.decode(errors="replace"))[:200],
        principals=tuple(name.decode() for name in _strings(principals)),
        valid_after=valid[0],
        valid_before=valid[1],
        blob=blob,
    )


def _part(blob: bytes, at: int, size: int) -> bytes:
    if at + size > len(blob):
        raise ValueError("the certificate is cut off")
    return blob[at : at + size]


def _strings(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        field, at = take_string(data, at)
        yield field
