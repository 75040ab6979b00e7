"""`ibshell pool`: make a pool, join one, choose one; who belongs to it, and what is believed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedpool.errors import NotFound, Refused, Unreachable, UsageError
from fedpool.identity.authorities import authority_fingerprint
from fedpool.names import NAME, RULE
from fedpool.units import format_duration, parse_duration
from ibshell import contexts, diagnostics, render, settings
from ibshell.cli import options
from ibshell.pool import LocalPool
from ibshell.render import Column

if TYPE_CHECKING:
    from ibshell.operator import Operator

app = typer.Typer(no_args_is_help=True, help="Pools: make, join and choose one; who belongs to it.")

POOLS = [Column("POOL", "name"), Column("CHOSEN", "chosen"), Column("HUB", "hub"), Column("IDENTITY", "pool")]
MEMBERS = [Column("MEMBER", "name"), Column("ROLE", "role"), Column("KEY", "key"), Column("STATE", "state")]
JOINS = [
    Column("NAME", "name"),
    Column("ROLE", "role"),
    Column("KEY", "key"),
    Column("ADDRESS", "address"),
    Column("TOKEN", "token"),
]
RENEW_EVERY_S = 60.0


def operator() -> Operator:
    """The operator of the chosen pool.

    Raises:
        NotFound: its authority is not on this machine.
    """
    from ibshell.operator import Operator

    pool = LocalPool(settings.pool_name())
    found = Operator(pool.authority, contexts.load(pool.client).pool)
    found.certify_self(pool.client)
    return found


def hub_address() -> str:
    """Where the chosen pool's hub listens for people.

    Raises:
        UsageError: it does not.
    """
    import tomllib

    path = LocalPool(settings.pool_name()).directory / "hub" / "hub.toml"
    address = str(tomllib.loads(path.read_text()).get("listen", ""))
    if not address:
        raise UsageError("the hub does not listen for people", f'set listen = "HOST:PORT" in {path} and restart it')
    return address


@app.command()
def init(
    name: Annotated[str, typer.Argument(help="Of the pool.")],
    listen: Annotated[str, typer.Option("--listen", help="HOST:PORT on which the hub takes people.")],
    listen_sites: Annotated[str, typer.Option("--listen-sites", help="HOST:PORT for sites that dial out.")] = "",
    key: Annotated[
        Path | None, typer.Option("--authority", help="Public key of an authority that ssh-agent (or a token) has.")
    ] = None,
) -> None:
    """Make a pool that others can join: its certificate authority, its hub's key and configuration, and an operator, you.

    Examples: ibshell pool init fedhealth --listen hub.example.org:7022 --listen-sites hub.example.org:7023
              ibshell pool init fedhealth --listen 10.0.0.5:7022 --authority ~/.ssh/ca.pub
    """
    if not NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no name: {RULE}")
    pool = LocalPool(name)
    if pool.directory.exists():
        raise Refused(f"the pool {name!r} is there already: {pool.directory}", "choose another name, or remove it")
    pool.create([], lambda _: False, listen, listen_sites, authority=key)
    contexts.use(name)
    render.write(f"pool {name}: {contexts.load(pool.client).pool}\n")
    diagnostics.say(f"start its hub: ibshell-agent hub --config {pool.directory / 'hub' / 'hub.toml'}")
    diagnostics.say("then: ibshell site invite NAME, ibshell pool invite --tenant NAME, ibshell pool renew --watch")


@app.command("list")
def list_(output: options.Output = None) -> None:
    """List the pools this user belongs to.

    Example: ibshell pool list
    """
    chosen = settings.pool_name()
    items: list[dict[str, Any]] = []
    for name, directory in contexts.names().items():
        context = contexts.load(directory)
        items.append(
            {"name": name, "chosen": name == chosen, "hub": context.hub or "this machine", "pool": context.pool}
        )
    answer = {"items": items, "errors": [], "as_of": {}}
    render.write(render.listing(answer, POOLS, "name", output, render.on_terminal()))


@app.command()
def use(name: Annotated[str, typer.Argument(help="Of the pool.")]) -> None:
    """Choose the pool that commands talk to; IBSHELL_POOL does it for one command.

    Example: ibshell pool use fedhealth
    """
    contexts.use(name)
    render.write(f"pool {name}\n")


@app.command()
def show(output: options.Output = None) -> None:
    """Show the chosen pool: its identity, its authority, this user's certificate.

    Example: ibshell pool show
    """
    from fedpool.identity import certificates
    from fedpool.identity.keys import fingerprint
    from fedpool.transport.identity import Identity

    name = settings.pool_name()
    directory = contexts.names().get(name)
    if directory is None:
        raise NotFound(f"no pool {name!r}", "ibshell pool list shows them")
    context = contexts.load(directory)
    own = contexts.signer(directory)
    assert own is not None
    try:
        with options.hub() as connection:
            own.refresh(connection)
    except Unreachable as error:
        diagnostics.say(f"as known here: {error.message}")
    trust, identity = own.trust(), Identity.load(directory / "identity")
    found = identity.certificate(certificates.USER)
    data = {
        "name": name,
        "pool": context.pool,
        "hub": context.hub or "this machine",
        "authorities": [authority_fingerprint(key) for key in trust.authorities],
        "roster": trust.number,
        "sites": sorted(trust.sites),
        "denied_keys": sorted(trust.denied.keys),
        "denied_serials": sorted(trust.denied.serials),
        "key": fingerprint(identity.public),
        "roles": list(found.principals) if found is not None else [],
        "expires_in_s": max(0.0, found.valid_before - time.time()) if found is not None else None,
    }
    render.write(render.record(data, output, "name"))


@app.command()
def invite(
    tenant: Annotated[str, typer.Option("--tenant", "-t", help="Of which tenant a member is invited.")] = "",
    role: Annotated[str, typer.Option("--role", help="member, operator or auditor.")] = "member",
    name: Annotated[str, typer.Option("--name", help="What the invited is called in lists.")] = "",
    for_: Annotated[str, typer.Option("--for", help="How long the invitation holds.")] = "24h",
) -> None:
    """Invite a person: prints one line, with which they join and which works once.

    Examples: ibshell pool invite --tenant oncology --name ana | ibshell pool invite --role auditor --name ben
    """
    from fedpool.identity.principals import require_principal, tenant_principal

    if role == "member" and not tenant:
        raise UsageError("a member of which tenant?", "ibshell pool invite --tenant NAME")
    if role not in ("member", "operator", "auditor"):
        raise UsageError(f"no role {role!r}", "member, operator or auditor")
    principal = require_principal(tenant_principal(tenant) if role == "member" else role)
    called = name or tenant or role
    invite_one(principal, called, for_)
    diagnostics.say(f"{called} joins with: ibshell pool join TOKEN; then: ibshell pool approve {called}")


@app.command()
def join(
    token: Annotated[str, typer.Argument(help="What ibshell pool invite printed; - reads it from standard input.")],
    name: Annotated[str, typer.Option("--name", help="What to call the pool here.")] = "",
    key: Annotated[Path | None, typer.Option("--key", help="Public half of a key that ssh-agent has.")] = None,
) -> None:
    """Join a pool: makes a key, waits for the operator, and keeps the certificate.

    Examples: ibshell pool join ibshell1.lqhm… | ibshell pool join - --key ~/.ssh/id_ed25519.pub < token
    """
    import sys

    from fedpool.client.joining import join_person

    line = sys.stdin.readline() if token == "-" else token
    called, role = join_person(line, contexts.joined_directory, name, key, diagnostics.say)
    contexts.use(called)
    render.write(f"joined pool {called} as {role}\n")


@app.command()
def joins(output: options.Output = None) -> None:
    """List who asks to join, and whether they have the token of an invitation.

    Example: ibshell pool joins
    """
    from fedpool.identity.keys import fingerprint, parse_public
    from fedpool.wire.membership import JoinsAsked
    from fedpool.wire.messages import Nothing

    own = operator()
    with options.hub() as connection:
        waiting = connection.call("pool.joins", Nothing(), JoinsAsked).items
    items = [
        {
            "id": one.id,
            "name": one.name or one.invited,
            "role": one.role,
            "key": fingerprint(parse_public(one.key, "the key")),
            "address": one.address,
            "token": "renewal" if one.role == "renewal" else "right" if own.proved(one) else "WRONG",
        }
        for one in waiting
    ]
    answer = {"items": items, "errors": [], "as_of": {}}
    render.write(render.listing(answer, JOINS, "id", output, render.on_terminal()))


def invite_one(role: str, name: str, for_: str) -> None:
    """Print a token with which somebody joins."""
    with options.hub() as connection:
        token = operator().invite(connection, hub_address(), role, name, parse_duration(for_))
    render.write(token.line() + "\n")


def approve_one(name: str, for_: str, refuse: str = "") -> None:
    """Let somebody in who asks under a name, or do not."""
    from fedpool.identity.keys import fingerprint, parse_public

    own = operator()
    with options.hub() as connection:
        asked = own.asking(connection, name)
        if refuse:
            own.refuse(connection, asked, refuse)
            render.write(f"{asked.name} is not let in: {refuse}\n")
            return
        found = own.let_in(connection, asked, parse_duration(for_) if for_ else None)
    render.write(f"{found.key_id} is in as {asked.role}: {fingerprint(parse_public(asked.key, 'the key'))}\n")
    left = found.valid_before - time.time()
    diagnostics.say(f"its certificate holds for {format_duration(left)}; ibshell pool renew --watch renews it")


@app.command()
def approve(
    name: Annotated[str, typer.Argument(help="Who asks, as ibshell pool joins shows it.")],
    for_: Annotated[str, typer.Option("--for", help="How long the certificate holds (12h).")] = "",
    refuse: Annotated[str, typer.Option("--refuse", help="Do not let them in, with this reason.")] = "",
) -> None:
    """Let in somebody who asks to join; only with the token of an invitation that is possible.

    Example: ibshell pool approve ana
    """
    approve_one(name, for_, refuse)


@app.command()
def members(output: options.Output = None) -> None:
    """List who was let in.

    Example: ibshell pool members
    """
    from fedpool.identity.keys import fingerprint, parse_public

    own = operator()
    known = own.roster()
    items = []
    for line, member in own.members().items():
        key = fingerprint(parse_public(line, "the key"))
        denied = key in known.denied_keys or bool(set(member.serials) & set(known.denied_serials))
        items.append({"name": member.name, "role": member.role, "key": key, "state": "revoked" if denied else "in"})
    answer = {"items": items, "errors": [], "as_of": {}}
    render.write(render.listing(answer, MEMBERS, "name", output, render.on_terminal()))


@app.command()
def revoke(
    who: Annotated[str, typer.Argument(help="A member's name, a key's fingerprint, or a certificate's serial number.")],
) -> None:
    """Believe a key or a certificate no longer; every site hears of it at once, or when it is back.

    Examples: ibshell pool revoke ana | ibshell pool revoke SHA256:Qp1…
    """
    with options.hub() as connection:
        denied = operator().deny(connection, who)
    render.write(f"believed no longer: {denied}\n")


@app.command()
def renew(
    watch: Annotated[bool, typer.Option("--watch", help="Go on until Ctrl-C: run it as a service.")] = False,
) -> None:
    """Renew certificates: as the operator those of sites and of members who ask, as a member your own.

    Examples: ibshell pool renew --watch | ibshell pool renew
    """
    from fedpool.errors import IbshellError

    pool = LocalPool(settings.pool_name())
    if not pool.authority.exists():
        from fedpool.client.joining import renew_person

        directory = contexts.joined_directory(settings.pool_name())
        context = contexts.load(directory)
        left = renew_person(directory, context.hub, context.pool, context.authorities, context.invite, diagnostics.say)
        render.write(f"the certificate holds for {format_duration(left)}\n")
        return
    own = operator()
    while True:
        try:
            own.certify_self(pool.client)
            own.certify_hub(pool.directory / "hub")
            with options.hub() as connection:
                for name in own.renew(connection):
                    render.write(f"renewed: {name}\n")
        except IbshellError as error:
            if not watch:
                raise
            diagnostics.say(f"{error.message}; trying again")
        if not watch:
            return
        time.sleep(RENEW_EVERY_S)


@app.command()
def rotate(
    finish: Annotated[bool, typer.Option("--finish", help="Believe the old authority no longer.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Leave sites outside that have no new certificate yet.")] = False,
    key: Annotated[
        Path | None, typer.Option("--authority", help="Public key of the new one, where ssh-agent has it.")
    ] = None,
) -> None:
    """Change the certificate authority: first both are believed and everything is renewed; then --finish drops the old one.

    Examples: ibshell pool rotate | ibshell pool rotate --finish
    """
    own = operator()
    with options.hub() as connection:
        if finish:
            render.write(f"believed no longer: {own.finish_rotation(connection, yes)}\n")
        else:
            render.write(f"the new authority: {own.rotate(connection, key)}\n")
            diagnostics.say("renew everything with it: ibshell pool renew; then: ibshell pool rotate --finish")


@app.command()
def krl(path: Annotated[Path, typer.Argument(help="File to write.")]) -> None:
    """Write what is revoked as a key revocation list for a stock sshd: RevokedKeys FILE.

    Example: ibshell pool krl /etc/ssh/pool.krl
    """
    own = operator()
    own.krl(path)
    known = own.roster()
    render.write(f"{path}: {len(known.denied_keys)} keys, {len(known.denied_serials)} certificates\n")
