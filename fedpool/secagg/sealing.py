"""Authenticated encryption of small secrets under keys that are used once: AES-256-GCM.

Every key here seals one message ever (it is derived for one sender, one receiver, one round), which is what makes the
fixed nonce right; a second message needs a second key.
"""

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fedpool.errors import IntegrityError

_NONCE = bytes(12)


def seal(key: bytes, plaintext: bytes, context: bytes) -> bytes:
    """Encrypt under a one-time key, binding the context."""
    return AESGCM(key).encrypt(_NONCE, plaintext, context)


def unseal(key: bytes, ciphertext: bytes, context: bytes, what: str) -> bytes:
    """Decrypt and check.

    Raises:
        IntegrityError: altered, cut short, or sealed for another context; `what` names it in the message.
    """
    try:
        return AESGCM(key).decrypt(_NONCE, ciphertext, context)
    except (InvalidTag, ValueError):
        raise IntegrityError(f"{what} was altered on its way") from None
