"""The roles that certificates give."""

from collections.abc import Sequence

from fedpool.errors import UsageError
from fedpool.names import NAME, RULE

OPERATOR, AUDITOR, HUB = "operator", "auditor", "hub"


def tenant_principal(tenant: str) -> str:
    """The role of a tenant's members."""
    return f"tenant/{tenant}"


def site_principal(site: str) -> str:
    """The role of a site's agent."""
    return f"site/{site}"


def require_principal(principal: str) -> str:
    """A role that exists.

    Raises:
        UsageError: it does not.
    """
    kind, _, name = principal.partition("/")
    if principal in (OPERATOR, AUDITOR, HUB) or (kind in ("tenant", "site") and NAME.fullmatch(name)):
        return principal
    if kind in ("tenant", "site"):
        raise UsageError(f"{name[:80]!r} is no name: {RULE}", f"the name of a {kind} is needed")
    raise UsageError(
        f"{principal[:80]!r} is no role", f"operator, auditor, hub, tenant/NAME or site/NAME; a name is {RULE}"
    )


def persons_role(principals: Sequence[str]) -> str:
    """The first role of a person among a certificate's; "" where there is none."""
    return next((one for one in principals if one in (OPERATOR, AUDITOR) or one.startswith("tenant/")), "")
