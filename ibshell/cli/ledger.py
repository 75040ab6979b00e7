"""`ibshell ledger`: what was done at every site, and whether the sites' ledgers are whole."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from fedpool.client.connection import Connection
from fedpool.errors import IbshellError, IntegrityError, Refused, StorageFailed, UsageError
from fedpool.leasing.usage import LeaseUse, Outflow, Usage
from fedpool.ledger import merkle
from fedpool.ledger.records import decode
from fedpool.ledger.retention import is_forgotten, leaf_of, told
from fedpool.ledger.verification import read_checkpoint
from fedpool.records import Signed
from fedpool.units import format_size, parse_duration
from fedpool.wire.membership import RosterShown, RosterWanted
from ibshell import diagnostics, render
from ibshell.cli import options
from ibshell.ledger import proofs, report
from ibshell.ledger.asked import PAGE, Ledger, site_names
from ibshell.ledger.exported import write, write_rosters
from ibshell.ledger.lines import line
from ibshell.ledger.verifying import at_sites, in_files, in_proof
from ibshell.progress import Bar
from ibshell.render import Column

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
    Column("FORGOTTEN", "forgotten", wide=True),
    Column("LEASES", "leases"),
    Column("SIGNED", "signatures"),
    Column("ROOT", "root"),
    Column("WITNESSES", "witnesses"),
    Column("FAULTS", "faults"),
]

EXPORTED = [Column("SITE", "site"), Column("RECORDS", "records"), Column("FILES", "files"), Column("SIZE", "size")]

Sites = Annotated[list[str] | None, typer.Option("--site", help="Only this site; may be repeated.")]


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


def _last(ledger: Ledger, wanted: _Filter, count: int) -> list[dict[str, Any]]:
    """The latest records that are wanted, read from the end."""
    found: list[dict[str, Any]] = []
    last = ledger.size
    while last > 0 and (not count or len(found) < count):
        first = max(0, last - PAGE)
        there = [said for said in ledger.records(first, last) if not is_forgotten(said[1])]
        page = [line(ledger.site, number, data) for number, data in there]
        recent = [item for item in page if item["said"].get("time", 0) >= wanted.since_ms]
        found = [item for item in recent if wanted.matches(item)] + found
        if len(recent) < last - first:
            break  # times never go back, and what is forgotten is older still
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
        for name in site_names(connection, site or ()):
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
            items = [line(ledger.site, *record) for record in ledger.records(seen[ledger.site], ledger.size)]
            seen[ledger.site] = ledger.size
            answer = {"items": [item for item in items if wanted.matches(item)], "errors": [], "as_of": {}}
            form = "ndjson" if output in ("json", "yaml") else output
            text = render.listing(answer, LOG, "id", form, render.on_terminal())
            if form in (None, "table", "wide", "csv"):
                text = text.partition("\n")[2]  # without the heading
            render.write(text)


@app.command()
def verify(
    path: Annotated[
        Path | None, typer.Argument(help="What export or prove wrote; without it the hub is asked.")
    ] = None,
    site: Sites = None,
    full: Annotated[bool, typer.Option("--full", help="From the first record, not only what is new here.")] = False,
    key: Annotated[str, typer.Option("--key", help="The key that must have signed it: NAME+ID+BASE64.")] = "",
    authority: Annotated[
        str, typer.Option("--authority", help="Public key of the pool's authority, for files that are verified.")
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
        results = (in_proof if path.is_file() else in_files)(path, key, authority)
    else:
        if key or authority:
            raise UsageError("--key or --authority without files", "keys of sites that are asked are remembered")
        with options.hub() as connection:
            results = at_sites(connection, site_names(connection, site) if site else (), full)
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
        ledgers = {name: Ledger(connection, name) for name in site_names(connection, ())}
        about, found = proofs.concerned(ledgers, what)
        _await_witnesses([ledgers[name] for name in found], {name: max(records) for name, records in found.items()})
        parts = [
            proofs.part_of(ledgers[name], records, [other for other in ledgers.values() if other.site != name])
            for name, records in found.items()
        ]
        rosters = _rosters(connection)
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


def _rosters(connection: Connection) -> list[Signed]:
    """What the pool's authorities have signed about who belongs to it; none where there are no authorities."""
    if connection.signer is None:
        return []
    return connection.call("pool.roster", RosterWanted(0), RosterShown).rosters


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
        everybody = site_names(connection, ())
        ledgers = [Ledger(connection, name) for name in (site_names(connection, site) if site else everybody)]
        if len(everybody) > 1:
            _await_witnesses(ledgers, {ledger.site: ledger.size - 1 for ledger in ledgers})
        write_rosters(directory, _rosters(connection))
        trust = None
        if connection.signer is not None:  # the roster knows the keys of witnesses that are away, too
            connection.signer.refresh(connection)
            trust = connection.signer.trust()
        for ledger in ledgers:
            keys = [proofs.witness_key(other.key) for other in ledgers if other is not ledger]
            with Bar("writing") as bar:
                witnesses = keys if trust is None else proofs.witness_keys(ledger.site, trust)
                written = write(ledger, directory, witnesses, bar)
            size = format_size(written.size)
            items.append({"site": ledger.site, "records": written.records, "files": written.files, "size": size})
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
        for name in site_names(connection, site or ()):
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

    def hashed() -> Iterator[tuple[int, bytes]]:
        for number, data in ledger.records(0, ledger.size):
            tree.append(leaf_of(data))
            yield number, data
            if number % 1000 == 0:
                bar.at(number, ledger.site)

    for number, data in told(hashed()):
        record = decode(data)
        if record is not None:
            usage.take(number, record)
    if tree.root() != read_checkpoint(ledger.note, ledger.key).root:
        raise IntegrityError(f"the records of {ledger.site} are not those it signed", "ibshell ledger verify --full")
    return tree.root().hex()
