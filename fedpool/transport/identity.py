"""A party's Ed25519 key on disk, in OpenSSH's own format, with its certificate beside it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedpool.errors import Failed, NotAuthorised, NotFound, UsageError
from fedpool.identity import certificates, sshsig
from fedpool.identity.certificates import Certificate
from fedpool.identity.keys import fingerprint, key_blob, parse_public, public_line
from fedpool.identity.trust import Trust
from fedpool.transport import keygen

if TYPE_CHECKING:
    import asyncssh


class Identity:
    """An Ed25519 key pair: SSH host or user key, signer of requests and of round messages.

    Attributes:
        signing: the private key.
        public: the 32 bytes of the public one.
        path: where it lies.
        trust: whom its owner believes beside keys that are pinned, or None.
    """

    def __init__(self, key: Ed25519PrivateKey, path: Path | None = None) -> None:
        self.signing = key
        self.public = key.public_key().public_bytes_raw()
        self.path = path
        self.trust: Trust | None = None
        self._pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        )

    @cached_property
    def ssh(self) -> asyncssh.SSHKey:
        """The key as asyncssh wants it."""
        import asyncssh

        return asyncssh.import_private_key(self._pem)

    def certificate_path(self, kind: str) -> Path:
        """Where a certificate of it lies: `identity-cert.pub` or `identity-host-cert.pub` beside `identity`.

        Args:
            kind: certificates.USER or HOST.
        """
        assert self.path is not None
        return self.path.with_name(f"{self.path.name}{'-host' if kind == certificates.HOST else ''}-cert.pub")

    def certificate(self, kind: str) -> Certificate | None:
        """A certificate of it as it is on disk now, None where there is none.

        Raises:
            UsageError: what is there is none, or another key's.
        """
        if self.path is None:
            return None
        path = self.certificate_path(kind)
        try:
            line = path.read_text()
        except FileNotFoundError:
            return None
        found = certificates.parse(line, str(path))
        if found.public != self.public:
            raise UsageError(f"{path} is the certificate of another key than {self.path}")
        return found

    def install(self, certificate: Certificate) -> None:
        """Put a certificate beside the key; whoever connects from now on shows it."""
        path = self.certificate_path(certificate.kind)
        temporary = path.with_suffix(".new")
        temporary.write_text(certificate.line + "\n")
        temporary.replace(path)

    def sshsig(self, shown: bytes, namespace: str, message: bytes) -> bytes:
        """Sign in SSHSIG.

        Args:
            shown: the key or certificate to show, as it travels in SSH.
            namespace: what for.
            message: of any length.
        """
        return sshsig.sign(self.signing, shown, namespace, message)

    @asynccontextmanager
    async def offered(self) -> AsyncIterator[list[Any]]:
        """The key as asyncssh logs in with it, as long as that takes."""
        yield self.keys(certificates.USER)

    def keys(self, kind: str) -> list[Any]:
        """The key as asyncssh is to show it: with its certificate where there is one, and bare to whoever knows it."""
        import asyncssh

        found = self.certificate(kind)
        if found is None:
            return [self.ssh]
        return [(self.ssh, asyncssh.import_certificate(found.line))]

    @classmethod
    def create(cls, path: Path) -> Identity:
        """Make a key and write it, readable by its owner only, with the public half beside it."""
        identity = cls(Ed25519PrivateKey.generate(), path)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(identity._pem)
        path.with_suffix(".pub").write_text(public_line(identity.public) + "\n")
        return identity

    @classmethod
    def load(cls, path: Path) -> Identity:
        """Read a key.

        Raises:
            NotFound: there is none.
            UsageError: it is no unencrypted Ed25519 key, or others may read it.
        """
        try:
            mode = path.stat().st_mode
            pem = path.read_bytes()
        except FileNotFoundError:
            if path.with_suffix(".pub").exists() and "SSH_AUTH_SOCK" in os.environ:
                return AgentIdentity(path)
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
        return cls(key, path)


class AgentIdentity(Identity):
    """A key that only ssh-agent has: `identity.pub` and its certificate lie here, the private half there.

    It logs people in and signs what they ask for; it is no host key.

    Args:
        path: where the private key would lie.
    """

    def __init__(self, path: Path) -> None:
        public_path = path.with_suffix(".pub")
        self.public = parse_public(public_path.read_text(), str(public_path))
        self.path = path
        self.trust = None

    def sshsig(self, shown: bytes, namespace: str, message: bytes) -> bytes:
        """See `Identity.sshsig`; ssh-keygen asks the agent.

        Raises:
            NotAuthorised: the agent does not have the key, or does not want to.
        """
        assert self.path is not None
        try:
            made = sshsig.parse(keygen.sign(self.path.with_suffix(".pub"), namespace, message))
        except Failed as error:
            raise NotAuthorised(f"{fingerprint(self.public)}: {error.message}", error.hint) from None
        return sshsig.assemble(made, shown)

    @asynccontextmanager
    async def offered(self) -> AsyncIterator[list[Any]]:
        """See `Identity.offered`.

        Raises:
            NotAuthorised: the agent does not have the key.
        """
        import asyncssh

        found = self.certificate(certificates.USER)
        try:
            async with asyncssh.connect_agent(os.environ["SSH_AUTH_SOCK"]) as agent:
                pairs = [pair for pair in await agent.get_keys() if pair.public_data == key_blob(self.public)]
                if not pairs:
                    raise NotAuthorised(
                        f"ssh-agent does not have {fingerprint(self.public)}", "ssh-add -l shows the keys it has"
                    )
                if found is not None:
                    pairs[0].set_certificate(asyncssh.import_certificate(found.line))
                yield pairs[:1]
        except (OSError, ValueError) as error:
            raise NotAuthorised(f"ssh-agent cannot be asked: {error}", "eval $(ssh-agent) starts one") from None
