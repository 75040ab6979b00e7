"""`ibshell doctor`: what is wrong with this set-up and how to mend it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from fedpool.errors import IbshellError
from fedpool.transport.local import SOCKET_PATH_MAX
from fedpool.units import format_duration
from fedpool.wire.messages import Listing, Nothing
from ibshell import render, settings
from ibshell.cli import options
from ibshell.render import Column

app = typer.Typer()
FAULTS = 9
SOON_S = 2 * 3600.0
POST_QUANTUM = ("mlkem", "sntrup")
COLUMNS = [Column("CHECK", "check"), Column("RESULT", "result"), Column("FOUND", "found"), Column("REMEDY", "remedy")]


def _row(check: str, result: str, found: str, remedy: str = "") -> dict[str, Any]:
    return {"check": check, "result": result, "found": found, "remedy": remedy}


def _checks() -> Iterator[dict[str, Any]]:
    good = sys.version_info >= (3, 11)
    yield _row(
        "python", "ok" if good else "fault", platform.python_version(), "" if good else "3.11 or newer is needed"
    )
    from fedpool.secagg import masks

    if masks.is_compiled():
        yield _row("kernels", "ok", "compiled")
    else:
        yield _row(
            "kernels", "warning", "pure reference, slower", "install gcc and python3-dev, then install ibshell again"
        )
    yield _intruder()
    version = importlib.metadata.version("asyncssh")
    new = tuple(int(part) for part in version.split(".")[:3]) >= (2, 24, 1)
    yield _row("asyncssh", "ok" if new else "fault", version, "" if new else "pip install 'asyncssh>=2.24.1'")
    try:
        from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey

        MLKEM768PrivateKey.generate()
        yield _row("post-quantum", "ok", "ML-KEM-768 for rounds and links")
    except (ImportError, ValueError, OSError) as error:
        yield _row("post-quantum", "fault", f"no ML-KEM-768: {error}", "pip install 'cryptography>=50'")
    ssh = shutil.which("ssh")
    yield _row(
        "openssh",
        "ok" if ssh else "warning",
        ssh or "no ssh on the path",
        "" if ssh else "apt-get install openssh-client",
    )
    socket = settings.hub_socket(settings.LOCAL_POOL)
    fits = len(os.fsencode(socket)) + 32 <= SOCKET_PATH_MAX
    yield _row(
        "sockets",
        "ok" if fits else "fault",
        str(socket.parent.parent),
        "" if fits else "set IBSHELL_RUNTIME_DIR to a shorter path",
    )
    state = settings.state_directory()
    existing = next(path for path in (state, *state.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    roomy = free > 1 << 30 and os.access(existing, os.W_OK)
    yield _row(
        "state",
        "ok" if roomy else "fault",
        f"{state}, {free >> 20} MiB free",
        "" if roomy else "make room, or set IBSHELL_STATE_DIR",
    )
    yield from _pool()


def _intruder() -> dict[str, Any]:
    """`agent` is a common word: see that the module of that name is ours."""
    spec = importlib.util.find_spec("agent")
    fedpool_spec = importlib.util.find_spec("fedpool")
    assert fedpool_spec is not None and fedpool_spec.origin is not None
    home = Path(fedpool_spec.origin).resolve().parent.parent
    if spec is None or spec.origin is None:
        return _row("agent", "fault", "the module `agent` cannot be found", "install ibshell again")
    found = Path(spec.origin).resolve()
    if found.parent.parent != home:
        return _row("agent", "fault", f"{found} stands before ours", "rename it, or run ibshell from another directory")
    return _row("agent", "ok", str(found.parent))


def _pool() -> Iterator[dict[str, Any]]:
    try:
        with options.hub() as connection:
            listing = connection.call("site.list", Nothing(), Listing)
    except IbshellError as error:
        yield _row("pool", "warning", error.message, error.hint)
        return
    yield _row("pool", "ok", f"{settings.pool_name()}: {len(listing.items)} sites")
    links = Counter((site["key_exchange"], site["cipher"]) for site in listing.items if site["key_exchange"])
    for (exchange, cipher), count in links.most_common():
        yield _row("links", "ok", f"{count} with keys by {exchange}, {cipher}")
    from fedpool import __version__

    for site in listing.items:
        if site["state"] != "up":
            yield _row(
                f"site {site['name']}",
                "fault",
                f"{site['state']}: {site['error']}",
                "start its agent; its log says more",
            )
        elif site["certificate_expires_in_s"] is not None and site["certificate_expires_in_s"] < SOON_S:
            yield _row(
                f"site {site['name']}",
                "warning",
                f"its certificate holds for {format_duration(site['certificate_expires_in_s'])}",
                "the operator renews it: ibshell pool renew --watch",
            )
        elif site["key_exchange"] and not site["key_exchange"].startswith(POST_QUANTUM):
            yield _row(
                f"site {site['name']}",
                "warning",
                f"its link has keys by {site['key_exchange']}, which a quantum computer could find out later",
                "bring its sshd to OpenSSH 9.9 or newer, or let its agent listen or dial out itself",
            )
        elif site["software"] != __version__:
            yield _row(
                f"site {site['name']}",
                "warning",
                f"runs {site['software']}",
                f"this is {__version__}: bring both to one",
            )


@app.command()
def doctor(output: options.Output = None) -> None:
    """Check this machine and the pool; exits with 9 when something is wrong.

    Examples: ibshell doctor | ibshell doctor -o json
    """
    items = list(_checks())
    answer = {"items": items, "errors": [], "as_of": {}}
    render.write(render.listing(answer, COLUMNS, "check", output, render.on_terminal()))
    if any(item["result"] == "fault" for item in items):
        raise typer.Exit(FAULTS)
