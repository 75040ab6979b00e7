"""What a program or a command talks through.

import fedpool.client as fed
with fed.join() as federation:            # inside a program that a site started for a run
    for round in federation:
        round.submit(train(round.params), weight=len(data), metrics={"auc": auc})

with fed.connect(socket_path) as pool:    # a command or a notebook, towards a hub
    pool.call("gpu.list", Nothing(), Listing)
"""

from typing import TYPE_CHECKING, Any

from fedpool.client.connection import Connection, connect

if TYPE_CHECKING:
    from fedpool.client.training import Federation, Round, join

__all__ = ["Connection", "Federation", "Round", "connect", "join"]


def __getattr__(name: str) -> Any:
    """Load what needs numpy only when it is asked for (PEP 562): a listing does not."""
    if name in ("Federation", "Round", "join"):
        from fedpool.client import training as module

        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
