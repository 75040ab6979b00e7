"""The life of a lease, as data.

    requested ── queued ── held ── active ── ending ── released | expired | revoked | failed
         └─────────┴────────┴────▶ aborted

`requested` is written before any site is asked, so an interrupted request is never lost. `queued` waits; while it is being
placed it stays queued, and a refusal leaves it there. `held` means the hub has decided to commit: from here it asks every site
until it acknowledges or refuses. `active` is said only when every site has acknowledged; a lease may be renewed, grow, shrink,
change hands or be given notice and stays active. `ending` lasts until every site has confirmed that the lease's processes are
gone. A site knows the subset it needs: a hold lapses into `aborted` by itself, an active lease into `ending` and then `expired`.
"""

from typing import Final

LIVE: Final = ("requested", "queued", "held", "active", "ending")
FINAL: Final = ("released", "expired", "revoked", "failed", "aborted")

# (state, event) -> state. What is not here is illegal and changes nothing.
TRANSITIONS: Final[dict[tuple[str, str], str]] = {
    ("requested", "wait"): "queued",
    ("requested", "hold"): "held",
    ("requested", "abort"): "aborted",
    ("queued", "hold"): "held",
    ("queued", "abort"): "aborted",
    ("queued", "wait"): "queued",
    ("held", "commit"): "active",
    ("held", "abort"): "aborted",
    ("held", "end"): "ending",
    ("active", "renew"): "active",
    ("active", "resize"): "active",
    ("active", "notify"): "active",
    ("active", "transfer"): "active",
    ("active", "end"): "ending",
    ("ending", "release"): "released",
    ("ending", "expire"): "expired",
    ("ending", "revoke"): "revoked",
    ("ending", "fail"): "failed",
}

# How an ending lease ends, by the reason it began to end.
ENDINGS: Final = {"released": "release", "expired": "expire", "revoked": "revoke", "failed": "fail"}


def after(state: str, event: str) -> str | None:
    """The state that follows, or None where the event is illegal."""
    return TRANSITIONS.get((state, event))


def progress(state: str) -> int:
    """How far a lease in this state has come; of two reports about one lease, the one further on is the newer."""
    return LIVE.index(state) if state in LIVE else len(LIVE)
