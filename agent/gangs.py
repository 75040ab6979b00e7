"""Drives the hub's leases: one machine a lease, every decision durable before the sites hear of it."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping

import msgspec

from agent import clock
from agent.links import SiteLink
from agent.store.sqlite import SqliteStore
from fedpool.errors import (
    IbshellError,
    Insufficient,
    NotFound,
    Refused,
    StaleToken,
    TimedOut,
    Unreachable,
    UsageError,
    from_wire,
)
from fedpool.leasing import lease as life
from fedpool.leasing.gang import (
    HOLD_TTL_S,
    Ask,
    EndAsked,
    Gang,
    GangDecision,
    GangEvent,
    Interrupted,
    LeaseRecorded,
    PartCommitted,
    PartEnded,
    PartHeld,
    PartRefused,
    site_says,
)
from fedpool.leasing.grants import Abort, Commit, Hold, Release, Renew
from fedpool.records import Lease, Part, SiteLease
from fedpool.wire.messages import LeaseView, LeaseWanted

log = logging.getLogger(__name__)

STREAM = "leases"
TERM_STREAM = "term"
HOLD_TIMEOUT_S = 10.0
ACTIVATION_TIMEOUT_S = 60.0
END_TIMEOUT_S = 60.0
RETRY_S = 0.5


class TermBegan(msgspec.Struct, frozen=True, tag="term.began"):
    """This hub's run: a larger term than any before it, which sites hold against its predecessors."""

    term: int


class Gangs:
    """All leases of the hub.

    Args:
        store: where decisions go.
        links: {site: link}.
        changed: told of every lease that took a new state.
    """

    def __init__(self, store: SqliteStore, links: Mapping[str, SiteLink], changed: Callable[[Lease], None]) -> None:
        self._store = store
        self._links = links
        self._changed = changed
        self._gangs: dict[str, Gang] = {}
        self._failures: dict[str, IbshellError] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._moved = asyncio.Condition()
        self._tasks: asyncio.TaskGroup | None = None
        # Needed only until the holds are asked for; what was not decided is aborted after a restart.
        self._gpu_types: dict[str, str | None] = {}
        self.term = 0

    async def recover(self, tasks: asyncio.TaskGroup) -> None:
        """Read the decisions back, begin a new term, and carry on what was decided."""
        self._tasks = tasks
        for entry in self._store.read(STREAM, LeaseRecorded):
            self._gangs[entry.lease.id] = Gang(entry.lease)
        self.term = 1 + max((entry.term for entry in self._store.read(TERM_STREAM, TermBegan)), default=0)
        await self._store.append(TERM_STREAM, [TermBegan(self.term)])
        for gang in list(self._gangs.values()):
            if gang.lease.state in life.LIVE:
                await self._step(gang.lease.id, Interrupted())

    def leases(self) -> list[Lease]:
        """All leases, oldest first."""
        return [gang.lease for gang in self._gangs.values()]

    def find(self, prefix: str) -> Lease:
        """A lease by id or unique prefix.

        Raises:
            NotFound: none or several.
        """
        matching = [gang.lease for key, gang in self._gangs.items() if key.startswith(prefix)]
        if not matching:
            raise NotFound(f"no lease {prefix}", "ibshell lease list shows them")
        if len(matching) > 1:
            raise NotFound(f"{prefix} could be {', '.join(lease.id for lease in matching[:5])}", "give more digits")
        return matching[0]

    def view(self, lease: Lease) -> LeaseView:
        """A lease with what people want to know beside it."""
        left = max(0.0, lease.deadline - clock.now()) if lease.state == "active" else None
        silent = {
            part.site: self._links[part.site].seen
            for part in lease.parts
            if lease.state in life.LIVE and part.site in self._links and not self._links[part.site].is_up
        }
        return LeaseView(lease, left, silent)

    async def request(self, wanted: LeaseWanted) -> Lease:
        """Lease devices at several sites, all or none; returns when the lease is active.

        Raises:
            Insufficient, Refused, Unreachable, UsageError: there is no lease, and no device is held for it.
        """
        if wanted.gpus < 1:
            raise UsageError(f"{wanted.gpus} GPUs", "ask for at least one")
        if wanted.duration_s <= 0:
            raise UsageError(f"a lease of {wanted.duration_s} s", "name a positive duration, for example --for 1h")
        shares = self._distribute(wanted)
        lease = Lease(
            id=self._new_id(),
            tenant=wanted.tenant,
            state="requested",
            parts=tuple(Part(site, gpus) for site, gpus in shares.items()),
            duration_s=wanted.duration_s,
            requested_at=clock.wall(),
        )
        gang = Gang(lease)
        self._gangs[lease.id] = gang
        self._gpu_types[lease.id] = wanted.gpu_type
        try:
            await self._commit(gang, gang.start())
        except IbshellError:
            del self._gangs[lease.id]
            raise
        try:
            final = await self._wait(
                lease.id, lambda found: found.state not in ("requested", "held"), ACTIVATION_TIMEOUT_S
            )
        except TimedOut:
            await self._step(lease.id, EndAsked("failed: not every site answered in time"))
            raise
        if final.state != "active":
            raise self._failures.pop(lease.id, Refused(f"lease {lease.id} was not granted: {final.reason}"))
        return final

    def _new_id(self) -> str:
        while (new := secrets.token_hex(4)) in self._gangs:
            pass
        return new

    def _distribute(self, wanted: LeaseWanted) -> dict[str, int]:
        """How many devices at which site: evenly over the named or the fullest sites."""
        free = {name: self._free(link, wanted.gpu_type) for name, link in self._links.items() if link.is_up}
        for name in wanted.site_names:
            if name not in self._links:
                raise NotFound(f"no site {name!r}", f"the pool's sites: {', '.join(sorted(self._links)) or 'none'}")
            if name not in free:
                raise Unreachable(f"{name} cannot be reached", self._links[name].error.message)
        known = sum(
            gpu.type == wanted.gpu_type or wanted.gpu_type is None
            for link in self._links.values()
            if link.description is not None
            for gpu in link.description.inventory.gpus()
        )
        kind = wanted.gpu_type or "GPU"
        if known < wanted.gpus:
            raise Insufficient(
                f"{wanted.gpus} {kind} asked for; the pool has {known}", "ask for fewer, or another type"
            )
        if sum(free.values()) < wanted.gpus:
            raise Insufficient(
                f"{wanted.gpus} {kind} asked for; {sum(free.values())} of {known} are free",
                "ibshell lease list shows who has them",
            )
        names = wanted.site_names
        if not names:
            count = wanted.sites or self._fewest(free, wanted.gpus)
            if count > wanted.gpus:
                raise UsageError(f"{wanted.gpus} GPUs over {count} sites", "each site needs at least one")
            if count > len(free):
                raise Insufficient(f"{count} sites asked for; {len(free)} can be reached", "ibshell site list says why")
            least = -(-wanted.gpus // count)
            names = sorted(free, key=lambda name: (free[name] < least, -free[name], name))[:count]
        each, extra = divmod(wanted.gpus, len(names))
        if not each:
            raise UsageError(f"{wanted.gpus} GPUs over {len(names)} sites", "each site needs at least one")
        return {name: each + (i < extra) for i, name in enumerate(sorted(names, key=lambda n: (-free[n], n)))}

    @staticmethod
    def _fewest(free: Mapping[str, int], gpus: int) -> int:
        count = total = 0
        for size in sorted(free.values(), reverse=True):
            count, total = count + 1, total + size
            if total >= gpus:
                break
        return max(1, count)

    @staticmethod
    def _free(link: SiteLink, gpu_type: str | None) -> int:
        description = link.description
        if description is None:
            return 0
        taken = {grant.uuid for lease in description.leases if lease.occupies for grant in lease.grants}
        return sum(g.uuid not in taken and gpu_type in (None, g.type) for g in description.inventory.gpus())

    async def renew(self, lease: Lease, duration_s: float) -> Lease:
        """Let a lease end `duration_s` seconds from now, at every site.

        Raises:
            Refused: it is not active, or a site refused.
            Unreachable: a site is silent; the others are renewed, and asking again is safe.
        """
        if duration_s <= 0:
            raise UsageError(f"a renewal of {duration_s} s", "name a positive duration, for example --for 1h")
        if lease.state != "active":
            raise Refused(f"lease {lease.id} is {lease.state}{f': {lease.reason}' if lease.reason else ''}, not active")
        sent = clock.now()
        problems = []
        async with asyncio.TaskGroup() as asks:
            answers = {part.site: asks.create_task(self._renew_part(lease, part, duration_s)) for part in lease.parts}
        for site, answer in answers.items():
            if answer.result() is not None:
                problems.append(f"{site}: {answer.result()}")
        if problems:
            raise Unreachable(
                f"lease {lease.id} was renewed at {len(answers) - len(problems)} of {len(answers)} sites ({'; '.join(problems)})",
                "ask again when they answer: a renewal may be repeated",
            )
        renewed = msgspec.structs.replace(lease, duration_s=duration_s, deadline=sent + duration_s)
        async with self._lock(lease.id):
            entry = LeaseRecorded(renewed)
            await self._store.append(STREAM, [entry])
            self._gangs[lease.id].apply(entry)
        return renewed

    async def _renew_part(self, lease: Lease, part: Part, duration_s: float) -> str | None:
        try:
            await self._links[part.site].call("lease.renew", Renew(lease.id, duration_s, self.term), SiteLease)
        except IbshellError as error:
            return error.message
        return None

    async def end(self, lease: Lease, reason: str, wait: bool = True) -> Lease:
        """End a lease at every site; returns when all have confirmed that its processes are gone.

        Raises:
            TimedOut: a site is silent; the lease goes on ending and is free there at its expiry at the latest.
        """
        if lease.state in life.FINAL:
            return lease
        await self._step(lease.id, EndAsked(reason))
        if not wait:
            return self._gangs[lease.id].lease
        return await self._wait(lease.id, lambda found: found.state in life.FINAL, END_TIMEOUT_S)

    async def site_up(self, link: SiteLink) -> None:
        """A site has connected: settle what the hub and the site see differently."""
        assert link.description is not None
        reported = {lease.id: lease for lease in link.description.leases}
        for gang in list(self._gangs.values()):
            if not any(part.site == link.name for part in gang.lease.parts):
                continue
            word = site_says(gang.lease, link.name, reported.get(gang.lease.id))
            if isinstance(word, Ask):
                self._ask(gang.lease.id, word)
            elif word is not None:
                await self._step(gang.lease.id, word)

    async def site_changed(self, link: SiteLink, lease: SiteLease) -> None:
        """A site tells of a lease that changed by itself."""
        link.note(lease)
        gang = self._gangs.get(lease.id)
        if gang is not None and lease.state in life.FINAL and lease.state != "aborted":
            reason = gang.lease.reason if gang.lease.state == "ending" else lease.reason
            await self._step(lease.id, PartEnded(link.name, reason))

    def _lock(self, lease_id: str) -> asyncio.Lock:
        return self._locks.setdefault(lease_id, asyncio.Lock())

    async def _step(self, lease_id: str, event: GangEvent) -> None:
        gang = self._gangs[lease_id]
        async with self._lock(lease_id):
            before = gang.lease.state
            await self._commit(gang, gang.step(event, clock.now()))
        if gang.lease.state != before:
            self._changed(gang.lease)
        async with self._moved:
            self._moved.notify_all()

    async def _commit(self, gang: Gang, decision: GangDecision) -> None:
        await self._store.append(STREAM, decision.entries)
        for entry in decision.entries:
            gang.apply(entry)
        for effect in decision.effects:
            self._ask(gang.lease.id, effect)

    def _ask(self, lease_id: str, ask: Ask) -> None:
        assert self._tasks is not None
        self._tasks.create_task(self._carry_out(lease_id, ask))

    async def _carry_out(self, lease_id: str, ask: Ask) -> None:
        try:
            event = await self._question(lease_id, ask)
            if event is not None:
                await self._step(lease_id, event)
        except Refused as error:
            log.info("lease %s: %s", lease_id, error)
        except IbshellError as error:
            log.error("lease %s at %s: %s", lease_id, ask.site, error)

    async def _question(self, lease_id: str, ask: Ask) -> GangEvent | None:
        """Put one question to a site until it is answered; a hold is asked once."""
        link = self._links.get(ask.site)
        lease = self._gangs[lease_id].lease
        part = next(part for part in lease.parts if part.site == ask.site)
        while True:
            try:
                if link is None:
                    return PartEnded(ask.site, f"failed: {ask.site} is no longer in the pool")
                match ask.verb:
                    case "hold":
                        hold = Hold(
                            lease_id, lease.tenant, part.gpus, HOLD_TTL_S, self.term, self._gpu_types.get(lease_id)
                        )
                        held = await link.call("lease.hold", hold, SiteLease, HOLD_TIMEOUT_S)
                        link.note(held)
                        return PartHeld(ask.site, held.grants)
                    case "commit":
                        commit = Commit(lease_id, lease.duration_s, self.term)
                        link.note(await link.call("lease.commit", commit, SiteLease))
                        return PartCommitted(ask.site)
                    case "abort":
                        link.note(await link.call("lease.abort", Abort(lease_id, self.term), SiteLease))
                        return None
                    case _:
                        release = Release(lease_id, self.term, lease.reason)
                        ended = await link.call("lease.release", release, SiteLease)
                        link.note(ended)
                        # While its processes are being ended the site's notice will say when they are gone.
                        return PartEnded(ask.site, lease.reason) if ended.state in life.FINAL else None
            except Unreachable as error:
                if ask.verb == "hold":
                    self._failures[lease_id] = error
                    return PartRefused(ask.site, f"{ask.site} did not answer: {error.message}")
                if ask.verb == "abort":
                    return None  # the hold lapses by itself
                if link is not None and not link.is_up:
                    return None  # asked again when the site is back
                await asyncio.sleep(RETRY_S)
            except NotFound:
                return PartEnded(ask.site, lease.reason) if ask.verb == "release" else None
            except StaleToken as error:
                log.error("%s: %s", ask.site, error)
                return PartRefused(ask.site, error.message)
            except IbshellError as error:
                if ask.verb in ("hold", "commit"):
                    self._failures[lease_id] = from_wire(error.code, error.message, error.hint)
                    return PartRefused(ask.site, error.message)
                raise

    async def _wait(self, lease_id: str, done: Callable[[Lease], bool], timeout_s: float) -> Lease:
        gang = self._gangs[lease_id]
        try:
            async with asyncio.timeout(timeout_s), self._moved:
                await self._moved.wait_for(lambda: done(gang.lease))
        except TimeoutError:
            waiting = [part.site for part in gang.lease.parts if part.state not in ("ended", "refused")]
            raise TimedOut(
                f"lease {lease_id} is still {gang.lease.state} after {timeout_s:.0f} s; waiting for {', '.join(waiting)}",
                f"look again later: ibshell lease show {lease_id}",
            ) from None
        return gang.lease
