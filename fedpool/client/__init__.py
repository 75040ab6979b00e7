"""What a program or a command talks through.

    import fedpool.client as fed
    with fed.join() as federation:            # inside a program that a site started for a run
        for round in federation:
            round.submit(train(round.params), weight=len(data), metrics={"auc": auc})

    with fed.connect(socket_path) as pool:    # a command or a notebook, towards a hub
        pool.call("gpu.list", Nothing(), Listing)
"""

from fedpool.client.connection import Connection, connect
from fedpool.client.join import Federation, Round, join

__all__ = ["Connection", "Federation", "Round", "connect", "join"]
