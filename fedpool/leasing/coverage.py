"""Whether what a site granted had been signed for: its records of requests against its records of leases.

The same rules as the gate's (`fedpool.leasing.gate`), read the other way round: from what is recorded, by whoever verifies.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from fedpool.errors import IbshellError, NotAuthorised, UsageError
from fedpool.identity import requests, sshsig
from fedpool.identity.authorities import authority_fingerprint
from fedpool.identity.principals import OPERATOR, tenant_principal
from fedpool.identity.trust import Trust
from fedpool.leasing import lease as life
from fedpool.leasing.gate import ABOUT_TENANTS, BODIES, GRANTING
from fedpool.leasing.grants import GUARD_FRACTION, GUARD_S
from fedpool.leasing.policy import Policy, digest, parse
from fedpool.ledger.records import (
    Cordoned,
    DevicesSaid,
    LeaseSaid,
    PolicyObeyed,
    Record,
    Requested,
    SiteStarted,
    Uncordoned,
)
from fedpool.records import Signed
from fedpool.wire.messages import LeaseWanted


class Covered(msgspec.Struct):
    """What has been signed about a lease that lives.

    Attributes:
        by: {method: (as whom, most devices, tenant named)}.
        tenant: who holds it.
        next_tenant: who takes it.
        devices: how many it has beside those it gives back; fewer need no signature.
        leaving: those it gives back.
        duration_s: the longest it was asked for.
    """

    by: dict[str, tuple[str, int, str]] = {}
    tenant: str = ""
    next_tenant: str = ""
    devices: int = 0
    leaving: tuple[str, ...] = ()
    duration_s: float = 0.0


class CoverageState(msgspec.Struct):
    """How far it has come, from which it goes on another time.

    Attributes:
        on: whether the ledger has said whose signatures it goes by.
        cordon: who signed the latest request about a cordon.
        policy: text of the site's, "" where everything is allowed.
        kinds: {UUID: kind} of what the site has.
    """

    on: bool = False
    leases: dict[str, Covered] = {}
    cordon: str = ""
    policy: str = ""
    kinds: dict[str, str] = {}


class Coverage:
    """Follows a site's records and says which grants nobody had signed for.

    Args:
        trust: whom the verifier believes; None where it believes none, and only looks for requests.
        state: where an earlier one ended.
        check: checks a signature, or puts that off.

    Attributes:
        requests: how many signatures were checked.
    """

    def __init__(
        self,
        trust: Trust | None,
        state: CoverageState | None = None,
        check: Callable[[sshsig.Signature, bytes, str, bytes], None] = sshsig.check,
    ) -> None:
        self._trust = trust
        self._check = check
        self._state = state or CoverageState()
        self._policy = _policy(self._state.policy)
        self.requests = 0

    def state(self) -> CoverageState:
        """Where it is."""
        return self._state

    def take(self, record: Record) -> list[str]:
        """One more record; returns what is wrong with it."""
        match record:
            case SiteStarted():
                return self._started(record)
            case Requested():
                return self._requested(record)
            case DevicesSaid():
                if not record.continued:
                    self._state.kinds = {}
                self._state.kinds |= {uuid: one.kind for one in record.kinds for uuid in one.devices}
            case PolicyObeyed():
                self._state.policy, self._policy = record.text, _policy(record.text)
                return [] if digest(record.text) == record.digest else ["a policy whose digest is another's"]
            case LeaseSaid():
                forbidden = self._forbidden(record)
                return [*forbidden, *(self._lease(record) if self._state.on else self._noted(record))]
            case Cordoned() | Uncordoned() if self._state.on:
                signer, self._state.cordon = self._state.cordon, ""
                return [] if signer == OPERATOR else [f"a change of cordons that {signer or 'nobody'} had signed"]
        return []

    def finish(self) -> list[str]:
        """What is wrong with the whole, after its last record."""
        if self._trust is not None and not self._state.on:
            return [
                "the site obeys its hub without signatures: nothing shows that tenants had asked for what it granted"
            ]
        return []

    def _started(self, record: SiteStarted) -> list[str]:
        was, self._state.on = self._state.on, bool(record.authorities)
        if self._trust is None:
            return []
        if not record.authorities:
            return ["the site obeys its hub without signatures from here on"] if was else []
        if record.pool != self._trust.pool:
            return [f"it goes by the signatures of the pool {record.pool!r}, not {self._trust.pool!r}"]
        known = {authority_fingerprint(authority) for authority in self._trust.authorities}
        others = [key for key in record.authorities if key not in known]
        return [f"it believes an authority that is not this pool's: {key}" for key in others]

    def _requested(self, record: Requested) -> list[str]:
        self.requests += 1
        try:
            signed = Signed(record.payload.encode(), base64.b64decode(record.signature, validate=True))
            payload = requests.read(signed)
            kind = BODIES.get(payload.method)
            if kind is None:
                raise NotAuthorised(f"a request for {payload.method[:40]!r}")
            time_ms = record.time
            if payload.method in ABOUT_TENANTS:  # see `Gate.about_tenant`
                time_ms = payload.time_ms
                if payload.principal != OPERATOR:
                    raise NotAuthorised(f"{payload.principal} has signed {payload.method}; an operator may")
            if self._trust is None:
                body: Any = msgspec.convert(payload.body, kind, str_keys=True)
            else:
                body = requests.open_(signed, self._trust, payload.method, kind, time_ms / 1000, self._check).body
        except (IbshellError, msgspec.ValidationError, binascii.Error) as error:
            return [f"a request about lease {record.lease or '-'} that nobody had signed so: {error}"]
        if payload.method.startswith("site."):
            self._state.cordon = payload.principal
            return []
        if payload.method in GRANTING:
            body = body if isinstance(body, LeaseWanted) else body.lease
        about = getattr(body, "id", "")
        if about != record.lease:
            return [f"a request about lease {about[:80]!r} recorded for {record.lease}"]
        covered = self._state.leases.setdefault(record.lease, Covered())
        if payload.method in GRANTING:
            covered.duration_s = body.duration_s
        covered.by[payload.method] = (
            payload.principal,
            max(getattr(body, "gpus", 0), getattr(body, "gpus_max", 0)),
            getattr(body, "tenant", ""),
        )
        return []

    def _forbidden(self, said: LeaseSaid) -> list[str]:
        """What the site's policy had against it."""
        if self._policy is None or said.event not in ("hold", "commit", "renew"):
            return []
        own = self._state.leases.get(said.lease, Covered())
        others = sum(
            one.devices
            for lease, one in self._state.leases.items()
            if one.tenant == said.tenant and lease != said.lease
        )
        devices = _staying(said, ()) if said.event == "hold" else own.devices
        # What a lease is given is a little longer than what was asked for; a hold says how long it waits for its commit.
        duration_s = _for_s(said) - 1.0 if said.event != "hold" else 0.0
        known = self._state.kinds
        kinds = dict.fromkeys(known[u] for group in said.grants or () for u in group.devices if u in known)
        problems = self._policy.lease_problems(said.tenant, others + devices, kinds, duration_s, said.time / 1000)
        return [f"{said.event} of lease {said.lease} against the site's policy: {problem}" for problem in problems]

    def _noted(self, said: LeaseSaid) -> list[str]:
        """A site that obeys its hub: nothing is compared, but who has what is known."""
        covered = self._state.leases.setdefault(said.lease, Covered())
        covered.tenant = said.tenant
        covered.devices = _staying(said, ()) if said.grants is not None else covered.devices
        if said.state in life.FINAL:
            self._state.leases.pop(said.lease, None)
        return []

    def _lease(self, said: LeaseSaid) -> list[str]:
        if said.event == "carried":
            self._state.leases[said.lease] = Covered(tenant=said.tenant, devices=_staying(said, ()))
            return []
        covered = self._state.leases.setdefault(said.lease, Covered())
        holder = tenant_principal(covered.tenant or said.tenant)
        found = []
        covered.leaving = said.leaving if said.leaving is not None else covered.leaving
        devices = _staying(said, covered.leaving)
        match said.event:
            case "hold":
                covered.tenant = said.tenant
                found = self._need(said, covered, tenant_principal(said.tenant), GRANTING, devices)
            case "commit" if _for_s(said) > covered.duration_s + 1.0:
                asked = f"{covered.duration_s:.0f} s were asked for"
                found = [f"commit of lease {said.lease} for {_for_s(said):.0f} s; {asked}"]
            case "renew":
                found = self._need(said, covered, holder, ("lease.renew", "fed.run", "fed.resume"))
                covered.by.pop("lease.renew", None)
            case "resize" if devices > covered.devices:
                found = self._need(said, covered, holder, ("lease.resize", *GRANTING), devices)
            case "transfer" if said.next_tenant:
                found = self._need(said, covered, holder, ("lease.offer",), named=said.next_tenant)
                taker = tenant_principal(said.next_tenant)
                found += self._need(said, covered, taker, ("lease.accept",), named=said.next_tenant)
                covered.next_tenant = said.next_tenant
            case "transfer":
                if said.tenant != covered.next_tenant:
                    found = [f"lease {said.lease} goes to {said.tenant}, which nobody had signed"]
                covered.tenant, covered.by = said.tenant, {}
        if said.grants is not None:
            covered.devices = devices
        if said.state in life.FINAL:
            self._state.leases.pop(said.lease, None)
        return found

    def _need(
        self,
        said: LeaseSaid,
        covered: Covered,
        principal: str,
        methods: tuple[str, ...],
        devices: int = 0,
        named: str = "",
    ) -> list[str]:
        shown = [covered.by[method] for method in methods if method in covered.by]
        for by, most, tenant in shown:
            if by == principal and devices <= most and (not named or tenant == named):
                return []
        what = f"{said.event} of lease {said.lease}{f' with {devices} devices' if devices else ''}"
        return [f"{what}: {principal} had signed no request for it"]


def _staying(said: LeaseSaid, leaving: Collection[str]) -> int:
    """How many devices a record gives a lease, beside those it is to give back."""
    return sum(uuid not in leaving for group in said.grants or () for uuid in group.devices)


def _for_s(said: LeaseSaid) -> float:
    """For how long a lease was asked for: what it is given is a little longer."""
    return max(0.0, (said.for_ms or 0) / 1000 - GUARD_S) / (1 + GUARD_FRACTION)


def _policy(text: str) -> Policy | None:
    """A policy as recorded; None where everything is allowed, or where it is of a newer release."""
    try:
        return parse(text, "the recorded policy") if text else None
    except UsageError:
        return None
