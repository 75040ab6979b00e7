"""Progress of a run: one line that is rewritten on a terminal, a line a round elsewhere. It goes to stderr."""

from __future__ import annotations

import shutil
import sys
from typing import Any

from fedpool.units import format_duration, format_size
from ibshell import diagnostics
from ibshell.render import cell

BAR_CELLS = 20


class Bar:
    """How far something has come: one line that is rewritten on a terminal, nothing elsewhere, gone at the end.

    Args:
        doing: what is going on.
        total: how much there is to do, 0 where it is not known yet.
    """

    def __init__(self, doing: str, total: int = 0) -> None:
        self.total = total
        self._doing = doing
        self._live = not diagnostics.is_plain(sys.stderr)
        self._ascii = "utf" not in (sys.stderr.encoding or "").lower()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def at(self, done: int, of: str = "") -> None:
        """It has come so far, with what `of` names."""
        if not self._live:
            return
        text = f"{bar(done, self.total, self._ascii)} {self._doing} {of} {done}/{self.total}"
        print(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}", end="", file=sys.stderr, flush=True)


def bar(done: int, total: int, ascii_only: bool) -> str:
    """`BAR_CELLS` cells of which some are full."""
    full, empty = ("#", ".") if ascii_only else ("━", "╌")
    filled = round(BAR_CELLS * done / max(1, total))
    return full * filled + empty * (BAR_CELLS - filled)


class Progress:
    """Shows a run's events.

    Args:
        rounds: how many the plan has.
    """

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self._live = not diagnostics.is_plain(sys.stderr)
        self._ascii = "utf" not in (sys.stderr.encoding or "").lower()
        self._done = 0
        self._cohort = 0
        self._phase = ""
        self._answered = 0
        self._metrics: dict[str, float] = {}
        self._bytes = 0
        self._round_times: list[float] = []
        self._out: set[str] = set()

    def event(self, event: dict[str, Any]) -> None:
        """Take in one event."""
        match event["kind"]:
            case "leasing":
                self.say(f"leasing {event['gpus']} GPUs at {event['sites']} sites")
            case "leased":
                self.say(f"lease {event['lease']}: {event['gpus']} GPUs at {event['sites']} sites")
            case "round":
                self._cohort = event["cohort"]
                self._rounds = event["rounds"]
            case "phase":
                self._phase, self._answered = event["phase"], 0
                self._draw()
            case "answered":
                self._answered += 1
                self._draw()
            case "site_out":
                # A site that stays away is told once, not every round.
                if event["site"] not in self._out:
                    self.say(f"round {event['round']}: {event['site']} is out ({event['phase']}): {event['reason']}")
                self._out.add(event["site"])
            case "aggregated":
                self._done = event["round"]
                self._metrics = event["metrics"]
                self._bytes += event["bytes_up"] + event["bytes_down"]
                self._round_times.append(event["seconds"])
                for site in sorted(self._out & set(event["survivors"])):
                    self.say(f"round {event['round']}: {site} is back")
                    self._out.discard(site)
                if not self._live:
                    does = " evaluated" if event["does"] == "evaluate" else ""
                    lost = f", without {', '.join(event['lost'])}" if event["lost"] else ""
                    diagnostics.say(
                        f"round {event['round']}/{self._rounds}{does}: {len(event['survivors'])} sites{lost}, "
                        f"{cell('metrics', self._metrics)}, {event['seconds']:.2f} s"
                    )
                self._draw()
            case "resumed":
                self.say("resumed")

    def _left(self) -> str:
        if not self._round_times:
            return ""
        recent = self._round_times[-5:]
        return f", {format_duration(max(0.1, (self._rounds - self._done) * sum(recent) / len(recent)))} left"

    def _draw(self) -> None:
        if not self._live:
            return
        text = (
            f"{bar(self._done, self._rounds, self._ascii)} round {min(self._done + 1, self._rounds)}/{self._rounds} "
            f"{self._phase} {self._answered}/{self._cohort} {cell('metrics', self._metrics)} "
            f"{format_size(self._bytes)}{self._left()}"
        )
        columns = shutil.get_terminal_size().columns
        print(f"\r\x1b[K{text[: columns - 1]}", end="", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """Print a line of its own above the progress."""
        if self._live:
            print("\r\x1b[K", end="", file=sys.stderr)
        diagnostics.say("".join(c if c.isprintable() else "?" for c in text))

    def close(self) -> None:
        """Leave the line."""
        if self._live:
            print(file=sys.stderr, flush=True)
