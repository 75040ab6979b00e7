"""A proof of what sites recorded about one lease: a file that is checked with nothing else but the sites' keys.

JSON: `{"format": 1, "lease": ID, "ledgers": […]}`, each ledger with `site`, `key`, `witnesses` (keys), `checkpoint` (the signed
note) and `records`: `{"number": N, "record": TEXT, "proof": [base64 hash…]}`, the proof being that of RFC 9162, 2.1.3.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from fedpool.errors import IbshellError, IntegrityError, NotFound
from fedpool.ledger import canonical, merkle, notes
from fedpool.ledger.verification import Finding, read_checkpoint
from ibshell.ledgers import Ledger

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


class Proof(msgspec.Struct, frozen=True):
    """The file."""

    format: int
    lease: str
    ledgers: list[LedgerPart]


def part_of(ledger: Ledger, records: Mapping[int, bytes], others: Sequence[Ledger]) -> LedgerPart:
    """Records of a ledger with their proofs, under the latest checkpoint that was witnessed, or else under the latest.

    Args:
        ledger: the site's.
        records: {number: record}.
        others: whose cosignatures count.
    """
    note = ledger.witnessed if ledger.witnessed_size > max(records) else ledger.note
    size = read_checkpoint(note, ledger.key).size
    proven = [
        Proven(number, data.decode(), [base64.b64encode(step).decode() for step in ledger.inclusion(number, size)])
        for number, data in records.items()
    ]
    keys = [witness_key(other.key) for other in others]
    cosigned = notes.signers(notes.decode(note), keys)
    witnesses = [key.line() for key in keys if key.name in cosigned]
    return LedgerPart(ledger.site, ledger.key.line(), witnesses, note.decode(), proven)


def witness_key(key: notes.Key) -> notes.Key:
    """The key under which the owner of a ledger cosigns others."""
    return msgspec.structs.replace(key, kind=notes.COSIGNATURE)


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


def check(part: LedgerPart, lease: str) -> tuple[int, list[str], list[Finding]]:
    """Check what one ledger says about a lease; returns (size of the log, names of witnesses, what is wrong)."""
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
    except IbshellError as error:
        return 0, [], [Finding(part.site, None, error.message)]
    for proven in part.records:
        try:
            data = proven.record.encode()
            said = canonical.decode(data)
            if not isinstance(said, dict) or said.get("lease") != lease:
                raise IntegrityError(f"it is not about lease {lease}")
            steps = [base64.b64decode(step, validate=True) for step in proven.proof]
            merkle.require_inclusion(merkle.leaf_hash(data), proven.number, checkpoint.size, steps, checkpoint.root)
        except (IbshellError, ValueError) as error:
            findings.append(Finding(part.site, proven.number, getattr(error, "message", str(error))))
    return checkpoint.size, cosigners, findings
