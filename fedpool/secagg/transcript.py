"""Hashing and key derivation with one unambiguous rule: every part is length-prefixed, every use has its own label.

Labels are the specification's constants. Changing one changes the protocol: give it a new version.
"""

import struct
from collections.abc import Iterable

from cryptography.hazmat.primitives import hashes, hmac

DIGEST_BYTES = 32

LABEL_MANIFEST = b"ibshell/sa1/manifest"
LABEL_KEYS = b"ibshell/sa1/keys"
LABEL_KEY_MESSAGE = b"ibshell/sa1/key-message"
LABEL_SHARE_MESSAGE = b"ibshell/sa1/share-message"
LABEL_CONFIRM_MESSAGE = b"ibshell/sa1/confirm-message"
LABEL_VECTOR_MESSAGE = b"ibshell/sa1/vector-message"
LABEL_SURVIVOR_MESSAGE = b"ibshell/sa1/survivor-message"
LABEL_PAIR = b"ibshell/sa1/pair"
LABEL_SEED = b"ibshell/sa1/seed"
LABEL_SHARE_KEY = b"ibshell/sa1/share-key"
LABEL_PAIR_CHECK = b"ibshell/sa1/pair-check"
LABEL_KEYSTREAM = b"ibshell/sa1/keystream"
LABEL_SECRET_CHECK = b"ibshell/sa1/secret-check"
LABEL_SHARE_CHECK = b"ibshell/sa1/share-check"
LABEL_SIGNATURE = b"ibshell/sa1/signature"
LABEL_ROUNDING = b"ibshell/sa1/rounding"


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
    h = hashes.Hash(hashes.SHA256())
    for part in parts:
        h.update(struct.pack(">Q", len(part)))
        h.update(part)
    return h.finalize()


def digest_list(label: bytes, parts: Iterable[bytes]) -> bytes:
    """Hash a labelled list of any length."""
    return digest(label, *parts)


def _hmac(key: bytes, data: bytes) -> bytes:
    h = hmac.HMAC(key, hashes.SHA256())
    h.update(data)
    return h.finalize()


def extract(salt: bytes, key_material: bytes) -> bytes:
    """HKDF-Extract with SHA-256 (RFC 5869 section 2.2)."""
    return _hmac(salt, key_material)


def expand(key: bytes, info: bytes) -> bytes:
    """HKDF-Expand with SHA-256 to one block of 32 bytes (RFC 5869 section 2.3)."""
    return _hmac(key, info + b"\x01")
