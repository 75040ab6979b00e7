"""The keys of certificate authorities: Ed25519 in a file, or whatever an ssh-agent has: ECDSA on a PKCS#11 token, FIDO tokens.

A key is kept as it travels in SSH. Signatures are those of RFC 8709, section 6 (Ed25519), RFC 5656, section 3.1.2 (ECDSA), and
OpenSSH's PROTOCOL.u2f (FIDO: what is signed is SHA-256 of the application, flags, counter, and SHA-256 of the message).
"""

import base64
import binascii
import hashlib

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, SECP256R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256

from fedpool.errors import NotAuthorised, UsageError
from fedpool.identity.keys import KEY_TYPE, ssh_string, take_string

ED25519, ECDSA_P256 = KEY_TYPE, b"ecdsa-sha2-nistp256"
SK_ED25519, SK_ECDSA_P256 = b"sk-ssh-ed25519@openssh.com", b"sk-ecdsa-sha2-nistp256@openssh.com"
TYPES = (ED25519, ECDSA_P256, SK_ED25519, SK_ECDSA_P256)
_CURVE = b"nistp256"
_PRESENT = 1  # flag of a FIDO signature: somebody touched the token


def parse_authority(line: str, where: str) -> bytes:
    """An authority's key, from a line as a file `….pub` has it.

    Raises:
        UsageError: it is none of a type that may vouch; `where` says what named it.
    """
    fields = line.split()
    try:
        blob = base64.b64decode(fields[1], validate=True)
        if _fields(blob)[0] != fields[0].encode():
            raise ValueError
        _public(blob)
    except (ValueError, IndexError, binascii.Error):
        known = ", ".join(kind.decode() for kind in TYPES)
        raise UsageError(
            f"{where}: {line[:60]!r} is no public key of an authority", f"copy the line of a .pub file of type {known}"
        ) from None
    return blob


def authority_line(blob: bytes) -> str:
    """An authority's key as a file `….pub` has it."""
    return f"{_fields(blob)[0].decode()} {base64.b64encode(blob).decode()}"


def authority_fingerprint(blob: bytes) -> str:
    """`SHA256:…`, as ssh-keygen -l prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def require_signed(blob: bytes, signature: bytes, message: bytes) -> None:
    """Check a signature against the key that is said to have made it.

    Args:
        blob: the key.
        signature: as it travels, with its type.
        message: what is signed.

    Raises:
        NotAuthorised: it is another's, of another message, or malformed.
    """
    try:
        kind, raw, rest = _signature(signature)
        if kind != _fields(blob)[0]:
            raise ValueError("it is of another type than the key")
        if kind in (SK_ED25519, SK_ECDSA_P256):
            if len(rest) != 5 or not rest[0] & _PRESENT:
                raise ValueError("nobody touched the token")
            application = _fields(blob)[-1]
            message = hashlib.sha256(application).digest() + rest + hashlib.sha256(message).digest()
        elif rest:
            raise ValueError("bytes are left over")
        public = _public(blob)
        if isinstance(public, Ed25519PublicKey):
            public.verify(raw, message)
        else:
            public.verify(_der(raw), message, ECDSA(SHA256()))
    except InvalidSignature:
        raise NotAuthorised(
            "the signature does not fit what it is said to sign", "it was altered on its way, or another key made it"
        ) from None
    except ValueError as error:
        raise NotAuthorised(f"the signature of an authority cannot be read: {error}") from None


def _fields(blob: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(blob):
        field, at = take_string(blob, at)
        found.append(field)
    if not found or found[0] not in TYPES or blob != b"".join(map(ssh_string, found)):
        raise ValueError("no key of an authority")
    return found


def _public(blob: bytes) -> Ed25519PublicKey | EllipticCurvePublicKey:
    kind, *rest = _fields(blob)
    is_token = kind in (SK_ED25519, SK_ECDSA_P256)
    if kind in (ED25519, SK_ED25519):
        if len(rest) != 1 + is_token:
            raise ValueError("no Ed25519 key")
        return Ed25519PublicKey.from_public_bytes(rest[0])
    if len(rest) != 2 + is_token or rest[0] != _CURVE:
        raise ValueError("no key on P-256")
    return EllipticCurvePublicKey.from_encoded_point(SECP256R1(), rest[1])


def _signature(data: bytes) -> tuple[bytes, bytes, bytes]:
    kind, at = take_string(data, 0)
    raw, at = take_string(data, at)
    return kind, raw, data[at:]


def _der(raw: bytes) -> bytes:
    """An ECDSA signature of SSH, two numbers, as others write it."""
    r, at = take_string(raw, 0)
    s, at = take_string(raw, at)
    if at != len(raw):
        raise ValueError("bytes are left over")
    return encode_dss_signature(int.from_bytes(r, signed=True), int.from_bytes(s, signed=True))
