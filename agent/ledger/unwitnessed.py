"""How long a site's ledger has said something for which no majority of witnesses vouches.

Only time counts in which a hub was connected, which carries checkpoints to witnesses: after a day without one, they have as long as
always. Whoever wants to use that has to be away, and gets nothing meanwhile.
"""

from agent.ports import Clock


class Unwitnessed:
    """See the module.

    Args:
        clock: the machine's.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._hubs = 0
        self._ran = 0.0  # seconds with a hub, until `_at`
        self._at = 0.0
        self._since: float | None = None  # what the watch showed when the first record was written that counts
        self._signed: dict[int, float] = {}  # {size of a checkpoint: what the watch showed when it was signed}

    def _watch(self) -> float:
        return self._ran + (self._clock.now() - self._at if self._hubs else 0.0)

    def hub_came(self) -> None:
        """A hub has connected."""
        self._ran, self._at = self._watch(), self._clock.now()
        self._hubs += 1

    def hub_left(self) -> None:
        """One is gone."""
        self._ran, self._at = self._watch(), self._clock.now()
        self._hubs -= 1

    def wrote(self) -> None:
        """There is something new."""
        if self._since is None:
            self._since = self._watch()

    def signed(self, size: int) -> None:
        """A checkpoint was signed: what comes beyond it is written later."""
        self._signed[size] = self._watch()

    def witnessed(self, size: int, recorded: int) -> None:
        """A majority vouches for so many of all records."""
        if size >= recorded:
            self._since = None
            self._signed.clear()
            return
        covered = [of for of in self._signed if of <= size]
        if covered:
            self._since = max(self._since or 0.0, self._signed[max(covered)])
            self._signed = {of: at for of, at in self._signed.items() if of >= max(covered)}
        elif self._since is None:
            self._since = self._watch()

    @property
    def seconds(self) -> float:
        """How long; 0 for not at all."""
        return 0.0 if self._since is None else self._watch() - self._since
