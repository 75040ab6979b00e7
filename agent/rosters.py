"""The roster a party goes by: kept in its store, so that a restart forgets nobody who is believed no longer."""

import hashlib
import logging
from collections.abc import Awaitable, Callable

import msgspec

from agent.ports import Store
from fedpool.errors import StorageFailed
from fedpool.identity.roster import Roster, read
from fedpool.identity.trust import Trust
from fedpool.records import Signed

log = logging.getLogger(__name__)

STREAM = "roster"


class RosterKept(msgspec.Struct, frozen=True, tag="roster.kept"):
    """A roster that was adopted.

    Attributes:
        chain: the rosters before it at which the authorities changed: who was away believes the latest by them.
    """

    signed: Signed
    chain: tuple[Signed, ...] = ()


class Rosters:
    """One party's.

    Args:
        trust: what goes by it.
        store: where it is kept.
        adopted: told of a new one once it is durable.

    Attributes:
        latest: as it was signed, None before the first.
        chain: see `RosterKept`.
    """

    def __init__(self, trust: Trust, store: Store, adopted: Callable[[Roster, str], Awaitable[None]]) -> None:
        self._trust = trust
        self._store = store
        self._adopted = adopted
        self.latest: Signed | None = None
        self.chain: tuple[Signed, ...] = ()

    def since(self, number: int) -> list[Signed]:
        """What somebody needs who goes by roster `number`, in order."""
        latest = () if self.latest is None or self._trust.number <= number else (self.latest,)
        return [one for one in self.chain if read(one).number > number] + list(latest)

    async def recover(self) -> None:
        """Go by the latest again."""
        for entry in await self._store.read(STREAM, RosterKept):
            self._trust.restore(entry.signed)
            self.latest, self.chain = entry.signed, entry.chain

    async def take(self, signed: Signed) -> Roster | None:
        """Go by a roster; None where it is the one that is known.

        Raises:
            NotAuthorised, Refused, UsageError: it is not believed.
            StorageFailed: it could not be kept; it is gone by all the same until the next start.
        """
        if self.latest is not None and signed.payload == self.latest.payload:
            return None
        before, known = self._trust.authorities, self.latest
        roster = self._trust.adopt(signed)
        if self._trust.authorities != before and known is not None and known not in self.chain:
            self.chain = (*self.chain, known)
        self.latest = signed
        try:
            await self._store.append(STREAM, [RosterKept(signed, self.chain)], snapshot=True)
        except StorageFailed:
            await self._store.read(STREAM, RosterKept)  # the stream takes nothing before
            raise
        log.info("roster %d: %d sites, %d authorities", roster.number, len(roster.sites), len(roster.authorities))
        await self._adopted(roster, hashlib.sha256(signed.payload).hexdigest())
        return roster
