"""A party's Ed25519 key on disk, in OpenSSH's own format, and the fingerprints by which people compare keys."""

import base64
import hashlib
import os
from pathlib import Path

import asyncssh
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedpool.errors import NotFound, UsageError


class Identity:
    """An Ed25519 key pair: SSH host or user key, and signer of round messages."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self.signing = key
        self.public = key.public_key().public_bytes_raw()
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        )
        self._pem = pem
        self.ssh = asyncssh.import_private_key(pem)

    @classmethod
    def create(cls, path: Path) -> "Identity":
        """Make a key and write it, readable by its owner only, with the public half beside it."""
        identity = cls(Ed25519PrivateKey.generate())
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(identity._pem)
        path.with_suffix(".pub").write_text(public_line(identity.public) + "\n")
        return identity

    @classmethod
    def load(cls, path: Path) -> "Identity":
        """Read a key.

        Raises:
            NotFound: there is none.
            UsageError: it is no unencrypted Ed25519 key, or others may read it.
        """
        try:
            mode = path.stat().st_mode
            pem = path.read_bytes()
        except FileNotFoundError:
            raise NotFound(f"no key at {path}", f"make one: ssh-keygen -t ed25519 -N '' -f {path}") from None
        if mode & 0o077:
            raise UsageError(f"the key at {path} may be read by others", f"chmod 600 {path}")
        try:
            key = serialization.load_ssh_private_key(pem, password=None)
        except (ValueError, TypeError) as error:
            raise UsageError(
                f"the key at {path} cannot be used: {error}", "an unencrypted Ed25519 key is needed"
            ) from None
        if not isinstance(key, Ed25519PrivateKey):
            raise UsageError(f"the key at {path} is no Ed25519 key", f"ssh-keygen -t ed25519 -N '' -f {path}")
        return cls(key)


def public_line(public: bytes) -> str:
    """A public key as authorized_keys and known_hosts have it: `ssh-ed25519 AAAA…`."""
    blob = _blob(public)
    return f"ssh-ed25519 {base64.b64encode(blob).decode()}"


def parse_public(line: str, where: str) -> bytes:
    """The 32 bytes of a public key line.

    Raises:
        UsageError: it is no Ed25519 public key; `where` says what named it.
    """
    fields = line.split()
    try:
        blob = base64.b64decode(fields[1], validate=True)
        if fields[0] != "ssh-ed25519" or len(blob) != len(_blob(bytes(32))) or blob != _blob(blob[-32:]):
            raise ValueError
    except (ValueError, IndexError):
        raise UsageError(
            f"{where}: {line[:60]!r} is no Ed25519 public key", "copy the line of a .pub file: ssh-ed25519 AAAA…"
        ) from None
    return blob[-32:]


def fingerprint(public: bytes) -> str:
    """`SHA256:…`, as ssh-keygen -l prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(_blob(public)).digest()).decode().rstrip("=")


def _blob(public: bytes) -> bytes:
    kind = b"ssh-ed25519"
    return len(kind).to_bytes(4, "big") + kind + len(public).to_bytes(4, "big") + public
