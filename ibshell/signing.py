"""This user's key for a pool: signs requests with the certificate at hand, or one that the authority at hand issues.

A key lies as OpenSSH has it, `identity` with `identity-cert.pub` beside it. Whoever has the pool's authority on this machine (as
after `ibshell up`) needs no certificate: one for an hour is made when it is needed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fedpool.errors import NotAuthorised
from fedpool.records import Signed

if TYPE_CHECKING:
    from fedpool.client.connection import Connection
    from fedpool.identity.certificates import Certificate
    from fedpool.identity.trust import Trust
    from fedpool.transport.identity import Identity
    from ibshell.authority import Authority

ISSUED_S = 3600


class PoolSigner:
    """Signs for one pool.

    Args:
        pool: the pool's identity.
        authorities: public key lines of those who may certify in it, before any roster is known.
        directory: with the private key, its certificate, and the latest roster.
        authority: path of the authority's private key, where it is on this machine.
    """

    def __init__(self, pool: str, authorities: Sequence[str], directory: Path, authority: Path | None = None) -> None:
        self._pool = pool
        self._authorities = authorities
        self._directory = directory
        self._authority_path = authority
        self._issued: dict[str, Certificate] = {}

    @cached_property
    def _identity(self) -> Identity:
        from fedpool.transport.identity import Identity

        return Identity.load(self._directory / "identity")

    @cached_property
    def _authority(self) -> Authority | None:
        """The authority, where it lies in a file; one that ssh-agent has is asked by its operator's commands alone."""
        from ibshell.authority import Authority

        if self._authority_path is None or not self._authority_path.exists():
            return None
        return Authority(self._authority_path.parent)

    def _certificate(self, principal: str) -> Certificate:
        from fedpool.identity import certificates

        now = time.time()
        known = self._issued.get(principal)
        if known is not None and now < known.valid_before - 60:
            return known
        own = self._identity.certificate(certificates.USER)
        if own is not None and principal in own.principals and now < own.valid_before:
            return own
        if self._authority is None:
            roles = ", ".join(own.principals) if own is not None else "nobody"
            expired = " and has expired" if own is not None and now >= own.valid_before else ""
            raise NotAuthorised(
                f"this key's certificate is for {roles}{expired}; {principal} is needed",
                "the pool's operator invites: ibshell pool invite",
            )
        issued = self._authority.issue(certificates.USER, self._identity.public, (principal,), "this machine", ISSUED_S)
        self._issued[principal] = issued
        return issued

    def trust(self) -> Trust:
        """Whom this pool's parties believe, as far as is known here."""
        from fedpool.identity.authorities import parse_authority
        from fedpool.identity.trust import Trust

        trust = Trust(self._pool, tuple(parse_authority(line, "authorities") for line in self._authorities))
        known = self._roster()
        if known is not None:
            trust.restore(known)
        return trust

    def _roster(self) -> Signed | None:
        try:
            return msgspec.json.decode((self._directory / "roster.json").read_bytes(), type=Signed)
        except FileNotFoundError:
            return None

    def refresh(self, hub: Connection) -> None:
        """Take the hub's roster, where it has a newer one that an authority has signed."""
        from fedpool.wire.membership import RosterShown, RosterWanted

        trust = self.trust()
        for shown in trust.follow(hub.call("pool.roster", RosterWanted(trust.number), RosterShown).rosters):
            temporary = self._directory / "roster.json.new"
            temporary.write_bytes(msgspec.json.encode(shown))
            temporary.replace(self._directory / "roster.json")

    def signed_plan(self, signed: Signed, tenant: str) -> str:
        """The plan in a request for a run that somebody of a tenant has signed.

        Raises:
            NotAuthorised: it was not, or for another pool.
        """
        from fedpool.identity import requests
        from fedpool.identity.principals import tenant_principal
        from fedpool.wire.messages import RunAgain

        payload = requests.read(signed)
        if payload.method not in ("fed.run", "fed.resume") or payload.principal != tenant_principal(tenant):
            raise NotAuthorised(
                f"the hub shows a request of {payload.principal} for {payload.method} as {tenant}'s run"
            )
        return requests.open_(
            signed, self.trust().of_the_past(), payload.method, RunAgain, payload.time_ms / 1000
        ).body.plan

    def sign(self, method: str, body: object, principal: str, sites: tuple[str, ...] = ()) -> Signed:
        """Sign a request as somebody.

        Raises:
            NotAuthorised: there is no certificate as that.
            NotFound: there is no key.
        """
        from fedpool.identity import requests

        certificate = self._certificate(principal)
        payload = requests.compose(
            self._pool, method, body, principal, sites, time.time_ns() // 1_000_000, secrets.token_hex(16)
        )
        return Signed(payload, self._identity.sshsig(certificate.blob, requests.NAMESPACE, payload))
