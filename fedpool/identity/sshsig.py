"""Signatures in OpenSSH's file format SSHSIG (PROTOCOL.sshsig), which `ssh-keygen -Y verify` reads.

The key in a signature may be a certificate: then the signature says by itself who vouches for the signer.
"""

import base64
import binascii
import hashlib
import struct

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedpool.errors import NotAuthorised, UsageError
from fedpool.identity.authorities import require_signed
from fedpool.identity.keys import KEY_TYPE, key_blob, ssh_string, take_string

BLOB_BYTES_MAX = 16384
_MAGIC = b"SSHSIG"
_VERSION = struct.pack(">I", 1)
_HASH = "sha512"
_HASHES = ("sha512", "sha256")
_BEGIN, _END = "-----BEGIN SSH SIGNATURE-----", "-----END SSH SIGNATURE-----"
_LINE = 70


class Signature(msgspec.Struct, frozen=True):
    """A signature, taken apart and not checked yet.

    Attributes:
        key: the public key or certificate as it travels in SSH.
        namespace: what it was made for.
        hash: name of the hash of the message.
        value: the signature itself as it travels, with its type.
    """

    key: bytes
    namespace: str
    hash: str
    value: bytes


def signed_bytes(namespace: str, message: bytes, hash_name: str = _HASH) -> bytes:
    """What is signed: the namespace and the hash of the message."""
    digest = hashlib.new(hash_name, message).digest()
    return _MAGIC + b"".join(map(ssh_string, (namespace.encode(), b"", hash_name.encode(), digest)))


def sign(key: Ed25519PrivateKey, shown: bytes, namespace: str, message: bytes) -> bytes:
    """Sign a message.

    Args:
        key: who signs.
        shown: the key or certificate to show, as it travels in SSH.
        namespace: what for.
        message: of any length.

    Returns:
        The signature, not armoured.
    """
    value = ssh_string(KEY_TYPE) + ssh_string(key.sign(signed_bytes(namespace, message)))
    return _MAGIC + _VERSION + b"".join(map(ssh_string, (shown, namespace.encode(), b"", _HASH.encode(), value)))


def assemble(signature: Signature, shown: bytes) -> bytes:
    """A signature with another way to show the same key: its certificate. What is signed does not name the key."""
    fields = (shown, signature.namespace.encode(), b"", signature.hash.encode(), signature.value)
    return _MAGIC + _VERSION + b"".join(map(ssh_string, fields))


def parse(blob: bytes) -> Signature:
    """Take a signature apart.

    Raises:
        UsageError: it is none, or of a kind that is not used here.
    """
    try:
        if len(blob) > BLOB_BYTES_MAX:
            raise ValueError(f"{len(blob)} bytes; the limit is {BLOB_BYTES_MAX}")
        if not blob.startswith(_MAGIC + _VERSION):
            raise ValueError("it does not begin as one")
        at, fields = len(_MAGIC + _VERSION), []
        for _ in range(5):
            field, at = take_string(blob, at)
            fields.append(field)
        key, namespace, reserved, hash_name, value = fields
        if at != len(blob) or reserved:
            raise ValueError("bytes are left over")
        if hash_name.decode() not in _HASHES:
            raise ValueError(f"the hash {hash_name[:20]!r} is not used in such signatures")
        return Signature(key, namespace.decode(), hash_name.decode(), value)
    except ValueError as error:
        raise UsageError(f"a signature cannot be read: {error}") from None


def check(signature: Signature, public: bytes, namespace: str, message: bytes) -> None:
    """Check a signature against the Ed25519 key that is said to have made it.

    Raises:
        NotAuthorised: it is another's, for something else, or of another message.
    """
    check_by_authority(signature, key_blob(public), namespace, message)


def check_by_authority(signature: Signature, authority: bytes, namespace: str, message: bytes) -> None:
    """As `check`, of an authority's key, as it travels."""
    if signature.namespace != namespace:
        raise NotAuthorised(f"a signature made for {signature.namespace[:40]!r}; one for {namespace!r} is needed")
    require_signed(authority, signature.value, signed_bytes(namespace, message, signature.hash))


def armor(blob: bytes) -> str:
    """A signature as a file has it."""
    text = base64.b64encode(blob).decode()
    lines = [text[at : at + _LINE] for at in range(0, len(text), _LINE)]
    return "\n".join((_BEGIN, *lines, _END)) + "\n"


def dearmor(text: str) -> bytes:
    """The signature in a file.

    Raises:
        UsageError: there is none.
    """
    lines = text.strip().splitlines()
    try:
        if len(text) > 2 * BLOB_BYTES_MAX or lines[0] != _BEGIN or lines[-1] != _END:
            raise ValueError
        return base64.b64decode("".join(lines[1:-1]), validate=True)
    except (ValueError, IndexError, binascii.Error):
        raise UsageError("no signature in the form of ssh-keygen -Y sign", f"it begins with {_BEGIN}") from None
