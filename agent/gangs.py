"""What people ask of leases: requests, renewals, changes of hands, ends; each a few events for the hub's machine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

import msgspec

from agent.pool_driver import PoolDriver
from fedpool.errors import (
    IbshellError,
    Insufficient,
    NotFound,
    Refused,
    TimedOut,
    Unreachable,
    UsageError,
    from_wire,
)
from fedpool.leasing import lease as life
from fedpool.leasing import policy as policies
from fedpool.leasing.demand import is_named, shape_of
from fedpool.leasing.gang import (
    Accepted,
    EndAsked,
    NoticeAsked,
    Offered,
    Renewed,
    Reported,
    ResizeAsked,
)
from fedpool.leasing.kept import ACCEPT, END, GRANT, OFFER, RESIZE, kept
from fedpool.leasing.pool import Adopted, ForLease, Submitted
from fedpool.leasing.requests import Renew
from fedpool.names import require_id
from fedpool.records import Demand, Lease, Part, Signed, SiteLease
from fedpool.wire.messages import LeaseView, LeaseWanted

END_TIMEOUT_S = 60.0
# A site refuses a resize that rests on an older version of the lease; it is asked again, so often.
RESIZES = 3
RESIZE_TIMEOUT_S = 10.0
ACTIVATION_TIMEOUT_S = 60.0
WAITS = ("requested", "queued")


class Gangs(PoolDriver):
    """All leases of the hub, for those who ask."""

    def leases(self) -> list[Lease]:
        """All leases, oldest first."""
        return [gang.lease for gang in self.machine.gangs.values()]

    def find(self, prefix: str) -> Lease:
        """A lease by id or unique prefix.

        Raises:
            NotFound: none or several.
        """
        gangs = self.machine.gangs
        return gangs[prefix if prefix in gangs else _only(prefix, gangs)].lease

    def summary(self, lease: Lease) -> LeaseView:
        """A lease as a line of a list: why it waits, but not for how long."""
        now = self.clock.now()
        left = max(0.0, lease.deadline - now) if lease.state == "active" else None
        silent = {
            part.site: self._links[part.site].seen
            for part in lease.parts
            if lease.state in life.LIVE and part.site in self._links and not self._links[part.site].is_up
        }
        return LeaseView(lease, left, silent, self.machine.why(lease, now) if lease.state in WAITS else "")

    def view(self, lease: Lease) -> LeaseView:
        """A lease with what people want to know beside it."""
        found, now = self.summary(lease), self.clock.now()
        if lease.state not in WAITS:
            return found
        starts, ahead = self.machine.expected_start(lease, now), self.machine.ahead(lease, now)
        why = self.machine.why(lease, now, who=True)
        return msgspec.structs.replace(found, starts_in_s=starts, ahead=ahead, waits_for=why)

    # --- asking for a lease

    def lease_of(self, wanted: LeaseWanted) -> Lease:
        """A request as a lease that is not there yet."""
        demand = Demand(
            gpus=wanted.gpus,
            gpus_max=wanted.gpus_max,
            shape=shape_of(wanted, tuple(self._uuid(name) for name in wanted.devices)),
            sites=wanted.sites,
            site_names=tuple(wanted.site_names),
            per_site_min=wanted.per_site_min,
            priority=wanted.priority,
            not_before=self.clock.now() + wanted.starts_in_s if wanted.starts_in_s else 0.0,
            max_wait_s=wanted.max_wait_s,
        )
        if wanted.starts_in_s < 0:
            raise UsageError(f"a start {-wanted.starts_in_s:.0f} s ago", "name a time that is still to come")
        new = require_id(wanted.id, "lease") if wanted.id else self._new_id()
        starts_at = self.clock.wall(wanted.starts_in_s) if wanted.starts_in_s else ""
        return Lease(
            new,
            wanted.tenant,
            "requested",
            demand,
            wanted.duration_s,
            self.clock.wall(),
            submitted=self.clock.now(),
            starts_at=starts_at,
        )

    def _new_id(self) -> str:
        while (new := f"{self._chance.getrandbits(32):08x}") in self.machine.gangs:
            pass
        return new

    def _uuid(self, name: str) -> str:
        """A device by UUID or as SITE:NODE/INDEX.

        Raises:
            NotFound: no site has it.
        """
        for site in self.machine.capacity.sites.values():
            for device in site.devices:
                if is_named(device, site.name, name):
                    return device.uuid
        raise NotFound(f"no device {name!r}", "ibshell gpu list shows them")

    def foresee(self, wanted: LeaseWanted) -> LeaseView:
        """What a request would meet, without asking.

        Raises:
            IbshellError: it would be refused, and why.
        """
        lease, now = self.lease_of(wanted), self.clock.now()
        self.machine.step(Submitted(lease), now)
        found = self.machine.queue.earliest(lease, now)
        starts = None if found is None else max(0.0, found.start - now)
        why = "" if starts == 0 else self.machine.why(lease, now, who=True)
        forbidden = self._forbidden(lease)
        if forbidden and (lease.demand.site_names or len(forbidden) == len(self._links)):
            starts, why = None, "the policies of the sites"
        return LeaseView(lease, None, {}, why, starts, forbidden=forbidden)

    def _forbidden(self, lease: Lease) -> dict[str, str]:
        """{site: why its policy forbids a lease}, as far as that can be told before it is placed."""
        found, demand = {}, lease.demand
        names = demand.site_names or tuple(self._links)
        share = max(demand.per_site_min, -(-demand.gpus // len(names)) if demand.site_names else 1)
        for name in names:
            link = self._links.get(name)
            if link is None or link.description is None or not link.description.policy:
                continue
            held = sum(
                len(one.grants)
                for one in self.machine.capacity.sites[name].leases.values()
                if one.occupies and one.tenant == lease.tenant
            )
            policy = policies.parse(link.description.policy, f"the policy of {name}")
            problems = policy.lease_problems(
                lease.tenant, held + share, demand.shape.kinds, lease.duration_s, self.clock.unix()
            )
            if why := "; ".join(problems):
                found[name] = why
        return found

    async def request(self, wanted: LeaseWanted, signed: Signed | None = None) -> Lease:
        """Lease devices at several sites, all or none; returns when the lease is active, or waits where it may.

        Raises:
            IbshellError: there is no lease, and no device is held for it.
        """
        lease = self.lease_of(wanted)
        known = self.machine.gangs.get(lease.id)
        if known is None:
            await self.put(Submitted(lease, kept(lease.id, GRANT, signed)))
        elif not _same(known.lease, lease):
            raise Refused(
                f"lease {lease.id} is there already and was asked for differently", "use a new key for a new request"
            )
        try:
            final = await self.wait_until(
                lease.id,
                lambda found: (
                    found.state not in ("requested", "held")
                    and not (found.state == "queued" and self.machine.gangs[lease.id].placing)
                ),
                ACTIVATION_TIMEOUT_S,
            )
        except TimedOut:
            await self.put(ForLease(lease.id, EndAsked("failed: not every site answered in time")))
            raise
        if final.state not in ("active", "queued") and not final.started:
            failure = self.machine.gangs[lease.id].failure
            if failure is not None:
                raise from_wire(failure.code, failure.message, failure.hint)
            if final.state == "aborted":
                raise Insufficient(final.reason, "ibshell lease list shows who has them; --wait 1h waits for them")
            raise Refused(f"lease {lease.id} was not granted: {final.reason}")
        return final

    async def wait(self, lease_id: str, state: str, wait_s: float) -> Lease:
        """A lease once it is in another state than this one, or as it is after so many seconds."""
        try:
            return await self.wait_until(lease_id, lambda found: found.state != state, wait_s)
        except TimedOut:
            return await self.told(lease_id)

    async def adopt(self, prefix: str) -> Lease:
        """Take in a lease that sites hold and the hub, whose state was lost, does not know.

        Raises:
            NotFound: no site has it, or several leases begin so.
            Refused: it ends by itself, or a site that may have a part of it has not said yet what it has.
        """
        orphans = [(link, lease) for link in self._links.values() for lease in self.orphans(link.name)]
        lease_id = _only(prefix, dict.fromkeys(lease.id for _, lease in orphans))
        held = [(link, lease) for link, lease in orphans if lease.id == lease_id]
        first = held[0][1]
        for link in self._links.values():
            if link.description is None:
                raise Refused(
                    f"{link.name} has not said yet whether it has a part of {first.id}", "wait until it is up"
                )
        active = [(link, lease) for link, lease in held if lease.state == "active"]
        if not active:
            raise Refused(f"lease {first.id} is {first.state} and ends by itself")
        left_s = []
        for link, lease in active:
            await link.describe()
            assert link.description is not None
            left_s.append(lease.deadline - link.description.boottime)
        parts = tuple(self._part(link.name, lease) for link, lease in active)
        now, gpus = self.clock.now(), sum(part.gpus for part in parts)
        demand = Demand(gpus, shape=first.shape, site_names=tuple(part.site for part in parts))
        adopted = Lease(
            first.id, first.tenant, "active", demand, min(left_s), self.clock.wall(), parts, now, now, now + min(left_s),
            attempt=max(lease.attempt for _, lease in active),
        )  # fmt: skip
        if first.id not in self.machine.gangs:
            await self.put(Adopted(adopted))
        return await self.told(first.id)

    def orphans(self, site: str) -> list[SiteLease]:
        """What a site holds and the hub does not know."""
        leases = self.machine.capacity.sites[site].leases.values()
        return [lease for lease in leases if lease.id not in self.machine.gangs]

    def _part(self, site: str, lease: SiteLease) -> Part:
        kind = self.machine.capacity.sites[site].kind_of(lease.grants[0].uuid) or ""
        return Part(site, len(lease.grants) - len(lease.leaving), "active", lease.grants, kind=kind)

    # --- changing one

    async def renew(self, lease: Lease, duration_s: float, signed: Signed | None = None) -> Lease:
        """Let a lease end `duration_s` seconds from now, at every site.

        Raises:
            Refused: it is not active, a site refused, or the devices are promised to a reservation.
            Unreachable: a site is silent; the others are renewed, and asking again is safe.
        """
        if duration_s <= 0:
            raise UsageError(f"a renewal of {duration_s} s", "name a positive duration, for example --for 1h")
        if lease.state != "active":
            raise Refused(f"lease {lease.id} is {lease.state}{f': {lease.reason}' if lease.reason else ''}, not active")
        sent = self.clock.now()
        blocking = self.machine.queue.timeline.blocks(lease, sent + duration_s)
        if blocking is not None:
            at = self.machine.gangs[blocking].lease.starts_at
            raise Refused(
                f"lease {lease.id} cannot go on for so long: its devices are reserved for lease {blocking} at {at}",
                "renew for less",
            )
        refused: dict[str, IbshellError] = {}
        async with asyncio.TaskGroup() as asks:
            answers = {
                part.site: asks.create_task(self._renew_part(lease, part, duration_s, signed)) for part in lease.parts
            }
        for site, answer in answers.items():
            error = answer.result()
            if error is not None:
                refused[site] = error
        if refused:
            words = "; ".join(f"{site}: {error.message}" for site, error in refused.items())
            kind = Unreachable if any(isinstance(error, Unreachable) for error in refused.values()) else Refused
            raise kind(
                f"lease {lease.id} was renewed at {len(answers) - len(refused)} of {len(answers)} sites ({words})",
                "ask again when they answer: a renewal may be repeated",
            )
        await self.put(ForLease(lease.id, Renewed(duration_s, sent)))
        return await self.told(lease.id)

    async def _renew_part(
        self, lease: Lease, part: Part, duration_s: float, signed: Signed | None
    ) -> IbshellError | None:
        asked = Renew(lease.id, duration_s, self.term, signed)
        try:
            report = await self.tell(part.site, asked)
            await self.put(ForLease(lease.id, Reported(part.site, report)))
        except IbshellError as error:
            return error
        return None

    async def end(self, lease: Lease, reason: str, signed: Signed | None = None) -> Lease:
        """End a lease at every site; returns when all have confirmed that its processes are gone.

        Raises:
            TimedOut: a site is silent; the lease goes on ending and is free there at its expiry at the latest.
        """
        if lease.state in life.FINAL:
            return lease
        await self.put(ForLease(lease.id, EndAsked(reason), kept(lease.id, END, signed)))
        return await self.wait_until(lease.id, lambda found: found.state in life.FINAL, END_TIMEOUT_S)

    async def revoke(self, lease: Lease, reason: str, grace_s: float, signed: Signed | None = None) -> Lease:
        """End somebody's lease, at once or after a grace in which its jobs are told."""
        if grace_s > 0 and lease.state == "active":
            await self.put(ForLease(lease.id, NoticeAsked(reason, grace_s), kept(lease.id, END, signed)))
            return await self.told(lease.id)
        return await self.end(lease, f"revoked: {reason}", signed)

    async def resize(self, lease: Lease, gpus: int, signed: Signed | None = None) -> Lease:
        """Let a lease have so many devices, at the sites it is at, and grow by itself to so many where there are not enough yet.

        Raises:
            Refused: it may not have so few, or is not active.
            Insufficient: the sites have not so many; it has got what they have.
        """
        if gpus < lease.demand.gpus:
            raise Refused(
                f"lease {lease.id} has at least {lease.demand.gpus} devices; {gpus} asked for",
                "release it, and ask for one with --gpus FEWEST..MOST",
            )

        def settled(now: Lease) -> bool:
            growing = any((now.id, part.site) in self.machine.queue.growing for part in now.parts)
            return now.state != "active" or (not growing and now.gpus <= gpus)

        for _ in range(RESIZES):
            share = self.machine.share(lease, gpus)
            changed = {part.site: share[part.site] for part in lease.parts if share[part.site] != part.gpus}
            asked = ResizeAsked(changed, self.machine.queue.grace_s, most=gpus)
            await self.put(ForLease(lease.id, asked, kept(lease.id, RESIZE, signed)))
            with contextlib.suppress(TimedOut):
                lease = await self.wait_until(lease.id, settled, RESIZE_TIMEOUT_S)
                break
            # The site has refused, since the lease had changed there before: by now its word on that is here.
            lease = await self.told(lease.id)
        if lease.state != "active" or lease.gpus > gpus:
            raise Refused(
                f"lease {lease.id} is {lease.state} and has {lease.gpus} devices; {gpus} asked for",
                "try again in a moment",
            )
        if lease.gpus < gpus:
            raise Insufficient(
                f"lease {lease.id} has {lease.gpus} of {gpus} devices: no more are free where it is",
                "it takes more by itself when they are",
            )
        return lease

    async def offer(self, lease: Lease, tenant: str, signed: Signed | None = None) -> Lease:
        """Offer a lease to another tenant, or take the offer back ("")."""
        if tenant:
            self.machine.tenants.require(tenant)
        await self.put(ForLease(lease.id, Offered(tenant), kept(lease.id, OFFER, signed)))
        return await self.told(lease.id)

    async def accept(self, lease: Lease, tenant: str, signed: Signed | None = None) -> Lease:
        """Take a lease that was offered.

        Raises:
            Refused: it was not offered to this tenant.
        """
        if lease.offered_to != tenant:
            raise Refused(
                f"lease {lease.id} is not offered to {tenant}", f"its holder says: ibshell lease offer {lease.id}"
            )
        await self.put(ForLease(lease.id, Accepted(), kept(lease.id, ACCEPT, signed)))
        return await self.wait_until(lease.id, lambda found: not found.next_tenant, END_TIMEOUT_S)


def _only(prefix: str, ids: Iterable[str]) -> str:
    """The one id that begins so.

    Raises:
        NotFound: none or several.
    """
    matching = [lease_id for lease_id in ids if lease_id.startswith(prefix)]
    if not matching:
        raise NotFound(f"no lease {prefix}", "ibshell lease list shows them")
    if len(matching) > 1:
        raise NotFound(f"{prefix} could be {', '.join(matching[:5])}", "give more digits")
    return matching[0]


def _same(known: Lease, asked: Lease) -> bool:
    """Whether two requests ask for the same; a start is given as so many seconds from then, so it may differ a little."""
    starts = abs(known.demand.not_before - asked.demand.not_before) < 60 or not known.demand.not_before
    demand = msgspec.structs.replace(asked.demand, not_before=known.demand.not_before)
    return starts and (known.tenant, known.demand, known.duration_s) == (asked.tenant, demand, asked.duration_s)
