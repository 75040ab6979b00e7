"""Sites as the user's own ssh reaches them: configurations of cases 037 to 044, and a real way through a jump host."""

import asyncio
import getpass
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedpool.errors import UsageError
from fedpool.identity.keys import public_line
from fedpool.transport import openssh
from fedpool.transport.identity import Identity
from ibshell.pool import free_ports

pytestmark = pytest.mark.integration

JUMP = """
Host inner
    HostName 203.0.113.40
    User root
    ProxyJump j1.example,ops@j2.example:2200
Host j1.example
    User jumper
    Port 2022
Host gate
    ProxyJump none
Host *
    ProxyJump j1.example
    User fallback
"""
FINAL = """
Match final host *.x.test,!jump.x.test
    ProxyJump jump.x.test
Host short
    HostName n07.x.test
"""
CANON = """
CanonicalizeHostname yes
CanonicalDomains cluster.test
CanonicalizeMaxDots 0
CanonicalizeFallbackLocal yes
Host *.cluster.test
    User siteop
    Port 2207
Host via
    ProxyJump jump.x.test
Match final all
    Compression yes
Host *
    User everyone
"""


@pytest.fixture
def config(need, tmp_path):
    need("ssh", "openssh-client")

    def write(text, name="config"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def route(destination, path, ssh=openssh.SSH):
    return asyncio.run(openssh.route(destination, path, ssh))


def reference(destination, path):
    """What ssh -G itself says: hostname, port, user, proxyjump."""
    out = subprocess.run(["ssh", "-G", "-F", path, destination], capture_output=True, text=True, check=True).stdout
    said = dict(line.split(" ", 1) for line in reversed(out.splitlines()) if " " in line)
    return said["hostname"], int(said["port"]), said["user"], said.get("proxyjump", "none")


def test_a_list_of_jump_hosts_each_with_its_own_settings(config):
    path = config(JUMP)
    found = route("inner", path)
    assert [str(hop) for hop in found.hops] == ["jumper@j1.example:2022", "ops@j2.example:2200"]
    assert (found.target.host, found.target.user) == ("203.0.113.40", "root")
    assert reference("inner", path) == ("203.0.113.40", 22, "root", "j1.example,ops@j2.example:2200")
    assert route("gate", path).hops == ()
    assert [str(hop) for hop in route("other", path).hops] == ["jumper@j1.example:2022"]


def test_a_jump_host_that_jumps_through_itself_is_refused_at_once(config, pool):
    path = config(JUMP)
    began = time.monotonic()
    with pytest.raises(UsageError, match=r"ProxyJump loop: j1\.example -> j1\.example"):
        route("j1.example", path)
    assert time.monotonic() - began < 1.0
    said = pool.cli("site", "route", "j1.example", "-F", path, status=2).stderr
    assert "ProxyJump loop: j1.example -> j1.example" in said and "ProxyJump none" in said and "Traceback" not in said
    with pytest.raises(UsageError, match="ProxyJump loop: c -> a -> b"):
        route("c", config("Host a\n ProxyJump b\nHost b\n ProxyJump a\nHost c\n ProxyJump a\n", "two"))


@pytest.mark.parametrize(
    ("name", "host", "jumps"),
    [
        ("short", "n07.x.test", ["jump.x.test"]),
        ("n07.x.test", "n07.x.test", ["jump.x.test"]),
        ("jump.x.test", "jump.x.test", []),
    ],
)
def test_match_final(config, name, host, jumps):
    path = config(FINAL)
    found = route(name, path)
    assert found.target.host == host and [hop.host for hop in found.hops] == jumps
    assert reference(name, path)[3] == (",".join(jumps) or "none")


def test_an_include_that_ends_inside_a_host_block(config, tmp_path):
    config("Host backup-*\n    User nobody\n", "inc-a.conf")
    config("Host n01\n    ProxyJump gate.x.example\n    Port 2222\n", "inc-b.conf")
    path = config(f"Include {tmp_path}/inc-a.conf\nInclude {tmp_path}/inc-b.conf\nUser operator\n")
    found = route("n01", path)
    assert (found.target.port, found.target.user, [hop.host for hop in found.hops]) == (
        2222,
        "operator",
        ["gate.x.example"],
    )
    assert reference("n01", path) == ("n01", 2222, "operator", "gate.x.example")


def test_canonical_names_without_a_resolver(config):
    found = route("n01", config(CANON))
    assert (found.target.host, found.target.user, found.target.port) == ("n01", "everyone", 22)
    assert found.settings["compression"] == "yes"
    via = route("via", config(CANON))
    assert via.target.host == "via" and [hop.host for hop in via.hops] == ["jump.x.test"]


@pytest.mark.skipif(os.getuid() != 0, reason="another /etc/hosts needs a mount namespace of root's")
def test_canonical_names_with_a_resolver_that_knows_them(config, tmp_path):
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n203.0.113.7 n01.cluster.test.\n")
    inside = f'mount --bind {tmp_path}/hosts /etc/hosts && exec ssh "$@"'
    found = route("n01", config(CANON), ("unshare", "-m", "sh", "-c", inside, "ssh"))
    assert (found.target.host, found.target.port) == ("n01.cluster.test", 2207)
    assert found.target.user == "everyone", "what was set first stays"
    assert found.settings["compression"] == "yes"


def test_a_key_that_is_revoked_by_name_is_refused_at_another_port(config, tmp_path):
    key = public_line(bytes(range(32)))
    known = tmp_path / "known_hosts"
    known.write_text(f"* {key}\n@revoked 203.0.113.40 {key}\n")
    path = config(
        f"Host odd\n HostName 203.0.113.40\n Port 2212\nHost *\n UserKnownHostsFile {known}\n GlobalKnownHostsFile none\n"
    )
    [entry] = openssh.refused_keys(route("odd", path))
    assert entry.where == f"{known}:2"
    words = openssh.command(route("odd", path), path, ["true"], "/revoked")
    assert "RevokedHostKeys=/revoked" in words
    assert openssh.refused_keys(route("203.0.113.40", path)) == [], "at 22 ssh itself refuses it"


@pytest.mark.parametrize("name", ["-oProxyCommand=touch /tmp/x", "--", ""])
def test_what_is_no_host_reaches_no_ssh(config, name):
    with pytest.raises(UsageError):
        route(name, config(""))


def sshd(base, port, host_key, authorized, need):
    server = need("sshd", "openssh-server")
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    base.mkdir()
    host = Identity.create(base / "host_key") if host_key is None else host_key
    (base / "authorized_keys").write_text(authorized)
    (base / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {base}/host_key\nAuthorizedKeysFile {base}/authorized_keys\n"
        f"StrictModes no\nPidFile none\nUsePAM no\nPasswordAuthentication no\n"
    )
    return host, subprocess.Popen([server, "-D", "-E", str(base / "log"), "-f", str(base / "sshd_config")])


def test_a_site_behind_a_jump_host(make_pool, need):
    """Two real sshds, the user's own configuration, hashed known_hosts, and a site's agent behind them."""
    pool = make_pool(2, start=False)
    jump_port, port = free_ports(2)
    base, hub = pool.work / "ssh", pool.directory / "hub" / "identity"
    base.mkdir()
    hub_key = (pool.directory / "hub" / "identity.pub").read_text().strip()
    bridge = f"{sys.executable} -P -m agent.main stdio --socket {pool.sockets}/site-01.sock"
    jump, first = sshd(base / "jump", jump_port, None, f"{hub_key}\n", need)
    target, second = sshd(
        base / "target", port, None, f'restrict,command="{bridge} ${{SSH_ORIGINAL_COMMAND##* }}" {hub_key}\n', need
    )
    known = base / "known_hosts"
    known.write_text(
        f"[127.0.0.1]:{jump_port} {public_line(jump.public)}\n[127.0.0.1]:{port} {public_line(target.public)}\n"
    )
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(known)], check=True, capture_output=True)
    (base / "config").write_text(
        f"Host gate\n HostName 127.0.0.1\n Port {jump_port}\nHost north\n HostName 127.0.0.1\n Port {port}\n ProxyJump gate\n"
        f"Host *\n User {getpass.getuser()}\n IdentityFile {hub}\n IdentitiesOnly yes\n UserKnownHostsFile {known}\n"
        f" GlobalKnownHostsFile none\n"
    )
    path = pool.directory / "hub" / "hub.toml"
    text = path.read_text()
    old = text[text.index('mode = "dial"') : text.index("[[site]]", text.index('mode = "dial"'))]
    path.write_text(text.replace(old, f'mode = "ssh"\naddress = "north"\nssh_config = "{base}/config"\n\n'))
    site = pool.site_directory("site-01") / "site.toml"
    site.write_text("\n".join(line for line in site.read_text().splitlines() if not line.startswith("listen =")) + "\n")
    try:
        pool.start_all()
        row = next(row for row in pool.rows("site") if row["name"] == "site-01")
        assert row["mode"] == "ssh" and row["key_exchange"].startswith(("sntrup761", "mlkem768", "curve25519"))
        lease = pool.json("lease", "request", "-t", "a", "-g", "2", "--site", "site-01")
        pool.cli("lease", "release", lease["id"])
        shown = pool.json("site", "route", "north", "-F", str(base / "config"))
        assert shown["hops"] == [f"{getpass.getuser()}@127.0.0.1:{jump_port}"]
        # Another host key than known_hosts has: ssh refuses, and its own words are shown.
        known.write_text(known.read_text().splitlines()[0] + f"\n[127.0.0.1]:{port} {public_line(bytes(range(32)))}\n")
        pool.stop("hub")
        pool.start("hub")
        pool.until(lambda: "erification failed" in _error(pool))
    finally:
        for server in (first, second):
            server.terminate()
            server.wait()


def _error(pool):
    from fedpool.errors import IbshellError

    try:
        return next(row for row in pool.rows("site") if row["name"] == "site-01")["error"]
    except IbshellError:
        return ""
