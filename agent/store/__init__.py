"""Durable entries: in SQLite beside the agent, or in etcd for an agent with stand-bys."""

from pathlib import Path

from agent import clock
from agent.ports import Store
from fedpool.errors import UsageError


async def open_store(url: str, path: Path, name: str) -> Store:
    """The store that a configuration names; in etcd it is open once this agent is the active one.

    Args:
        url: `etcd://…`, or "" for SQLite.
        path: of the SQLite file.
        name: under which the entries stand in etcd.

    Raises:
        UsageError: the address is none, or the client for etcd is not installed.
        IntegrityError, StorageFailed: it cannot be opened.
    """
    if not url:
        from agent.store.sqlite import SqliteStore

        return SqliteStore(path)
    try:
        from agent.store.etcd import EtcdStore
    except ModuleNotFoundError:
        raise UsageError("store = etcd://… needs aetcd", "pip install 'ibshell[etcd]'") from None
    store = EtcdStore(url, name, clock)
    await store.lead()
    return store
