"""`ibshell-agent join TOKEN`: a site makes its key and shows it to the operator; certificate and configuration follow."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fedpool.client.joining import accept, until_decided
from fedpool.errors import NotAuthorised, Refused, UsageError
from fedpool.identity import tokens
from fedpool.identity.authorities import authority_fingerprint, authority_line
from fedpool.identity.keys import fingerprint
from fedpool.transport import ssh
from fedpool.transport.identity import Identity
from fedpool.wire.membership import JoinWanted


async def join_site(
    line: str,
    state: Path,
    config: Path,
    listen: str,
    simulated: Sequence[tuple[str, object]],
    say: Callable[[str], None],
) -> None:
    """Join a pool as a site and write the agent's configuration.

    Args:
        line: the token.
        state: for key and database.
        config: the configuration to write.
        listen: `host:port` on which the hub dials in, or "" to dial out to it.
        simulated: what stands in for devices.
        say: tells people how it goes.

    Raises:
        UsageError, Refused: the token is none of a site's, or there is a configuration already.
        NotAuthorised: see `until_decided` and `accept`.
    """
    token = tokens.parse(line)
    kind, _, name = token.role.partition("/")
    if kind != "site":
        raise UsageError(f"a token for {token.role}", "a person joins with: ibshell pool join TOKEN")
    if config.exists():
        raise Refused(f"{config} is there already", "name another with --config, or remove it to join anew")
    if time.time() > token.until:
        raise NotAuthorised("the invitation is over", "ask the operator for another")
    path = state / "identity"
    identity = Identity.load(path) if path.exists() else Identity.create(path)
    say(f"this site's key: {fingerprint(identity.public)}")
    say(f"the pool's authority: {authority_fingerprint(token.authority)}; compare it with what the operator tells you")
    wanted = JoinWanted(token.invite, name, listen, token.proof(identity.public, name, listen))
    say(f"waiting for the operator: ibshell site approve {name}")
    decided = await until_decided(token, identity, wanted, say)
    trust = accept(token, identity, decided)
    if trust.sites.get(name) != identity.public:
        raise NotAuthorised("the roster names another key for this site", "invite it again")
    hub = "" if listen else _reached(token.hub, decided.hub_sites)
    lines = [
        f"name = {json.dumps(name)}",
        f"state = {json.dumps(str(state.resolve()))}",
        f"socket = {json.dumps(str((state / 'site.sock').resolve()))}",
        f"listen = {json.dumps(listen)}" if listen else f"hub = {json.dumps(hub)}",
        f"pool = {json.dumps(token.pool)}",
        f"authorities = {json.dumps([authority_line(key) for key in trust.authorities])}",
        "",
        "[simulated]",
        f"name = {json.dumps(name)}",
        *(f"{key} = {json.dumps(value)}" for key, value in simulated),
    ]
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text("\n".join(lines) + "\n")


def _reached(hub: str, sites: str) -> str:
    """Where sites dial in: at the host by which people reach the hub, where it listens on all of its addresses.

    Raises:
        Refused: it takes no sites that dial out.
    """
    if not sites:
        raise Refused("the hub takes no sites that dial out", "join with --listen HOST:PORT, so that it dials in")
    host, port = ssh.parse_address(sites)
    if host in ("0.0.0.0", "::"):
        host = ssh.parse_address(hub)[0]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
