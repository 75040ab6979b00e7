"""A ledger of a million records: written and hashed, verified in full, and verified again after a thousand more."""

import hashlib
import time
from collections.abc import Callable, Iterator

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedpool.identity import certificates, requests
from fedpool.identity.authorities import authority_fingerprint
from fedpool.identity.keys import key_blob
from fedpool.identity.principals import OPERATOR
from fedpool.identity.trust import Trust
from fedpool.leasing.holdings import over_limits
from fedpool.leasing.recorded import requested
from fedpool.leasing.rules import LedgerRules
from fedpool.ledger import merkle, notes
from fedpool.ledger.records import Granted, LeaseSaid, LedgerOpened, Record, Requested, SiteStarted, encode_at
from fedpool.ledger.verification import Verification
from fedpool.records import Quota, Tenant
from fedpool.wire.messages import LeaseWanted
from ibshell.ledger.signature_checks import SignatureChecks
from ibshell.measure.figure import Figure

RECORDS = 1_000_000
MORE = 1000
REACH_S = 60.0
REACH_MORE_S = 1.0
LIVING = 64  # leases at a time, of two devices
LIMIT = 2 * LIVING


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


class _Tenant:
    """Somebody who signs what stands in the ledger, and who believes it."""

    def __init__(self) -> None:
        self.authority, self.key = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
        public = self.key.public_key().public_bytes_raw()
        role = ("tenant/oncology", OPERATOR)
        self.certificate = certificates.issue(self.authority, certificates.USER, public, role, "bench", 1, (0, 1 << 40))
        self.trust = Trust("bench@0", (key_blob(self.authority.public_key().public_bytes_raw()),))

    def limit(self) -> Requested:
        """What an operator has signed about it, as a record."""
        wanted = Tenant("oncology", quotas=(Quota("*", "*", LIMIT, LIMIT),))
        payload = requests.compose("bench@0", "tenant.set", wanted, OPERATOR, (), 1, "0" * 32)
        return requested("", requests.sign(self.key, self.certificate, payload))

    def request(self, lease: str, nonce: int) -> Requested:
        """A signed request for a lease, as a record."""
        wanted = LeaseWanted("oncology", 2, 3600.0, gpu_type="h100", id=lease)
        payload = requests.compose("bench@0", "lease.request", wanted, "tenant/oncology", (), 1, f"{nonce:032x}")
        return requested(lease, requests.sign(self.key, self.certificate, payload))


def _signed(count: int, tenant: _Tenant) -> Iterator[Record]:
    """As `_records`, each lease with its tenant's request before it."""
    yield SiteStarted(
        epoch=1, software="bench", pool="bench@0", authorities=(authority_fingerprint(tenant.trust.authorities[0]),)
    )
    yield tenant.limit()
    for number, record in enumerate(_records(count * 4 // 5)):
        if isinstance(record, LeaseSaid) and record.event == "hold":
            yield tenant.request(record.lease, number)
        yield record


def _verified_signed(signing: Ed25519PrivateKey, key: notes.Key) -> tuple[float, int, float]:
    """Seconds for a ledger of a million records with the signatures in it, how many those are, and for one bare signature."""
    tenant, tree = _Tenant(), merkle.Frontier()
    data = _written(tree, iter([LedgerOpened(format=1, site="bench", key="")]), 1)
    data += _written(tree, _signed(RECORDS, tenant), 2)
    began = time.perf_counter()
    with SignatureChecks(lambda: check.size - 1) as checks:
        rules = LedgerRules(tenant.trust, None, checks)
        check = _check(key, rules, lambda: check.size - 1)
        for record in data:
            check.take(record)
        wrong = checks.finish()
    check.finish(_note(tree, signing, key.name))
    over = over_limits({"bench": rules.holdings})
    took = time.perf_counter() - began
    if wrong or check.findings or rules.finish() or over:
        raise AssertionError(f"{wrong[:1]} {check.findings[:1]} {over[:1]}")
    message = b"x" * 400
    value = tenant.key.sign(message)
    public = tenant.key.public_key()
    began = time.perf_counter()
    for _ in range(2000):
        public.verify(value, message)
    return took, rules.signatures, (time.perf_counter() - began) / 2000


def _check(key: notes.Key, rules: LedgerRules, number: Callable[[], int]) -> Verification:
    """As `ibshell ledger verify` checks."""
    return Verification("bench", key, lambda record: rules.take(number(), record), None, rules.hashed)


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

    check = _check(key, LedgerRules(None), lambda: check.size - 1)
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
    signed, signatures, bare_signature = _verified_signed(signing, key)
    return [
        Figure(
            "ledger",
            f"verify {RECORDS} records with {signatures} signed requests",
            round(signed, 2),
            "s",
            limit=f"{signatures} bare signatures on one core",
            limit_value=round(signatures * bare_signature, 2),
        ),
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
