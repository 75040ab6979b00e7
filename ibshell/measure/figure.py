"""One measured figure, and the peers it stands beside."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ibshell import diagnostics


class Figure(msgspec.Struct, frozen=True):
    """One row of `ibshell bench`.

    Attributes:
        ratio: how many times better than the peer, or None without one.
        limit: the physical limit measured in the same run, or "".
    """

    bench: str
    case: str
    value: float
    unit: str
    peer: str = ""
    peer_value: float | None = None
    ratio: float | None = None
    limit: str = ""
    limit_value: float | None = None


def peer(program: str, environment: str, install: str, arguments: Sequence[str]) -> dict[str, Any] | None:
    """Run a peer's program in its own virtual environment; None where it is not there, with a line on how to get it.

    Args:
        program: file under tests/bench/peers.
        environment: name of its virtual environment under .venv-peers.
        install: command that makes it.
        arguments: for the program.
    """
    root = Path.cwd()
    source, python = root / "tests/bench/peers" / program, root / ".venv-peers" / environment / "bin/python"
    if not source.exists() or not python.exists():
        diagnostics.say(f"peer {environment} is not here; in the source tree: {install}")
        return None
    done = subprocess.run([str(python), str(source), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        diagnostics.say(
            f"peer {environment} failed: {done.stderr.strip().splitlines()[-1] if done.stderr else done.returncode}"
        )
        return None
    found: dict[str, Any] = msgspec.json.decode(done.stdout.strip().splitlines()[-1])
    sys.stderr.flush()
    return found
