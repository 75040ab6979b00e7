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
    mig = ["3g.40gb", "3g.40gb"]   # every card, or the last mig_gpus of each node, is cut into these slices
    mig_gpus = 1
"""

import re
import uuid
from collections.abc import Iterator

import msgspec

from fedpool.errors import PlanError, UsageError
from fedpool.names import NAME, RULE
from fedpool.records import Gpu, Inventory, Node, Slice
from fedpool.toml import TomlText
from fedpool.units import GIB, parse_size

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
# A card has seven compute slices, whatever its model (NVIDIA MIG User Guide, "Supported MIG Profiles").
MIG_COMPUTE = 7
_PROFILE = re.compile(r"([1-7])g\.([1-9][0-9]{0,2})gb")
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
    mig: tuple[str, ...] = ()
    mig_gpus: int = 0

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
            cut_from = self.gpus_per_node - (self.mig_gpus or self.gpus_per_node)
            gpus = tuple(
                Gpu(
                    f"GPU-{self._uuid(node, i)}",
                    i,
                    self.gpu_type,
                    size,
                    0,
                    tuple(
                        Slice(f"MIG-{self._uuid(node, i, s)}", profile, _memory(profile))
                        for s, profile in enumerate(self.mig if i >= cut_from else ())
                    ),
                )
                for i in range(self.gpus_per_node)
            )
            nodes.append(Node(node, f"leaf{n // self.nodes_per_leaf + 1:02}", gpus))
        return Inventory(tuple(nodes), "simulated")

    def _uuid(self, *place: object) -> uuid.UUID:
        return uuid.uuid5(_NAMESPACE, "/".join(map(str, (self.name, *place))))


def _memory(profile: str) -> int:
    return int(profile.partition(".")[2].removesuffix("gb")) * GIB


def check(site: SimulatedSite, where: str) -> None:
    """Refuse impossible numbers.

    Raises:
        UsageError: naming the key, the value and the limit.
    """
    for _, problem, hint in problems(site):
        raise UsageError(f"{where}: {problem}", hint)


def problems(site: SimulatedSite) -> Iterator[tuple[str, str, str]]:
    """(key, what is wrong with its value, remedy) of a described site."""
    if not NAME.fullmatch(site.name):
        yield "name", f"name = {site.name!r} is no name: {RULE}", ""
    for key, value, low, high in (
        ("count", site.count, 1, SITES_MAX),
        ("nodes", site.nodes, 1, 100_000),
        ("gpus_per_node", site.gpus_per_node, 1, 64),
        ("nodes_per_leaf", site.nodes_per_leaf, 1, 100_000),
    ):
        if not low <= value <= high:
            yield key, f"{key} = {value}: it may be {low} to {high}", ""
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]{0,31}", site.gpu_type):
        yield "gpu_type", f"gpu_type = {site.gpu_type!r}: lower-case letters and digits", "for example h100"
    try:
        size = parse_size(site.memory or MEMORY.get(site.gpu_type, "80GiB"))
    except UsageError as error:
        yield "memory", f"memory: {error.message}", error.hint
    else:
        yield from _problems_of_mig(site, size)


def _problems_of_mig(site: SimulatedSite, size: int) -> Iterator[tuple[str, str, str]]:
    compute = memory = 0
    for profile in site.mig:
        match = _PROFILE.fullmatch(profile)
        if match is None:
            yield "mig", f"mig = {profile!r} is no profile", "for example 1g.10gb"
            return
        compute, memory = compute + int(match[1]), memory + _memory(profile)
    if compute > MIG_COMPUTE or memory > size:
        yield (
            "mig",
            f"mig takes {compute} compute slices and {memory // GIB} GiB; a {site.gpu_type} has {MIG_COMPUTE} and "
            f"{size // GIB} GiB",
            "",
        )
    if not 0 <= site.mig_gpus <= site.gpus_per_node or (site.mig_gpus and not site.mig):
        yield (
            "mig_gpus",
            f"mig_gpus = {site.mig_gpus}: it says how many of gpus_per_node = {site.gpus_per_node} are cut as mig says",
            "",
        )


class _Scenario(msgspec.Struct, forbid_unknown_fields=True):
    site: list[SimulatedSite] = []


def parse(text: str, where: str) -> list[SimulatedSite]:
    """Read a scenario file into single sites.

    Raises:
        PlanError: malformed; line and key are named.
    """
    toml = TomlText(text, where, PlanError)
    if not isinstance(toml.raw.get("site"), list) or not toml.raw["site"]:
        raise PlanError(f"{where} has no [[site]]", 'write [[site]] and name = "shanghai" below it')
    sites: list[SimulatedSite] = []
    names: set[str] = set()
    for number, site in enumerate(toml.convert(_Scenario).site):
        for key, problem, hint in problems(site):
            raise toml.wrong(key, problem, hint, "site", number)
        for named in site.named():
            if named.name in names:
                raise toml.wrong("name", f"it names the site {named.name!r} twice", "", "site", number)
            names.add(named.name)
            sites.append(named)
    return sites
