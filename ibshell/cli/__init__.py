"""The command line: a table of nouns, each imported only when it is used, so that a listing starts in tens of milliseconds."""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fedpool.errors import IbshellError
from ibshell import diagnostics

# Noun or command -> module under ibshell.cli, and the line that `ibshell --help` shows.
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("demo", "The whole story on this machine: 16 hospitals train together, one report."),
    "up": ("pool", "Start a pool on this machine: a hub and simulated sites as real processes."),
    "down": ("pool", "End the pool on this machine."),
    "status": ("pool", "The pool in a few lines."),
    "pool": ("pools", "Make a pool, join one, choose one; who belongs to it."),
    "site": ("site", "The sites of the pool."),
    "node": ("node", "The nodes of every site."),
    "gpu": ("gpu", "The GPUs of every site."),
    "tenant": ("tenant", "Who may lease, and how much of the pool belongs to whom."),
    "lease": ("lease", "Take, show, renew and release GPUs across sites."),
    "fed": ("fed", "Federated training: run a plan, watch it, resume it."),
    "ledger": ("ledger", "What was done at every site, and whether the sites' ledgers are whole."),
    "doctor": ("doctor", "What is wrong with this set-up and how to mend it."),
    "bench": ("bench", "The project's own measurements on this machine."),
}
PLURALS = {f"{noun}s": noun for noun in ("site", "node", "gpu", "tenant", "lease")}


class LazyGroup(TyperGroup):
    """The top level: knows every command's name and imports none before it is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        """The names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import the one command that was called."""
        name = PLURALS.get(cmd_name, cmd_name)
        if name not in COMMANDS:
            return None
        module = importlib.import_module(f"ibshell.cli.{COMMANDS[name][0]}")
        command = typer.main.get_command(module.app)
        if isinstance(command, TyperGroup) and name in command.commands:
            return command.commands[name]
        command.name = name
        return command


app = typer.Typer(
    cls=LazyGroup,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="One terminal for GPU clusters that belong to different institutions.",
    epilog="Examples: ibshell demo | ibshell up --sites 4 | ibshell gpu list | ibshell fed run plan.toml",
)


def _version(wanted: bool) -> None:
    if wanted:
        from fedpool import __version__

        typer.echo(f"ibshell {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """One terminal for GPU clusters that belong to different institutions."""


def _wants_json() -> bool:
    """Whether errors are wanted as JSON: known before the options are parsed, since parsing itself may fail."""
    words = sys.argv[1:]
    return (
        any(pair in (("-o", "json"), ("--output", "json")) for pair in itertools.pairwise(words)) or "-ojson" in words
    )


def run() -> int:
    """Run a command; returns the exit status."""
    if diagnostics.is_plain(sys.stdout):
        os.environ.setdefault("TERM", "dumb")
    try:
        result = app(standalone_mode=False)
        return result if isinstance(result, int) else 0
    except IbshellError as error:
        return diagnostics.report(error, _wants_json())
    except (KeyboardInterrupt, typer.Abort):
        diagnostics.say("interrupted")
        return diagnostics.INTERRUPTED
    except typer.Exit as ended:
        return ended.exit_code
    except BrokenPipeError:
        diagnostics.quiet_pipe()
    except Exception as error:
        # Usage errors of the parser: they know how to show themselves and their exit status.
        show = getattr(error, "show", None)
        if show is None:
            raise
        show()
        return int(getattr(error, "exit_code", 2))
