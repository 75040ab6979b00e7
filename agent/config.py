"""Configuration files of site and hub: TOML, checked key by key; paths in them are relative to the file."""

import tomllib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fedpool.errors import NotFound, UsageError
from fedpool.leasing.grants import SiteLimits
from fedpool.names import NAME, RULE
from fedpool.sim.scenario import SimulatedSite
from fedpool.transport.identity import parse_public

Config = TypeVar("Config")


class SiteConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A site agent's configuration.

    Attributes:
        name: of the site.
        state: directory of its key, database and work files.
        socket: its Unix socket, for `ibshell-agent stdio`.
        hub_key: public key of the hub, which alone may speak to this site.
        simulated: the stand-in for its devices.
        listen: `host:port` on which the hub dials in, or "".
        hub: `host:port` of the hub to dial out to, or "".
        data: directory that programs get as `{data}`.
        minimum_cohort: fewest sites whose sum this site lets anybody see.
        peers: {site: public key} of the sites it may be in a cohort with.
        policy: what it allows whoever asks.
        store: `etcd://…` for an agent with stand-bys, "" for SQLite in `state`.
    """

    name: str
    socket: str
    hub_key: str
    simulated: SimulatedSite
    state: str = "."
    listen: str = ""
    hub: str = ""
    data: str = ""
    minimum_cohort: int = 3
    peers: dict[str, str] = {}
    policy: SiteLimits = SiteLimits()
    store: str = ""


class SiteEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the hub reaches one site.

    Attributes:
        name: of the site.
        key: the site's identity, which signs its round messages and, but for stdio, is its SSH host key.
        mode: dial, reverse or stdio.
        address: `host:port` for dial and stdio.
        host_key: the stock sshd's host key, for stdio.
        user: login name, for stdio.
        command: what runs there, for stdio.
    """

    name: str
    key: str
    mode: str = "dial"
    address: str = ""
    host_key: str = ""
    user: str = ""
    command: list[str] = msgspec.field(default_factory=lambda: ["ibshell-agent", "stdio"])


class HubConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A hub's configuration.

    Attributes:
        name: of the pool.
        state: directory of its key, database and runs.
        socket: its Unix socket, for commands on this machine.
        listen: `host:port` for users' SSH connections, or "".
        listen_sites: `host:port` for sites that dial out, or "".
        users: {name: public key} of those who may connect over SSH.
        site: the sites.
        store: `etcd://…` for a hub with stand-bys, "" for SQLite in `state`.
        strict: whether a lease at a silent site counts until the site has confirmed that its processes are gone, however long
            that takes; otherwise until its time is surely over there.
    """

    name: str
    socket: str
    state: str = "."
    listen: str = ""
    listen_sites: str = ""
    users: dict[str, str] = {}
    site: list[SiteEntry] = []
    store: str = ""
    strict: bool = False


def load(path: Path, kind: type[Config]) -> Config:
    """Read a configuration file.

    Raises:
        NotFound: there is none.
        UsageError: malformed; file and key are named.
    """
    try:
        raw: dict[str, Any] = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise NotFound(f"no configuration at {path}", "ibshell up makes one; README shows one by hand") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
    try:
        config = msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"{path}: {error}") from None
    _check(config, path)
    return config


def _check(config: object, path: Path) -> None:
    keys: dict[str, str] = {}
    if isinstance(config, SiteConfig):
        names = [config.name, *config.peers]
        keys = {"hub_key": config.hub_key, **{f"peers.{name}": key for name, key in config.peers.items()}}
        if not (config.listen or config.hub or config.socket):
            raise UsageError(f"{path}: the hub has no way in", "set listen, or hub, or socket for ibshell-agent stdio")
    else:
        assert isinstance(config, HubConfig)
        names = [config.name, *(site.name for site in config.site)]
        keys = {f"users.{name}": key for name, key in config.users.items()}
        for site in config.site:
            keys[f"site {site.name}: key"] = site.key
            if site.mode not in ("dial", "reverse", "stdio"):
                raise UsageError(f"{path}: site {site.name}: mode = {site.mode!r}", "it may be dial, reverse or stdio")
            if site.mode != "reverse" and not site.address:
                raise UsageError(
                    f"{path}: site {site.name}: mode {site.mode} needs an address", 'address = "host:port"'
                )
            if site.mode == "stdio":
                keys[f"site {site.name}: host_key"] = site.host_key
        if len({site.name for site in config.site}) < len(config.site):
            raise UsageError(f"{path}: two sites have one name")
    for name in names:
        if not NAME.fullmatch(name):
            raise UsageError(f"{path}: {name!r} is no name: {RULE}")
    for where, key in keys.items():
        parse_public(key, f"{path}: {where}")
