"""OpenSSH's known_hosts files (sshd(8), SSH_KNOWN_HOSTS FILE FORMAT): which keys a host is known by, which are revoked for it."""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
from collections.abc import Iterable

import msgspec

from fedpool.errors import NotAuthorised

REVOKED, AUTHORITY = "@revoked", "@cert-authority"
SSH_PORT = 22
HASHED = "(hashed)"


class Entry(msgspec.Struct, frozen=True):
    """One line.

    Attributes:
        where: `FILE:LINE`.
        marker: REVOKED, AUTHORITY or "".
        hosts: as written: patterns, or one hash.
        key: type and base64, as written.
    """

    where: str
    marker: str
    hosts: str
    key: str

    @property
    def shown(self) -> str:
        """The hosts for people: a hash tells nobody whose it is, so nobody guesses."""
        return HASHED if self.hosts.startswith("|1|") else self.hosts

    def names(self, host: str, port: int) -> bool:
        """Whether it is about a host at a port; on another port than 22 a host goes by `[host]:port` alone."""
        name = (host if port == SSH_PORT else f"[{host}]:{port}").lower()
        if self.hosts.startswith("|1|"):
            return _hashed(self.hosts, name)
        found = False
        for pattern in self.hosts.lower().split(","):
            if _matches(name, pattern.removeprefix("!")):
                if pattern.startswith("!"):
                    return False
                found = True
        return found


def parse(text: str, where: str) -> list[Entry]:
    """The lines of a file; what is none is passed over, as OpenSSH does."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        marker = fields.pop(0) if fields[0].startswith("@") else ""
        if len(fields) >= 3:
            found.append(Entry(f"{where}:{number}", marker, fields[0], f"{fields[1]} {fields[2]}"))
    return found


def keys(entries: Iterable[Entry], host: str, port: int) -> list[str]:
    """The keys by which a host is known at a port, less those that are revoked for it."""
    about = [entry for entry in entries if entry.names(host, port)]
    revoked = {entry.key for entry in about if entry.marker == REVOKED}
    return [entry.key for entry in about if not entry.marker and entry.key not in revoked]


def revoked(entries: Iterable[Entry], host: str, port: int) -> list[Entry]:
    """What is revoked for a host at a port."""
    return [entry for entry in entries if entry.marker == REVOKED and entry.names(host, port)]


def revoked_elsewhere(entries: Iterable[Entry], host: str, port: int) -> list[Entry]:
    """What is revoked for a host by its name alone, which OpenSSH does not apply on another port than 22: it is no better there."""
    entries = list(entries)
    if port == SSH_PORT:
        return []
    here = {entry.where for entry in revoked(entries, host, port)}
    return [entry for entry in revoked(entries, host, SSH_PORT) if entry.where not in here]


def require(entries: Iterable[Entry], host: str, port: int, key: str, other_ports: bool = False) -> list[str]:
    """Judge the key that a host shows.

    Args:
        entries: of all files.
        host: as it was asked for.
        port: at which.
        key: type and base64.
        other_ports: whether a key that is revoked for the host without a port may be used at another one.

    Returns:
        What has to be said about it all the same.

    Raises:
        NotAuthorised: it is revoked, or none by which the host is known.
    """
    entries = list(entries)
    for entry in revoked(entries, host, port):
        if entry.key == key:
            raise NotAuthorised(
                f"the key of {host} is revoked ({entry.where})", "ask its administrator for the new one"
            )
    warnings = []
    for entry in revoked_elsewhere(entries, host, port):
        if entry.key == key:
            said = f"the key is revoked for {host} ({entry.where})"
            if not other_ports:
                raise NotAuthorised(
                    f"{said}; it is shown at port {port}", "allow_revoked_other_port = true uses it all the same"
                )
            warnings.append(said)
    if key not in keys(entries, host, port):
        raise NotAuthorised(
            f"{host} is not known by the key that it shows at port {port}", "compare it and add it to known_hosts"
        )
    return warnings


def _matches(name: str, pattern: str) -> bool:
    # In OpenSSH brackets stand for themselves.
    return fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))


def _hashed(hosts: str, name: str) -> bool:
    try:
        _, _, salt, value = hosts.split("|")
        expected = base64.b64decode(value, validate=True)
        made = hmac.digest(base64.b64decode(salt, validate=True), name.encode(), hashlib.sha1)
    except (ValueError, binascii.Error):
        return False
    return hmac.compare_digest(made, expected)
