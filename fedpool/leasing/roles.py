"""Who may ask a hub for what. The sites judge for themselves what concerns them; the hub refuses early what they would."""

from fedpool.errors import NotAuthorised
from fedpool.identity.principals import OPERATOR, tenant_principal

# What changes something, and so has to be signed, with what the roles are that may ask it: an operator's, the tenant's that the
# request itself names, or that of whoever holds what it is about.
MAY: dict[str, tuple[str, ...]] = {
    "lease.request": ("named",),
    "lease.renew": ("holder",),
    "lease.resize": ("holder",),
    "lease.offer": ("holder",),
    "lease.accept": ("named",),
    "lease.release": ("holder", OPERATOR),
    "lease.revoke": (OPERATOR,),
    "lease.adopt": (OPERATOR,),
    "site.cordon": (OPERATOR,),
    "site.uncordon": (OPERATOR,),
    "tenant.set": (OPERATOR,),
    "tenant.remove": (OPERATOR,),
    "pool.invite": (OPERATOR,),
    "pool.approve": (OPERATOR,),
    "pool.adopt": (OPERATOR,),
    "pool.certificate": (OPERATOR,),
    "site.remove": (OPERATOR,),
    "fed.run": ("named",),
    "fed.resume": ("holder",),
    "fed.stop": ("holder", OPERATOR),
}


def require_role(method: str, principal: str, named: str, holder: str) -> None:
    """Refuse a request by somebody who may not ask it.

    Args:
        method: one of `MAY`.
        principal: the role in which it was signed.
        named: the tenant that the request names, or "".
        holder: the tenant that holds what it is about, or "".

    Raises:
        NotAuthorised: saying who may.
    """
    tenants = {"named": named, "holder": holder}
    allowed = [tenant_principal(tenants[role]) if role in tenants else role for role in MAY[method]]
    if principal not in allowed:
        raise NotAuthorised(
            f"{principal} may not ask for {method}; {' or '.join(allowed)} may",
            "ask for an invitation as that: ibshell pool invite",
        )
