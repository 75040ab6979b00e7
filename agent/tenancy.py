"""What operators have signed about tenants, as a site knows it: recorded, kept, and the limits in it held at this site.

The hub passes it on, and keeps quotas over all sites. A site sees that a tenant has no more here alone than it may have at all;
whoever verifies the ledgers sees the rest.
"""

import hashlib
import logging
from collections.abc import Iterable

import msgspec

from agent.ledger.site_ledger import SiteLedger
from agent.ports import Clock, Store
from fedpool.errors import Forbidden, StorageFailed
from fedpool.identity import requests
from fedpool.leasing.gate import Gate
from fedpool.leasing.recorded import requested
from fedpool.leasing.tenants import ANY, TenantRecorded, TenantRemoved, Tenants, in_words
from fedpool.records import Device, Signed, SiteLease, Tenant

log = logging.getLogger(__name__)

STREAM = "tenants"


class TenantSaid(msgspec.Struct, frozen=True, tag="tenant.said"):
    """What was signed about a tenant last."""

    name: str
    time_ms: int
    tenant: Tenant | None


def digest_of(times: Iterable[tuple[str, int]]) -> str:
    """What stands for all that is known: of each tenant when it was signed."""
    return hashlib.sha256("\n".join(f"{name} {time_ms}" for name, time_ms in sorted(times)).encode()).hexdigest()[:32]


def digest_of_signed(signed: Iterable[Signed]) -> str:
    """As `digest_of`, of what has not been taken apart."""
    payloads = [requests.read(one) for one in signed]
    return digest_of((payload.body["name"], payload.time_ms) for payload in payloads)


class Tenancy:
    """See the module.

    Args:
        gate: knows whose word counts.
        store: where it is kept.
        ledger: the site's.
        clock: the machine's.
    """

    def __init__(self, gate: Gate, store: Store, ledger: SiteLedger, clock: Clock) -> None:
        self._gate = gate
        self._store = store
        self._ledger = ledger
        self._clock = clock
        self._times: dict[str, int] = {}
        self._tenants = Tenants()

    @property
    def digest(self) -> str:
        """Of all that is known."""
        return digest_of(self._times.items())

    async def recover(self) -> None:
        """Read back what is known."""
        for entry in await self._store.read(STREAM, TenantSaid):
            self._apply(entry)

    def _apply(self, said: TenantSaid) -> None:
        self._times[said.name] = said.time_ms
        self._tenants.apply(TenantRemoved(said.name) if said.tenant is None else TenantRecorded(said.tenant))

    async def adopt(self, signed: Iterable[Signed]) -> None:
        """Go by it where it is newer than what is known.

        Raises:
            NotAuthorised: no operator has signed it; what came before it is gone by.
            StorageFailed: it could not be kept; it is gone by all the same until the next start.
        """
        for one in signed:
            opened = self._gate.about_tenant(one, self._clock.unix())
            name, time_ms = opened.body.name, opened.payload.time_ms
            if time_ms <= self._times.get(name, -1):
                continue
            said = TenantSaid(name, time_ms, opened.body if isinstance(opened.body, Tenant) else None)
            self._apply(said)
            try:
                await self._store.append(STREAM, [said], records=self._ledger.at([requested("", one)]))
            except StorageFailed:
                await self._store.read(STREAM, TenantSaid)  # the stream takes nothing before
                raise
            self._ledger.wrote()
            log.info("what an operator has signed about tenant %s is gone by", name)

    def require_room(
        self, tenant: str, gpus: int, kinds: tuple[str, ...], held: Iterable[SiteLease], devices: Iterable[Device]
    ) -> None:
        """A tenant may have so many more devices here.

        Args:
            tenant: who.
            gpus: how many more.
            kinds: one of which they are, where that is known.
            held: the tenant's other leases here.
            devices: the site's.

        Raises:
            Forbidden: it would have more at this site alone than it may have.
        """
        kind_of = {device.uuid: device.kind for device in devices}
        has = [
            kind_of.get(grant.uuid, "") for lease in held for grant in lease.grants if grant.uuid not in lease.leaving
        ]
        for quota in self._tenants.limits(tenant):
            if quota.site not in (ANY, self._ledger.site) or (quota.kind != ANY and kinds != (quota.kind,)):
                continue
            count = sum(quota.kind in (ANY, kind) for kind in has)
            assert quota.limit is not None
            if gpus and count + gpus > quota.limit:
                raise Forbidden(
                    f"{in_words(tenant, count, quota)}, as an operator has signed; {gpus} more asked for at "
                    f"{self._ledger.site}",
                    "ibshell tenant show NAME prints its quotas",
                )
