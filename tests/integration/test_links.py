"""The three ways to a site, real keys verified, and what happens when something else answers or asks."""

import getpass
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedpool.client import Connection, connect
from fedpool.client.remote import connect_ssh
from fedpool.errors import NotAuthorised, NotFound, PeerProtocolError, Unreachable, UsageError, VersionMismatch
from fedpool.identity import certificates
from fedpool.identity.keys import parse_public, public_line
from fedpool.transport.identity import Identity
from fedpool.wire import frames
from fedpool.wire.messages import Listing, Nothing
from ibshell.pool import free_ports

pytestmark = pytest.mark.integration


def hub_config(pool):
    return pool.directory / "hub" / "hub.toml"


def edit(path, *changes):
    text = path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)


def row(pool, site):
    return next(r for r in pool.rows("site") if r["name"] == site)


def test_dialled_and_dialling_out(make_pool):
    pool = make_pool(2)
    assert {(r["name"], r["mode"], r["state"]) for r in pool.rows("site")} == {
        ("site-01", "dial", "up"),
        ("site-02", "reverse", "up"),
    }
    assert all(r["cipher"] == "aes128-gcm@openssh.com" for r in pool.rows("site"))


@pytest.mark.parametrize("party", ["hub", "site-01", "site-02"])
def test_the_link_comes_back_after_either_side_restarts(make_pool, party):
    pool = make_pool(2)
    lease = pool.json("lease", "request", "-t", "a", "-g", "4")
    pool.stop(party, signal.SIGKILL)
    pool.start(party)
    pool.until(pool.all_up)
    assert pool.json("lease", "show", lease["id"])["state"] == "active"
    held = {gpu["uuid"] for gpu in pool.rows("gpu") if gpu["lease"] == lease["id"]}
    assert held == {grant["uuid"] for part in lease["parts"] for grant in part["grants"]}
    pool.cli("lease", "release", lease["id"])
    assert pool.json("status")["gpus_free"] == 4


@pytest.mark.waits
def test_a_site_that_falls_silent_is_noticed_and_its_lease_lives_on(make_pool):
    """Stopped, not killed: its sockets stay open, so only the keepalives tell (5 s, four times), whoever dialled."""
    pool = make_pool(2)
    leases = [pool.json("lease", "request", "-t", "a", "-g", "2", "--site", site) for site in ("site-01", "site-02")]
    pids = [pool.processes()[site] for site in ("site-01", "site-02")]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        pool.until(lambda: {site["state"] for site in pool.rows("site")} == {"silent"}, 30)
        listed = pool.json("lease", "list")["items"]
        assert all(lease["state"].startswith("unknown since 20") for lease in listed)
        assert pool.json("status")["gpus_free"] == 0
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    pool.until(pool.all_up, 30)
    assert {pool.json("lease", "show", lease["id"])["state"] for lease in leases} == {"active"}
    assert {lease["state"] for lease in pool.json("lease", "list")["items"]} == {"active"}


def test_behind_a_stock_sshd(make_pool, need):
    sshd = need("sshd", "openssh-server")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    pool = make_pool(2, start=False)
    base = pool.work / "sshd"
    base.mkdir()
    host = Identity.create(base / "host_key")
    hub_key = (pool.directory / "hub" / "identity.pub").read_text().strip()
    bridge = f"{sys.executable} -P -m agent.main stdio --socket {pool.sockets}/site-01.sock"
    # What a site's administrator writes: this key may run the bridge and nothing else.
    (base / "authorized_keys").write_text(f'restrict,command="{bridge} ${{SSH_ORIGINAL_COMMAND##* }}" {hub_key}\n')
    [port] = free_ports(1)
    (base / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {base}/host_key\nAuthorizedKeysFile {base}/authorized_keys\n"
        f"StrictModes no\nPidFile {base}/pid\nUsePAM no\nPasswordAuthentication no\n"
    )
    server = subprocess.Popen([sshd, "-D", "-E", str(base / "log"), "-f", str(base / "sshd_config")])
    try:
        entry = hub_config(pool).read_text()
        old = entry[entry.index('mode = "dial"') : entry.index("[[site]]", entry.index('mode = "dial"'))]
        new = (
            f'mode = "stdio"\naddress = "127.0.0.1:{port}"\nhost_key = "{public_line(host.public)}"\n'
            f'user = "{getpass.getuser()}"\n\n'
        )
        edit(hub_config(pool), (old, new))
        path = pool.site_directory("site-01") / "site.toml"
        lines = [line for line in path.read_text().splitlines() if not line.startswith("listen =")]
        path.write_text("\n".join(lines) + "\n")
        pool.start_all()
        assert row(pool, "site-01")["mode"] == "stdio"
        pool.cli("fed", "run", str(pool.plan(rounds=2, minimum_cohort=2)), "--out", "result")
        pool.stop("site-01", signal.SIGKILL)
        pool.until(lambda: row(pool, "site-01")["state"] == "silent")
        pool.start("site-01")
        pool.until(lambda: row(pool, "site-01")["state"] == "up")
    finally:
        server.terminate()
        server.wait()


def test_a_wrong_host_key_stops_the_hub_and_names_both(make_pool):
    pool = make_pool(2, start=False)
    stranger = Identity.create(pool.work / "stranger")
    true = (pool.site_directory("site-01") / "identity.pub").read_text().strip()
    edit(hub_config(pool), (true, public_line(stranger.public)))
    for party in ("hub", "site-01", "site-02"):
        pool.start(party)
    pool.until(lambda: _rows(pool) and row(pool, "site-02")["state"] == "up")
    # The first words may be that nothing listens there yet: the agent is starting.
    pool.until(lambda: "presents the host key SHA256:" in row(pool, "site-01")["error"])
    found = row(pool, "site-01")
    assert "is expected" in found["error"]
    assert found["state"] == "unknown"


def test_a_site_whose_key_is_not_listed_stays_out(make_pool):
    pool = make_pool(2, start=False)
    stranger = Identity.create(pool.work / "stranger")
    true = (pool.site_directory("site-02") / "identity.pub").read_text().strip()
    edit(hub_config(pool), (true, public_line(stranger.public)))
    for party in ("hub", "site-01", "site-02"):
        pool.start(party)
    pool.until(lambda: _rows(pool) and row(pool, "site-01")["state"] == "up")
    pool.until(lambda: "an unknown site dialled in; its key is SHA256:" in pool.log("hub").read_text())
    assert row(pool, "site-02")["state"] == "unknown"


def test_a_hub_that_the_pool_s_authority_does_not_vouch_for_is_refused(make_pool):
    pool = make_pool(2, start=False)
    hub, stranger = Identity.load(pool.directory / "hub" / "identity"), Ed25519PrivateKey.generate()
    hub.install(certificates.issue(stranger, certificates.USER, hub.public, ("hub",), "hub", 1, (0, 1 << 40)))
    for party in ("hub", "site-01", "site-02"):
        pool.start(party)
    pool.until(lambda: _rows(pool))
    pool.until(lambda: "does not accept the certificate" in row(pool, "site-01")["error"])
    pool.until(lambda: "is of an authority that is not this pool's" in pool.log("site-01").read_text())
    assert not pool.sites_up()


def _unsigned(config):
    """A configuration as an earlier release made it."""
    return "".join(
        f"{line}\n" for line in config.splitlines() if line.split(" =")[0] not in ("pool", "authorities", "roster")
    )


def _rows(pool):
    try:
        return pool.rows("site")
    except Unreachable:
        return []


def test_a_user_over_ssh(make_pool):
    """By a key that the hub's configuration names, in a pool of an earlier release, which asks for no signatures."""
    pool = make_pool(1, start=False, reverse=lambda position: False)
    user, other = Identity.create(pool.work / "alice"), Identity.create(pool.work / "mallory")
    path = hub_config(pool)
    hub_key = (pool.directory / "hub" / "identity.pub").read_text().strip()
    own = tomllib.loads(path.read_text())
    path.write_text(f'users = {{ alice = "{public_line(user.public)}" }}\n' + _unsigned(path.read_text()))
    site = pool.site_directory("site") / "site.toml"
    site.write_text(f'hub_key = "{hub_key}"\n' + _unsigned(site.read_text()))
    (pool.client / "pool.toml").unlink()
    pool.start_all()
    remote = {
        "IBSHELL_POOL": f"ssh://{own['listen']}",
        "IBSHELL_HUB_KEY": hub_key,
        "IBSHELL_KEY": str(pool.work / "alice"),
    }
    assert len(pool.json("gpu", "list", **remote)["items"]) == 2
    lease = pool.json("lease", "request", "-t", "a", "-g", "2", **remote)
    pool.cli("lease", "release", lease["id"], **remote)
    refused = pool.cli("gpu", "list", status=4, **{**remote, "IBSHELL_KEY": str(pool.work / "mallory")})
    assert "does not accept the key SHA256:" in refused.stderr
    wrong = pool.cli("gpu", "list", status=4, **{**remote, "IBSHELL_HUB_KEY": public_line(other.public)})
    assert "presents the host key" in wrong.stderr
    unknown = pool.cli("gpu", "list", status=2, IBSHELL_POOL=remote["IBSHELL_POOL"], IBSHELL_HUB_KEY="")
    assert "IBSHELL_HUB_KEY" in unknown.stderr
    with pytest.raises(NotAuthorised):
        connect_ssh(own["listen"], parse_public(hub_key, "it"), pool.work / "mallory")
    port = own["listen"].rpartition(":")[2]
    # Nothing but our subsystem: a stock client gets no shell and no command.
    ssh = ["ssh", "-p", port, "-i", str(pool.work / "alice"), "-o", "StrictHostKeyChecking=no"]
    ssh += ["-o", "UserKnownHostsFile=/dev/null", "-o", "BatchMode=yes", "fedpool@127.0.0.1"]
    for more in (["id"], []):
        done = subprocess.run([*ssh, *more], capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=30)
        assert done.returncode != 0 and "uid=" not in done.stdout


@pytest.fixture(scope="module")
def hub_socket(shared_pool):
    return shared_pool.socket


def raw(path):
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(10)
    sock.connect(os.fspath(path))
    return sock


def end_of(sock):
    while sock.recv(65536):
        pass
    sock.close()


def test_a_version_mismatch_is_refused_by_the_hub(shared_pool, hub_socket):
    sock = raw(hub_socket)
    hello = {"versions": [99], "role": "client", "name": "future", "software": "9"}
    sock.sendall(frames.write({"v": 99, "kind": "event", "method": "hello", "body": hello}))
    end_of(sock)
    with connect(hub_socket) as hub:
        assert hub.call("site.list", Nothing(), Listing).items, "the hub lives on"


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", 1 << 30),
        struct.pack(">I", 100) + b"\x91" * 100,
        b"GET / HTTP/1.1\r\nHost: hub\r\n\r\n",
        struct.pack(">I", 5) + b"\xc1\xc1\xc1\xc1\xc1",
    ],
)
def test_a_hostile_frame_ends_the_channel_and_not_the_hub(shared_pool, hub_socket, data):
    sock = raw(hub_socket)
    sock.sendall(data)
    sock.shutdown(socket.SHUT_WR)
    end_of(sock)
    with connect(hub_socket) as hub:
        assert hub.call("site.list", Nothing(), Listing).items


def test_a_hub_of_another_version_is_named(tmp_path):
    """A command meets a hub that speaks only a later protocol."""
    path = tmp_path / "s"
    server = socket.socket(socket.AF_UNIX)
    server.bind(os.fspath(path))
    server.listen()
    hello = {"versions": [7], "role": "hub", "name": "pool", "software": "7.0"}

    def serve():
        sock, _ = server.accept()
        sock.sendall(frames.write({"v": 7, "kind": "event", "method": "hello", "body": hello}))
        time.sleep(0.5)
        sock.close()

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(VersionMismatch, match=r"hub pool runs 7.0 and speaks protocol versions \[7\]"):
        connect(path)
    thread.join()
    server.close()


def test_an_unknown_method_is_said(shared_pool):
    with shared_pool.connect() as hub, pytest.raises(UsageError, match="does not know the method 'make_coffee'"):
        hub.call("make_coffee", Nothing(), Nothing)


def test_a_body_of_the_wrong_shape_is_said(shared_pool):
    with shared_pool.connect() as hub, pytest.raises(PeerProtocolError, match="gpus"):
        hub.call("lease.foresee", {"tenant": "a", "gpus": "many", "duration_s": 5}, Nothing)


def site_channel(pool, site):
    """A control channel to a site as the hub has one, through the socket that the bridge behind sshd uses."""
    sock = raw(pool.sockets / f"{site}.sock")
    sock.sendall(b"fedpool\n")
    return Connection(sock, "hub", "hub", site)


@pytest.mark.parametrize("name", ["../../../hub", "/etc", "a" * 8 + "/..", "", "x" * 100, "ABCDEF01"])
def test_a_hostile_hub_cannot_choose_paths(shared_pool, name):
    with site_channel(shared_pool, "site-01") as site:
        for method, body in (
            ("task.stop", {"run": name, "reason": "x"}),
            ("task.start", {"run": name, "lease": "0" * 8, "token": 1, "program": ["true"], "plan": b""}),
            ("lease.hold", {"lease": name, "tenant": "a", "gpus": 1, "ttl_s": 1, "term": 10**6}),
        ):
            with pytest.raises(UsageError, match=r"is no (run|lease) id"):
                site.call(method, body, Nothing)
    assert (shared_pool.directory / "hub" / "hub.db").exists()


def test_a_program_under_no_lease_is_refused(shared_pool):
    with site_channel(shared_pool, "site-01") as site, pytest.raises(NotFound, match="has no lease"):
        body = {"run": "0" * 8, "lease": "f" * 8, "token": 1, "program": ["true"], "plan": b""}
        site.call("task.start", body, Nothing)
