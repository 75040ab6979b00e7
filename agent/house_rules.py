"""What a site refuses whoever has signed it: what its policy forbids, what is over a quota here, anything new without witnesses.

The policy is its file as it is now: read again when it changes, and never let go for one that cannot be read.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from agent.ledger.site_ledger import SiteLedger
from agent.tenancy import Tenancy
from fedpool.errors import Forbidden, IbshellError, NotFound, UsageError
from fedpool.leasing import policy as policies
from fedpool.leasing.grants import SiteGrants
from fedpool.leasing.policy import Policy
from fedpool.leasing.requests import GrantEvent, Hold, Renew, Resize, Transfer
from fedpool.records import SiteLease
from fedpool.units import format_duration

log = logging.getLogger(__name__)

LOOK_S = 1.0


class HouseRules:
    """See the module.

    Args:
        site: its name.
        path: of the file, or None where everything is allowed.
        changed: told of a new policy, which is gone by when it returns.
        ledger: the site's, which witnesses have to vouch for; None where nobody has said who belongs to the pool.
        tenancy: what operators have signed about tenants; None where nobody can.

    Attributes:
        policy: what is gone by now.
        text: of it.

    Raises:
        NotFound, UsageError: there is none at the start, or it cannot be read.
    """

    def __init__(
        self,
        site: str,
        path: Path | None,
        changed: Callable[[str, Policy], Awaitable[None]],
        ledger: SiteLedger | None,
        tenancy: Tenancy | None,
    ) -> None:
        self._site = site
        self._ledger = ledger
        self._tenancy = tenancy
        self._path = path
        self._changed = changed
        self.text = "" if path is None else _text(path)
        self.policy = policies.parse(self.text, str(path))
        self._seen = self.text

    async def run(self) -> None:
        """Look whether the file has changed, until cancelled."""
        while self._path is not None:
            await asyncio.sleep(LOOK_S)
            try:
                text = _text(self._path)
            except (NotFound, UsageError) as error:
                text = self._seen
                log.debug("%s", error)
            if text == self._seen:
                continue
            self._seen = text
            before = self.text, self.policy
            try:
                self.text, self.policy = text, policies.parse(text, str(self._path))
                await self._changed(text, self.policy)
            except IbshellError as error:
                self.text, self.policy = before
                log.error("the policy stays as it was: %s", error)
                continue
            log.info("a new policy is in force")

    def require(self, event: GrantEvent, lease: SiteLease | None, machine: SiteGrants, unix: float) -> None:
        """Refuse what the policy forbids; what takes away is always allowed.

        Raises:
            Forbidden: with everything that forbids it.
        """
        match event:
            case Hold():
                self.require_witnessed()
                kinds = event.shape.kinds or tuple(_kinds(machine, event.shape.devices))
                self._lease(event.tenant, event.gpus, kinds, event.duration_s, event.lease, machine, unix)
                self._room(event.tenant, event.gpus, kinds, event.lease, machine)
            case Renew() if lease is not None:
                self._lease(lease.tenant, len(lease.grants), (), event.duration_s, lease.id, machine, unix)
            case Resize() if lease is not None and event.gpus > len(lease.grants) - len(lease.leaving):
                self.require_witnessed()
                kinds = lease.shape.kinds or tuple(_kinds(machine, [grant.uuid for grant in lease.grants]))
                self._lease(lease.tenant, event.gpus, kinds, 1.0, lease.id, machine, unix)
                self._room(lease.tenant, event.gpus, kinds, lease.id, machine)
            case Transfer() if lease is not None and event.tenant not in (lease.tenant, lease.next_tenant):
                kinds = tuple(_kinds(machine, [grant.uuid for grant in lease.grants]))
                self._lease(event.tenant, len(lease.grants), kinds, 1.0, lease.id, machine, unix)
                self._room(event.tenant, len(lease.grants), kinds, lease.id, machine)

    def require_witnessed(self) -> None:
        """Do nothing that others build on while no majority of the witnesses vouches for what the ledger says.

        Raises:
            Forbidden: for longer than the policy has patience.
        """
        if self._ledger is None:
            return
        waiting_s = self._ledger.unwitnessed_s()
        if waiting_s > self.policy.unwitnessed_s(self._ledger.sites):
            raise Forbidden(
                f"no majority of its witnesses has cosigned the ledger of {self._site} for {format_duration(waiting_s)}",
                "ibshell ledger verify shows who has; they are away, or the hub does not carry checkpoints to them",
            )

    def _lease(
        self,
        tenant: str,
        gpus: int,
        kinds: tuple[str, ...],
        duration_s: float,
        about: str,
        machine: SiteGrants,
        unix: float,
    ) -> None:
        if self._path is None:
            return
        held = sum(len(one.grants) for one in _others(tenant, about, machine))
        policies.require(self._site, self.policy.lease_problems(tenant, held + gpus, kinds, duration_s, unix))

    def _room(self, tenant: str, gpus: int, kinds: tuple[str, ...], about: str, machine: SiteGrants) -> None:
        if self._tenancy is not None:
            self._tenancy.require_room(tenant, gpus, kinds, _others(tenant, about, machine), machine.devices)


def _kinds(machine: SiteGrants, uuids: Sequence[str]) -> dict[str, None]:
    """Of what kinds devices are; where none are named, it may be any that the site has."""
    return dict.fromkeys(device.kind for device in machine.devices if not uuids or device.uuid in uuids)


def _others(tenant: str, about: str, machine: SiteGrants) -> list[SiteLease]:
    """A tenant's leases here beside the one that it is about."""
    return [one for one in machine.leases.values() if one.occupies and one.tenant == tenant and one.id != about]


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        raise NotFound(f"no policy at {path}", "policy_file names it; remove the key to allow everything") from None
    except (UnicodeDecodeError, OSError) as error:
        raise UsageError(f"the policy at {path} cannot be read: {error}") from None
