"""Configuration files of site and hub: TOML, checked key by key; paths in them are relative to the file."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from fedpool.errors import NotFound, UsageError
from fedpool.identity.authorities import parse_authority
from fedpool.identity.keys import parse_public
from fedpool.identity.trust import Trust
from fedpool.leasing.grants import SiteLimits
from fedpool.names import NAME, RULE
from fedpool.sim.scenario import SimulatedSite, problems
from fedpool.toml import TomlText
from fedpool.units import parse_duration

Config = TypeVar("Config", bound=msgspec.Struct)
MODES = ("dial", "reverse", "stdio", "ssh")


class SiteConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A site agent's configuration.

    Attributes:
        name: of the site.
        state: directory of its key, database and work files.
        socket: its Unix socket, for `ibshell-agent stdio`.
        simulated: the stand-in for its devices.
        hub_key: public key of the hub, which alone may speak to this site; "" where the pool's authority vouches for it.
        listen: `host:port` on which the hub dials in, or "".
        hub: `host:port` of the hub to dial out to, or "".
        data: directory that programs get as `{data}`.
        minimum_cohort: fewest sites whose sum this site lets anybody see.
        peers: {site: public key} of the sites it may be in a cohort with.
        policy: what it allows whoever asks.
        store: `etcd://…` for an agent with stand-bys, "" for SQLite in `state`.
        pool: the identity of the pool, which every request names.
        authorities: public keys of the pool's certificate authority, two while it changes; where there are any, the site obeys only
            what somebody with the right to it has signed, and otherwise the hub.
        policy_file: with the site's policy, "" where everything is allowed; read again when it changes.
        keep_records: how long records of the ledger keep their text (`400d`); "" for ever.
    """

    name: str
    socket: str
    simulated: SimulatedSite
    hub_key: str = ""
    state: str = "."
    listen: str = ""
    hub: str = ""
    data: str = ""
    minimum_cohort: int = 3
    peers: dict[str, str] = {}
    policy: SiteLimits = SiteLimits()
    store: str = ""
    pool: str = ""
    authorities: list[str] = []
    policy_file: str = ""
    keep_records: str = ""


class SiteEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the hub reaches one site.

    Attributes:
        name: of the site.
        key: the site's identity, which signs its round messages and, but for stdio, is its SSH host key.
        mode: dial, reverse, stdio, or ssh for a host as this user's `ssh` reaches it.
        address: `host:port` for dial and stdio, `[user@]host` for ssh.
        host_key: the stock sshd's host key, for stdio.
        user: login name, for stdio.
        command: what runs there, for stdio and ssh.
        ssh_config: configuration of `ssh`, "" for the user's.
        allow_revoked_other_port: whether a key that known_hosts revokes for the host without a port may be shown at another one.
    """

    name: str
    key: str
    mode: str = "dial"
    address: str = ""
    host_key: str = ""
    user: str = ""
    command: list[str] = msgspec.field(default_factory=lambda: ["ibshell-agent", "stdio"])
    ssh_config: str = ""
    allow_revoked_other_port: bool = False


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
        pool: the identity of the pool.
        authorities: public keys of its certificate authority; where there are any, whoever asks has to sign.
        roster: file with a roster to begin with, or "".
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
    pool: str = ""
    authorities: list[str] = []
    roster: str = ""


def load(path: Path, kind: type[Config]) -> Config:
    """Read a configuration file.

    Raises:
        NotFound: there is none.
        UsageError: malformed; file, line and key are named.
    """
    try:
        toml = TomlText(path.read_text(), str(path))
    except FileNotFoundError:
        raise NotFound(f"no configuration at {path}", "ibshell up makes one; README shows one by hand") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not TOML: {error}") from None
    config = toml.convert(kind)
    if isinstance(config, SiteConfig):
        _check_site(toml, config)
    elif isinstance(config, HubConfig):
        _check_hub(toml, config)
    return config


def _check_site(toml: TomlText, config: SiteConfig) -> None:
    _check_name(toml, "name", config.name)
    if not config.hub_key and not config.authorities:
        raise toml.wrong(
            "", "the key 'hub_key' is missing", "or authorities, where the pool has a certificate authority"
        )
    if config.hub_key:
        _check_key(toml, "hub_key", config.hub_key)
    _check_trust(toml, config)
    for name, key in config.peers.items():
        _check_name(toml, name, name, "peers")
        _check_key(toml, name, key, "peers")
    if not (config.listen or config.hub or config.socket):
        raise toml.wrong("", "the hub has no way in", "set listen, or hub, or socket for ibshell-agent stdio")
    for key, problem, hint in problems(config.simulated):
        raise toml.wrong(key, problem, hint, "simulated")
    if config.keep_records:
        try:
            keep_s = parse_duration(config.keep_records)
        except UsageError as error:
            raise toml.wrong("keep_records", f"keep_records = {error.message}", error.hint) from None
        if keep_s <= 0:
            raise toml.wrong("keep_records", f"keep_records = {config.keep_records!r}", 'for example "400d"')
    longest = config.policy.max_duration_s
    if not 0 < longest < math.inf:
        raise toml.wrong(
            "max_duration_s", f"max_duration_s = {longest:g}: it may be any positive number of seconds", "", "policy"
        )


def _check_hub(toml: TomlText, config: HubConfig) -> None:
    _check_name(toml, "name", config.name)
    _check_trust(toml, config)
    for name, key in config.users.items():
        _check_key(toml, name, key, "users")
    names: set[str] = set()
    for number, site in enumerate(config.site):
        _check_name(toml, "name", site.name, "site", number)
        if site.name in names:
            raise toml.wrong("name", f"it names the site {site.name!r} twice", "", "site", number)
        names.add(site.name)
        _check_key(toml, "key", site.key, "site", number)
        if site.mode not in MODES:
            raise toml.wrong("mode", f"mode = {site.mode!r}", f"it may be {', '.join(MODES)}", "site", number)
        if site.mode != "reverse" and not site.address:
            raise toml.wrong(
                "mode", f"site {site.name}: mode {site.mode} needs an address", 'address = "host:port"', "site", number
            )
        if site.mode == "stdio":
            _check_key(toml, "host_key", site.host_key, "site", number)


def trust_of(config: SiteConfig | HubConfig) -> Trust | None:
    """Whom a party believes; None where it believes whoever is connected."""
    if not config.authorities:
        return None
    return Trust(config.pool, tuple(parse_authority(line, "authorities") for line in config.authorities))


def _check_trust(toml: TomlText, config: SiteConfig | HubConfig) -> None:
    for line in config.authorities:
        _check_key(toml, "authorities", line, parse=parse_authority)
    if config.authorities and not config.pool:
        raise toml.wrong("authorities", "pool is missing beside authorities", 'pool = "…": what ibshell pool show says')


def _check_name(toml: TomlText, key: str, name: str, table: str = "", number: int = 0) -> None:
    if not NAME.fullmatch(name):
        raise toml.wrong(key, f"{name!r} is no name: {RULE}", "", table, number)


def _check_key(
    toml: TomlText,
    key: str,
    line: str,
    table: str = "",
    number: int = 0,
    parse: Callable[[str, str], bytes] = parse_public,
) -> None:
    try:
        parse(line, key)
    except UsageError as error:
        raise toml.wrong(key, error.message, error.hint, table, number) from None
