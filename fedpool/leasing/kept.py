"""What was signed about leases, kept at the hub to be shown to their sites, which obey nothing else that gives a right."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from fedpool.leasing.requests import Hold, LeaseEvent, Notify, Release, Renew, Resize, Transfer
from fedpool.records import Signed

GRANT, RESIZE, OFFER, ACCEPT, END = "grant", "resize", "offer", "accept", "end"
# What covers what a site is asked: the first of these that was signed.
_COVERED_BY: dict[type[LeaseEvent], tuple[str, ...]] = {
    Hold: (GRANT,),
    Renew: (GRANT,),
    Resize: (RESIZE, GRANT),
    Transfer: (ACCEPT,),
    Release: (END,),
    Notify: (END,),
}


class RequestKept(msgspec.Struct, frozen=True, tag="request.kept"):
    """What was signed about a lease.

    Attributes:
        lease: which.
        use: GRANT, RESIZE, OFFER, ACCEPT or END; a later one takes the place of an earlier one.
        signed: the request.
    """

    lease: str
    use: str
    signed: Signed


def kept(lease: str, use: str, signed: Signed | None) -> tuple[RequestKept, ...]:
    """A request to be kept, if there is one."""
    return () if signed is None else (RequestKept(lease, use, signed),)


class KeptRequests:
    """The requests about leases that live."""

    def __init__(self) -> None:
        self._of: dict[str, dict[str, Signed]] = {}

    def apply(self, entry: RequestKept) -> None:
        """Fold one durable entry into the state."""
        self._of.setdefault(entry.lease, {})[entry.use] = entry.signed

    def state(self) -> tuple[RequestKept, ...]:
        """All of them."""
        return tuple(RequestKept(lease, use, signed) for lease, of in self._of.items() for use, signed in of.items())

    def restore(self, entries: Iterable[RequestKept]) -> None:
        """Have these and no others."""
        self._of.clear()
        for entry in entries:
            self.apply(entry)

    def drop(self, lease: str) -> None:
        """A lease is over."""
        self._of.pop(lease, None)

    def shown(self, event: LeaseEvent) -> LeaseEvent:
        """What a site is asked, with what was signed about it."""
        of = self._of.get(event.lease)
        uses = _COVERED_BY.get(type(event), ())
        if not of or getattr(event, "request", None) is not None:
            return event
        if isinstance(event, Transfer):
            event = msgspec.structs.replace(event, offer=of.get(OFFER))
        signed = next((of[use] for use in uses if use in of), None)
        return event if signed is None else msgspec.structs.replace(event, request=signed)
