"""Ed25519 public keys as OpenSSH writes them, and the fingerprints by which people compare them."""

import base64
import binascii
import hashlib
import struct

from fedpool.errors import UsageError

KEY_TYPE = b"ssh-ed25519"
_LENGTH = struct.Struct(">I")


def ssh_string(data: bytes) -> bytes:
    """Length and bytes: a string of RFC 4251, section 5."""
    return _LENGTH.pack(len(data)) + data


def take_string(data: bytes, at: int) -> tuple[bytes, int]:
    """The string that begins at an offset, and where it ends.

    Raises:
        ValueError: it is cut off.
    """
    start = at + _LENGTH.size
    if start > len(data):
        raise ValueError("a string is cut off")
    end = start + _LENGTH.unpack_from(data, at)[0]
    if end > len(data):
        raise ValueError("a string is cut off")
    return data[start:end], end


def key_blob(public: bytes) -> bytes:
    """The 32 bytes of a public key in the form that travels in SSH (RFC 8709, section 4)."""
    return ssh_string(KEY_TYPE) + ssh_string(public)


def public_line(public: bytes) -> str:
    """A public key as authorized_keys and known_hosts have it: `ssh-ed25519 AAAA…`."""
    return f"{KEY_TYPE.decode()} {base64.b64encode(key_blob(public)).decode()}"


def parse_public(line: str, where: str) -> bytes:
    """The 32 bytes of a public key line.

    Raises:
        UsageError: it is no Ed25519 public key; `where` says what named it.
    """
    fields = line.split()
    try:
        blob = base64.b64decode(fields[1], validate=True)
        if fields[0] != KEY_TYPE.decode() or blob != key_blob(blob[-32:]):
            raise ValueError
    except (ValueError, IndexError, binascii.Error):
        raise UsageError(
            f"{where}: {line[:60]!r} is no Ed25519 public key", "copy the line of a .pub file: ssh-ed25519 AAAA…"
        ) from None
    return blob[-32:]


def fingerprint(public: bytes) -> str:
    """`SHA256:…`, as ssh-keygen -l prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key_blob(public)).digest()).decode().rstrip("=")
