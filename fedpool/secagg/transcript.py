"""Hashing and key derivation with one unambiguous rule: every part is length-prefixed, every use has its own label.

Labels are the specification's constants. Changing one changes the protocol: give it a new version.
"""

import hashlib
import hmac
import struct
from collections.abc import Iterable

DIGEST_BYTES = 32

LABEL_MANIFEST = b"ibshell/sa2/manifest"
LABEL_KEYS = b"ibshell/sa2/keys"
LABEL_KEY_MESSAGE = b"ibshell/sa2/key-message"
LABEL_SHARE_MESSAGE = b"ibshell/sa2/share-message"
LABEL_CONFIRM_MESSAGE = b"ibshell/sa2/confirm-message"
LABEL_VECTOR_MESSAGE = b"ibshell/sa2/vector-message"
LABEL_SURVIVOR_MESSAGE = b"ibshell/sa2/survivor-message"
LABEL_PAIR = b"ibshell/sa2/pair"
LABEL_SEED = b"ibshell/sa2/seed"
LABEL_SHARE_KEY = b"ibshell/sa2/share-key"
LABEL_PAIR_CHECK = b"ibshell/sa2/pair-check"
LABEL_KEYSTREAM = b"ibshell/sa2/keystream"
LABEL_SECRET_CHECK = b"ibshell/sa2/secret-check"
LABEL_SHARE_CHECK = b"ibshell/sa2/share-check"
LABEL_SIGNATURE = b"ibshell/sa2/signature"
LABEL_ROUNDING = b"ibshell/sa2/rounding"
LABEL_VECTOR = b"ibshell/sa2/vector"
LABEL_GRAPH = b"ibshell/sa2/graph"


_LENGTH = struct.Struct(">Q").pack


def u32(value: int) -> bytes:
    """Encode a count or an index as four bytes, big-endian."""
    return struct.pack(">I", value)


def u64(value: int) -> bytes:
    """Encode a large count as eight bytes, big-endian."""
    return struct.pack(">Q", value)


def f64(value: float) -> bytes:
    """Encode a real number as IEEE 754 binary64, big-endian."""
    return struct.pack(">d", value)


def digest(*parts: bytes) -> bytes:
    """SHA-256 over the parts, each preceded by its length as u64: no two part lists collide by concatenation."""
    return hashlib.sha256(b"".join([piece for part in parts for piece in (_LENGTH(len(part)), part)])).digest()


def digest_list(label: bytes, parts: Iterable[bytes]) -> bytes:
    """Hash a labelled list of any length."""
    return digest(label, *parts)


def _hmac(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")


def extract(salt: bytes, key_material: bytes) -> bytes:
    """HKDF-Extract with SHA-256 (RFC 5869 section 2.2)."""
    return _hmac(salt, key_material)


def expand(key: bytes, info: bytes) -> bytes:
    """HKDF-Expand with SHA-256 to one block of 32 bytes (RFC 5869 section 2.3)."""
    return _hmac(key, info + b"\x01")
