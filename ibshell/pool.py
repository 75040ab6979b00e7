"""A pool on this machine: a hub and simulated sites as real processes, made, started, watched and ended.

Everything about it lies in one directory: each party's key, configuration, database and log. The agents are started as
processes by `python -P -m agent.main`; this package never imports them.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedpool.client import Connection, connect
from fedpool.errors import Failed, IbshellError, Refused, TimedOut, Unreachable
from fedpool.sim.scenario import SimulatedSite
from fedpool.wire.messages import Listing, Nothing
from ibshell import contexts, settings

if TYPE_CHECKING:
    from fedpool.transport.identity import Identity
    from ibshell.authority import Authority

START_TIMEOUT_S = 60.0
START_SITE_S = 0.2  # more for every site
STOP_TIMEOUT_S = 15.0


def _toml(value: object) -> str:
    return json.dumps(value)


class LocalPool:
    """A pool on this machine.

    Args:
        name: of the pool.
        directory: for everything about it but sockets, or None for the usual place.
        tied: whether the agents die with this process, whatever ends it.
    """

    def __init__(self, name: str = settings.LOCAL_POOL, directory: Path | None = None, tied: bool = False) -> None:
        self.name = name
        self.directory = directory or settings.pool_directory(name)
        self.sockets = settings.pool_sockets(name)
        self._tied = tied
        self._children: list[subprocess.Popen[bytes]] = []
        self._roster = self.directory / "processes.json"

    @property
    def socket(self) -> Path:
        """The hub's Unix socket."""
        return self.sockets / "hub.sock"

    def site_directory(self, site: str) -> Path:
        """A site's directory."""
        return self.directory / "sites" / site

    def log(self, party: str) -> Path:
        """A party's log: `hub` or a site's name."""
        return (self.directory / "hub" if party == "hub" else self.site_directory(party)) / "agent.log"

    def processes(self) -> dict[str, int]:
        """{party: process id} of the agents that run."""
        try:
            roster = json.loads(self._roster.read_text())
        except (FileNotFoundError, ValueError):
            return {}
        return {party: pid for party, (pid, born) in roster.items() if _born(pid) == born}

    def _enrol(self, parties: Sequence[str], pid: int) -> None:
        roster = {name: [p, _born(p)] for name, p in self.processes().items()}
        roster |= {party: [pid, _born(pid)] for party in parties}
        temporary = self._roster.with_suffix(".new")
        temporary.write_text(json.dumps(roster))
        temporary.replace(self._roster)

    def create(
        self,
        sites: Sequence[SimulatedSite],
        reverse: Callable[[int], bool],
        listen: str = "",
        listen_sites: str = "",
        authority: Path | None = None,
    ) -> None:
        """Make keys and configurations.

        Args:
            sites: the simulated sites, each with count 1.
            reverse: whether the site at this position dials out to the hub instead of being dialled.
            listen: `host:port` for people, or "" for a free port of this machine alone.
            listen_sites: the same for sites.
            authority: public key of a certificate authority that ssh-agent has; None makes one in a file.

        Raises:
            Refused: a pool of that name runs.
        """
        if self.processes():
            raise Refused(f"the pool {self.name!r} is running", "ibshell down ends it; ibshell status shows it")
        from fedpool.identity.certificates import HOST, USER
        from fedpool.identity.keys import public_line
        from fedpool.identity.principals import HUB, site_principal
        from fedpool.transport.identity import Identity
        from ibshell.operator import HUB_S, Operator

        shutil.rmtree(self.directory, ignore_errors=True)
        hub = self.directory / "hub"
        vouching, trusted = self._found(authority)
        hub_key = Identity.create(hub / "identity")
        for kind in (USER, HOST):  # what others can join has an operator who renews
            _certify(vouching, hub_key, kind, HUB, LOCAL_S if sites else HUB_S)
        ports = free_ports(len(sites) + 2)
        listen = listen or f"127.0.0.1:{ports[-2]}"
        listen_sites = listen_sites or f"127.0.0.1:{ports[-1]}"
        keys = {}
        for site in sites:
            key = Identity.create(self.site_directory(site.name) / "identity")
            _certify(vouching, key, HOST, site_principal(site.name), LOCAL_S)
            keys[site.name] = public_line(key.public)
        lines = [
            f"name = {_toml(self.name)}",
            f"socket = {_toml(str(self.socket))}",
            *trusted,
            f"roster = {_toml(str(self.authority / 'roster.json'))}",
            f"listen = {_toml(listen)}",
            f"listen_sites = {_toml(listen_sites)}",
        ]
        for position, site in enumerate(sites):
            dials_out = reverse(position)
            address = f"127.0.0.1:{ports[position]}"
            lines += ["", "[[site]]", f"name = {_toml(site.name)}", f"key = {_toml(keys[site.name])}"]
            lines += ['mode = "reverse"'] if dials_out else ['mode = "dial"', f"address = {_toml(address)}"]
            own = [
                f"name = {_toml(site.name)}",
                f"socket = {_toml(str(self.sockets / f'{site.name}.sock'))}",
                *trusted,
                f"hub = {_toml(listen_sites)}" if dials_out else f"listen = {_toml(address)}",
                'data = "data"',
                f"minimum_cohort = {min(3, len(sites))}" if len(sites) > 1 else "minimum_cohort = 2",
                "",
                "[simulated]",
                *(f"{key} = {_toml(getattr(site, key))}" for key in SimulatedSite.__struct_fields__),
            ]
            (self.site_directory(site.name) / "data").mkdir()
            (self.site_directory(site.name) / "site.toml").write_text("\n".join(own) + "\n")
        Operator(self.authority, contexts.load(self.client).pool).begin(keys)
        (hub / "hub.toml").write_text("\n".join(lines) + "\n")

    def _found(self, public: Path | None) -> tuple[Authority, list[str]]:
        """Make the pool's certificate authority and this user's key.

        Returns:
            The authority, and what every configuration says of the pool.
        """
        from fedpool.identity.authorities import authority_line, parse_authority
        from fedpool.transport.identity import Identity
        from ibshell.authority import Authority

        if public is None:
            Identity.create(self.authority / "identity")
        else:
            line = authority_line(parse_authority(public.read_text(), str(public)))
            self.authority.mkdir(parents=True, mode=0o700)
            (self.authority / "identity.pub").write_text(line + "\n")
        authority = Authority(self.authority)
        Identity.create(self.client / "identity")
        pool = f"{self.name}@{hashlib.sha256(authority.public).hexdigest()[:12]}"
        line = authority_line(authority.public)
        contexts.save(self.client, contexts.Context(pool, (line,)))
        return authority, [f"pool = {_toml(pool)}", f"authorities = [{_toml(line)}]"]

    @property
    def has_hub(self) -> bool:
        """Whether its hub was set up on this machine; what is remembered of a pool that was joined lies in `directory` too."""
        return (self.directory / "hub").exists()

    @property
    def client(self) -> Path:
        """What this user needs to ask the hub."""
        return self.directory / "client"

    @property
    def authority(self) -> Path:
        """The certificate authority's directory."""
        return self.directory / "authority"

    def site_names(self) -> list[str]:
        """The pool's sites."""
        sites = self.directory / "sites"
        return sorted(path.name for path in sites.iterdir()) if sites.exists() else []

    def start(self, *parties: str) -> int:
        """Start the hub, or an agent for one or several sites; returns its process id."""
        party = parties[0]
        kind = "hub" if party == "hub" else "site"
        directory = self.directory / "hub" if party == "hub" else self.site_directory(party)
        words = [sys.executable, "-P", "-m", "agent.main", kind]
        for name in parties:
            words += ["--config", str(directory.parent / name / f"{kind}.toml")]
        self.sockets.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._reap()
        with self.log(party).open("ab") as log:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=directory,
                preexec_fn=_die_with_parent if self._tied else None,
            )
        self._children.append(process)
        self._enrol(parties, process.pid)
        return process.pid

    def start_all(self, progress: Callable[[int, int], None] = lambda up, all_: None, sites_a_process: int = 1) -> None:
        """Start hub and sites and wait until every site is up.

        Args:
            progress: told how many sites of how many are up.
            sites_a_process: how many sites share an agent, and its end.

        Raises:
            Failed: an agent ended; its log's last line is told.
            TimedOut: not every site came up.
        """
        sites = self.site_names()
        self.start("hub")
        for first in range(0, len(sites), sites_a_process):
            self.start(*sites[first : first + sites_a_process])
        patience = START_TIMEOUT_S + START_SITE_S * len(sites)
        deadline = time.monotonic() + patience
        while True:
            up = self._sites_up()
            progress(up, len(sites))
            if up == len(sites):
                return
            running = self.processes()
            for party in ["hub", *sites]:
                if party not in running:
                    raise Failed(
                        f"the agent of {party} ended: {_last_line(self.log(party))}", f"its log: {self.log(party)}"
                    )
            if time.monotonic() > deadline:
                raise TimedOut(
                    f"{up} of {len(sites)} sites are up after {patience:.0f} s",
                    f"the hub's log: {self.log('hub')}",
                )
            time.sleep(0.1)

    def _sites_up(self) -> int:
        try:
            with connect(self.socket) as hub:
                listing = hub.call("site.list", Nothing(), Listing)
        except Unreachable:
            return 0
        return sum(site["state"] == "up" for site in listing.items)

    def stop(self, party: str, how: signal.Signals = signal.SIGTERM) -> None:
        """End one agent and see that it is gone."""
        pid = self.processes().get(party)
        if pid is not None:
            _end([pid], how)
            self._reap()

    def stop_all(self) -> list[str]:
        """End every agent, the hub last; returns who was running."""
        running = self.processes()
        _end([pid for party, pid in running.items() if party != "hub"], signal.SIGTERM)
        _end([pid for party, pid in running.items() if party == "hub"], signal.SIGTERM)
        for child in self._children:
            if child.pid in running.values():
                child.wait()  # it has ended; collect it
        self._reap()
        shutil.rmtree(self.sockets, ignore_errors=True)
        return sorted(running)

    def _reap(self) -> None:
        """Collect the agents that this process started and that have ended."""
        self._children = [child for child in self._children if child.poll() is None]

    def remove(self) -> None:
        """Forget the pool's files."""
        shutil.rmtree(self.directory, ignore_errors=True)

    def connect(self) -> Connection:
        """A channel to the hub.

        Raises:
            Unreachable: no pool runs.
        """
        try:
            hub = connect(self.socket)
        except Unreachable as error:
            if self.processes():
                raise Unreachable(
                    f"the hub of pool {self.name!r} does not answer", f"its log: {self.log('hub')}"
                ) from None
            raise Unreachable(
                f"no pool {self.name!r} is running on this machine",
                "start one: ibshell up   (or name another: IBSHELL_POOL=ssh://HOST:PORT)",
            ) from error
        hub.signer = contexts.signer(self.client, self.authority / "identity")
        return hub


LOCAL_S = 365 * 86400.0  # nobody renews what a pool on one machine has


def _certify(authority: Authority, key: Identity, kind: str, principal: str, for_s: float) -> None:
    key.install(authority.issue(kind, key.public, (principal,), principal, for_s))


_libc = ctypes.CDLL(None)


def _die_with_parent() -> None:
    _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _born(pid: int) -> int:
    """When a process started, in the kernel's ticks; 0 where there is none. It tells a process from a later one of its id."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, IndexError):
        return 0
    return 0 if stat[0] in ("Z", "X") else int(stat[19])


def _end(pids: Iterable[int], how: signal.Signals) -> None:
    born = {pid: _born(pid) for pid in pids}
    for pid in born:
        _signal(pid, how)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while any(born[pid] and _born(pid) == born[pid] for pid in born):
        if time.monotonic() > deadline:
            for pid in born:
                if _born(pid) == born[pid]:
                    _signal(pid, signal.SIGKILL)
        time.sleep(0.02)


def _signal(pid: int, how: signal.Signals) -> None:
    try:
        os.kill(pid, how)
    except ProcessLookupError:
        return


_FIRST_PORT = 10_000


def free_ports(count: int) -> list[int]:
    """Ports of the loopback on which nothing listens, and none from which the kernel lets connections go out.

    Of those, one may be taken while its owner is down: by anybody, or by the very party that dials it again and again and so at
    last connects to itself.

    Raises:
        Failed: there are not so many.
    """
    ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[int] = []
    candidates = range(_FIRST_PORT, ephemeral) if ephemeral > _FIRST_PORT + 2 * count else range(_FIRST_PORT, 65536)
    for port in random.sample(candidates, len(candidates)):
        if len(found) == count:
            break
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind(("127.0.0.1", port))
            found.append(port)
    if len(found) < count:
        raise Failed(f"{count} free ports wanted; the loopback has {len(found)}", "end what listens there")
    return found


def _last_line(log: Path) -> str:
    try:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError as error:
        raise IbshellError(f"no log at {log}: {error.strerror}") from None
    return lines[-1] if lines else "it said nothing"
