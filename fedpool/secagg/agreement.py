"""A round's one-shot keys and the secrets that two sites derive from them: X25519 and ML-KEM-768 together.

Each ordered pair i -> j has an encapsulation of i to j's ML-KEM key. The key that seals i's shares for j comes from
(X25519(i, j), that encapsulation), so it stands before j has said anything; the pair's mask seed comes from
(X25519(i, j), both encapsulations). An attacker must break both X25519 and ML-KEM to learn either. Opening a mask seed
after a drop-out says nothing about the share keys: they are derived under another label from other inputs.
"""

from __future__ import annotations

from typing import NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from fedpool.errors import IntegrityError
from fedpool.secagg import transcript
from fedpool.secagg.shamir import Entropy

X25519_BYTES = 32
MLKEM_KEY_BYTES = 1184  # FIPS 203, ML-KEM-768 encapsulation key
PUBLIC_BYTES = X25519_BYTES + MLKEM_KEY_BYTES
CIPHERTEXT_BYTES = 1088  # FIPS 203, ML-KEM-768 ciphertext
SIGNATURE_BYTES = 64


class Encapsulation(NamedTuple):
    """A secret for one peer and the ciphertext that carries it there."""

    secret: bytes
    ciphertext: bytes


class RoundKeys:
    """One site's private keys of one round. They are never stored: a site that restarts is a drop-out of that round."""

    def __init__(self, entropy: Entropy) -> None:
        self._x25519 = X25519PrivateKey.from_private_bytes(entropy(32))
        self._mlkem = MLKEM768PrivateKey.from_seed_bytes(entropy(64))
        self.public = self._x25519.public_key().public_bytes_raw() + self._mlkem.public_key().public_bytes_raw()

    def exchange(self, peer_public: bytes) -> bytes:
        """The X25519 secret shared with a peer.

        Raises:
            IntegrityError: the peer's key is malformed or of low order.
        """
        try:
            return self._x25519.exchange(X25519PublicKey.from_public_bytes(peer_public[:X25519_BYTES]))
        except ValueError as error:  # cryptography refuses an all-zero result by itself (RFC 7748 section 6.1)
            raise IntegrityError(f"a peer's X25519 key is unusable: {error}") from None

    def decapsulate(self, ciphertext: bytes) -> bytes:
        """The ML-KEM secret that a peer encapsulated to this site."""
        try:
            return self._mlkem.decapsulate(ciphertext)
        except ValueError as error:
            raise IntegrityError(f"a peer's ML-KEM ciphertext is unusable: {error}") from None


def encapsulate(peer_public: bytes) -> Encapsulation:
    """Make a fresh ML-KEM secret for a peer. (The library draws this one's randomness by itself.)"""
    try:
        secret, ciphertext = MLKEM768PublicKey.from_public_bytes(peer_public[X25519_BYTES:]).encapsulate()
    except ValueError as error:
        raise IntegrityError(f"a peer's ML-KEM key is unusable: {error}") from None
    return Encapsulation(secret, ciphertext)


def share_key(context: bytes, sender: int, receiver: int, exchanged: bytes, sent: Encapsulation) -> bytes:
    """The key under which `sender` seals its shares for `receiver`.

    Args:
        context: digest of manifest and all public keys of the round.
        sender: index of the dealing site.
        receiver: index of the holding site.
        exchanged: their X25519 secret.
        sent: the sender's encapsulation to the receiver.
    """
    salt = transcript.digest(transcript.LABEL_PAIR, context)
    info = transcript.digest(
        transcript.LABEL_SHARE_KEY, transcript.u32(sender), transcript.u32(receiver), sent.ciphertext
    )
    return transcript.expand(transcript.extract(salt, exchanged + sent.secret), info)


def pair_seed(context: bytes, low: int, high: int, exchanged: bytes, up: Encapsulation, down: Encapsulation) -> bytes:
    """The seed of the mask that sites `low` < `high` add and subtract.

    Args:
        context: digest of manifest and all public keys of the round.
        low: the smaller index.
        high: the larger index.
        exchanged: their X25519 secret.
        up: the encapsulation of `low` to `high`.
        down: the encapsulation of `high` to `low`.
    """
    assert low < high
    salt = transcript.digest(transcript.LABEL_PAIR, context)
    info = transcript.digest(
        transcript.LABEL_SEED, transcript.u32(low), transcript.u32(high), up.ciphertext, down.ciphertext
    )
    return transcript.expand(transcript.extract(salt, exchanged + up.secret + down.secret), info)


def sign(identity: Ed25519PrivateKey, message_digest: bytes) -> bytes:
    """Sign a message's digest. The label keeps these signatures apart from those that the same key makes in SSH."""
    return identity.sign(transcript.LABEL_SIGNATURE + message_digest)


def verify(identity: bytes, signature: bytes, message_digest: bytes, whose: str) -> None:
    """Check a site's signature.

    Raises:
        IntegrityError: it is not that site's signature over that message; `whose` names the site in the message.
    """
    try:
        Ed25519PublicKey.from_public_bytes(identity).verify(signature, transcript.LABEL_SIGNATURE + message_digest)
    except (InvalidSignature, ValueError):
        raise IntegrityError(
            f"a round message of {whose} does not carry {whose}'s signature",
            "the hub or the network altered it, or the peer list names another key for that site",
        ) from None
