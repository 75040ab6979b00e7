"""A proof of what sites recorded about one lease or run: a file that is checked with the pool's authority's public key alone.

JSON: `{"format": 1, "lease": ID, "run": ID, "rosters": […], "ledgers": […]}`, each ledger with `site`, `key`, `witnesses` (keys),
`checkpoint` (the signed note) and `records`: `{"number": N, "record": TEXT, "proof": [base64 hash…]}`, the proof being that of RFC
9162, 2.1.3. A roster is `{"payload": base64, "signature": base64}`; it names the sites' keys, and an authority has signed it.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from fedpool.errors import IbshellError, IntegrityError, NotFound
from fedpool.identity import roster
from fedpool.identity.trust import Trust
from fedpool.leasing.coverage import Coverage, CoverageState
from fedpool.ledger import canonical, merkle, notes, records
from fedpool.ledger.verification import Finding, read_checkpoint
from fedpool.ledger.witnesses import majority, witnesses_of
from fedpool.records import Signed
from ibshell.ledger.asked import Ledger

FORMAT = 1
FILE_BYTES_MAX = 256 << 20


class Proven(msgspec.Struct, frozen=True):
    """One record, and that it is in the ledger."""

    number: int
    record: str
    proof: list[str]


class LedgerPart(msgspec.Struct, frozen=True):
    """What one site's ledger says."""

    site: str
    key: str
    witnesses: list[str]
    checkpoint: str
    records: list[Proven]


class Proof(msgspec.Struct, frozen=True, omit_defaults=True):
    """The file, about a lease or about a run."""

    format: int
    lease: str
    ledgers: list[LedgerPart]
    run: str = ""
    rosters: list[Signed] = []

    @property
    def about(self) -> str:
        """In words."""
        return f"run {self.run}" if self.run else f"lease {self.lease}"


class _About(msgspec.Struct):
    lease: str = ""
    run: str = ""


_ABOUT = msgspec.json.Decoder(_About)


def _about(record: bytes) -> _About:
    """What a record is about; nothing where it cannot be read, which whoever verifies says."""
    try:
        return _ABOUT.decode(record)
    except (msgspec.MsgspecError, RecursionError):
        return _About()


def concerned(ledgers: Mapping[str, Ledger], prefix: str) -> tuple[_About, dict[str, dict[int, bytes]]]:
    """What sites recorded about the lease whose id begins so, or about the run, with the leases under which it ran.

    Returns:
        Which it is, and {site: {number: record}}.

    Raises:
        NotFound: none, or several.
    """
    leases: set[str] = set()
    runs: dict[str, set[str]] = {}
    for ledger in ledgers.values():
        for _, data in ledger.told():
            said = _about(data)
            if said.lease.startswith(prefix):
                leases.add(said.lease)
            if said.run and said.run.startswith(prefix):
                runs.setdefault(said.run, set()).add(said.lease)
    leases.discard("")
    found = [*leases, *runs]
    if len(found) != 1:
        hint = f"it may be {', '.join(sorted(found)[:5])}" if found else "ibshell ledger log shows what is recorded"
        what = "several leases or runs begin" if found else "no site has recorded a lease or run that begins"
        raise NotFound(f"{what} {prefix!r}", hint)
    about = _About(run=next(iter(runs))) if runs else _About(lease=found[0])
    wanted = runs[about.run] if about.run else {about.lease}
    chosen: dict[str, dict[int, bytes]] = {}
    for name, ledger in ledgers.items():
        for number, data in ledger.told():
            said = _about(data)
            if said.lease in wanted or (about.run and said.run == about.run):
                chosen.setdefault(name, {})[number] = data
    return about, chosen


def trust_of(rosters: Iterable[Signed], authority: bytes) -> Trust:
    """Whom to believe, going by one authority that the reader knows.

    Raises:
        IntegrityError: none of the rosters is that authority's.
    """
    trust = None
    for signed in rosters:
        try:
            pool = roster.read(signed).pool
            trust = trust or Trust(pool, (authority,))
            trust.adopt(signed)
        except IbshellError:
            continue  # of an authority before this one, or of none
    if trust is None or not trust.number:
        raise IntegrityError(
            "no roster in it is signed by the authority that was named", "ibshell pool show prints its fingerprint"
        )
    return trust


def part_of(ledger: Ledger, chosen: Mapping[int, bytes], others: Sequence[Ledger]) -> LedgerPart:
    """Records of a ledger with their proofs, under the latest checkpoint that was witnessed, or else under the latest.

    Args:
        ledger: the site's.
        chosen: {number: record}.
        others: whose cosignatures count.
    """
    note = ledger.witnessed if ledger.witnessed_size > max(chosen) else ledger.note
    size = read_checkpoint(note, ledger.key).size
    proven = [
        Proven(number, data.decode(), [base64.b64encode(step).decode() for step in ledger.inclusion(number, size)])
        for number, data in chosen.items()
    ]
    keys = [witness_key(other.key) for other in others]
    cosigned = notes.signers(notes.decode(note), keys)
    witnesses = [key.line() for key in keys if key.name in cosigned]
    return LedgerPart(ledger.site, ledger.key.line(), witnesses, note.decode(), proven)


def witness_key(key: notes.Key) -> notes.Key:
    """The key under which the owner of a ledger cosigns others."""
    return msgspec.structs.replace(key, kind=notes.COSIGNATURE)


def witness_keys(site: str, trust: Trust) -> list[notes.Key]:
    """The keys under which a site's witnesses cosign, as the roster has them."""
    return [witness_key(notes.key_of(name, trust.sites[name])) for name in witnesses_of(site, trust.sites)]


def read(path: Path) -> Proof:
    """Read a proof, not checked yet.

    Raises:
        NotFound: there is no such file.
        IntegrityError: it is no proof.
    """
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise IntegrityError(f"{path} is larger than {FILE_BYTES_MAX} bytes: no proof")
        found = msgspec.json.decode(path.read_bytes(), type=Proof)
    except FileNotFoundError:
        raise NotFound(f"no file {path}", "ibshell ledger prove LEASE writes one") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise IntegrityError(f"{path} is no proof: {error}") from None
    if found.format != FORMAT:
        raise IntegrityError(f"{path} has format {found.format}; this release knows {FORMAT}", "use a newer release")
    return found


def check(part: LedgerPart, proof: Proof, trust: Trust | None) -> tuple[int, list[str], list[Finding]]:
    """Check what one ledger says; returns (size of the log, names of witnesses, what is wrong).

    Args:
        part: of the proof.
        proof: the whole.
        trust: whom to believe; None checks the file against itself alone.
    """
    findings: list[Finding] = []
    try:
        key = notes.parse_key(part.key)
        note = part.checkpoint.encode()
        checkpoint = read_checkpoint(note, key)
        keys = [notes.parse_key(line) for line in part.witnesses]
        if not key.name.startswith(f"ibshell/{part.site}/") or any(one.kind != notes.COSIGNATURE for one in keys):
            raise IntegrityError(f"the keys are not those of {part.site} and of witnesses")
        cosigners = list(notes.signers(notes.decode(note), keys))
        if len(cosigners) != len(part.witnesses):
            raise IntegrityError("a witness that is named has not cosigned")
        if trust is not None:
            _require_known(part, key, keys, trust)
    except IbshellError as error:
        return 0, [], [Finding(part.site, None, error.message)]
    # What came before the first record is not shown; that the site goes by signatures the roster's authority has to be believed.
    coverage = Coverage(trust.of_the_past() if trust is not None else None, CoverageState(on=trust is not None))
    leases = {_about(proven.record.encode()).lease for proven in part.records} if proof.run else {proof.lease}
    for proven in part.records:
        try:
            data = proven.record.encode()
            said = canonical.decode(data)
            if not isinstance(said, dict) or not (said.get("lease") in leases or said.get("run") == proof.run != ""):
                raise IntegrityError(f"it is not about {proof.about}")
            steps = [base64.b64decode(step, validate=True) for step in proven.proof]
            merkle.require_inclusion(merkle.leaf_hash(data), proven.number, checkpoint.size, steps, checkpoint.root)
            record = records.decode(data)
            if record is not None and trust is not None:
                findings += [Finding(part.site, proven.number, problem) for problem in coverage.take(record)]
        except (IbshellError, ValueError) as error:
            findings.append(Finding(part.site, proven.number, getattr(error, "message", str(error))))
    return checkpoint.size, cosigners, findings


def _require_known(part: LedgerPart, key: notes.Key, witnesses: Sequence[notes.Key], trust: Trust) -> None:
    """The keys are those of the roster, and of a site's witnesses a majority has cosigned.

    Raises:
        IntegrityError: not so.
    """
    if trust.sites.get(part.site) != key.public:
        raise IntegrityError(f"the roster names another key for {part.site}")
    strangers = [one.name for one in witnesses if one.public not in trust.sites.values()]
    if strangers:
        raise IntegrityError(f"{strangers[0]} is no site of the roster")
    needed = majority(len(trust.sites))
    if len(witnesses) < needed:
        raise IntegrityError(f"{len(witnesses)} sites have witnessed it; {needed} are needed")
