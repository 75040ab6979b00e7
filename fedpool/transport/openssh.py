"""Hosts as the user's own `ssh` reaches them: it alone reads its configuration (`ssh -G`), and it connects.

So ProxyJump, Match final, Include and canonical names mean here what they mean there. What is added are refusals: a jump host that
would jump through itself, and a key that is revoked for a host under its name when it is shown at another port.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from fedpool.errors import NotFound, TimedOut, Unreachable, UsageError
from fedpool.transport import known_hosts
from fedpool.transport.stream import AsyncioStream

RESOLVE_S = 10.0
HOPS_MAX = 16
SSH = ("ssh",)
# Whatever a configuration says of these, a link is for our frames and nothing else, and never asks a person.
ALWAYS = (
    "BatchMode=yes",
    "ClearAllForwardings=yes",
    "ConnectTimeout=15",
    "ControlMaster=no",
    "ControlPath=none",
    "ForwardAgent=no",
    "ForwardX11=no",
    "LogLevel=DEBUG1",
    "PermitLocalCommand=no",
    "RequestTTY=no",
    "ServerAliveCountMax=3",
    "ServerAliveInterval=5",
    "StrictHostKeyChecking=yes",
)


# What `ssh` says besides, and what a jump host's says when the other has ended.
_CHATTER = ("debug1:", "OpenSSH_", "Authenticated to ", "Transferred: ", "Bytes per second:", "Killed by signal ")


class Hop(msgspec.Struct, frozen=True):
    """One host on the way, the last being where it leads.

    Attributes:
        named: as it was written: `[user@]host[:port]`.
        host: by its real name.
        port: of its sshd.
        user: to log in as.
        has_proxy: whether its own configuration connects to it by a command.
    """

    named: str
    host: str
    port: int
    user: str
    has_proxy: bool = False

    def __str__(self) -> str:
        return f"{self.user}@{self.host}:{self.port}"


class Route(msgspec.Struct, frozen=True):
    """How `ssh` reaches a host.

    Attributes:
        hops: jump hosts, the first to be connected to first.
        target: where it leads.
        proxy_command: what connects to it instead of jumps, or "".
        files: known_hosts files, in order.
        settings: what `ssh -G` says of the target.
    """

    hops: tuple[Hop, ...]
    target: Hop
    proxy_command: str
    files: tuple[str, ...]
    settings: dict[str, str]


async def route(destination: str, config: str = "", ssh: Sequence[str] = SSH) -> Route:
    """Ask `ssh` how it would reach a host; opens no socket but for the names that its configuration lets it look up.

    Args:
        destination: `[user@]host`, as `ssh` takes it.
        config: of `ssh`, or "" for the user's.
        ssh: the program, and what goes before its arguments.

    Raises:
        UsageError: jump hosts that lead back to themselves; a configuration that cannot be read.
        NotFound: there is no `ssh`.
    """
    settings = await _settings(destination, config, ssh)
    jumps = _jumps(settings)
    if jumps:
        hops = await _hops(destination, jumps, (destination,), config, ssh)
    else:
        hops = ()
    files = [*settings.get("userknownhostsfile", "").split(), *settings.get("globalknownhostsfile", "").split()]
    return Route(
        hops,
        _hop(destination, settings),
        "" if jumps else settings.get("proxycommand", ""),
        tuple(str(Path(file).expanduser()) for file in files),
        settings,
    )


async def _hops(
    named: str, jumps: Sequence[str], before: tuple[str, ...], config: str, ssh: Sequence[str]
) -> tuple[Hop, ...]:
    """Jump hosts, each with its own settings; those of the first lead to it, and are followed."""
    if len(before) > HOPS_MAX:
        raise UsageError(f"more than {HOPS_MAX} jump hosts: {' -> '.join(before)}")
    found: list[Hop] = []
    for position, jump in enumerate(jumps):
        if jump == named:
            raise UsageError(
                f"ProxyJump loop: {named} -> {jump}", f"write in ssh's configuration: Host {jump}\\n  ProxyJump none"
            )
        settings = await _settings(jump, config, ssh)
        own = _jumps(settings)
        # Whoever is jumped through has what `Host *` says too: not that it jumps through itself.
        if position == 0 and own and own != [jump]:
            if jump in before or any(one in before for one in own):
                raise UsageError(f"ProxyJump loop: {' -> '.join((*before, jump, *own))}", "see ssh -G for each of them")
            found += await _hops(jump, own, (*before, jump), config, ssh)
        found.append(_hop(jump, settings))
    return tuple(found)


def _jumps(settings: dict[str, str]) -> list[str]:
    value = settings.get("proxyjump", "none")
    return [] if value.lower() == "none" else [jump.strip().removeprefix("ssh://") for jump in value.split(",")]


def _hop(named: str, settings: dict[str, str]) -> Hop:
    return Hop(
        named,
        settings.get("hostname", named),
        int(settings.get("port", "22")),
        settings.get("user", ""),
        "proxycommand" in settings,
    )


def _words(named: str) -> list[str]:
    """A host as `ssh` takes it: a port is an option of its own."""
    if not named or named.startswith("-"):
        raise UsageError(f"{named!r} is no host")
    user, at, host = named.rpartition("@")
    if host.startswith("["):
        host, _, port = host[1:].partition("]")
        port = port.removeprefix(":")
    else:
        host, _, port = host.partition(":") if host.count(":") == 1 else (host, "", "")
    return [*(["-p", port] if port else []), "--", f"{user}{at}{host}"]


async def _settings(named: str, config: str, ssh: Sequence[str]) -> dict[str, str]:
    words = [*ssh, "-G", *(["-F", config] if config else []), *_words(named)]
    try:
        process = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
    except FileNotFoundError:
        raise NotFound(f"no {words[0]} on the path", "apt-get install openssh-client") from None
    try:
        async with asyncio.timeout(RESOLVE_S):
            out, err = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise TimedOut(
            f"ssh -G {named} does not answer within {RESOLVE_S:.0f} s", "it looks up a name; is DNS there?"
        ) from None
    if process.returncode:
        lines = err.decode(errors="replace").strip().splitlines() or ["it gives no reason"]
        raise UsageError(f"ssh -G {named}: {lines[-1]}", "mend ssh's configuration")
    settings: dict[str, str] = {}
    for line in out.decode(errors="replace").splitlines():
        key, _, value = line.partition(" ")
        settings.setdefault(key.lower(), value)
    return settings


def refused_keys(found: Route) -> list[known_hosts.Entry]:
    """Keys that must not be believed at the target although `ssh` would: revoked for its name, on another port."""
    entries: list[known_hosts.Entry] = []
    for file in found.files:
        path = Path(file)
        if path.is_file() and os.access(path, os.R_OK):
            entries += known_hosts.parse(path.read_text(errors="replace"), file)
    name = found.settings.get("hostkeyalias") or found.target.host
    return known_hosts.revoked_elsewhere(entries, name, found.target.port)


def command(found: Route, config: str, words: Sequence[str], revoked: str = "", ssh: Sequence[str] = SSH) -> list[str]:
    """The `ssh` that takes this route and runs something at its end.

    Args:
        found: the route.
        config: as for `route`.
        words: what runs there.
        revoked: file with keys that must not be believed, or "".
        ssh: the program.
    """
    proxy = ""
    for hop in found.hops:
        # By itself, the first would do what `Host *` says, and that may be to jump through itself.
        over = proxy or ("" if hop.has_proxy else "none")
        proxy = shlex.join([*ssh, *_options(config, over), "-W", "[%h]:%p", *_words(hop.named)])
    options = _options(config, proxy)
    options += ["-o", f"RevokedHostKeys={revoked}"] if revoked else []
    return [*ssh, "-T", *options, *_words(found.target.named), shlex.join(words)]


def _options(config: str, proxy: str) -> list[str]:
    words = ["-F", config] if config else []
    for option in ALWAYS:
        words += ["-o", option]
    if proxy == "none":
        return [*words, "-o", "ProxyJump=none"]
    return [*words, "-o", f"ProxyCommand={proxy}"] if proxy else words


@asynccontextmanager
async def connect(
    destination: str, config: str, words: Sequence[str], other_ports: bool = False, ssh: Sequence[str] = SSH
) -> AsyncIterator[tuple[AsyncioStream, dict[str, str]]]:
    """Run something at a host and speak with it over its standard input and output.

    Args:
        destination: see `route`.
        config: see `route`.
        words: what runs there.
        other_ports: whether a key that is revoked for the host by name alone may be shown at another port.
        ssh: the program.

    Yields:
        The stream, and what the connection agreed on as soon as `ssh` says so.

    Raises:
        Unreachable: it ended, and why, as `ssh` says.
    """
    found = await route(destination, config, ssh)
    refused = [] if other_ports else refused_keys(found)
    with tempfile.TemporaryDirectory(prefix="ibshell-") as directory:
        revoked = Path(directory) / "revoked"
        revoked.write_text("".join(f"{entry.key}\n" for entry in refused))
        line = command(found, config, words, str(revoked) if refused else "", ssh)
        try:
            process = await asyncio.create_subprocess_exec(
                *line,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise Unreachable(f"{line[0]} cannot be started: {error.strerror}") from None
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        negotiated: dict[str, str] = {}
        said: deque[str] = deque(maxlen=3)
        listening = asyncio.create_task(_listen(process.stderr, negotiated, said))
        try:
            yield AsyncioStream(process.stdout, process.stdin), negotiated
        except Unreachable as error:
            await asyncio.wait([listening], timeout=1.0)
            if said:
                raise Unreachable(f"ssh {destination}: {said[-1]}", "try it by hand: ssh " + destination) from None
            raise error
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()
            listening.cancel()


async def _listen(stderr: asyncio.StreamReader, negotiated: dict[str, str], said: deque[str]) -> None:
    """What `ssh` says: the algorithms, and at last why it ended."""
    while line := (await stderr.readline()).decode(errors="replace").strip():
        if line.startswith("debug1: kex: algorithm: "):
            negotiated["key_exchange"] = line.rpartition(" ")[2]
        elif line.startswith("debug1: kex: server->client cipher: "):
            negotiated["cipher"] = line.removeprefix("debug1: kex: server->client cipher: ").partition(" ")[0]
        elif not line.startswith(_CHATTER):
            said.append(line)
