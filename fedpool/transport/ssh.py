"""SSH with certificates or pinned keys, in all three directions, and nothing but our own subsystems.

- hub dials site:        `Acceptor` at the site (SSH server), `dial` at the hub.
- site dials hub:        `ReverseAcceptor` at the hub (SSH client on an accepted connection), `dial_reverse` at the site.
- behind OpenSSH:        `dial` to a stock sshd, then `open_command` runs `ibshell-agent stdio` there.

In each the hub is the SSH client and authenticates with its key, and the site proves its host key; both are pinned, or the pool's
authority vouches for them, less what it has denied again. No shell,
pty, forwarding, sftp or password is offered; handshakes in flight and sessions per connection are bounded, and a peer that does
not read what it asked for is cut off. Only AES-GCM (asyncssh would prefer chacha20, three times slower), ML-KEM first.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import asyncssh
from asyncssh.connection import SSHConnection
from asyncssh.stream import SSHServerStreamSession

from fedpool.errors import IbshellError, NotAuthorised, Unreachable, UsageError
from fedpool.identity.certificates import HOST, USER, Certificate
from fedpool.identity.keys import fingerprint, public_line
from fedpool.transport.identity import Identity
from fedpool.transport.stream import SshStream, Stream

log = logging.getLogger(__name__)

CONTROL = "fedpool"
BULK = "fedpool-bulk"
SUBSYSTEMS = (CONTROL, BULK)
USERNAME = "fedpool"
GUEST = "join"  # whoever has proved a key, and may do no more than ask that it be vouched for

# A dead peer is noticed within interval * (count + 1) = 20 s.
KEEPALIVE_S = 5
KEEPALIVE_COUNT = 3
LOGIN_TIMEOUT_S = 10
HANDSHAKES_MAX = 64
SESSIONS_MAX = 8

CONTROL_WINDOW_BYTES = 256 * 1024
BULK_WINDOW_BYTES = 8 * 1024 * 1024
BULK_PACKET_BYTES = 512 * 1024
# A transport buffer past this means that the peer asks and does not read.
BUFFER_BYTES_MAX = 4 * BULK_WINDOW_BYTES + (1 << 20)

# What both ends of every connection are told.
COMMON: dict[str, Any] = {
    "kex_algs": ["mlkem768x25519-sha256", "curve25519-sha256"],
    "encryption_algs": ["aes128-gcm@openssh.com", "aes256-gcm@openssh.com"],
    "signature_algs": ["ssh-ed25519"],
    "compression_algs": None,
    "keepalive_interval": KEEPALIVE_S,
    "keepalive_count_max": KEEPALIVE_COUNT,
    "login_timeout": LOGIN_TIMEOUT_S,
    "rekey_bytes": 8 << 30,
    "rekey_seconds": 3600,
    "config": None,
}
_SERVER: dict[str, Any] = {
    "password_auth": False,
    "kbdint_auth": False,
    "host_based_auth": False,
    "gss_host": None,
    "allow_pty": False,
    "line_editor": False,
    "x11_forwarding": False,
    "agent_forwarding": False,
    "allow_scp": False,
    "encoding": None,
}
_CLIENT: dict[str, Any] = {
    "agent_path": None,
    "password_auth": False,
    "kbdint_auth": False,
    "host_based_auth": False,
    "gss_auth": False,
    "server_host_key_algs": ["ssh-ed25519-cert-v01@openssh.com", "ssh-ed25519"],
    "preferred_auth": ["publickey"],
}

# Says which role of a certificate counts.
Role = Callable[[Certificate], str]
# Called with the subsystem, the stream and the name bound to the peer's key; the channel closes when it returns.
Serve = Callable[[str, Stream, str], Awaitable[None]]


class _Session(SSHServerStreamSession[bytes]):
    """A session channel that accepts one of our subsystems and nothing else."""

    def __init__(self, server: "_Server") -> None:
        super().__init__(self._started)
        self._server = server
        self._subsystem = ""

    def shell_requested(self) -> bool:
        return False

    def exec_requested(self, command: str) -> bool:
        return False

    def subsystem_requested(self, subsystem: str) -> bool:
        self._subsystem = subsystem
        return subsystem in self._server.subsystems

    async def _started(self, stdin: Any, stdout: Any, stderr: Any) -> None:
        stream = SshStream(stdin, stdout)
        try:
            await self._server.serve(self._subsystem, stream, self._server.peer_name)
        finally:
            self._server.sessions -= 1
            stream.close()


class _Server(asyncssh.SSHServer):
    """One accepted connection of a peer whose public key is on the list."""

    def __init__(
        self,
        identity: Identity,
        serve: Serve,
        authorized: Mapping[bytes, str],
        role: Role,
        subsystems: Sequence[str] = SUBSYSTEMS,
        guests: bool = False,
    ) -> None:
        self._guests = guests
        self._trust = identity.trust
        self._role = role
        self.serve = serve
        self.subsystems = subsystems
        self.sessions = 0
        self.peer_name = ""
        self._authorized = authorized
        self._connection: asyncssh.SSHServerConnection | None = None

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._connection = conn
        _observe(conn)
        # asyncssh has no hook that sees the certificate: its owner is asked about the authority alone, and serial and roles count.
        conn._validate_openssh_certificate = self._certified  # type: ignore[method-assign]  # of this connection alone

    async def _certified(self, username: str, cert: Any) -> Any:
        if self._trust is None:
            return None
        try:
            certificate = self._trust.certificate(cert.public_data)
            self._trust.require(certificate, USER, self._role(certificate), time.time())
        except IbshellError as error:
            log.warning("refused: %s", error)
            return None
        self.peer_name = certificate.key_id
        return cert.key

    def begin_auth(self, username: str) -> bool:
        return True

    def public_key_auth_supported(self) -> bool:
        return True

    def validate_public_key(self, username: str, key: asyncssh.SSHKey) -> bool:
        if self._guests and username == GUEST and key.get_algorithm() == "ssh-ed25519":
            self.peer_name = GUEST + "/" + key.public_data[-32:].hex()
            return True
        name = self._authorized.get(key.public_data[-32:]) if key.get_algorithm() == "ssh-ed25519" else None
        if name is None or (self._trust is not None and key.get_fingerprint() in self._trust.denied.keys):
            log.warning("refused the key %s", key.get_fingerprint())
            return False
        self.peer_name = name
        return True

    def session_requested(self) -> Any:
        if self.sessions >= SESSIONS_MAX or self._connection is None:
            return False
        self.sessions += 1
        channel = self._connection.create_server_channel(
            encoding=None, window=BULK_WINDOW_BYTES, max_pktsize=BULK_PACKET_BYTES
        )
        return channel, _Session(self)


class _PinnedClient(asyncssh.SSHClient):
    """A client connection whose server must prove a key on the list, or show a certificate of a role; `name` says whose."""

    def __init__(self, identity: Identity, known: Mapping[bytes, str], roles: Mapping[str, str]) -> None:
        self._trust = identity.trust
        self._known = known
        self._roles = roles
        self.name = ""
        self.offered = b""
        self.problem = ""

    def connection_made(self, conn: asyncssh.SSHClientConnection) -> None:
        _observe(conn)
        # As in `_Server`: no hook sees the certificate.
        conn._validate_openssh_host_certificate = self._certified  # type: ignore[method-assign]  # of this connection alone

    def _certified(self, host: str, addr: str, port: int, cert: Any) -> Any:
        self.offered = cert.key.public_data[-32:]
        pinned = self._known.get(self.offered, "")
        if self._known and not pinned:  # a key that is named counts, whoever vouches for another
            raise ValueError("an unknown host key")
        if self._trust is None:
            self.name = pinned
            return cert.key
        try:
            certificate = self._trust.certificate(cert.public_data)
            role = next((role for role in certificate.principals if role in self._roles), next(iter(self._roles), ""))
            self._trust.require_host(certificate, role, time.time())
        except IbshellError as error:
            self.problem = str(error)
            raise ValueError(error.message) from None
        self.name = self._roles[role]
        if pinned not in ("", self.name):
            self.problem = f"the certificate is for {self.name}, the key is that of {pinned}"
            raise ValueError(self.problem)
        return cert.key

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        if key.get_algorithm() != "ssh-ed25519":
            return False
        self.offered = key.public_data[-32:]
        denied = self._trust is not None and key.get_fingerprint() in self._trust.denied.keys
        self.name = "" if denied else self._known.get(self.offered, "")
        return bool(self.name)


def parse_address(text: str, default_port: int | None = None) -> tuple[str, int]:
    """Read `host:port`, `[v6]:port`, or `host` where a default port exists.

    Raises:
        UsageError: it is none of these.
    """
    host, _, port = text.rpartition(":")
    if not host and default_port is not None:
        return text, default_port
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or not 0 <= int(port) < 65536:
        raise UsageError(f"{text!r} is no address", "write host:port, for example 127.0.0.1:7022")
    return host, int(port)


# {connection: name of its key exchange}; asyncssh itself forgets it when it is done.
_exchanges: WeakKeyDictionary[SSHConnection, str] = WeakKeyDictionary()


def _observe(connection: SSHConnection) -> None:
    """Note by what key exchange a connection got its keys."""
    finish = connection.send_newkeys

    def noting(k: bytes, h: bytes) -> None:
        exchange = connection._kex
        _exchanges[connection] = exchange.algorithm.decode() if exchange is not None else ""
        finish(k, h)

    # No public attribute tells it, and afterwards no private one does.
    connection.send_newkeys = noting  # type: ignore[method-assign]  # of this connection alone


async def _guard_buffer(connection: SSHConnection) -> None:
    """Cut off a peer that keeps asking without reading the answers."""
    while True:
        await asyncio.sleep(1.0)
        transport = connection._transport  # asyncssh has no public way to ask
        if transport is None:
            return
        if transport.get_write_buffer_size() > BUFFER_BYTES_MAX:
            log.warning("a peer left %d bytes unread: connection closed", transport.get_write_buffer_size())
            connection.abort()
            return


class Listener:
    """A listening socket with a bound on concurrent handshakes; each accepted connection is handed to a task.

    Args:
        address: `host:port`; port 0 takes a free one.
        accepted: takes the raw socket, shakes hands under the semaphore, serves until the connection ends.
    """

    def __init__(self, address: str, accepted: Callable[[socket.socket, asyncio.Semaphore], Awaitable[None]]) -> None:
        self._host, self._port = parse_address(address)
        self._accepted = accepted
        self._handshakes = asyncio.Semaphore(HANDSHAKES_MAX)
        self._socket: socket.socket | None = None

    def bind(self) -> str:
        """Start listening; returns `host:port` as bound.

        Raises:
            Unreachable: the address cannot be bound.
        """
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((self._host, self._port))
        except OSError as error:
            self._socket.close()
            raise Unreachable(
                f"cannot listen on {self._host}:{self._port}: {error.strerror}",
                "choose another port, or end what listens there",
            ) from None
        self._socket.listen(128)
        self._socket.setblocking(False)
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self._socket.getsockname()[1]}"

    async def run(self) -> None:
        """Accept until cancelled."""
        assert self._socket is not None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as connections:
                while True:
                    # The bound is taken here, so that a flood waits in the kernel's queue and costs no memory.
                    await self._handshakes.acquire()
                    try:
                        accepted, _ = await loop.sock_accept(self._socket)
                    except OSError as error:
                        self._handshakes.release()
                        log.warning("accept: %s", error)
                        await asyncio.sleep(0.1)
                        continue
                    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    connections.create_task(self._connection(accepted))
        finally:
            self._socket.close()

    async def _connection(self, accepted: socket.socket) -> None:
        try:
            await self._accepted(accepted, self._handshakes)
        except (asyncssh.Error, OSError) as error:
            log.info("a connection failed: %s", error)


async def _serve_connection(connection: SSHConnection) -> None:
    async with asyncio.TaskGroup() as tasks:
        guard = tasks.create_task(_guard_buffer(connection))
        try:
            await connection.wait_closed()
        finally:
            guard.cancel()
            connection.abort()


def server_acceptor(
    identity: Identity, authorized: Mapping[bytes, str], serve: Serve, role: Role, guests: bool = False
) -> Any:
    """What a `Listener` needs to act as SSH server for the authorized keys, and for whoever has a certificate of a role.

    Args:
        identity: the host key, with its certificate as it is at each connection.
        authorized: {public key: name}; read anew at each login.
        serve: gets each opened channel.
        role: the role that a certificate has to give.
        guests: whether anybody may log in as `GUEST`, with whatever key; `serve` gets `join/` and that key, hexadecimal, as name.
    """

    async def accepted(sock: socket.socket, handshakes: asyncio.Semaphore) -> None:
        try:
            connection = await asyncssh.run_server(
                sock,
                server_factory=lambda: _Server(identity, serve, authorized, role, guests=guests),
                server_host_keys=identity.keys(HOST),
                **COMMON,
                **_SERVER,
            )
        finally:
            handshakes.release()
        await _serve_connection(connection)

    return accepted


def reverse_acceptor(
    identity: Identity,
    known: Mapping[bytes, str],
    roles: Mapping[str, str],
    connected: Callable[[asyncssh.SSHClientConnection, str], Awaitable[None]],
) -> Any:
    """What a `Listener` needs to act as SSH client towards sites that dial in.

    Args:
        identity: the hub's key.
        known: {host key: site name}; read anew at each connection.
        roles: {role in a host certificate: site name}; likewise.
        connected: gets the connection and the site's name; the connection closes when it returns.
    """

    async def accepted(sock: socket.socket, handshakes: asyncio.Semaphore) -> None:
        client = _PinnedClient(identity, known, roles)
        try:
            connection = await asyncssh.run_client(
                sock,
                client_factory=lambda: client,
                known_hosts=([], [], []),
                username=USERNAME,
                client_keys=identity.keys(USER),
                **COMMON,
                **_CLIENT,
            )
        except asyncssh.HostKeyNotVerifiable:
            why = client.problem or f"its key is {fingerprint(client.offered or bytes(32))}"
            log.warning("an unknown site dialled in; %s", why)
            return
        finally:
            handshakes.release()
        try:
            await connected(connection, client.name)
        finally:
            connection.abort()

    return accepted


async def dial(
    address: str, host_key: bytes | None, identity: Identity, name: str, username: str = USERNAME, role: str = ""
) -> asyncssh.SSHClientConnection:
    """Connect to an SSH server whose host key is pinned.

    Args:
        address: `host:port`.
        host_key: the Ed25519 key it must prove, or None where a certificate of the role is needed.
        identity: this side's key.
        name: what to call the other side in messages.
        username: login name (a stock sshd wants a real one).
        role: a host certificate of it will do too, or "".

    Raises:
        NotAuthorised: another host key, or this side's key is not accepted.
        Unreachable: nobody answers.
    """
    host, port = parse_address(address, 22)
    client = _PinnedClient(identity, {host_key: name} if host_key else {}, {role: name} if role else {})
    try:
        async with asyncio.timeout(LOGIN_TIMEOUT_S + 5), identity.offered() as keys:
            connection = await asyncssh.connect(
                host,
                port,
                client_factory=lambda: client,
                known_hosts=([], [], []),
                username=username,
                client_keys=keys,
                **COMMON,
                **_CLIENT,
            )
    except asyncssh.HostKeyNotVerifiable:
        if client.problem or host_key is None:
            raise NotAuthorised(
                f"{name} at {address}: {client.problem or 'it shows no certificate of this pool'}",
                "this is what an impostor looks like; its operator can tell more",
            ) from None
        raise NotAuthorised(
            f"{name} at {address} presents the host key {fingerprint(client.offered) if client.offered else '(none)'}; "
            f"{fingerprint(host_key)} is expected",
            "compare fingerprints by another way before you change the expected key: this is what an impostor looks like",
        ) from None
    except asyncssh.PermissionDenied:
        if identity.trust is not None and identity.certificate(USER) is not None:
            raise NotAuthorised(
                f"{name} at {address} does not accept the certificate of {fingerprint(identity.public)}",
                "it has expired or was revoked: ibshell pool show, ibshell pool renew",
            ) from None
        raise NotAuthorised(
            f"{name} at {address} does not accept the key {fingerprint(identity.public)}",
            f"add this line there: {public_line(identity.public)}",
        ) from None
    except (asyncssh.Error, OSError, TimeoutError) as error:
        reason = str(error) or "no answer in time"
        raise Unreachable(f"{name} at {address} cannot be reached: {reason}", "is its agent running there?") from None
    return connection


async def dial_reverse(
    address: str,
    identity: Identity,
    hub_keys: Mapping[bytes, str],
    serve: Serve,
    role: Role,
    subsystems: Sequence[str],
) -> None:
    """Dial out to the hub and serve it as SSH server until the connection ends.

    Args:
        address: the hub's `host:port` for sites.
        identity: this site's host key.
        hub_keys: {the hub's key: its name}.
        serve: gets each channel the hub opens.
        role: the role that the hub's certificate has to give.
        subsystems: what this connection is for; the hub finds out by asking.

    Raises:
        Unreachable: nobody answers, or the hub does not know this site's key.
    """
    host, port = parse_address(address)
    try:
        async with asyncio.timeout(LOGIN_TIMEOUT_S + 5):
            connection = await asyncssh.connect_reverse(
                host,
                port,
                server_factory=lambda: _Server(identity, serve, hub_keys, role, subsystems),
                server_host_keys=identity.keys(HOST),
                **COMMON,
                **_SERVER,
            )
    except (asyncssh.Error, OSError, TimeoutError) as error:
        reason = str(error) or "no answer in time"
        raise Unreachable(
            f"the hub at {address} cannot be reached: {reason}",
            f"it must run there and list this site's key {fingerprint(identity.public)}",
        ) from None
    await _serve_connection(connection)


async def open_channel(connection: asyncssh.SSHClientConnection, subsystem: str) -> SshStream:
    """Open one of our subsystems on a connection.

    Raises:
        Unreachable: the other side refuses it or is gone.
    """
    bulk = subsystem == BULK
    try:
        writer, reader, _ = await connection.open_session(
            subsystem=subsystem,
            encoding=None,
            window=BULK_WINDOW_BYTES if bulk else CONTROL_WINDOW_BYTES,
            max_pktsize=BULK_PACKET_BYTES if bulk else 32 * 1024,
        )
    except (asyncssh.Error, OSError) as error:
        raise Unreachable(f"the {subsystem} channel was refused: {error}") from None
    return SshStream(reader, writer)


async def open_command(connection: asyncssh.SSHClientConnection, command: Sequence[str]) -> SshStream:
    """Run a command behind a stock sshd and speak with it over its standard input and output.

    Raises:
        Unreachable: it cannot be started.
    """
    import shlex

    try:
        writer, reader, _ = await connection.open_session(
            command=shlex.join(command), encoding=None, window=BULK_WINDOW_BYTES, max_pktsize=BULK_PACKET_BYTES
        )
    except (asyncssh.Error, OSError) as error:
        raise Unreachable(f"{command[0]} cannot be started there: {error}") from None
    return SshStream(reader, writer)


def negotiated(connection: SSHConnection) -> dict[str, str]:
    """What the two sides agreed on, for `site show`."""
    return {"cipher": str(connection.get_extra_info("send_cipher")), "key_exchange": _exchanges.get(connection, "")}
