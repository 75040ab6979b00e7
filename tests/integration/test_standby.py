"""Agents with stand-bys over a real etcd: one is active, another takes over within ten seconds, nothing is lost or doubled."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from fedpool.errors import IbshellError

pytestmark = [pytest.mark.integration, pytest.mark.waits]

CLONE_NEWNET = 0x40000000
TAKE_OVER_S = 10.0


def on_etcd(pool, cluster, *parties):
    for party in parties:
        kind = "hub" if party == "hub" else "site"
        directory = pool.directory / "hub" if party == "hub" else pool.site_directory(party)
        path = directory / f"{kind}.toml"
        path.write_text(f'store = "{cluster.url}"\n{path.read_text()}')


def state_of(pool, lease_id):
    try:
        return next(row["state"] for row in pool.rows("lease") if row["id"] == lease_id)
    except IbshellError:
        return "the hub is away"


def epoch(pool, site):
    return next((row["epoch"] or 0 for row in pool.rows("site") if row["name"] == site and row["state"] == "up"), 0)


@contextmanager
def on_another_machine(pool, site):
    """A second agent of a site, as it would be elsewhere: with a socket of its own."""
    directory = pool.site_directory(site)
    text = (directory / "site.toml").read_text()
    (directory / "second.toml").write_text(text.replace(f"{site}.sock", f"{site}-2.sock"))
    with (directory / "agent.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "agent.main", "site", "--config", str(directory / "second.toml")],
            stdout=log,
            stderr=log,
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def end(pool, pid, how):
    [process] = [child for child in pool._children if child.pid == pid]
    process.send_signal(how)
    process.wait()


def waited(condition):
    """Seconds until a condition holds."""
    started = time.monotonic()
    while time.monotonic() < started + 60:
        try:
            if condition():
                return time.monotonic() - started
        except IbshellError:
            pass
        time.sleep(0.05)
    raise AssertionError("it did not come true in a minute")


def test_a_site_s_stand_by_takes_over(make_pool, make_etcd):
    pool = make_pool(2, start=False, reverse=lambda position: True)
    on_etcd(pool, make_etcd(), "site-01")
    pool.start_all()
    active = pool.processes()["site-01"]
    lease = pool.json("lease", "request", "-t", "a", "-g", "3")
    before = epoch(pool, "site-01")
    stand_by = pool.start("site-01")
    time.sleep(2)
    assert epoch(pool, "site-01") == before, "there is one active agent"
    end(pool, active, signal.SIGKILL)
    assert waited(lambda: epoch(pool, "site-01") > before) < TAKE_OVER_S
    assert state_of(pool, lease["id"]) == "active", "link loss is not job loss"
    assert pool.json("status")["gpus_free"] == 1
    pool.cli("lease", "release", lease["id"])
    pool.until(lambda: pool.json("status")["gpus_free"] == 4)
    # In order, the leadership is handed over at once.
    before = epoch(pool, "site-01")
    pool.start("site-01")
    time.sleep(2)
    end(pool, stand_by, signal.SIGTERM)
    assert waited(lambda: epoch(pool, "site-01") > before) < TAKE_OVER_S / 2


def test_a_hub_s_stand_by_takes_over(make_pool, make_etcd):
    pool = make_pool(2, start=False)
    on_etcd(pool, make_etcd(), "hub")
    pool.start_all()
    active = pool.processes()["hub"]
    held = pool.json("lease", "request", "-t", "a", "-g", "3")
    pool.start("hub")
    time.sleep(1)
    end(pool, active, signal.SIGKILL)
    assert waited(lambda: state_of(pool, held["id"]) == "active" and len(pool.sites_up()) == 2) < TAKE_OVER_S
    assert len(pool.rows("lease")) == 1
    pool.cli("lease", "release", held["id"])
    pool.until(lambda: pool.json("status")["gpus_free"] == 4)


def test_a_stopped_agent_is_fenced_when_it_goes_on(make_pool, make_etcd):
    """SIGSTOP: the old one wakes up, finds that another leads, and ends without having written anything."""
    pool = make_pool(1, start=False, reverse=lambda position: True)
    on_etcd(pool, make_etcd(), "site")
    pool.start_all()
    old = pool._children[-1]
    lease = pool.json("lease", "request", "-t", "a", "-g", "1")
    before = epoch(pool, "site")
    with on_another_machine(pool, "site"):
        old.send_signal(signal.SIGSTOP)
        assert waited(lambda: epoch(pool, "site") > before) < TAKE_OVER_S
        old.send_signal(signal.SIGCONT)
        assert old.wait(timeout=20) != 0, "it ends and says why"
        check_after_take_over(pool, lease)


def check_after_take_over(pool, lease):
    assert "not the active one any more" in pool.log("site").read_text()
    assert state_of(pool, lease["id"]) == "active" and pool.json("status")["gpus_free"] == 1


def supervise(pool, site):
    """What a site's service manager does: an agent that has ended is started again, whatever ended it."""
    if site not in pool.processes():
        pool.start(site)
        pool.until(lambda: pool.sites_up() == {site})


def test_members_are_killed(make_pool, make_etcd):
    """One of three is nothing; two of three is no quorum: nobody is active until one is back.

    Where the machine stalls for longer than the leadership lasts, the agent ends even so; that is what a supervisor is for.
    """
    cluster = make_etcd(3)
    pool = make_pool(1, start=False, reverse=lambda position: True)
    on_etcd(pool, cluster, "site")
    pool.start_all()
    for number in range(3):
        cluster.kill(number)
        supervise(pool, "site")
        lease = pool.json("lease", "request", "-t", "a", "-g", "2", "--wait", "60s")
        pool.cli("lease", "release", lease["id"])
        cluster.start(number)
        cluster.until_healthy()
        supervise(pool, "site")
    kept = pool.json("lease", "request", "-t", "a", "-g", "1")
    cluster.kill(0)
    cluster.kill(1)
    pool.until(lambda: "site" not in pool.processes())
    cluster.start(0)
    cluster.start(1)
    pool.start("site")
    pool.until(lambda: pool.sites_up() == {"site"})
    assert state_of(pool, kept["id"]) == "active" and pool.json("status")["gpus_free"] == 1


@contextmanager
def in_namespace(need):
    """This thread, and every process it starts, in a network of its own."""
    if os.getuid() != 0:
        pytest.skip("a network namespace needs root")
    ip, name = need("ip", "iproute2"), f"ibt{os.getpid()}"
    libc = ctypes.CDLL(None, use_errno=True)
    subprocess.run([ip, "netns", "add", name], check=True)
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    inner = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        assert libc.setns(inner, CLONE_NEWNET) == 0
        subprocess.run([ip, "link", "set", "lo", "up"], check=True)
        yield
    finally:
        assert libc.setns(own, CLONE_NEWNET) == 0
        os.close(inner)
        os.close(own)
        subprocess.run([ip, "netns", "del", name], check=True)


def cut(need, ports):
    """Nothing reaches these ports, or comes from them, any more."""
    numbers = ", ".join(str(port) for port in ports)
    rules = (
        "add table inet cut; add chain inet cut in { type filter hook input priority 0; };"
        f" add rule inet cut in tcp dport {{ {numbers} }} drop; add rule inet cut in tcp sport {{ {numbers} }} drop"
    )
    subprocess.run([need("nft", "nftables"), rules], check=True)


def join(need):
    subprocess.run([need("nft", "nftables"), "delete table inet cut"], check=True)


def test_members_are_cut_off(make_pool, make_etcd, need):
    """A network of its own, in which packets to members are dropped: one of three is nothing; all of them, and nobody is active."""
    with in_namespace(need):
        cluster = make_etcd(3)
        pool = make_pool(1, start=False, reverse=lambda position: True)
        on_etcd(pool, cluster, "site")
        pool.start_all()
        for client, peer in cluster.ports[:2]:
            cut(need, [client, peer])
            lease = pool.json("lease", "request", "-t", "a", "-g", "2")
            pool.cli("lease", "release", lease["id"])
            join(need)
            cluster.until_healthy()
        kept = pool.json("lease", "request", "-t", "a", "-g", "1")
        cut(need, [client for client, _ in cluster.ports])
        pool.until(lambda: "site" not in pool.processes())
        pool.start("site")
        time.sleep(3)
        join(need)
        pool.until(lambda: pool.sites_up() == {"site"})
        assert state_of(pool, kept["id"]) == "active" and pool.json("status")["gpus_free"] == 1
        pool.stop_all()
        cluster.stop()
