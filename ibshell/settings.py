"""Where things are: configuration, state and sockets by the XDG rules, each with an IBSHELL_ variable before it."""

import os
import tempfile
from pathlib import Path

LOCAL_POOL = "local"


def _directory(variable: str, xdg: str, fallback: str) -> Path:
    own = os.environ.get(variable)
    if own:
        return Path(own)
    base = os.environ.get(xdg)
    return (Path(base) if base else Path.home() / fallback) / "ibshell"


def config_directory() -> Path:
    """Configuration: `$XDG_CONFIG_HOME/ibshell`."""
    return _directory("IBSHELL_CONFIG_DIR", "XDG_CONFIG_HOME", ".config")


def state_directory() -> Path:
    """State: `$XDG_STATE_HOME/ibshell`."""
    return _directory("IBSHELL_STATE_DIR", "XDG_STATE_HOME", ".local/state")


def runtime_directory() -> Path:
    """Sockets: `$XDG_RUNTIME_DIR/ibshell`, or a private directory under the temporary one."""
    own = os.environ.get("IBSHELL_RUNTIME_DIR")
    if own:
        return Path(own)
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and os.access(base, os.W_OK):
        return Path(base) / "ibshell"
    return Path(tempfile.gettempdir()) / f"ibshell-{os.getuid()}"


def pool_name() -> str:
    """The pool commands talk to: IBSHELL_POOL, what `ibshell pool use` chose, or `local`."""
    return os.environ.get("IBSHELL_POOL") or _chosen() or LOCAL_POOL


def _chosen() -> str:
    try:
        return (config_directory() / "current").read_text().strip()
    except FileNotFoundError:
        return ""


def pool_directory(name: str) -> Path:
    """State of a pool that runs on this machine."""
    return state_directory() / "pools" / name


def pool_sockets(name: str) -> Path:
    """Sockets of a pool that runs on this machine."""
    return runtime_directory() / name


def hub_socket(name: str) -> Path:
    """The hub's Unix socket."""
    return pool_sockets(name) / "hub.sock"
