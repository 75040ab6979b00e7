"""Requests that change something: asked, and signed, as whoever may ask them."""

from __future__ import annotations

import secrets
from typing import Any, TypeVar

import msgspec

from fedpool.client.connection import Connection
from fedpool.errors import NotAuthorised, NotFound
from fedpool.identity.principals import tenant_principal
from fedpool.leasing.roles import MAY
from fedpool.records import Signed
from fedpool.wire.messages import ById, LeaseView, LeaseWanted, Listing, Nothing, RunView

Answer = TypeVar("Answer")


def act(
    hub: Connection,
    method: str,
    body: Any,
    expect: type[Answer],
    timeout_s: float | None = 90.0,
    key: str = "",
    sites: tuple[str, ...] = (),
) -> Answer:
    """Ask the hub for a change, in the first of the roles that may ask it in which this connection may sign.

    Args:
        hub: where the pool does not sign, it is asked all the same.
        body: where it names a lease or a run by a prefix, the whole id takes its place.
        sites: at which the request holds; empty: at whichever the hub chooses.

    Raises:
        NotAuthorised: none of the roles is this user's.
        IbshellError: whatever the other side answered.
    """
    if hub.signer is None:
        return hub.call(method, body, expect, timeout_s, key)
    if isinstance(body, LeaseWanted) and not body.id:
        body = msgspec.structs.replace(body, id=secrets.token_hex(4))  # what is signed says which lease it is for
    signed, principal = _signed(hub, method, body, sites)
    try:
        return hub.call(method, signed, expect, timeout_s, key)
    except NotAuthorised:
        # Whoever holds it may have changed since the hub was asked, above all while it learns from the sites after a restart.
        signed, now = _signed(hub, method, body, sites)
        if now == principal:
            raise
        return hub.call(method, signed, expect, timeout_s, key)


def _signed(hub: Connection, method: str, body: Any, sites: tuple[str, ...]) -> tuple[Signed, str]:
    """The request, signed in the first of the roles that may ask it that is this user's; and that role."""
    assert hub.signer is not None
    roles = []
    for role in MAY[method]:
        if role == "named":
            roles.append(tenant_principal((getattr(body, "lease", None) or body).tenant))
        elif role == "holder":
            body, tenant = _held(hub, method, body)
            roles += [tenant_principal(tenant)] if tenant else []
        else:
            roles.append(role)
    refused: NotAuthorised | None = None
    for principal in roles:
        try:
            return hub.signer.sign(method, body, principal, sites), principal
        except NotAuthorised as error:
            refused = refused or error
    raise refused or NotAuthorised(f"nobody may ask for {method} of {body}")


def _held(hub: Connection, method: str, body: Any) -> tuple[Any, str]:
    """A request with the whole id of what it is about, and who holds that."""
    if method.startswith("fed."):
        run = hub.call("fed.show", ById(body.id), RunView)
        return msgspec.structs.replace(body, id=run.id), run.tenant
    try:
        lease = hub.call("lease.show", ById(body.id), LeaseView).lease
    except NotFound:  # sites may hold one that the hub does not know: it is listed
        rows = [row for row in hub.call("lease.list", Nothing(), Listing).items if row["id"].startswith(body.id)]
        found = {(row["id"], row["tenant"]) for row in rows}
        if len(found) != 1:
            raise
        [(lease_id, tenant)] = found
        return msgspec.structs.replace(body, id=lease_id), tenant
    return msgspec.structs.replace(body, id=lease.id), lease.tenant
