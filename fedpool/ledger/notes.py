"""Signed notes, checkpoints and cosignatures in the formats of c2sp.org (signed-note, tlog-checkpoint, tlog-cosignature).

A note is text, a blank line, and lines of signatures. A checkpoint is a note that says how large a log is and what its root is. A
witness that has seen that a log continues what it saw before cosigns the log's checkpoint, with the time.
"""

import base64
import hashlib
import struct
from collections.abc import Iterable, Sequence

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from fedpool.errors import IntegrityError, UsageError
from fedpool.ledger.merkle import HASH_BYTES

ED25519 = 1  # who owns a log
COSIGNATURE = 4  # who has witnessed it

_DASH = "— "
_KEY_ID_BYTES = 4
_NOTE_BYTES_MAX = 1 << 20
_SIGNATURES_MAX = 1024
_TIME = struct.Struct(">Q")


class Key(msgspec.Struct, frozen=True):
    """A public key under a name.

    Attributes:
        name: without blanks and `+`; a log's is its origin.
        public: 32 bytes of Ed25519.
        kind: ED25519 or COSIGNATURE.
    """

    name: str
    public: bytes
    kind: int = ED25519

    @property
    def id(self) -> bytes:
        """The four bytes by which a signature names its key."""
        return hashlib.sha256(self.name.encode() + b"\n" + bytes([self.kind]) + self.public).digest()[:_KEY_ID_BYTES]

    def line(self) -> str:
        """The key as verifiers of other people read it: `NAME+ID+BASE64`."""
        return f"{self.name}+{self.id.hex()}+{base64.b64encode(bytes([self.kind]) + self.public).decode()}"


def key_of(site: str, public: bytes) -> Key:
    """The key that signs a site's checkpoints; its name is the ledger's origin."""
    return Key(f"ibshell/{site}/{public.hex()[:16]}", public)


class Signature(msgspec.Struct, frozen=True):
    """One line of signature, not checked yet."""

    name: str
    key_id: bytes
    value: bytes

    def line(self) -> str:
        """As it stands in a note."""
        return f"{_DASH}{self.name} {base64.b64encode(self.key_id + self.value).decode()}\n"


class Note(msgspec.Struct, frozen=True):
    """Text, each line ended, and who signed it."""

    text: str
    signatures: tuple[Signature, ...] = ()

    def encode(self) -> bytes:
        """The note as it is stored and sent."""
        return (self.text + "\n" + "".join(signature.line() for signature in self.signatures)).encode()

    def signed(self, *more: Signature) -> "Note":
        """The note with further signatures; one that is there already is not repeated."""
        new = tuple(one for one in more if one not in self.signatures)
        return Note(self.text, self.signatures + new)


def parse_key(line: str) -> Key:
    """Read `NAME+ID+BASE64`.

    Raises:
        UsageError: it is no key of a kind that is known.
    """
    name, _, rest = line.partition("+")
    said, _, encoded = rest.partition("+")
    try:
        data = _base64(encoded)
    except ValueError:
        data = b""
    if len(data) != 33 or data[0] not in (ED25519, COSIGNATURE):
        raise UsageError(f"{line[:80]!r} is no key of a log or a witness", "it is written NAME+ID+BASE64")
    key = Key(_checked_name(name), data[1:], data[0])
    if said != key.id.hex():
        raise UsageError(f"the key of {name} has the id {key.id.hex()}, not {said[:16]!r}", "copy the whole line")
    return key


def _base64(text: str) -> bytes:
    """Decode what encodes to just this text: one signature has one form."""
    data = base64.b64decode(text, validate=True)
    if base64.b64encode(data).decode() != text:
        raise ValueError(text)
    return data


def _checked_name(name: str) -> str:
    if not name or any(character.isspace() or character == "+" for character in name):
        raise UsageError(f"{name!r} is no name of a key", "it has no blanks and no +")
    return name


def decode(data: bytes) -> Note:
    """Read a note; its signatures are not checked yet.

    Raises:
        IntegrityError: it is none.
    """
    if len(data) > _NOTE_BYTES_MAX:
        raise IntegrityError(f"a note of {len(data)} bytes; the limit is {_NOTE_BYTES_MAX}")
    try:
        content = data.decode()
    except UnicodeDecodeError:
        raise IntegrityError("a note that is no UTF-8") from None
    if any(character < " " and character != "\n" for character in content):
        raise IntegrityError("a note with control characters")
    text, blank, signatures = content.rpartition("\n\n")
    lines = signatures.splitlines(keepends=True)
    if not blank or not lines or not signatures.endswith("\n") or len(lines) > _SIGNATURES_MAX:
        raise IntegrityError("a note without signatures")
    return Note(text + "\n", tuple(parse_signature(line) for line in lines))


def parse_signature(line: str) -> Signature:
    """Read one line of signature.

    Raises:
        IntegrityError: it is none.
    """
    name, blank, encoded = line.removeprefix(_DASH).removesuffix("\n").partition(" ")
    try:
        value = _base64(encoded)
    except ValueError:
        value = b""
    if not line.startswith(_DASH) or not name or not blank or len(value) <= _KEY_ID_BYTES:
        raise IntegrityError(f"a malformed line of signature: {line[:80]!r}")
    return Signature(name, value[:_KEY_ID_BYTES], value[_KEY_ID_BYTES:])


# --- who signed


def sign(text: str, name: str, key: Ed25519PrivateKey) -> Signature:
    """Sign a note's text as the owner of a log."""
    public = Key(_checked_name(name), key.public_key().public_bytes_raw())
    return Signature(name, public.id, key.sign(text.encode()))


def cosign(text: str, name: str, key: Ed25519PrivateKey, time_s: int) -> Signature:
    """Sign a checkpoint's text as a witness, at a time in seconds of Unix."""
    public = Key(_checked_name(name), key.public_key().public_bytes_raw(), COSIGNATURE)
    return Signature(name, public.id, _TIME.pack(time_s) + key.sign(_witnessed(text, time_s)))


def _witnessed(text: str, time_s: int) -> bytes:
    return f"cosignature/v1\ntime {time_s}\n{text}".encode()


def signers(note: Note, keys: Iterable[Key]) -> dict[str, int]:
    """Who of these has signed: {name: time in seconds of Unix, 0 for the owner of a log}. Others' signatures are ignored.

    Raises:
        IntegrityError: a signature that names one of these keys is not that key's.
    """
    found: dict[str, int] = {}
    known = {(key.name, key.id): key for key in keys}
    for signature in note.signatures:
        key = known.get((signature.name, signature.key_id))
        if key is not None:
            found[key.name] = _require_signed(note.text, signature, key)
    return found


def _require_signed(text: str, signature: Signature, key: Key) -> int:
    value, time_s, message = signature.value, 0, text.encode()
    if key.kind == COSIGNATURE:
        if len(value) < _TIME.size:
            raise IntegrityError(f"a cosignature of {key.name} without a time")
        (time_s,) = _TIME.unpack_from(value)
        value, message = value[_TIME.size :], _witnessed(text, time_s)
    try:
        Ed25519PublicKey.from_public_bytes(key.public).verify(value, message)
    except InvalidSignature:
        raise IntegrityError(f"a signature in the name of {key.name} is not of its key") from None
    return time_s


# --- checkpoints


class Checkpoint(msgspec.Struct, frozen=True):
    """How large a log is.

    Attributes:
        origin: which log.
        size: entries.
        root: of their tree.
    """

    origin: str
    size: int
    root: bytes

    def text(self) -> str:
        """The text of its note."""
        return f"{self.origin}\n{self.size}\n{base64.b64encode(self.root).decode()}\n"


def parse_checkpoint(note: Note, origin: str) -> Checkpoint:
    """Read the checkpoint of a log; lines after the third are for others.

    Raises:
        IntegrityError: it is none, or another log's.
    """
    lines: Sequence[str] = note.text.split("\n")
    try:
        size, root = int(lines[1]), _base64(lines[2])
        if str(size) != lines[1] or size < 0 or len(root) != HASH_BYTES:
            raise ValueError
    except (ValueError, IndexError):
        raise IntegrityError(f"no checkpoint: {note.text[:120]!r}") from None
    if lines[0] != origin:
        raise IntegrityError(f"a checkpoint of {lines[0][:80]!r}, not of {origin}")
    return Checkpoint(origin, size, root)
