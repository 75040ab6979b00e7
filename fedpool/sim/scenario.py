"""Simulated sites: how many nodes, which GPUs, under which leaf switches.

A scenario file:

    [[site]]
    name = "hospital"        # with count > 1: hospital-01, hospital-02, …
    count = 16
    nodes = 1
    gpus_per_node = 2
    gpu_type = "h100"
    memory = "80GiB"
    nodes_per_leaf = 32
"""

import re
import tomllib
import uuid

import msgspec

from fedpool.errors import PlanError, UsageError
from fedpool.names import NAME, RULE
from fedpool.records import Gpu, Inventory, Node
from fedpool.units import parse_size

MEMORY = {
    "h100": "80GiB",
    "h200": "141GiB",
    "a100": "80GiB",
    "b200": "192GiB",
    "mi250": "128GiB",
    "mi300x": "192GiB",
    "l40s": "48GiB",
}
SITES_MAX = 4096
_NAMESPACE = uuid.UUID("6a0c1f0e-1b1b-5f5a-9a55-1b5e11000000")


class SimulatedSite(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One `[[site]]` of a scenario: a site, or `count` of them."""

    name: str
    count: int = 1
    nodes: int = 1
    gpus_per_node: int = 2
    gpu_type: str = "h100"
    memory: str = ""
    nodes_per_leaf: int = 32

    def named(self) -> "list[SimulatedSite]":
        """The sites it stands for, each with its own name and count 1."""
        if self.count == 1:
            return [self]
        width = max(2, len(str(self.count)))
        return [
            msgspec.structs.replace(self, name=f"{self.name}-{i:0{width}}", count=1) for i in range(1, self.count + 1)
        ]

    def inventory(self) -> Inventory:
        """Its nodes and GPUs. UUIDs follow from the names: they stay the same whenever the site restarts."""
        size = parse_size(self.memory or MEMORY.get(self.gpu_type, "80GiB"))
        width = max(2, len(str(self.nodes)))
        nodes = []
        for n in range(self.nodes):
            node = f"gpu{n + 1:0{width}}"
            gpus = tuple(
                Gpu(f"GPU-{uuid.uuid5(_NAMESPACE, f'{self.name}/{node}/{i}')}", i, self.gpu_type, size, 0)
                for i in range(self.gpus_per_node)
            )
            nodes.append(Node(node, f"leaf{n // self.nodes_per_leaf + 1:02}", gpus))
        return Inventory(tuple(nodes), "simulated")


def check(site: SimulatedSite, where: str) -> None:
    """Refuse impossible numbers.

    Raises:
        UsageError: naming the key, the value and the limit.
    """
    if not NAME.fullmatch(site.name):
        raise UsageError(f"{where}: name = {site.name!r} is no name: {RULE}")
    for key, value, low, high in (
        ("count", site.count, 1, SITES_MAX),
        ("nodes", site.nodes, 1, 100_000),
        ("gpus_per_node", site.gpus_per_node, 1, 64),
        ("nodes_per_leaf", site.nodes_per_leaf, 1, 100_000),
    ):
        if not low <= value <= high:
            raise UsageError(f"{where}: {key} = {value}: it may be {low} to {high}")
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,31}", site.gpu_type):
        raise UsageError(f"{where}: gpu_type = {site.gpu_type!r}: lower-case letters and digits, for example h100")
    if site.memory:
        parse_size(site.memory)


def parse(text: str, where: str) -> list[SimulatedSite]:
    """Read a scenario file into single sites.

    Raises:
        PlanError: malformed; place and key are named.
    """
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"{where} is not TOML: {error}") from None
    blocks = raw.get("site")
    if not isinstance(blocks, list) or not blocks:
        raise PlanError(f"{where} has no [[site]]", 'write [[site]] and name = "shanghai" below it')
    sites: list[SimulatedSite] = []
    for number, block in enumerate(blocks, 1):
        try:
            site = msgspec.convert(block, SimulatedSite)
            check(site, f"{where}, [[site]] number {number}")
        except msgspec.ValidationError as error:
            raise PlanError(f"{where}, [[site]] number {number}: {error}") from None
        sites.extend(site.named())
    names = [site.name for site in sites]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise PlanError(f"{where} names the site {twice!r} twice")
    return sites
