"""Everything on stderr, and the exit codes. Messages are lower case without a full stop; the hint stands on its own line."""

import json
import os
import sys
from typing import NoReturn

from fedpool.errors import IbshellError

INTERRUPTED = 130


def is_plain(stream: object) -> bool:
    """Whether a stream must get no colour and no cursor movement."""
    isatty = getattr(stream, "isatty", lambda: False)
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb" or not isatty()


def say(text: str) -> None:
    """Talk: stderr."""
    print(text, file=sys.stderr, flush=True)


def report(error: IbshellError, as_json: bool = False) -> int:
    """Print an error; returns the exit status."""
    if as_json:
        detail = {"code": error.code, "message": error.message, "hint": error.hint}
        say(json.dumps({"error": detail}))
        return error.exit_status
    red, reset = ("", "") if is_plain(sys.stderr) else ("\x1b[31m", "\x1b[0m")
    say(f"{red}error:{reset} {error.message}")
    if error.hint:
        say(f"  {error.hint}")
    return error.exit_status


def quiet_pipe() -> NoReturn:
    """The reader of our output has gone (`| head`): end without a word."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    sys.exit(0)
