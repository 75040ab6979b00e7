"""The pools this user belongs to: one directory each, with what the pool is, this user's key and its certificate.

A pool that was made on this machine (`ibshell up`, `ibshell pool init`) keeps it beside the hub's state, one that was joined under
the configuration. `ibshell pool use NAME` chooses one, as IBSHELL_POOL does for one command.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from fedpool.errors import NotFound, UsageError
from fedpool.names import NAME
from ibshell import settings
from ibshell.signing import PoolSigner

if TYPE_CHECKING:
    from fedpool.client.connection import Connection


class Context(msgspec.Struct, frozen=True):
    """One pool, as this user knows it.

    Attributes:
        pool: its identity.
        authorities: public key lines of those who may certify.
        hub: `host:port`, or "" for a hub on this machine.
        invite: the invitation's number, by which a new certificate is asked for.
        protected: whether what destroys is always asked for twice.
    """

    pool: str
    authorities: tuple[str, ...]
    hub: str = ""
    invite: str = ""
    protected: bool = False


def joined_directory(name: str) -> Path:
    """Where a pool that was joined is kept."""
    if not NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no name of a pool", "ibshell pool list shows them")
    return settings.config_directory() / "pools" / name


def names() -> dict[str, Path]:
    """{name: directory} of all pools."""
    found: dict[str, Path] = {}
    for base, inner in ((settings.state_directory() / "pools", "client"), (settings.config_directory() / "pools", "")):
        if base.exists():
            for path in sorted(base.iterdir()):
                if (path / inner / "pool.toml").exists():
                    found.setdefault(path.name, path / inner)
    return found


def load(directory: Path) -> Context:
    """Read one.

    Raises:
        NotFound: there is none.
        UsageError: it is malformed.
    """
    path = directory / "pool.toml"
    try:
        return msgspec.convert(tomllib.loads(path.read_text()), Context)
    except FileNotFoundError:
        raise NotFound(f"no pool at {directory}", "ibshell pool list shows them") from None
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise UsageError(f"{path}: {error}", "join the pool again: ibshell pool join TOKEN") from None


def save(directory: Path, context: Context) -> None:
    """Write one."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    values = msgspec.to_builtins(context)
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())
    temporary = directory / "pool.toml.new"
    temporary.write_text(text)
    temporary.replace(directory / "pool.toml")


def signer(directory: Path, authority: Path | None = None) -> PoolSigner | None:
    """This user's signer for a pool; None where it is one of an earlier release, which does not ask for signatures.

    Args:
        directory: of the pool.
        authority: the private key of the pool's authority, should it be on this machine.
    """
    try:
        context = load(directory)
    except NotFound:
        return None
    return PoolSigner(context.pool, context.authorities, directory, authority)


def connect(name: str) -> Connection:
    """A channel to the hub of a pool that was joined.

    Raises:
        NotFound: it was not.
        Unreachable, NotAuthorised: the hub does not answer, or is another, or does not know this user.
    """
    from fedpool.client.remote import connect_ssh

    directory = joined_directory(name)
    context = load(directory)
    own = PoolSigner(context.pool, context.authorities, directory)
    hub = connect_ssh(context.hub, None, directory / "identity", own.trust())
    hub.signer = own
    own.refresh(hub)
    return hub


def use(name: str) -> None:
    """Choose a pool.

    Raises:
        NotFound: there is none of that name.
    """
    if name not in names():
        raise NotFound(f"no pool {name!r}", f"known: {', '.join(names()) or 'none; ibshell up makes one'}")
    path = settings.config_directory() / "current"
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    path.write_text(name + "\n")
