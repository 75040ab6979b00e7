"""ssh-keygen, where a key is in ssh-agent alone, or on a token that the agent has: it asks the agent."""

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fedpool.errors import Failed
from fedpool.identity import sshsig

TIMEOUT_S = 60.0  # somebody may have to touch a token


def keygen(words: Sequence[str]) -> None:
    """Run it.

    Raises:
        Failed: it does not do it, and why.
    """
    try:
        done = subprocess.run(["ssh-keygen", "-q", *words], capture_output=True, text=True, timeout=TIMEOUT_S)
    except FileNotFoundError:
        raise Failed("ssh-keygen is not on the path", "apt-get install openssh-client") from None
    except subprocess.TimeoutExpired:
        raise Failed("the key did not answer", "touch the token, or unlock ssh-agent") from None
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no reason given"
        raise Failed(f"the key cannot be used: {reason}", "it must be in ssh-agent: ssh-add -l shows what is")


def sign(public: Path, namespace: str, message: bytes) -> bytes:
    """Sign in SSHSIG; the signature is not armoured.

    Args:
        public: file with the public half of the key.
        namespace: what for.
        message: of any length.

    Raises:
        Failed: the agent does not have the key, or does not want to.
    """
    with tempfile.TemporaryDirectory(prefix="ibshell-") as directory:
        path = Path(directory) / "message"
        path.write_bytes(message)
        keygen(["-Y", "sign", "-f", str(public), "-n", namespace, str(path)])
        return sshsig.dearmor(path.with_name("message.sig").read_text())
