"""`ibshell gpu`: the devices of every site."""

from typing import Annotated

import typer

from fedpool.errors import NotFound
from ibshell import render
from ibshell.cli import options
from ibshell.render import Column

app = typer.Typer(no_args_is_help=True, help="The GPUs of every site.")

COLUMNS = [
    Column("GPU", "gpu"),
    Column("TYPE", "type"),
    Column("MEMORY", "memory_bytes"),
    Column("STATE", "state"),
    Column("USED", "used_milli"),
    Column("LEASE", "lease"),
    Column("TENANT", "tenant"),
    Column("LEAF", "leaf", wide=True),
    Column("NVLINK", "nvlink_domain", wide=True),
    Column("TOKEN", "token", wide=True),
    Column("CORDON", "cordon", wide=True),
    Column("UUID", "uuid", wide=True),
]


@app.command("list")
def list_(output: options.Output = None, strict: options.Strict = False, watch: options.Watch = False) -> None:
    """List the GPUs.

    Examples: ibshell gpu list | ibshell gpu list -o wide | ibshell gpu list -o json
    """
    options.show_listing(lambda: options.ask_listing("gpu.list"), COLUMNS, "gpu", output, strict, watch)


@app.command()
def show(
    gpu: Annotated[str, typer.Argument(help="SITE:NODE/INDEX (INDEX.SLICE), or a UUID or its beginning.")],
    output: options.Output = None,
) -> None:
    """Show one GPU.

    Example: ibshell gpu show hospital-07:gpu01/0
    """
    answer = options.ask_listing("gpu.list")
    by_uuid = [item for item in answer["items"] if gpu.startswith(("GPU-", "MIG-")) and item["uuid"].startswith(gpu)]
    if len(by_uuid) > 1:
        raise NotFound(f"{gpu} could be any of {len(by_uuid)} devices", "give more of the UUID")
    item = by_uuid[0] if by_uuid else options.pick(answer, "gpu", gpu, "gpu")
    render.write(render.record(item, output, "gpu"))
