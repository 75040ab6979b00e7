"""Leasing through the real path: client, hub, SSH, sites, fsync and back; beside the same disk's bare SQLite commits."""

import sqlite3
import tempfile
import threading
import time
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedpool.client.acting import act
from fedpool.identity import certificates, requests
from fedpool.identity.keys import key_blob
from fedpool.identity.trust import Trust
from fedpool.leasing import policy as policies
from fedpool.leasing.gate import Gate
from fedpool.leasing.requests import Hold
from fedpool.records import Shape
from fedpool.sim.scenario import SimulatedSite
from fedpool.wire.messages import ById, LeaseView, LeaseWanted
from ibshell.measure.figure import Figure
from ibshell.pool import LocalPool

SITES = 4
NODES = 64
GPUS_PER_NODE = 8
GANGS = 200
CLIENTS = 16
SECONDS = 6.0
COMMITS = 2000
CHECKS = 1000
PUBLIC_MS = (
    300.0  # what a public scheduler states for deciding about a gang of this size, without committing it anywhere
)


def _bare_commits(path: Path) -> float:
    """Commits a second of one row, WAL and synchronous=FULL."""
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=FULL")
    db.execute("CREATE TABLE rows (body TEXT)")
    start = time.perf_counter()
    for _ in range(COMMITS):
        db.execute("INSERT INTO rows VALUES (?)", ("x" * 200,))
    rate = COMMITS / (time.perf_counter() - start)
    db.close()
    return rate


def _gangs_ms(pool: LocalPool, gpus: int) -> list[float]:
    times = []
    with pool.connect() as hub:
        for _ in range(GANGS):
            start = time.perf_counter()
            wanted = LeaseWanted("bench", gpus, 3600.0, sites=SITES)
            lease = act(hub, "lease.request", wanted, LeaseView).lease
            times.append(1000 * (time.perf_counter() - start))
            act(hub, "lease.release", ById(lease.id), LeaseView)
    return sorted(times)


def _grants_a_second(pool: LocalPool) -> float:
    until = time.perf_counter() + SECONDS
    granted = [0] * CLIENTS

    def client(number: int) -> None:
        with pool.connect() as hub:
            while time.perf_counter() < until:
                wanted = LeaseWanted(f"bench-{number}", 1, 3600.0)
                lease = act(hub, "lease.request", wanted, LeaseView).lease
                granted[number] += 1
                act(hub, "lease.release", ById(lease.id), LeaseView)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(granted) / (time.perf_counter() - start)


def _checks_us() -> tuple[float, float]:
    """Microseconds for what a site checks of one hold, signature and policy, and for one bare Ed25519 verification."""
    authority, key = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes_raw()
    certificate = certificates.issue(
        authority, certificates.USER, public, ("tenant/oncology",), "bench", 1, (0, 1 << 40)
    )
    site = SimulatedSite("site", 1, NODES, GPUS_PER_NODE)
    gate = Gate(
        "site", Trust("bench@0", (key_blob(authority.public_key().public_bytes_raw()),)), site.inventory().devices()
    )
    policy = policies.parse(
        'types = ["h100"]\n[tenants.oncology]\ngpus = 64\nhours = ["mon-sun 00:00-24:00"]\n', "bench"
    )
    now = time.time()
    holds = []
    for number in range(CHECKS):
        wanted = LeaseWanted("oncology", 4, 3600.0, gpu_type="h100", id=f"{number:08x}")
        payload = requests.compose(
            "bench@0", "lease.request", wanted, "tenant/oncology", (), int(now * 1000), f"{number:032x}"
        )
        signed = requests.sign(key, certificate, payload)
        holds.append(Hold(wanted.id, "oncology", 4, 15.0, 1, Shape(kinds=("h100",)), 3600.0, 1, signed))
    start = time.perf_counter()
    for hold in holds:
        gate.admit(hold, None, 0, now, 0.0)
        policies.require("site", policy.lease_problems("oncology", 4, ("h100",), 3600.0, now))
    checks = time.perf_counter() - start
    message, value = b"x" * 400, key.sign(b"x" * 400)
    start = time.perf_counter()
    for _ in range(CHECKS):
        key.public_key().verify(value, message)
    return 1e6 * checks / CHECKS, 1e6 * (time.perf_counter() - start) / CHECKS


def measure() -> list[Figure]:
    """Gangs of every device of four sites, and single devices from 16 clients that each give theirs back at once."""
    total = SITES * NODES * GPUS_PER_NODE
    with tempfile.TemporaryDirectory(prefix="ibshell-bench-", ignore_cleanup_errors=True) as directory:
        bare = _bare_commits(Path(directory) / "bare.db")
        pool = LocalPool(Path(directory).name, Path(directory) / "pool", tied=True)
        try:
            pool.create(
                SimulatedSite("site", SITES, NODES, GPUS_PER_NODE).named(), reverse=lambda position: position % 2 == 1
            )
            pool.start_all()
            times = _gangs_ms(pool, total)
            rate = _grants_a_second(pool)
        finally:
            pool.stop_all()
    commit_ms = round(1000 / bare, 3)
    p50, p99 = times[len(times) // 2], times[int(len(times) * 0.99)]
    gang = f"gang {total} over {SITES} sites"
    limit = "five bare SQLite commits"
    checks, bare_check = _checks_us()
    return [
        Figure(
            "lease",
            "signature and policy of a hold",
            round(checks, 1),
            "us",
            limit="one bare Ed25519 verification",
            limit_value=round(bare_check, 1),
        ),
        Figure("lease", f"{gang} p50", round(p50, 1), "ms", limit=limit, limit_value=round(5 * commit_ms, 3)),
        Figure(
            bench="lease",
            case=f"{gang} p99",
            value=round(p99, 1),
            unit="ms",
            peer="public figure, decision alone",
            peer_value=PUBLIC_MS,
            ratio=round(PUBLIC_MS / p99, 2),
            limit=limit,
            limit_value=round(5 * commit_ms, 3),
        ),
        Figure(
            bench="lease",
            case=f"grants with {CLIENTS} clients",
            value=round(rate, 1),
            unit="1/s",
            limit="bare SQLite commits",
            limit_value=round(bare, 1),
        ),
    ]
