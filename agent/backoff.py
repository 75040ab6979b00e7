"""How long to wait before dialling again: doubling, and shortened at random so that sites do not return all at once."""

import random

FIRST_S = 0.2
LAST_S = 2.0


def delay(attempt: int, chance: random.Random) -> float:
    """Seconds to wait before attempt 1, 2, …"""
    longest: float = min(LAST_S, FIRST_S * 2 ** min(attempt, 10))
    return longest * chance.uniform(0.5, 1.0)
