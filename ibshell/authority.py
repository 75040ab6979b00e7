"""The pool's certificate authority: a key in a file, or one that only ssh-agent has, and with it a PKCS#11 or FIDO token.

With the key in a file everything is done here; otherwise ssh-keygen does it, which asks the agent (`ssh-keygen -U`, `-Y sign`).
"""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from fedpool.errors import NotFound
from fedpool.identity import certificates, roster, sshsig
from fedpool.identity.authorities import parse_authority
from fedpool.identity.certificates import Certificate
from fedpool.identity.keys import public_line
from fedpool.identity.roster import Roster
from fedpool.records import Signed
from fedpool.transport import keygen
from fedpool.transport.identity import Identity


class Authority:
    """One authority.

    Args:
        directory: with `identity.pub`, and `identity` where the key is in a file.

    Raises:
        NotFound: there is none.
    """

    def __init__(self, directory: Path) -> None:
        self._public_path = directory / "identity.pub"
        try:
            self.public = parse_authority(self._public_path.read_text(), str(self._public_path))
        except FileNotFoundError:
            raise NotFound(
                f"no certificate authority at {directory}", "ibshell pool init makes one; it is where that was run"
            ) from None
        path = directory / "identity"
        self._identity = Identity.load(path) if path.exists() else None

    def issue(self, kind: str, public: bytes, principals: Sequence[str], key_id: str, for_s: float) -> Certificate:
        """Vouch for a key from now on.

        Args:
            kind: certificates.USER or HOST.
            public: 32 bytes.
            principals: its roles.
            key_id: what it is issued for.
            for_s: how long it holds.
        """
        now, serial = int(time.time()), secrets.randbits(63)
        valid = (now - certificates.BACKDATED_S, now + int(for_s))
        if self._identity is not None:
            return certificates.issue(self._identity.signing, kind, public, principals, key_id, serial, valid)
        with tempfile.TemporaryDirectory(prefix="ibshell-") as directory:
            path = Path(directory) / "key.pub"
            path.write_text(public_line(public) + "\n")
            words = ["-U", "-s", str(self._public_path), "-I", key_id, "-n", ",".join(principals)]
            words += ["-z", str(serial), "-V", f"0x{valid[0]:x}:0x{valid[1]:x}"]
            words += ["-h"] if kind == certificates.HOST else []
            keygen.keygen([*words, str(path)])
            return certificates.parse(path.with_name("key-cert.pub").read_text(), "what ssh-keygen issued")

    def sign(self, wanted: Roster) -> Signed:
        """Sign a roster."""
        payload = roster.encode(wanted)
        if self._identity is not None:
            blob = sshsig.sign(self._identity.signing, self.public, roster.NAMESPACE, payload)
            return Signed(payload, blob)
        return Signed(payload, keygen.sign(self._public_path, roster.NAMESPACE, payload))
