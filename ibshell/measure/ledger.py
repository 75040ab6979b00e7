"""A ledger of a million records: written and hashed, verified in full, and verified again after a thousand more."""

import hashlib
import time
from collections.abc import Iterator

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedpool.leasing.recorded import Replay
from fedpool.ledger import merkle, notes
from fedpool.ledger.records import Granted, LeaseSaid, LedgerOpened, Record, encode_at
from fedpool.ledger.verification import Verification
from ibshell.measure.figure import Figure

RECORDS = 1_000_000
MORE = 1000
REACH_S = 60.0
REACH_MORE_S = 1.0
LIVING = 64  # leases at a time, of two devices


def _records(count: int, first: int = 0) -> Iterator[Record]:
    """The lives of leases, one after the other, some at once: as a busy site writes them."""
    for number in range(first, first + count // 4):
        lease = f"{number:08x}"
        at = 2 * (number % LIVING)
        grants = (Granted((f"GPU-{at:036}", f"GPU-{at + 1:036}"), 10_000 + number),)
        for version, (event, state) in enumerate(
            (("hold", "held"), ("commit", "active"), ("end", "ending"), ("release", "released")), 1
        ):
            yield LeaseSaid(
                lease=lease,
                tenant="oncology",
                event=event,
                state=state,
                version=version,
                term=1,
                for_ms={1: 15_000, 2: 3_641_000}.get(version),
                grants=grants if version == 1 else None,
                reason="released" if version > 2 else "",
            )


def _written(tree: merkle.Frontier, records: Iterator[Record], time_ms: int) -> list[bytes]:
    """Encoded and hashed, as a site does it."""
    data = []
    for record in records:
        data += encode_at([record], time_ms)
        tree.append(merkle.leaf_hash(data[-1]))
    return data


def _note(tree: merkle.Frontier, key: Ed25519PrivateKey, name: str) -> bytes:
    text = notes.Checkpoint(name, tree.size, tree.root()).text()
    return notes.Note(text).signed(notes.sign(text, name, key)).encode()


def measure() -> list[Figure]:
    """Against what is to be reached, and the bare hash of the same bytes."""
    signing = Ed25519PrivateKey.generate()
    key = notes.Key("ibshell/bench/0", signing.public_key().public_bytes_raw())
    tree = merkle.Frontier()
    data = _written(tree, iter([LedgerOpened(format=1, site="bench", key="")]), 1)
    began = time.perf_counter()
    data += _written(tree, _records(RECORDS), 2)
    append = time.perf_counter() - began

    began = time.perf_counter()
    for record in data:
        hashlib.sha256(record).digest()
    bare = time.perf_counter() - began

    check = Verification("bench", key, Replay().take)
    began = time.perf_counter()
    for record in data:
        check.take(record)
    check.finish(_note(tree, signing, key.name))
    full = time.perf_counter() - began

    more = _written(tree, _records(MORE, RECORDS), 3)
    began = time.perf_counter()
    for record in more:
        check.take(record)
    check.finish(_note(tree, signing, key.name))
    again = time.perf_counter() - began
    if check.findings:
        raise AssertionError(check.findings[0].problem)
    return [
        Figure(
            "ledger",
            "encode and hash a record",
            round(append / RECORDS * 1e6, 2),
            "us",
            limit="SHA-256 of its bytes",
            limit_value=round(bare / RECORDS * 1e6, 2),
        ),
        Figure("ledger", f"verify {RECORDS} records", round(full, 2), "s", limit="to be reached", limit_value=REACH_S),
        Figure("ledger", f"verify {MORE} more", round(again, 4), "s", limit="to be reached", limit_value=REACH_MORE_S),
        Figure("ledger", "bytes of a lease of 2 devices", round(sum(map(len, data)) / (RECORDS / 4)), "B"),
    ]
