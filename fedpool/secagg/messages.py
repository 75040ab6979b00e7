"""The messages of a round. What a signature covers is the digest made here, never an encoding on the wire."""

import msgspec

from fedpool.secagg import transcript as t


class KeyMessage(msgspec.Struct, frozen=True):
    """A site's one-shot public keys (X25519 then ML-KEM-768), signed with its identity."""

    index: int
    public: bytes
    signature: bytes

    @staticmethod
    def digest(manifest: bytes, index: int, public: bytes) -> bytes:
        """What the signature covers."""
        return t.digest(t.LABEL_KEY_MESSAGE, manifest, t.u32(index), public)

    def header(self, manifest: bytes) -> "KeyHeader":
        """The message as sites get it that share no mask with this one."""
        return KeyHeader(self.index, self.digest(manifest, self.index, self.public), self.signature)


class KeyHeader(msgspec.Struct, frozen=True):
    """A key message as its digest and the signature over that."""

    index: int
    key: bytes
    signature: bytes


def list_digest(indices: list[int]) -> bytes:
    """The digest of a list of sites."""
    return t.digest(*(t.u32(i) for i in indices))


def key_context(manifest: bytes, keys: list[KeyHeader]) -> bytes:
    """HK: the digest of manifest and all public keys, to which everything later is bound."""
    ordered = sorted(keys, key=lambda key: key.index)
    return t.digest(t.LABEL_KEYS, manifest, *(t.u32(key.index) + key.key for key in ordered))


class Dealing(msgspec.Struct, frozen=True):
    """What one site deals to one holder.

    Attributes:
        holder: index of the receiving site.
        ciphertext: ML-KEM encapsulation to it.
        sealed: the two shares and their salts, sealed for it.
        own_check: commitment to the share of the own-mask seed.
        box_check: commitment to the share of the box key.
    """

    holder: int
    ciphertext: bytes
    sealed: bytes
    own_check: bytes
    box_check: bytes

    def digest(self) -> bytes:
        """Hash of the whole dealing, of which the dealer's signed list is made."""
        return t.digest(t.u32(self.holder), self.ciphertext, self.sealed, self.own_check, self.box_check)


class ShareMessage(msgspec.Struct, frozen=True):
    """All that one site deals, with commitments to the two secrets, signed."""

    index: int
    dealings: list[Dealing]
    own_check: bytes
    box_check: bytes
    signature: bytes

    def deliveries(self) -> "dict[int, ShareDelivery]":
        """The parts of this message that go to each holder."""
        holders, digests = [d.holder for d in self.dealings], [d.digest() for d in self.dealings]
        return {
            d.holder: ShareDelivery(self.index, d, holders, digests, self.own_check, self.box_check, self.signature)
            for d in self.dealings
        }

    @staticmethod
    def digest(
        context: bytes, index: int, holders: list[int], digests: list[bytes], own_check: bytes, box_check: bytes
    ) -> bytes:
        """What the signature covers."""
        parts = [t.u32(holder) + digest for holder, digest in zip(holders, digests, strict=True)]
        return t.digest(t.LABEL_SHARE_MESSAGE, context, t.u32(index), own_check, box_check, *parts)


class ShareDelivery(msgspec.Struct, frozen=True):
    """One dealer's message as one holder gets it: its own dealing, the digests of the others."""

    index: int
    dealing: Dealing
    holders: list[int]
    digests: list[bytes]
    own_check: bytes
    box_check: bytes
    signature: bytes


class ConfirmMessage(msgspec.Struct, frozen=True):
    """A site has opened all shares: its sealed pair seeds, and a check value of each seed.

    Attributes:
        index: the site.
        dealers: all sites that dealt shares, ascending, as the hub told this one.
        box: its pair seeds, sealed under its box key; opened only if it drops out after masking began.
        checks: one digest for each of its neighbours among the dealers, ascending.
        signature: by its identity.
    """

    index: int
    dealers: list[int]
    box: bytes
    checks: list[bytes]
    signature: bytes

    def header(self) -> "ConfirmHeader":
        """The message without the box, as the other sites get it."""
        return ConfirmHeader(self.index, self.dealers, t.digest(self.box), self.checks, self.signature)


class ConfirmHeader(msgspec.Struct, frozen=True):
    """A confirmation as the other sites see it."""

    index: int
    dealers: list[int]
    box_digest: bytes
    checks: list[bytes]
    signature: bytes

    @staticmethod
    def digest(context: bytes, index: int, dealers: list[int], box_digest: bytes, checks: list[bytes]) -> bytes:
        """What the signature covers."""
        return t.digest(t.LABEL_CONFIRM_MESSAGE, context, t.u32(index), list_digest(dealers), box_digest, *checks)


class VectorMessage(msgspec.Struct, frozen=True):
    """A site's masked vector has been sent: its SHA-256, signed together with the set it was masked for."""

    index: int
    vector: bytes
    signature: bytes

    @staticmethod
    def digest(context: bytes, index: int, masked_for: bytes, vector: bytes) -> bytes:
        """What the signature covers; `masked_for` is the digest of that list."""
        return t.digest(t.LABEL_VECTOR_MESSAGE, context, t.u32(index), masked_for, vector)


class SurvivorMessage(msgspec.Struct, frozen=True):
    """A site's signature on the one list of survivors it will ever release shares for in this round."""

    index: int
    signature: bytes

    @staticmethod
    def digest(context: bytes, masked_for: bytes, survivors: list[int], vectors: list[bytes]) -> bytes:
        """What the signature covers; the same for every site."""
        rest = t.digest(*(t.u32(i) + vector for i, vector in zip(survivors, vectors, strict=True)))
        return t.digest(t.LABEL_SURVIVOR_MESSAGE, context, masked_for, rest)


class RevealedShare(msgspec.Struct, frozen=True):
    """One share of one dealer: of its own-mask seed if it survived, of its box key if it dropped out, never both."""

    dealer: int
    share: bytes
    salt: bytes


class ReleaseMessage(msgspec.Struct, frozen=True):
    """What a site reveals at the end: one share for itself and every neighbour that masked."""

    index: int
    own: list[RevealedShare]
    box: list[RevealedShare]


KIND_OWN = b"own"
KIND_BOX = b"box"


def secret_check(context: bytes, index: int, kind: bytes, secret: bytes) -> bytes:
    """Commitment of a site to one of its two secrets, so that a wrong reconstruction is noticed."""
    return t.digest(t.LABEL_SECRET_CHECK, context, t.u32(index), kind, secret)


def share_check(context: bytes, dealer: int, holder: int, kind: bytes, share: bytes, salt: bytes) -> bytes:
    """Commitment of a dealer to one share, so that a bad share names its holder."""
    return t.digest(t.LABEL_SHARE_CHECK, context, t.u32(dealer), t.u32(holder), kind, share, salt)


def pair_check(context: bytes, one: int, other: int, seed: bytes) -> bytes:
    """Value by which both ends confirm a pair seed before anything large moves."""
    return t.digest(t.LABEL_PAIR_CHECK, context, t.u32(min(one, other)), t.u32(max(one, other)), seed)
