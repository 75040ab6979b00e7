"""`ibshell-agent`: the long-running side. The composition root, and the only place that picks real or simulated parts."""

import argparse
import asyncio
import gc
import logging
import os
import resource
import signal
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from fedpool import __version__
from fedpool.errors import IbshellError
from fedpool.transport import memory

_EXAMPLES = """examples:
  ibshell-agent hub --config hub.toml
  ibshell-agent site --config site.toml
  ibshell-agent key --state /var/lib/ibshell          make this party's key if there is none, and print its public half
  ibshell-agent join ibshell1.…                       join a pool: makes a key, waits for the operator, writes site.toml
  ibshell-agent backup /var/lib/ibshell/site.db /backup/site-2026-12-01.db
  ibshell-agent restore /backup/site-2026-12-01.db /var/lib/ibshell/site.db     stop the agent first
  ibshell-agent stdio --socket /run/ibshell/site.sock fedpool     behind sshd: bridge to the site agent
"""


def main() -> None:
    """Run the command line of the agent."""
    parser = argparse.ArgumentParser(
        prog="ibshell-agent", epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"ibshell-agent {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("hub", "run a hub"), ("site", "run a site's agent")):
        command = commands.add_parser(name, help=text)
        several = {"action": "append"} if name == "site" else {}
        words = "its configuration, TOML" + ("; several sites in one process where it is repeated" if several else "")
        command.add_argument("--config", type=Path, required=True, help=words, **several)
        command.add_argument("--verbose", action="store_true", help="log debugging details too")
    key = commands.add_parser("key", help="make a key if there is none and print its public half")
    key.add_argument("--state", type=Path, default=Path(), help="the party's state directory")
    stdio = commands.add_parser("stdio", help="bridge standard input and output to a site agent")
    stdio.add_argument(
        "--socket", type=Path, default=None, help="the agent's Unix socket (default: IBSHELL_AGENT_SOCKET)"
    )
    stdio.add_argument("subsystem", help="fedpool or fedpool-bulk")
    join = commands.add_parser("join", help="join a pool as a site, with the token that its operator gave you")
    join.add_argument("token", help="what ibshell site invite printed; - reads it from standard input")
    join.add_argument("--state", type=Path, default=Path(), help="directory for the site's key and database")
    join.add_argument(
        "--config", type=Path, default=None, help="configuration to write (default: site.toml in --state)"
    )
    join.add_argument(
        "--listen", default="", metavar="HOST:PORT", help="let the hub dial in, instead of dialling out to it"
    )
    join.add_argument("--nodes", type=int, default=1, help="simulated nodes")
    join.add_argument("--gpus-per-node", type=int, default=2, help="simulated GPUs of a node")
    join.add_argument("--gpu-type", default="h100", help="their type")
    backup = commands.add_parser("backup", help="copy an agent's database while it runs")
    backup.add_argument("database", type=Path, help="hub.db or site.db in the agent's state directory")
    backup.add_argument("copy", type=Path, help="the file to make")
    restore = commands.add_parser("restore", help="put a copy in place of a database; its agent must be stopped")
    restore.add_argument("copy", type=Path, help="made by backup")
    restore.add_argument("database", type=Path, help="hub.db or site.db; what is there is put aside")
    arguments = parser.parse_args()
    try:
        sys.exit(_run(arguments))
    except IbshellError as error:
        print(f"ibshell-agent: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"  {error.hint}", file=sys.stderr)
        sys.exit(error.exit_status)


def _run(arguments: argparse.Namespace) -> int:
    match arguments.command:
        case "key":
            return _key(arguments.state)
        case "join":
            return _join(arguments)
        case "stdio":
            from agent.stdio import bridge

            socket = arguments.socket or Path(os.environ.get("IBSHELL_AGENT_SOCKET", "site.sock"))
            return asyncio.run(bridge(socket, arguments.subsystem))
        case "backup":
            from agent.store.copies import backup

            print(f"{backup(arguments.database, arguments.copy)} entries in {arguments.copy}")
            return 0
        case "restore":
            from agent.store.copies import restore

            entries, aside = restore(arguments.copy, arguments.database)
            print(f"{entries} entries in {arguments.database}{f'; the old file is {aside}' if aside else ''}")
            return 0
        case "hub":
            return _serve(_hub(arguments.config), arguments.verbose)
        case _:
            return _serve(_sites(arguments.config), arguments.verbose)


def _key(state: Path) -> int:
    from fedpool.identity.keys import fingerprint, public_line
    from fedpool.transport.identity import Identity

    path = state / "identity"
    identity = Identity.load(path) if path.exists() else Identity.create(path)
    print(public_line(identity.public))
    print(fingerprint(identity.public), file=sys.stderr)
    return 0


def _join(arguments: argparse.Namespace) -> int:
    from agent.join import join_site

    logging.getLogger("asyncssh").setLevel(logging.WARNING)
    line = sys.stdin.readline() if arguments.token == "-" else arguments.token
    config = arguments.config or arguments.state / "site.toml"
    simulated = (
        ("nodes", arguments.nodes),
        ("gpus_per_node", arguments.gpus_per_node),
        ("gpu_type", arguments.gpu_type),
    )

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        asyncio.run(join_site(line, arguments.state, config, arguments.listen, simulated, say))
    except KeyboardInterrupt:
        say("interrupted; the same command goes on with the same key")
        return 130
    print(f"joined; start the agent: ibshell-agent site --config {config}")
    return 0


# Answers of thousands of devices make so many objects that the usual thresholds look through all of them many times a second;
# hardly any is in a cycle.
GC_THRESHOLDS = (50_000, 20, 100)


async def _hub(path: Path) -> None:
    from agent.config import HubConfig, load
    from agent.hub import Hub
    from agent.store import open_store

    config, directory = load(path, HubConfig), path.parent.resolve()
    store = await open_store(config.store, directory / config.state / "hub.db", f"hub/{config.name}")
    await Hub(config, directory, store).run()


async def _sites(paths: list[Path]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for path in paths:
            tasks.create_task(_site(path))


async def _site(path: Path) -> None:
    from agent.config import SiteConfig, load
    from agent.probes.simulated import SimulatedProbe
    from agent.site import SiteAgent
    from agent.store import open_store

    config, directory = load(path, SiteConfig), path.parent.resolve()
    store = await open_store(config.store, directory / config.state / "site.db", f"site/{config.name}")
    await SiteAgent(config, directory, SimulatedProbe(config.simulated), store).run()


def _serve(service: Coroutine[Any, Any, None], verbose: bool) -> int:
    """Run a service until SIGTERM or SIGINT, which end it in order."""
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname).1s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("asyncssh").setLevel(logging.WARNING)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    memory.keep_big_blocks()
    gc.set_threshold(*GC_THRESHOLDS)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a hub has two connections a site
    return asyncio.run(_until_signalled(service))


async def _until_signalled(service: Coroutine[Any, Any, None]) -> int:
    loop = asyncio.get_running_loop()
    task = loop.create_task(service)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return 0
    except BaseExceptionGroup as group:
        known, others = group.split(IbshellError)
        if others is not None or known is None:
            raise
        error: BaseException = known
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
    return 0


if __name__ == "__main__":
    main()
