"""`ibshell ledger`: what was done at every site, and whether the sites' ledgers are whole."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
import typer

from fedpool.client.connection import Connection
from fedpool.errors import IbshellError, IntegrityError, NotFound, Refused, StorageFailed, UsageError
from fedpool.identity.keys import parse_public
from fedpool.identity.trust import Trust
from fedpool.leasing.coverage import Coverage
from fedpool.leasing.recorded import Replay
from fedpool.leasing.usage import LeaseUse, Outflow, Usage
from fedpool.ledger import merkle, notes
from fedpool.ledger.records import decode
from fedpool.ledger.verification import Finding, Verification, read_checkpoint
from fedpool.units import format_size, parse_duration
from fedpool.wire.membership import RosterShown, RosterWanted
from fedpool.wire.messages import Listing, Nothing
from ibshell import diagnostics, proofs, render, report
from ibshell.cli import options
from ibshell.exported import Exported, found_in, write
from ibshell.ledgers import PAGE, Ledger, seen_by
from ibshell.progress import Bar
from ibshell.render import Column
from ibshell.signature_checks import SignatureChecks

app = typer.Typer(no_args_is_help=True, help="What was done at every site, and whether the sites' ledgers are whole.")

FAULTS = 9
FOLLOW_S = 1.0
WITNESS_S = 15.0  # how long a proof waits for cosignatures
LOG = [
    Column("TIME", "time"),
    Column("SITE", "site"),
    Column("RECORD", "record"),
    Column("KIND", "kind"),
    Column("TENANT", "tenant"),
    Column("LEASE", "lease"),
    Column("GPUS", "gpus"),
    Column("WHAT", "what"),
]
VERIFIED = [
    Column("SITE", "site"),
    Column("RESULT", "result"),
    Column("RECORDS", "records"),
    Column("NEW", "new"),
    Column("LEASES", "leases"),
    Column("SIGNED", "signatures"),
    Column("ROOT", "root"),
    Column("WITNESSES", "witnesses"),
    Column("FAULTS", "faults"),
]

EXPORTED = [Column("SITE", "site"), Column("RECORDS", "records"), Column("FILES", "files"), Column("SIZE", "size")]

Result: TypeAlias = tuple[dict[str, Any], list[Finding]]
Sites = Annotated[list[str] | None, typer.Option("--site", help="Only this site; may be repeated.")]


def _names(connection: Connection, wanted: Sequence[str]) -> list[str]:
    """The sites to ask."""
    known = [site["name"] for site in connection.call("site.list", Nothing(), Listing).items]
    for name in wanted:
        if name not in known:
            raise NotFound(f"no site {name!r}", "ibshell site list shows them")
    return list(wanted) or known


def _since_ms(text: str) -> int:
    """A time, or how long ago, as milliseconds of Unix.

    Raises:
        UsageError: it is neither.
    """
    if not text:
        return 0
    try:
        return int(datetime.fromisoformat(text).astimezone().timestamp() * 1000)
    except ValueError:
        pass
    try:
        return int((time.time() - parse_duration(text)) * 1000)
    except UsageError:
        raise UsageError(f"--since {text} is no time", "write 2h, 3d, or 2026-12-24T22:00+01:00") from None


class _Filter:
    """What of the ledgers is wanted."""

    def __init__(self, tenant: str, lease: str, kind: str, since_ms: int) -> None:
        self.tenant = tenant
        self.lease = lease
        self.kind = kind
        self.since_ms = since_ms

    def matches(self, item: dict[str, Any]) -> bool:
        """Whether a record is."""
        return (
            (not self.tenant or item["tenant"] == self.tenant)
            and (not self.lease or item["lease"].startswith(self.lease))
            and (not self.kind or item["kind"] == self.kind or item["kind"].startswith(self.kind + "."))
        )


def _item(site: str, number: int, data: bytes) -> dict[str, Any]:
    """A record as a line of a listing, with the whole of it beside."""
    said = json.loads(data)
    kind = str(said.get("kind", ""))
    devices = sum(len(group["devices"]) for group in said.get("grants", ()))
    what = said.get("reason") or said.get("what") or ""
    tenant = said.get("tenant", "")
    if kind == "request":
        asked = json.loads(said["payload"])
        role, _, name = asked["principal"].partition("/")
        what, tenant = f"{asked['method']} signed by {asked['principal']}", name if role == "tenant" else ""
    if said.get("next_tenant"):
        what = f"to {said['next_tenant']}"
    elif kind == "round":
        what = f"round {said['round']}: {said['event']}, {said['bytes']} bytes, {said['form']}, {len(said['cohort'])} sites"
    elif kind == "login":
        what = f"{said['who']} with {said['software']}"
    elif kind in ("policy", "roster"):
        what = f"{said.get('number', '')} {said['digest'][:16]}".strip()
    elif not what and "for_ms" in said:
        what = f"for {render.cell('for_s', said['for_ms'] / 1000)}"
    return {
        "id": f"{site}:{number}",
        "time": datetime.fromtimestamp(said.get("time", 0) / 1000, UTC).isoformat(timespec="milliseconds")[:-6] + "Z",
        "site": site,
        "record": number,
        "kind": f"{kind}.{said['event']}" if kind in ("lease", "program", "round") else kind,
        "tenant": tenant,
        "lease": said.get("lease", ""),
        "gpus": devices or None,
        "what": what,
        "said": said,
    }


def _last(ledger: Ledger, wanted: _Filter, count: int) -> list[dict[str, Any]]:
    """The latest records that are wanted, read from the end."""
    found: list[dict[str, Any]] = []
    last = ledger.size
    while last > 0 and (not count or len(found) < count):
        first = max(0, last - PAGE)
        page = [_item(ledger.site, number, data) for number, data in ledger.records(first, last)]
        recent = [item for item in page if item["said"].get("time", 0) >= wanted.since_ms]
        found = [item for item in recent if wanted.matches(item)] + found
        if len(recent) < len(page):
            break  # times never go back
        last = first
    return found[-count:] if count else found


@app.command()
def log(
    site: Sites = None,
    tenant: Annotated[str, typer.Option("--tenant", "-t", help="Only this tenant's.")] = "",
    lease: Annotated[str, typer.Option("--lease", help="Only this lease, or those whose id begins so.")] = "",
    kind: Annotated[str, typer.Option("--kind", help="lease, lease.expire, cordoned, site.started, …")] = "",
    since: Annotated[str, typer.Option("--since", help="2h, 3d, or 2026-12-24T22:00+01:00.")] = "",
    last: Annotated[int, typer.Option("--last", "-n", min=0, help="The latest so many; 0 for all.")] = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is written, until Ctrl-C.")] = False,
    output: options.Output = None,
    strict: options.Strict = False,
) -> None:
    """Show what the sites have recorded, the latest last.

    Examples: ibshell ledger log --lease 7f3a
              ibshell ledger log --tenant oncology --since 2d -n 0 -o json
              ibshell ledger log --kind lease.expire --follow
    """
    wanted = _Filter(tenant, lease, kind, _since_ms(since))
    with options.hub() as connection:
        ledgers: list[Ledger] = []
        found: list[dict[str, Any]] = []
        errors: list[dict[str, str]] = []
        for name in _names(connection, site or ()):
            try:
                ledger = Ledger(connection, name)
                found += _last(ledger, wanted, last)
                ledgers.append(ledger)
            except IbshellError as error:
                errors.append({"site": name, "message": error.message})
        found.sort(key=lambda item: (item["said"].get("time", 0), item["site"], item["record"]))
        answer = {"items": found[-last:] if last else found, "errors": errors, "as_of": {}}
        options.show_listing(
            lambda: answer, LOG, "id", "ndjson" if follow and output == "json" else output, strict, False
        )
        if follow:
            _follow(ledgers, wanted, output)


def _follow(ledgers: Sequence[Ledger], wanted: _Filter, output: str | None) -> None:
    """Show what is written from now on."""
    seen = {ledger.site: ledger.size for ledger in ledgers}
    while True:
        time.sleep(FOLLOW_S)
        for ledger in ledgers:
            ledger.update()
            items = [_item(ledger.site, *record) for record in ledger.records(seen[ledger.site], ledger.size)]
            seen[ledger.site] = ledger.size
            answer = {"items": [item for item in items if wanted.matches(item)], "errors": [], "as_of": {}}
            form = "ndjson" if output in ("json", "yaml") else output
            text = render.listing(answer, LOG, "id", form, render.on_terminal())
            if form in (None, "table", "wide", "csv"):
                text = text.partition("\n")[2]  # without the heading
            render.write(text)


def _verified(
    ledger: Ledger | Exported,
    others: Mapping[str, Ledger],
    shown: Mapping[str, bytes],
    full: bool,
    bar: Bar,
    trust: Trust | None,
) -> Result:
    """Verify one site's ledger, and compare it with what others have seen of it."""
    seen = None if full else ledger.seen
    replay = Replay(seen.replayed if seen else None)
    with SignatureChecks(lambda: check.size - 1) as signatures:
        coverage = Coverage(
            trust.of_the_past() if trust is not None else None, seen.covered if seen else None, signatures
        )
        check = Verification(
            ledger.site,
            ledger.key,
            lambda record: [*replay.take(record), *coverage.take(record)],
            seen.verified if seen else None,
        )
        first, cosigners = check.size, _expect(check, ledger, others, shown)
        for number, data in ledger.records(first, ledger.size):
            check.take(data)
            if number % 1000 == 0:
                bar.at(number, ledger.site)
        for number, problem in signatures.finish():
            check.find(problem, number)
    check.finish(ledger.note)
    for problem in coverage.finish():
        check.find(problem)
    for size, root, said in check.earlier:
        try:
            ledger.require_consistent(size, root, check.size, check.root)
        except IntegrityError:
            check.find(f"the first {size} records are not {said}: there are two histories")
    if trust is not None and trust.sites.get(ledger.site, ledger.key.public) != ledger.key.public:
        check.find("it is signed by another key than the pool's roster names")
    if not check.faults:
        ledger.remember(check.state(), replay.state(), coverage.state())
    row = {
        "site": ledger.site,
        "result": "faults" if check.faults else "whole",
        "records": check.size,
        "new": check.size - first,
        "leases": replay.leases,
        "signatures": coverage.requests,
        "root": check.root.hex()[:16],
        "witnesses": f"{len(cosigners)} of {len(others)}" if others else None,
        "faults": check.faults,
        "unknown": check.unknown,
        "key": ledger.key.line(),
    }
    return row, check.findings


def _expect(
    check: Verification, ledger: Ledger | Exported, others: Mapping[str, Ledger], shown: Mapping[str, bytes]
) -> list[str]:
    """What was verified here before, what the site showed to others, what they cosigned; returns who has cosigned."""
    if ledger.seen is not None:
        before = ledger.seen.verified
        check.expect(before.size, merkle.Frontier(before.size, before.peaks).root(), "verified here before")
    for name, note in shown.items():
        checkpoint = read_checkpoint(note, ledger.key)
        check.expect(checkpoint.size, checkpoint.root, f"signed and shown to {name}")
    if not ledger.witnessed:
        return []
    checkpoint = read_checkpoint(ledger.witnessed, ledger.key)
    check.expect(checkpoint.size, checkpoint.root, "signed and witnessed")
    keys = [proofs.witness_key(other.key) for other in others.values()]
    return list(notes.signers(notes.decode(ledger.witnessed), keys))


def _unverified(name: str, error: IbshellError) -> Result:
    return {"site": name, "result": "unverified", "faults": 1}, [Finding(name, None, error.message)]


def _files(path: Path, key: str) -> Iterator[Result]:
    for directory in found_in(path):
        with Bar("verifying") as bar:
            try:
                ledger = Exported(directory, key)
                bar.total = ledger.size
                yield _verified(ledger, {}, {}, True, bar, None)
            except IbshellError as error:
                yield _unverified(str(directory), error)


def _proof(path: Path, key: str, authority: str) -> Iterator[Result]:
    """What `prove` wrote."""
    found = proofs.read(path)
    trust = proofs.trust_of(found, parse_public(authority, "--authority")) if authority else None
    if not found.ledgers:
        yield _unverified(str(path), IntegrityError(f"{path} proves nothing"))
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
        yield row, findings


def _asked(connection: Connection, wanted: Sequence[str], full: bool) -> Iterator[Result]:
    """All sites are asked what they have seen of those that are verified."""
    ledgers: dict[str, Ledger] = {}
    errors: dict[str, IbshellError] = {}
    seen: dict[str, dict[str, bytes]] = {}
    names = _names(connection, ())
    trust = None
    if connection.signer is not None:
        connection.signer.refresh(connection)
        trust = connection.signer.trust()
    for name in names:
        try:
            seen[name] = seen_by(connection, name)
        except IbshellError as error:
            errors[name] = error
    for name in seen:  # after what others have seen of it: it is no shorter
        try:
            ledgers[name] = Ledger(connection, name)
        except IbshellError as error:
            errors[name] = error
    for name in wanted or names:
        if name in errors:
            yield _unverified(name, errors[name])
            continue
        with Bar("verifying", ledgers[name].size) as bar:
            try:
                others = {other: one for other, one in ledgers.items() if other != name}
                shown = {other: known[name] for other, known in seen.items() if name in known}
                yield _verified(ledgers[name], others, shown, full, bar, trust)
            except IbshellError as error:
                yield _unverified(name, error)


@app.command()
def verify(
    path: Annotated[
        Path | None, typer.Argument(help="What export or prove wrote; without it the hub is asked.")
    ] = None,
    site: Sites = None,
    full: Annotated[bool, typer.Option("--full", help="From the first record, not only what is new here.")] = False,
    key: Annotated[str, typer.Option("--key", help="The key that must have signed it: NAME+ID+BASE64.")] = "",
    authority: Annotated[
        str, typer.Option("--authority", help="Public key of the pool's authority, for what prove wrote.")
    ] = "",
    output: options.Output = None,
) -> None:
    """Check every record, signature and rule of the sites' ledgers; exits with 9 when something is wrong.

    A site's key is remembered when it is first seen, and how far its ledger was verified: the next time begins there, and another
    key, or a past that has changed since, is a fault.

    Examples: ibshell ledger verify
              ibshell ledger verify --site hospital-07 -o json
              ibshell ledger verify archive/2026/hospital-07 --key "$KEY"
    """
    if path is not None:
        if site:
            raise UsageError("--site with files", "name the site's directory")
        results = list(_proof(path, key, authority) if path.is_file() else _files(path, key))
    else:
        if key or authority:
            raise UsageError("--key or --authority without files", "keys of sites that are asked are remembered")
        with options.hub() as connection:
            results = list(_asked(connection, _names(connection, site) if site else (), full))
    findings = [finding for _, found in results for finding in found]
    answer = {
        "items": [row for row, _ in results],
        "findings": [{"site": f.site, "record": f.record, "problem": f.problem} for f in findings],
        "errors": [],
        "as_of": {},
    }
    render.write(render.listing(answer, VERIFIED, "site", output, render.on_terminal()))
    if output not in ("json", "yaml"):
        for finding in findings:
            where = "" if finding.record is None else f" record {finding.record}:"
            render.write(f"{finding.site}:{where} {render.cell('problem', finding.problem)}\n")
    if findings:
        raise typer.Exit(FAULTS)


@app.command()
def prove(
    what: Annotated[
        str, typer.Argument(metavar="LEASE|RUN", help="A lease or a federation's run, or how its id begins.")
    ],
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Where to [default: ID.proof.json].")] = None,
) -> None:
    """Write what every site recorded about a lease, or about a federation and its rounds, to one file, with proofs.

    `ibshell ledger verify FILE --authority KEY` checks it without any hub, going by the pool's authority alone.

    Example: ibshell ledger prove 7f3a91c2 && ibshell ledger verify 7f3a91c2.proof.json --authority "ssh-ed25519 AAAA…"
    """
    with options.hub() as connection:
        ledgers = {name: Ledger(connection, name) for name in _names(connection, ())}
        about, found = proofs.concerned(ledgers, what)
        _await_witnesses([ledgers[name] for name in found], {name: max(records) for name, records in found.items()})
        parts = [
            proofs.part_of(ledgers[name], records, [other for other in ledgers.values() if other.site != name])
            for name, records in found.items()
        ]
        rosters = []
        if connection.signer is not None:
            rosters = connection.call("pool.roster", RosterWanted(0), RosterShown).rosters
    proof = proofs.Proof(proofs.FORMAT, about.lease, parts, about.run, rosters)
    path = file or Path(f"{about.run or about.lease}.proof.json")
    data = msgspec.json.format(msgspec.json.encode(proof), indent=1)
    try:
        with path.open("xb") as target:
            target.write(data + b"\n")
    except FileExistsError:
        raise Refused(f"{path} exists already", "name another file with --file") from None
    except OSError as error:
        raise StorageFailed(f"{path} cannot be written: {error.strerror}", "name another place with --file") from None
    count = sum(len(part.records) for part in parts)
    render.write(f"{path}: {count} records of {len(parts)} sites about {proof.about}\n")


def _await_witnesses(ledgers: Sequence[Ledger], last: Mapping[str, int]) -> None:
    """Give witnesses a little time for what has just been written."""
    until = time.monotonic() + WITNESS_S
    while late := [ledger for ledger in ledgers if ledger.witnessed_size <= last[ledger.site]]:
        if time.monotonic() > until:
            diagnostics.say(f"not witnessed yet: {', '.join(ledger.site for ledger in late)}")
            return
        time.sleep(FOLLOW_S)
        for ledger in late:
            ledger.update()


@app.command()
def export(
    directory: Annotated[Path, typer.Argument(help="Where a directory a site is made.")],
    site: Sites = None,
    output: options.Output = None,
) -> None:
    """Write the sites' ledgers to files that never change, in the layout of c2sp.org/tlog-tiles, sealed by their checkpoints.

    Examples: ibshell ledger export archive/2026
              ibshell ledger export archive/2026 --site hospital-07
    """
    items: list[dict[str, Any]] = []
    with options.hub() as connection:
        for name in _names(connection, site or ()):
            with Bar("writing") as bar:
                ledger = Ledger(connection, name)
                bar.total = ledger.size
                files, size = write(ledger, directory, bar)
            items.append({"site": name, "records": ledger.size, "files": files, "size": format_size(size)})
    answer = {"items": items, "errors": [], "as_of": {}}
    render.write(render.listing(answer, EXPORTED, "site", output, render.on_terminal()))


@app.command("report")
def report_(
    tenant: Annotated[str, typer.Option("--tenant", "-t", help="Only this tenant's.")] = "",
    since: Annotated[str, typer.Option("--since", help="2h, 3d, or 2026-12-24T22:00+01:00.")] = "30d",
    site: Sites = None,
    form: Annotated[str, typer.Option("--output", "-o", help="markdown, html or json.", metavar="FORM")] = "markdown",
) -> None:
    """Report who used which GPUs when, under which policy, and what left the sites in federations, in what form and how many bytes.

    It is made from the sites' ledgers alone, and names the records and checkpoints it rests on.

    Examples: ibshell ledger report --tenant oncology --since 30d > report.md
              ibshell ledger report --since 2026-12-01 -o html > report.html
    """
    if form not in report.FORMS:
        raise UsageError(f"no output form {form!r}", f"known: {', '.join(report.FORMS)}")
    since_ms, until_ms = _since_ms(since), int(time.time() * 1000)
    uses: dict[str, list[LeaseUse]] = {}
    left: dict[str, list[Outflow]] = {}
    ledgers: list[dict[str, Any]] = []
    with options.hub() as connection:
        for name in _names(connection, site or ()):
            usage = Usage(since_ms, until_ms)
            try:
                ledger = Ledger(connection, name)
                with Bar("reading", ledger.size) as bar:
                    root = _folded(ledger, usage, bar)
            except IbshellError as error:
                ledgers.append({"site": name, "missing": error.message})
                diagnostics.say(f"missing: {name}: {error.message}")
                continue
            uses[name] = usage.uses(until_ms)
            left[name] = usage.outflows()
            checkpoint = {
                "records": ledger.size,
                "root": root,
                "key": ledger.key.line(),
                "checkpoint": ledger.note.decode(),
            }
            ledgers.append({"site": name, **checkpoint, "missing": ""})
    whose = f"{tenant}: " if tenant else ""
    title = f"{whose}GPUs used from {report.stamp(since_ms)} to {report.stamp(until_ms)}"
    render.write(report.document(title, report.rows(uses, tenant), report.outflows(left, tenant), ledgers, form))


def _folded(ledger: Ledger, usage: Usage, bar: Bar) -> str:
    """Fold a ledger's records; returns their root, which is the signed one.

    Raises:
        IntegrityError: it is not.
    """
    tree = merkle.Frontier()
    for number, data in ledger.records(0, ledger.size):
        tree.append(merkle.leaf_hash(data))
        record = decode(data)
        if record is not None:
            usage.take(number, record)
        if number % 1000 == 0:
            bar.at(number, ledger.site)
    if tree.root() != read_checkpoint(ledger.note, ledger.key).root:
        raise IntegrityError(f"the records of {ledger.site} are not those it signed", "ibshell ledger verify --full")
    return tree.root().hex()
