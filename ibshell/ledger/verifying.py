"""Verifying sites' ledgers: each by itself, against what others have seen of it, and all of them against the tenants' limits.

A ledger is asked for through the hub, or lies in files; both are verified in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from fedpool.client.connection import Connection
from fedpool.errors import IbshellError, IntegrityError
from fedpool.identity.authorities import parse_authority
from fedpool.identity.trust import Trust
from fedpool.leasing.holdings import Holdings, over_limits
from fedpool.leasing.rules import LedgerRules
from fedpool.ledger import merkle, notes
from fedpool.ledger.verification import Finding, Verification, read_checkpoint
from fedpool.ledger.witnesses import majority, witnesses_of
from ibshell.ledger import proofs
from ibshell.ledger.asked import Ledger, seen_by, site_names
from ibshell.ledger.exported import Exported, found_in
from ibshell.ledger.signature_checks import SignatureChecks
from ibshell.progress import Bar

TOLD_S = 600.0  # so long a site may take to hear of a roster

Result: TypeAlias = tuple[dict[str, Any], list[Finding]]


class LedgerCheck:
    """One ledger that is verified.

    Args:
        ledger: asked for, or in files.
        trust: whom to believe about who signed what, or None.
        witnesses: keys whose cosignatures count.
        full: from the first record, not only what is new here.
    """

    def __init__(
        self, ledger: Ledger | Exported, trust: Trust | None, witnesses: Sequence[notes.Key], full: bool = False
    ) -> None:
        self.ledger = ledger
        self._trust = trust
        self._witnesses = witnesses
        seen = None if full or ledger.seen is None or ledger.seen.rules is None else ledger.seen
        self._signatures = SignatureChecks(lambda: self._check.size - 1)
        past = trust.of_the_past() if trust is not None else None
        self._rules = rules = LedgerRules(past, seen.rules if seen else None, self._signatures)
        self._check = Verification(
            ledger.site,
            ledger.key,
            lambda record: rules.take(self._check.size - 1, record),
            seen.verified if seen else None,
            rules.hashed,
        )
        self._first = self._check.size
        self._cosigners: list[str] = []

    @property
    def holdings(self) -> Holdings:
        """Who held what."""
        return self._rules.holdings

    def run(self, shown: Mapping[str, bytes], bar: Bar) -> None:
        """Verify its records, and that they are what was shown to others: {site: checkpoint}."""
        check, ledger = self._check, self.ledger
        self._expect(shown)
        with self._signatures:
            for number, data in ledger.records(self._first, ledger.size):
                check.take(data)
                if number % 1000 == 0:
                    bar.at(number, ledger.site)
            for at, problem in self._signatures.finish():
                check.find(problem, at)
        check.finish(ledger.note)
        for problem in self._rules.finish():
            check.find(problem)
        for size, root, said in check.earlier:
            try:
                ledger.require_consistent(size, root, check.size, check.root)
            except IntegrityError:
                check.find(f"the first {size} records are not {said}: there are two histories")
        if self._trust is not None and self._trust.sites.get(ledger.site, ledger.key.public) != ledger.key.public:
            check.find("it is signed by another key than the pool's roster names")

    def _expect(self, shown: Mapping[str, bytes]) -> None:
        """What was verified here before, what the site showed to others, what they cosigned."""
        check, ledger = self._check, self.ledger
        if ledger.seen is not None:
            before = ledger.seen.verified
            check.expect(before.size, merkle.Frontier(before.size, before.peaks).root(), "verified here before")
        for name, note in shown.items():
            checkpoint = read_checkpoint(note, ledger.key)
            check.expect(checkpoint.size, checkpoint.root, f"signed and shown to {name}")
        if ledger.witnessed:
            checkpoint = read_checkpoint(ledger.witnessed, ledger.key)
            check.expect(checkpoint.size, checkpoint.root, "signed and witnessed")
            self._cosigners = list(notes.signers(notes.decode(ledger.witnessed), self._witnesses))

    def require_witnesses(self, needed: int) -> None:
        """It is sealed: so many have cosigned its checkpoint."""
        if len(self._cosigners) < needed:
            self._check.find(f"{len(self._cosigners)} sites have witnessed it; {needed} are needed")

    def require_roster(self, unix: float) -> None:
        """The site, which is up, goes by the roster that is known here, unless that is very new: else the hub withholds it."""
        trust, rules = self._trust, self._rules
        if trust is not None and rules.roster < trust.number and unix - trust.signed_ms / 1000 > TOLD_S:
            self._check.find(
                f"it goes by roster {rules.roster}; the pool's authority has signed roster {trust.number}: the hub withholds "
                "what is revoked"
            )

    def find(self, finding: Finding) -> None:
        """Something is wrong with it that shows beside other ledgers only."""
        self._check.find(finding.problem, finding.record)

    def result(self) -> Result:
        """What came of it; where nothing is wrong, the next time goes on from here."""
        check, ledger = self._check, self.ledger
        if not check.faults:
            ledger.remember(check.state(), self._rules.state())
        witnesses = self._witnesses
        row = {
            "site": ledger.site,
            "result": "faults" if check.faults else "whole",
            "records": check.size,
            "new": check.size - self._first,
            "forgotten": check.forgotten,
            "leases": self._rules.leases,
            "signatures": self._rules.signatures,
            "root": check.root.hex()[:16],
            "witnesses": f"{len(self._cosigners)} of {len(witnesses)}" if witnesses else None,
            "faults": check.faults,
            "unknown": check.unknown,
            "key": ledger.key.line(),
        }
        return row, check.findings


def _unverified(name: str, error: IbshellError) -> Result:
    return {"site": name, "result": "unverified", "faults": 1}, [Finding(name, None, error.message)]


def _together(checks: Mapping[str, LedgerCheck | IbshellError]) -> Iterator[Result]:
    """Compare what tenants held at all sites with their limits; then say what came of each."""
    good = {name: check for name, check in checks.items() if isinstance(check, LedgerCheck)}
    for finding in over_limits({name: check.holdings for name, check in good.items()}):
        good[finding.site].find(finding)
    for name, check in checks.items():
        yield check.result() if isinstance(check, LedgerCheck) else _unverified(name, check)


def in_files(path: Path, key: str, authority: str) -> list[Result]:
    """Verify what export wrote.

    Args:
        path: a directory of one ledger, or of several.
        key: the line of the key that must have signed, or "".
        authority: public key line of the pool's authority, or "": then nobody is believed about who signed what.
    """
    checks: dict[str, LedgerCheck | IbshellError] = {}
    for directory in found_in(path):
        with Bar("verifying") as bar:
            try:
                ledger = Exported(directory, key)
                trust, witnesses = None, ledger.witnesses
                if authority:
                    trust = proofs.trust_of(ledger.rosters(), parse_authority(authority, "--authority"))
                    witnesses = proofs.witness_keys(ledger.site, trust)
                bar.total = ledger.size
                check = LedgerCheck(ledger, trust, witnesses)
                check.run({}, bar)
                if trust is not None:
                    check.require_witnesses(majority(len(trust.sites)))
                checks[ledger.site] = check
            except IbshellError as error:
                checks[str(directory)] = error
    return list(_together(checks))


def in_proof(path: Path, key: str, authority: str) -> list[Result]:
    """Verify what prove wrote; see `in_files`."""
    found = proofs.read(path)
    trust = proofs.trust_of(found.rosters, parse_authority(authority, "--authority")) if authority else None
    if not found.ledgers:
        return [_unverified(str(path), IntegrityError(f"{path} proves nothing"))]
    results = []
    for part in found.ledgers:
        size, witnesses, findings = proofs.check(part, found, trust)
        if key and part.key != key:
            findings.append(Finding(part.site, None, f"it is signed by {part.key}, not by --key"))
        row = {
            "site": part.site,
            "result": "faults" if findings else "whole",
            "records": len(part.records),
            "of": size,
            "about": found.about,
            "witnesses": len(witnesses),
            "faults": len(findings),
            "key": part.key,
        }
        results.append((row, findings))
    return results


def at_sites(connection: Connection, wanted: Iterable[str], full: bool) -> list[Result]:
    """Verify the ledgers of sites that are up; all are asked what they have seen of those.

    Args:
        connection: to the hub.
        wanted: names of sites; none for all.
        full: from the first record, not only what is new here.
    """
    ledgers: dict[str, Ledger] = {}
    seen: dict[str, dict[str, bytes]] = {}
    names = site_names(connection, ())
    checks: dict[str, LedgerCheck | IbshellError] = {}
    trust = None
    if connection.signer is not None:
        connection.signer.refresh(connection)
        trust = connection.signer.trust()
    for name in names:
        try:
            seen[name] = seen_by(connection, name)
        except IbshellError as error:
            checks[name] = error
    for name in seen:  # after what others have seen of it: it is no shorter
        try:
            ledgers[name] = Ledger(connection, name)
        except IbshellError as error:
            checks[name] = error
    for name, ledger in ledgers.items():
        if wanted and name not in wanted:
            continue
        with Bar("verifying", ledger.size) as bar:
            try:
                witnesses = [ledgers[other] for other in witnesses_of(name, names) if other in ledgers]
                keys = [proofs.witness_key(other.key) for other in witnesses]
                check = LedgerCheck(ledger, trust, keys, full)
                check.run({other: known[name] for other, known in seen.items() if name in known}, bar)
                check.require_roster(time.time())
                checks[name] = check
            except IbshellError as error:
                checks[name] = error
    return list(_together({name: checks[name] for name in wanted or names}))
