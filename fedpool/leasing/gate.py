"""What a site obeys: whether what the hub asks is covered by what somebody with the right to it has signed.

What gives or extends a right needs a signature: a hold, a renewal, devices added, a change of hands, a cordon or its end. What
takes one away (a release, a notice, devices given back) the hub may do by itself, since it could refuse anyway: with a signature
it is the requester's act, without one the ledger shows it as the hub's.

A request can be shown more than once and comes to nothing the second time: a lease is granted once under its id, which the request
names; of the requests about a lease only later ones are obeyed; a renewal is counted from when it was signed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from fedpool.errors import NotAuthorised, Refused
from fedpool.identity import requests, sshsig
from fedpool.identity.principals import OPERATOR, tenant_principal
from fedpool.identity.requests import SKEW_S, Opened
from fedpool.identity.trust import Trust
from fedpool.leasing.demand import is_named, shape_of
from fedpool.leasing.requests import (
    Commit,
    Cordon,
    GrantEvent,
    Hold,
    Notify,
    Release,
    Renew,
    Resize,
    Transfer,
    Uncordon,
)
from fedpool.records import Device, Mandate, Signed, SiteLease, Tenant
from fedpool.wire.messages import (
    ById,
    CordonWanted,
    LeaseEnding,
    LeaseOffer,
    LeaseRenewal,
    LeaseSize,
    LeaseWanted,
    RunAgain,
    RunWanted,
    TenantNamed,
)

# A record has to hold it, with what escapes add: entries of a bundle have at most 65,535 bytes.
RECORDED_BYTES_MAX = 24 * 1024
# A hold may follow its request so much later than it may wait: the hub asks again and again until every site has one.
PLACING_S = 120.0
BODIES: dict[str, type[msgspec.Struct]] = {
    "lease.request": LeaseWanted,
    "lease.renew": LeaseRenewal,
    "lease.resize": LeaseSize,
    "lease.offer": LeaseOffer,
    "lease.accept": LeaseOffer,
    "lease.release": ById,
    "lease.revoke": LeaseEnding,
    "site.cordon": CordonWanted,
    "site.uncordon": CordonWanted,
    "tenant.set": Tenant,
    "tenant.remove": TenantNamed,
    "fed.run": RunWanted,
    "fed.resume": RunAgain,
}
GRANTING = ("lease.request", "fed.run", "fed.resume")
ENDING = ("lease.release", "lease.revoke")
ABOUT_TENANTS = ("tenant.set", "tenant.remove")


def digest(signed: Signed) -> str:
    """What stands for a request where it is not repeated: 32 hexadecimal digits."""
    return hashlib.sha256(signed.payload).hexdigest()[:32]


class Gate:
    """One site's gate.

    Args:
        site: its name.
        trust: whom it believes.
        devices: what it has.
    """

    def __init__(self, site: str, trust: Trust, devices: Iterable[Device]) -> None:
        self.site = site
        self.trust = trust
        self._devices = {device.uuid: device for device in devices}

    def admit(
        self, event: GrantEvent, lease: SiteLease | None, asked_ms: int, unix: float, now: float
    ) -> tuple[GrantEvent, tuple[Signed, ...]]:
        """Let through what is covered.

        Args:
            event: asked by the hub.
            lease: as it is at this site, if it is.
            asked_ms: when the latest cordon that was obeyed was signed.
            unix: Unix seconds.
            now: CLOCK_BOOTTIME, in seconds.

        Returns:
            The event as it may be obeyed, and the requests that cover it.

        Raises:
            NotAuthorised: what is shown does not cover it.
            Refused: it does, but something later has been obeyed.
        """
        match event:
            case Hold():
                return self._hold(event, lease, unix, now)
            case Commit() if lease is not None:
                return self._commit(event, lease), ()
            case Renew() if lease is not None:
                return self._renew(event, lease, unix)
            case Resize() if lease is not None:
                return self._resize(event, lease, unix)
            case Transfer() if lease is not None:
                return self._transfer(event, lease, unix)
            case Release() | Notify() if lease is not None:
                return self._end(event, lease, unix)
            case Cordon() | Uncordon():
                return self._cordon(event, asked_ms, unix)
            case Hold() | Renew() | Resize() | Transfer() | Release() | Notify():
                return bare(event), ()  # of a lease that is not here: the machine says so
            case _:
                return event, ()

    def open(self, signed: Signed | None, methods: tuple[str, ...], unix: float) -> Opened[Any]:
        """Open a request for one of several methods.

        Raises:
            NotAuthorised: there is none, or it is not what it should be.
        """
        if signed is None:
            raise NotAuthorised(
                f"{self.site} is asked without a signed request for {' or '.join(methods)}",
                "the hub is of an earlier release, or not honest",
            )
        if len(signed.payload) > RECORDED_BYTES_MAX:
            raise NotAuthorised(f"a request of {len(signed.payload)} bytes; the limit is {RECORDED_BYTES_MAX}")
        method = requests.read(signed).method
        if method not in methods:
            raise NotAuthorised(f"a request for {method[:40]!r} covers no {' or '.join(methods)}")
        opened: Opened[Any] = requests.open_(signed, self.trust, method, BODIES[method], unix)
        sites = opened.payload.sites
        if sites and self.site not in sites:
            raise NotAuthorised(f"a request for {', '.join(sites[:5])}, shown to {self.site}")
        return opened

    def about_tenant(self, signed: Signed, unix: float) -> Opened[Any]:
        """What an operator has signed about a tenant. It stands until they sign something else, so its signer's certificate has to
        hold when it was signed, not now: a site may be told much later.

        Raises:
            NotAuthorised: nobody with the right to it has, or it was signed in the future.
        """
        signed_at = requests.read(signed).time_ms / 1000
        opened = self.open(signed, ABOUT_TENANTS, min(signed_at, unix + SKEW_S))
        requests.require_fresh(opened.payload, unix, math.inf)
        if opened.payload.principal != OPERATOR:
            raise NotAuthorised(f"{opened.payload.principal} has signed {opened.payload.method}; an operator may")
        return opened

    # --- what gives a right

    def _hold(self, event: Hold, lease: SiteLease | None, unix: float, now: float) -> tuple[Hold, tuple[Signed, ...]]:
        opened = self.open(event.request, GRANTING, unix)
        wanted = wanted_lease(opened)
        patience = (math.inf if wanted.max_wait_s is None else wanted.max_wait_s) + wanted.starts_in_s + PLACING_S
        requests.require_fresh(opened.payload, unix, patience)
        self._require_covered(event, wanted, opened)
        last = min(opened.payload.time_ms / 1000 + SKEW_S + patience, opened.certificate.valid_before)
        mandate = Mandate(digest(opened.signed), opened.payload.time_ms, now + max(0.0, last - unix), wanted.duration_s)
        known = (
            lease is not None
            and lease.occupies
            and lease.mandate is not None
            and lease.mandate.request == mandate.request
        )
        return msgspec.structs.replace(event, request=None, mandate=mandate), () if known else (opened.signed,)

    def _require_covered(self, event: Hold, wanted: LeaseWanted, opened: Opened[Any]) -> None:
        """A hold is what the request asks for, at this site."""
        shape, principal = event.shape, opened.payload.principal
        whole = shape_of(wanted, shape.devices)
        if whole.kinds:
            right = bool(shape.kinds) and set(shape.kinds) <= set(whole.kinds)
        else:  # any whole card, but no slice
            right = not any("/" in kind for kind in shape.kinds)
        expected = [
            ("lease", event.lease, wanted.id, event.lease == wanted.id),
            ("tenant", event.tenant, wanted.tenant, event.tenant == wanted.tenant),
            ("principal", principal, tenant_principal(wanted.tenant), principal == tenant_principal(wanted.tenant)),
            ("site", self.site, wanted.site_names, not wanted.site_names or self.site in wanted.site_names),
            ("gpus", event.gpus, max(wanted.gpus, wanted.gpus_max), event.gpus <= max(wanted.gpus, wanted.gpus_max)),
            ("duration_s", event.duration_s, wanted.duration_s, 0 < event.duration_s <= wanted.duration_s),
            ("kinds", shape.kinds, whole.kinds, right),
            ("devices", shape.devices, wanted.devices, self._are_named(shape.devices, wanted.devices)),
            ("shape", shape, whole, msgspec.structs.replace(shape, kinds=whole.kinds) == whole),
        ]
        for what, asked, signed, ok in expected:
            if not ok:
                raise NotAuthorised(
                    f"the hub asks {self.site} for a hold with {what} {str(asked)[:200]}; signed is {str(signed)[:200]}",
                    "the hub is not honest, or its software is at fault",
                )

    def _commit(self, event: Commit, lease: SiteLease) -> Commit:
        """A hold becomes a lease for no longer than was signed."""
        longest = lease.mandate.duration_s if lease.mandate is not None else 0.0
        if lease.state == "held" and event.duration_s > longest:
            raise NotAuthorised(
                f"the hub commits lease {lease.id} at {self.site} for {event.duration_s:g} s; signed is {longest:g} s"
            )
        return event

    def _are_named(self, uuids: tuple[str, ...], names: list[str]) -> bool:
        found = [self._devices.get(uuid) for uuid in uuids]
        if not names:
            return not uuids
        return bool(uuids) and all(
            device is not None and any(is_named(device, self.site, name) for name in names) for device in found
        )

    def _renew(self, event: Renew, lease: SiteLease, unix: float) -> tuple[Renew, tuple[Signed, ...]]:
        shown: tuple[Signed, ...] = ()
        if (payload := self._mandated(event.request, lease)) is not None:
            # A run's request lets its lease be renewed until the run is over.
            left = payload.time_ms / 1000 + _renewable_s(payload) - unix
        else:
            opened = self._about(event.request, ("lease.renew",), lease, unix)
            if event.duration_s > opened.body.duration_s:
                raise NotAuthorised(f"a renewal of {event.duration_s:g} s; signed is {opened.body.duration_s:g} s")
            payload, shown = opened.payload, (opened.signed,)
            left = payload.time_ms / 1000 + opened.body.duration_s + SKEW_S - unix
        if left <= 0:
            raise NotAuthorised(f"lease {lease.id} may go on no longer by what was signed", "ask for a renewal")
        mandate = _later(lease, payload.time_ms)
        event = msgspec.structs.replace(event, duration_s=min(event.duration_s, left), mandate=mandate, request=None)
        return event, shown

    def _resize(self, event: Resize, lease: SiteLease, unix: float) -> tuple[Resize, tuple[Signed, ...]]:
        staying = sum(grant.uuid not in lease.leaving for grant in lease.grants)
        if event.gpus <= staying:
            return bare(event), ()
        shown: tuple[Signed, ...] = ()
        if (mandated := self._mandated(event.request, lease)) is not None:
            most = _most(mandated)
            mandate = lease.mandate
        else:
            opened = self._about(event.request, ("lease.resize",), lease, unix, math.inf)
            most = opened.body.gpus
            shown = (opened.signed,)
            mandate = _later(lease, opened.payload.time_ms, digest(opened.signed))
        if event.gpus > most:
            raise NotAuthorised(f"{event.gpus} devices for lease {lease.id} at {self.site}; signed is {most} in all")
        return msgspec.structs.replace(event, request=None, mandate=mandate), shown

    def _transfer(self, event: Transfer, lease: SiteLease, unix: float) -> tuple[Transfer, tuple[Signed, ...]]:
        if event.tenant in (lease.tenant, lease.next_tenant):
            return bare(event), ()
        offer = self._about(event.offer, ("lease.offer",), lease, unix, math.inf)
        accept = self._about(event.request, ("lease.accept",), lease, unix, holder=event.tenant)
        for opened in (offer, accept):
            if opened.body.tenant != event.tenant:
                raise NotAuthorised(f"lease {lease.id} to {event.tenant}; signed is {opened.body.tenant[:80]}")
        # What was asked for by its old holder, a run for instance, is the new one's no more.
        mandate = msgspec.structs.replace(_later(lease, accept.payload.time_ms, digest(accept.signed)), grant="")
        shown = (offer.signed, accept.signed)
        return msgspec.structs.replace(event, offer=None, request=None, mandate=mandate), shown

    def plan(self, signed: Signed | None, lease: SiteLease, run: str) -> str:
        """The plan of a run, as was signed by who asked for the lease it runs under.

        Raises:
            NotAuthorised: the lease was asked for otherwise, or for another run.
        """
        payload = self._mandated(signed, lease)
        if payload is None or payload.method not in ("fed.run", "fed.resume"):
            raise NotAuthorised(f"lease {lease.id} at {self.site} was not asked for to run a program")
        body = msgspec.convert(payload.body, RunAgain, str_keys=True)
        if body.id != run:
            raise NotAuthorised(f"run {run} under lease {lease.id}, which is for run {body.id[:80]!r}")
        return body.plan

    # --- what takes one away

    def _end(self, event: Release | Notify, lease: SiteLease, unix: float) -> tuple[GrantEvent, tuple[Signed, ...]]:
        if event.request is None:
            return bare(event), ()
        opened = self.open(event.request, ENDING, unix)
        allowed = {OPERATOR}
        if opened.payload.method == "lease.release":
            allowed |= {tenant_principal(lease.tenant), tenant_principal(lease.next_tenant)}
        if opened.body.id != lease.id or opened.payload.principal not in allowed:
            raise NotAuthorised(
                f"lease {lease.id} of {lease.tenant} is to end; {opened.payload.principal} has signed the end of "
                f"{opened.body.id[:80]!r}"
            )
        return bare(event), (opened.signed,)

    def _cordon(
        self, event: Cordon | Uncordon, asked_ms: int, unix: float
    ) -> tuple[Cordon | Uncordon, tuple[Signed, ...]]:
        method = "site.cordon" if isinstance(event, Cordon) else "site.uncordon"
        opened: Opened[CordonWanted] = self.open(event.request, (method,), unix)
        requests.require_fresh(opened.payload, unix)
        if opened.payload.principal != OPERATOR:
            raise NotAuthorised(f"{opened.payload.principal} may not change what {self.site} grants", "an operator may")
        if (opened.body.site, opened.body.what) != (self.site, event.what):
            raise NotAuthorised(
                f"{event.what!r} at {self.site}; signed is {opened.body.what[:80]!r} at {opened.body.site[:80]}"
            )
        if opened.payload.time_ms < asked_ms:
            raise Refused(f"a later change of what {self.site} grants has been obeyed", "ask again")
        event = msgspec.structs.replace(event, request=None, asked_ms=opened.payload.time_ms)
        return event, (opened.signed,)

    # --- what they share

    def _mandated(self, signed: Signed | None, lease: SiteLease) -> requests.Payload | None:
        """What was signed, if it is what the lease rests on: that has been checked when it was granted.

        Raises:
            NotAuthorised: its signer has been revoked since.
        """
        if (
            signed is None
            or lease.mandate is None
            or digest(signed) not in (lease.mandate.request, lease.mandate.grant)
        ):
            return None
        self.trust.require_not_denied(self.trust.certificate(sshsig.parse(signed.signature).key))
        return requests.read(signed)

    def _about(
        self,
        signed: Signed | None,
        methods: tuple[str, ...],
        lease: SiteLease,
        unix: float,
        patience_s: float = 0.0,
        holder: str = "",
    ) -> Opened[Any]:
        """A request about a lease of whoever holds it, not older than the latest that was obeyed."""
        opened = self.open(signed, methods, unix)
        requests.require_fresh(opened.payload, unix, patience_s)
        principal = tenant_principal(holder or lease.tenant)
        if opened.body.id != lease.id or opened.payload.principal != principal:
            raise NotAuthorised(
                f"lease {lease.id} belongs to {lease.tenant}; {opened.payload.principal} has signed {methods[0]} of "
                f"{opened.body.id[:80]!r}"
            )
        if lease.mandate is not None and opened.payload.time_ms < lease.mandate.asked_ms:
            raise Refused(f"a later request about lease {lease.id} has been obeyed at {self.site}", "ask again")
        return opened


def _later(lease: SiteLease, time_ms: int, request: str = "", until: float = 0.0) -> Mandate:
    """What a lease rests on once a later request has been obeyed, which takes the place of the first where it is named."""
    before = lease.mandate or Mandate("", 0, 0.0)
    return Mandate(
        request or before.request,
        max(before.asked_ms, time_ms),
        max(before.until, until),
        before.duration_s,
        before.grant or before.request,
    )


def wanted_lease(opened: Opened[Any]) -> LeaseWanted:
    """The lease that a request asks for, by itself or for a run.

    Raises:
        NotAuthorised: none.
    """
    wanted = opened.body if isinstance(opened.body, LeaseWanted) else opened.body.lease
    if not isinstance(wanted, LeaseWanted):
        raise NotAuthorised(f"a request for {opened.payload.method} that asks for no lease")
    return wanted


Bare = TypeVar("Bare", bound=msgspec.Struct)


def bare(event: Bare) -> Bare:
    """An event with nothing that was signed, and nothing that only a gate may fill in."""
    if isinstance(event, Transfer):
        event = msgspec.structs.replace(event, offer=None)
    return msgspec.structs.replace(event, request=None, mandate=None)


def unsigned(event: GrantEvent) -> GrantEvent:
    """An event as it is obeyed where the hub is believed."""
    match event:
        case Hold() | Renew() | Resize() | Transfer() | Release() | Notify():
            return bare(event)
        case Cordon() | Uncordon():
            return msgspec.structs.replace(event, request=None, asked_ms=0)
        case _:
            return event


def _renewable_s(payload: requests.Payload) -> float:
    """How long after it was signed the hub may renew a lease by itself: only a run's, and until it is over."""
    if payload.method not in ("fed.run", "fed.resume"):
        return 0.0
    return msgspec.convert(payload.body, RunAgain, str_keys=True).renew_for_s


def _most(payload: requests.Payload) -> int:
    """How many devices a lease may grow to by itself, over all sites."""
    if payload.method == "lease.resize":
        return msgspec.convert(payload.body, LeaseSize, str_keys=True).gpus
    if payload.method == "lease.request":
        wanted: LeaseWanted | None = msgspec.convert(payload.body, LeaseWanted, str_keys=True)
    else:
        wanted = msgspec.convert(payload.body, RunAgain, str_keys=True).lease
    return max(wanted.gpus, wanted.gpus_max) if wanted is not None else 0
