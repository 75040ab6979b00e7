"""Requests in words, tried against a site's policy before anybody asks."""

import shlex
import time
from datetime import UTC, datetime
from typing import Any

from fedpool.errors import UsageError
from fedpool.leasing import policy as policies
from fedpool.units import parse_duration

WORDS = ("tenant", "gpus", "type", "for", "at", "program", "data")


def tried(text: str, where: str, words: str) -> dict[str, Any]:
    """What a policy says to a request.

    Args:
        text: of the policy.
        where: what to call it in messages.
        words: `tenant=oncology gpus=4 type=h100 for=2h at=2026-12-02T22:00Z program="python train.py" data=mammography`.

    Raises:
        UsageError: one of the two cannot be read.
    """
    policy = policies.parse(text, where)
    given: dict[str, str] = {}
    try:
        pairs = shlex.split(words)
    except ValueError as error:
        raise UsageError(f"{words[:200]!r}: {error}", "program='python train.py'") from None
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or key not in WORDS:
            raise UsageError(f"{pair!r} in a request", f"known are {', '.join(f'{word}=' for word in WORDS)}")
        given[key] = value
    try:
        program = shlex.split(given.get("program", ""))
    except ValueError as error:
        raise UsageError(f"program={given['program'][:200]!r}: {error}") from None
    if not given:
        return {"request": "", "allowed": True, "problems": []}
    problems: list[str] = []
    if "tenant" in given:
        try:
            gpus = int(given.get("gpus", "1"))
            unix = _unix(given["at"]) if "at" in given else time.time()
        except ValueError as error:
            raise UsageError(f"{words!r}: {error}", "gpus=4 at=2026-12-02T22:00Z") from None
        kinds = given["type"].split(",") if "type" in given else []
        problems += policy.lease_problems(given["tenant"], gpus, kinds, parse_duration(given.get("for", "1h")), unix)
    if "program" in given or "data" in given:
        problems += policy.program_problems(program, given["data"].split(",") if "data" in given else [])
    return {"request": words, "allowed": not problems, "problems": problems}


def _unix(text: str) -> float:
    at = datetime.fromisoformat(text)
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
