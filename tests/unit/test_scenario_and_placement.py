import pytest

from fedpool.errors import IbshellError, PlanError
from fedpool.placement.policies import pack
from fedpool.sim import scenario
from fedpool.sim.scenario import SimulatedSite


def test_sites_of_a_scenario():
    sites = scenario.parse('[[site]]\nname = "hospital"\ncount = 3\n[[site]]\nname = "bank"\nnodes = 2\n', "s.toml")
    assert [site.name for site in sites] == ["hospital-01", "hospital-02", "hospital-03", "bank"]
    assert len(sites[-1].inventory().gpus()) == 4


def test_uuids_stay_the_same_and_are_unique():
    one, again = (SimulatedSite("zurich", nodes=3, gpus_per_node=8).inventory() for _ in range(2))
    assert one == again and len({gpu.uuid for gpu in one.gpus()}) == 24


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no [[site]]"),
        ("site = 3", "has no [[site]]"),
        ("[[site]]\n", "name"),
        ('[[site]]\nname = "a/b"', "is no name"),
        ('[[site]]\nname = "a"\nnodes = 0', "nodes = 0: it may be 1 to"),
        ('[[site]]\nname = "a"\ncolour = 1', "colour"),
        ('[[site]]\nname = "a"\nmemory = "lots"', "'lots' is not a size"),
        ('[[site]]\nname = "a"\n[[site]]\nname = "a"', "names the site 'a' twice"),
        ("[[site", "is not TOML"),
    ],
)
def test_malformed_scenarios_are_named(text, says):
    with pytest.raises(IbshellError) as refused:
        scenario.parse(text, "s.toml")
    assert says in refused.value.message
    assert isinstance(refused.value, PlanError) or refused.value.exit_status == 2


def test_a_gang_is_packed_under_the_tightest_leaf_that_fits():
    inventory = SimulatedSite("x", nodes=8, gpus_per_node=4, nodes_per_leaf=4).inventory()
    free = {gpu.uuid for gpu in inventory.gpus()} - {gpu.uuid for gpu in inventory.nodes[5].gpus}
    chosen = pack(inventory, free, 8, None)
    leaves = {node.leaf for node in inventory.nodes for gpu in node.gpus if gpu in chosen}
    assert leaves == {"leaf02"}, "the leaf with 12 free devices is tighter than the one with 16"
    nodes = {node.name for node in inventory.nodes for gpu in node.gpus if gpu in chosen}
    assert len(nodes) == 2


def test_the_node_that_fits_exactly_is_taken():
    inventory = SimulatedSite("x", nodes=3, gpus_per_node=4).inventory()
    free = {gpu.uuid for gpu in inventory.gpus()} - {gpu.uuid for gpu in inventory.nodes[1].gpus[:2]}
    assert {gpu.uuid for gpu in pack(inventory, free, 2, None)} == {gpu.uuid for gpu in inventory.nodes[1].gpus[2:]}


def test_a_gang_wider_than_a_leaf_takes_the_fullest_first():
    inventory = SimulatedSite("x", nodes=6, gpus_per_node=2, nodes_per_leaf=2).inventory()
    free = {gpu.uuid for gpu in inventory.gpus()} - {gpu.uuid for gpu in inventory.nodes[0].gpus}
    chosen = pack(inventory, free, 8, "h100")
    assert len({node.leaf for node in inventory.nodes for gpu in node.gpus if gpu in chosen}) == 2
    assert pack(inventory, free, 11, "h100") is None
    assert pack(inventory, free, 1, "a100") is None
