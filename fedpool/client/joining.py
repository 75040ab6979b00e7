"""Joining a pool with a token, and getting a new certificate later: the joiner's side, the same for sites and people.

The joiner shows its key to the hub and asks until the operator has decided. It believes nothing but the authority that the token
names.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from fedpool.errors import IbshellError, NotAuthorised, Refused, Unreachable, UsageError
from fedpool.identity import certificates, tokens
from fedpool.identity.authorities import authority_fingerprint, authority_line, parse_authority
from fedpool.identity.keys import fingerprint, parse_public, public_line
from fedpool.identity.principals import HUB
from fedpool.identity.roster import read
from fedpool.identity.tokens import Token
from fedpool.identity.trust import Trust
from fedpool.transport import ssh
from fedpool.transport.identity import Identity
from fedpool.transport.peer import Peer
from fedpool.wire.membership import JoinState, JoinWanted

ASK_S = (0.2, 0.3, 0.5, 1.0, 2.0)  # after each question; the last for ever


async def ask(token: Token, identity: Identity, wanted: JoinWanted) -> JoinState:
    """Ask the hub what has become of it.

    Raises:
        NotAuthorised: the hub is none that the token's authority vouches for, or knows no such invitation.
        Unreachable: it does not answer.
    """
    identity.trust = Trust(token.pool, (token.authority,))
    connection = await ssh.dial(token.hub, None, identity, "the hub", ssh.GUEST, HUB)
    try:
        peer = Peer(await ssh.open_channel(connection, ssh.CONTROL), "site", wanted.name)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(peer.run())
            await peer.start()
            answer = await peer.call("join.ask", wanted, JoinState)
            running.cancel()
        return answer
    except BaseExceptionGroup as group:
        known, others = group.split(IbshellError)
        if others is not None or known is None:
            raise
        raise known.exceptions[0] from None
    finally:
        connection.abort()


async def until_decided(token: Token, identity: Identity, wanted: JoinWanted, say: Callable[[str], None]) -> JoinState:
    """Ask until the operator has decided.

    Raises:
        NotAuthorised: it was refused, or the invitation is over.
    """
    said, asked = "", 0
    while True:
        if asked:
            await asyncio.sleep(ASK_S[min(asked, len(ASK_S)) - 1])
        asked += 1
        try:
            state = await ask(token, identity, wanted)
        except Unreachable as error:
            if time.time() > token.until:
                raise
            if error.message != said:
                said = error.message
                say(f"{error.message}; trying again")
            continue
        if state.state == "approved":
            return state
        wanted = msgspec.structs.replace(wanted, renew=False)  # it has been asked
        if state.state == "refused":
            raise NotAuthorised(f"the operator has not let {wanted.name} in: {state.reason}")


def accept(token: Token, identity: Identity, state: JoinState) -> Trust:
    """Install what the operator has issued; returns whom the pool believes.

    Raises:
        NotAuthorised: it is not of the token's authority, not for this key, or for another role.
    """
    trust = Trust(token.pool, (token.authority,))
    # Who joins believes the authority of the token; rosters before it was one are not for it to judge.
    later = [one for one in state.rosters if token.authority in read(one).authority_keys()]
    if state.rosters and not later:
        raise NotAuthorised(
            "the hub shows no roster that names the authority of the token", "ask for another invitation"
        )
    for signed in later[-1:]:
        try:
            trust.adopt(signed)
        except IbshellError as error:
            raise NotAuthorised(f"the hub shows a roster that is not to be believed: {error.message}") from None
    kind = certificates.HOST if token.role.startswith("site/") else certificates.USER
    for line in state.certificates:
        found = certificates.parse(line, "the certificate")
        if found.public != identity.public:
            raise NotAuthorised("the hub shows a certificate of another key")
        trust.require(found, kind, token.role, time.time())
        identity.install(found)
    return trust


def join_person(
    line: str, directory_of: Callable[[str], Path], name: str, key: Path | None, say: Callable[[str], None]
) -> tuple[str, str]:
    """Join a pool as a person.

    Args:
        line: the token.
        directory_of: {name of a pool -> where it is kept}.
        name: what to call the pool, "" for its own name.
        key: public half of a key that ssh-agent has; None makes one in a file.
        say: tells people how it goes.

    Returns:
        What the pool is called here, and the role.
    """
    token = tokens.parse(line)
    if token.role.startswith("site/"):
        raise UsageError(f"a token for {token.role}", "a site joins with: ibshell-agent join TOKEN")
    if time.time() > token.until:
        raise NotAuthorised("the invitation is over", "ask the operator for another")
    called = name or token.pool.partition("@")[0]
    directory = directory_of(called)
    if (directory / "pool.toml").exists():
        raise Refused(f"there is a pool {called!r} already", "give it another name: --name")
    path = directory / "identity"
    if key is not None:
        public = parse_public(key.read_text(), str(key))
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.with_suffix(".pub").write_text(public_line(public) + "\n")
    exists = path.exists() or path.with_suffix(".pub").exists()
    identity = Identity.load(path) if exists else Identity.create(path)
    say(f"your key: {fingerprint(identity.public)}")
    say(f"the pool's authority: {authority_fingerprint(token.authority)}; compare it with what the operator tells you")
    say("waiting for the operator: ibshell pool approve")
    own = token.role.replace("/", "-")
    wanted = JoinWanted(token.invite, own, "", token.proof(identity.public, own, ""))
    trust = accept(token, identity, asyncio.run(until_decided(token, identity, wanted, say)))
    values = {
        "pool": token.pool,
        "authorities": [authority_line(key) for key in trust.authorities],
        "hub": token.hub,
        "invite": token.invite,
    }
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
    (directory / "pool.toml").write_text(text)
    return called, token.role


def renew_person(
    directory: Path, hub: str, pool: str, authorities: Sequence[str], invite: str, say: Callable[[str], None]
) -> float:
    """Get a new certificate for a key that was let in before.

    Args:
        directory: of the key.
        hub: `host:port`.
        pool: its identity.
        authorities: public key lines of those who are believed.
        invite: the number of the invitation with which it was let in.
        say: tells people how it goes.

    Returns:
        How long it holds, in seconds.

    Raises:
        NotAuthorised: the operator does not renew it.
    """
    identity = Identity.load(directory / "identity")
    own = identity.certificate(certificates.USER)
    role = own.principals[0] if own is not None else ""
    say("waiting for the operator: ibshell pool renew")
    for line in authorities:
        token = Token(pool, hub, parse_authority(line, "authorities"), invite, b"", role, int(time.time()) + 3600)
        wanted = JoinWanted(invite, role.replace("/", "-"), renew=True)
        state = asyncio.run(until_decided(token, identity, wanted, say))
        accept(token, identity, state)
        break
    found = identity.certificate(certificates.USER)
    return found.valid_before - time.time() if found is not None else 0.0
