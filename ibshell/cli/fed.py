"""`ibshell fed`: federated training."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from fedpool.client.acting import act
from fedpool.client.connection import Connection
from fedpool.errors import NotAuthorised, NotFound
from fedpool.federation import plan as plans
from fedpool.federation.plan import Plan
from fedpool.wire.messages import (
    ById,
    Events,
    EventsWanted,
    ModelPiece,
    ModelWanted,
    RunAgain,
    RunView,
    RunWanted,
    Upload,
    UploadState,
)
from ibshell import diagnostics, render
from ibshell.cli import options
from ibshell.progress import Progress
from ibshell.render import Column

app = typer.Typer(no_args_is_help=True, help="Federated training: run a plan, watch it, resume it.")

PIECE_BYTES = 512 * 1024
FAILED = 1

COLUMNS = [
    Column("RUN", "id"),
    Column("NAME", "name"),
    Column("TENANT", "tenant"),
    Column("STATE", "state"),
    Column("ROUND", "round"),
    Column("OF", "rounds"),
    Column("SITES", "sites"),
    Column("METRICS", "metrics"),
    Column("LEASE", "lease", wide=True),
    Column("REASON", "reason", wide=True),
]
RANGES = [
    Column("VALUES", "values"),
    Column("CLIP", "clip"),
    Column("STEP", "step"),
    Column("LEVELS", "levels"),
    Column("ERROR_BOUND", "error_bound"),
]
RunArgument = Annotated[str, typer.Argument(help="Run id, a unique beginning of it, or its name.")]
Out = Annotated[Path | None, typer.Option("--out", help="Directory for the model and the history (default: NAME-ID).")]


def send(connection: Connection, path: Path, key: str = "") -> str:
    """Upload a file to the hub; returns its id, which with an idempotency key follows from the content."""
    try:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest() if key else ""
            upload = hashlib.sha256(f"{key}/{content}".encode()).hexdigest() if key else secrets.token_hex(16)
            file.seek(0)
            offset = 0
            while True:
                data = file.read(PIECE_BYTES)
                last = len(data) < PIECE_BYTES
                connection.call("upload", Upload(upload, offset, data, last), UploadState)
                offset += len(data)
                if last:
                    return upload
    except FileNotFoundError:
        raise _without_initial(path) from None


def foreseen(plan: Plan, initial: Path) -> dict[str, Any]:
    """What the plan's rounds will be like; nobody is asked and nothing is leased.

    Raises:
        NotFound, UsageError: there are no initial parameters, or they cannot be averaged.
    """
    import numpy as np

    from fedpool.federation import parameters
    from fedpool.federation.preview import preview

    if not initial.is_file():
        raise _without_initial(initial)
    file = np.memmap(initial, np.uint8, "r") if initial.stat().st_size else np.empty(0, np.uint8)
    layout = parameters.layout(file, str(initial), plan.exclude)
    return options.as_data(preview(plan, layout))


def _preview(found: dict[str, Any], output: str | None) -> None:
    if output is None:
        ranges = {"items": found.pop("ranges"), "errors": [], "as_of": {}}
        render.write(render.record(found, None) + "\n")
        render.write(render.listing(ranges, RANGES, "clip", None, render.on_terminal()))
    else:
        render.write(render.record(found, output))


def _without_initial(path: Path) -> NotFound:
    return NotFound(f"no initial parameters at {path}", "the plan's `initial` is a path beside the plan")


def run_wanted(text: str, upload: str, key: str = "") -> RunWanted:
    """What is asked, and signed, to run a plan.

    Args:
        text: of the plan.
        upload: its initial parameters.
        key: idempotency key, which gives the ids of run and lease; or "".
    """
    plan = plans.parse(text)
    run, lease = (
        hashlib.sha256(f"{plan.tenant}/{key}/{what}".encode()).hexdigest()[:8] if key else secrets.token_hex(4)
        for what in ("run", "lease")
    )
    return RunWanted(text, upload, run, plan.lease_wanted(lease), plan.longest_s)


def run_again(connection: Connection, view: RunView) -> RunAgain:
    """What is asked, and signed, to go on with a run: its plan as its tenant has signed it before, whatever the hub shows.

    Raises:
        NotAuthorised: nobody who may has signed what the hub shows.
    """
    if connection.signer is None:
        return RunAgain(view.id)
    if view.request is None:
        raise NotAuthorised(
            f"run {view.id} was begun before requests were signed", "start it anew: ibshell fed run plan.toml"
        )
    text = connection.signer.signed_plan(view.request, view.tenant)
    plan = plans.parse(text)
    return RunAgain(view.id, text, plan.lease_wanted(secrets.token_hex(4), view.sites), plan.longest_s)


def fetch_model(connection: Connection, run: str, path: Path, number: int | None = None) -> str:
    """Download a round's global parameters; returns their SHA-256, checked.

    Raises:
        IntegrityError: what arrived is something else.
    """
    from fedpool.errors import IntegrityError

    arriving, digest, offset = path.with_suffix(".part"), hashlib.sha256(), 0
    with arriving.open("wb") as file:
        while True:
            piece = connection.call("fed.model", ModelWanted(run, offset, PIECE_BYTES, number), ModelPiece)
            file.write(piece.data)
            digest.update(piece.data)
            offset += len(piece.data)
            if offset >= piece.size:
                break
    if digest.hexdigest() != piece.sha256:
        raise IntegrityError(
            f"the model of run {run} arrived damaged", "fetch it again: ibshell fed show RUN --out DIR"
        )
    arriving.replace(path)
    return piece.sha256


Seen = Callable[[dict[str, Any], Callable[[str], None]], None]


def watch(connection: Connection, run: RunView, seen: Seen = lambda event, say: None) -> RunView:
    """Follow a run to its end, with live progress on stderr; `seen` gets every event, and a way to say something."""
    progress = Progress(run.rounds)
    after = 0
    try:
        while True:
            events = connection.call("fed.events", EventsWanted(run.id, after, 10.0), Events)
            after = events.next
            for event in events.items:
                progress.event(event)
                seen(event, progress.say)
            if not events.items and events.state not in ("running",):
                break
    finally:
        progress.close()
    return connection.call("fed.show", ById(run.id), RunView)


def collect(connection: Connection, run: RunView, directory: Path) -> None:
    """Write the latest global parameters, the best ones if the plan says what that is, and the history."""
    directory.mkdir(parents=True, exist_ok=True)
    fetch_model(connection, run.id, directory / "model.safetensors")
    if run.best is not None:
        fetch_model(connection, run.id, directory / "best.safetensors", run.best.model)
    history = {"run": run.id, "name": run.name, "tenant": run.tenant, "state": run.state, "rounds": run.history}
    (directory / "history.json").write_text(json.dumps(history, indent=2) + "\n")


def _data(view: RunView) -> dict[str, Any]:
    """A run as it is printed: without what was signed, which the ledgers show."""
    data = options.as_data(view)
    data.pop("request", None)
    return data


def _follow(connection: Connection, run: RunView, out: Path | None, output: str | None) -> None:
    try:
        final = watch(connection, run)
    except KeyboardInterrupt:
        diagnostics.say(
            f"detached; run {run.id} goes on. Watch it: ibshell fed show {run.id} --watch; end it: ibshell fed stop {run.id}"
        )
        raise
    directory = out or Path(f"{final.name}-{final.id}")
    collect(connection, final, directory)
    if output is not None:
        render.write(render.record(_data(final), output))
    else:
        last = final.history[-1]["metrics"] if final.history else {}
        what = f" ({render.cell('metrics', last)})" if last else ""
        render.write(f"run {final.id} {final.state} after round {final.round} of {final.rounds}{what}; {directory}/\n")
        if final.best is not None:
            value = render.cell("metrics", {final.best.metric: final.best.value})
            render.write(f"best: {value} in round {final.best.model}, best.safetensors\n")
        if final.state == "finished" and final.reason:
            diagnostics.say(final.reason)
    if final.state != "finished":
        if output is None:
            diagnostics.say(f"reason: {final.reason}")
            diagnostics.say(f"next: ibshell fed resume {final.id}")
        raise typer.Exit(FAILED)


@app.command()
def run(
    plan: Annotated[Path, typer.Argument(help="Plan file (TOML).")],
    out: Out = None,
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait for the end.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only check it, and say what its rounds will be like.")
    ] = False,
    output: options.Output = None,
    idempotency_key: Annotated[str, typer.Option("--idempotency-key")] = "",
) -> None:
    """Run a plan: lease, train round by round under secure aggregation, then fetch model and history.

    Examples: ibshell fed run plan.toml | ibshell fed run plan.toml --detach -o name | ibshell fed run plan.toml --dry-run
    """
    try:
        text = plan.read_text()
    except (FileNotFoundError, IsADirectoryError):
        raise NotFound(f"no plan at {plan}") from None
    parsed = plans.parse(text, str(plan))
    if dry_run:
        _preview(foreseen(parsed, plan.parent / parsed.initial), output)
        return
    with options.hub() as connection:
        upload = send(connection, plan.parent / parsed.initial, idempotency_key)
        started = act(connection, "fed.run", run_wanted(text, upload, idempotency_key), RunView, key=idempotency_key)
        if detach:
            render.write(render.record(_data(started), output or "name"))
            return
        _follow(connection, started, out, output)


@app.command("list")
def list_(output: options.Output = None, strict: options.Strict = False, watch: options.Watch = False) -> None:
    """List the runs.

    Example: ibshell fed list
    """
    options.show_listing(lambda: options.ask_listing("fed.list"), COLUMNS, "id", output, strict, watch)


@app.command()
def show(
    run: RunArgument,
    out: Out = None,
    watch_: Annotated[bool, typer.Option("--watch", help="Follow it to its end.")] = False,
    output: options.Output = None,
) -> None:
    """Show a run and its rounds; with --out also fetch its latest model and history.

    Examples: ibshell fed show 7f3a | ibshell fed show 7f3a --watch | ibshell fed show 7f3a --out result
    """
    with options.hub() as connection:
        view = connection.call("fed.show", ById(run), RunView)
        if watch_ and view.state == "running":
            view = watch(connection, view)
        if out is not None:
            collect(connection, view, out)
    data = _data(view)
    if output not in (None, "table", "wide"):
        render.write(render.record(data, output))
        return
    history = data.pop("history")
    render.write(render.record({k: v for k, v in data.items() if v != ""}, output))
    rows = [{**entry, "sites": len(entry["survivors"]), "lost": list(entry["lost"])} for entry in history]
    columns = [
        Column(key.upper(), key) for key in ("round", "sites", "lost", "metrics", "seconds", "bytes_up", "bytes_down")
    ]
    render.write("\n" + render.table(columns, rows, render.on_terminal()))
    if view.state == "interrupted":
        diagnostics.say(f"its hub restarted; go on with: ibshell fed resume {view.id}")


@app.command()
def resume(
    run: RunArgument,
    out: Out = None,
    detach: Annotated[bool, typer.Option("--detach", help="Do not wait for the end.")] = False,
    output: options.Output = None,
) -> None:
    """Go on with a run that failed, was stopped, or whose hub restarted; a round in progress is continued, not repeated.

    Example: ibshell fed resume 7f3a
    """
    with options.hub() as connection:
        view = act(
            connection, "fed.resume", run_again(connection, connection.call("fed.show", ById(run), RunView)), RunView
        )
        if detach:
            render.write(render.record(_data(view), output or "name"))
            return
        _follow(connection, view, out, output)


@app.command()
def stop(run: RunArgument, output: options.Output = None) -> None:
    """Stop a run: its programs end, its lease is released; it can be resumed.

    Example: ibshell fed stop 7f3a
    """
    with options.hub() as connection:
        view = act(connection, "fed.stop", ById(run), RunView)
    if output is None:
        render.write(f"run {view.id} is {view.state}\n")
    else:
        render.write(render.record(_data(view), output))
