import pytest

from fedpool.errors import IbshellError, PlanError
from fedpool.placement import policies
from fedpool.records import Gpu, Inventory, Node, Shape, Slice
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
        ('[[site]]\nname = "b"\n\n[[site]]\nname = "a"\nnodes = 0', "s.toml, line 6: nodes = 0: it may be 1 to"),
        ('[[site]]\nname = "a"\ncolour = 1', "s.toml, line 3: unknown key 'colour'"),
        ('[[site]]\nname = "a"\nnodes = "two"', "s.toml, line 3: nodes: expected `int`, got `str`"),
        ("[[site]]\nnodes = 1", "s.toml, line 1: the key 'name' is missing"),
        ('[[site]]\nname = "a"\nmig = ["1g"]', "line 3: mig = '1g' is no profile"),
        (
            '[[site]]\nname = "a"\nmig = ["4g.40gb", "4g.40gb"]',
            "line 3: mig takes 8 compute slices and 80 GiB; a h100 has 7",
        ),
        ('[[site]]\nname = "a"\nmig_gpus = 1', "line 3: mig_gpus = 1"),
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


def test_cards_of_a_scenario_may_be_cut():
    [site] = scenario.parse(
        '[[site]]\nname = "zurich"\ngpus_per_node = 2\nmig = ["3g.40gb", "1g.10gb"]\nmig_gpus = 1', "s.toml"
    )
    whole, *slices = site.inventory().devices()
    assert (whole.kind, whole.label) == ("h100", "0")
    assert [(s.kind, s.label, s.memory_bytes >> 30) for s in slices] == [
        ("h100/3g.40gb", "1.0", 40),
        ("h100/1g.10gb", "1.1", 10),
    ]
    assert len({device.uuid for device in (whole, *slices)}) == 3 and slices[0].uuid.startswith("MIG-")


def pick(inventory, taken, count, shape=None):
    """The devices chosen where these UUIDs are taken, or None."""
    shape = shape or Shape()
    used = dict.fromkeys(taken, 1000) if not isinstance(taken, dict) else taken
    return policies.choose(policies.usable(inventory.devices(), used, shape), used, shape, count)


def uuids(node):
    return [gpu.uuid for gpu in node.gpus]


def test_a_gang_is_packed_under_the_tightest_leaf_that_fits():
    inventory = SimulatedSite("x", nodes=8, gpus_per_node=4, nodes_per_leaf=4).inventory()
    chosen = pick(inventory, uuids(inventory.nodes[5]), 8)
    assert {device.leaf for device in chosen} == {"leaf02"}, "the leaf with 12 free is tighter than the one with 16"
    assert len({device.node for device in chosen}) == 2


def test_the_node_that_fits_exactly_is_taken():
    inventory = SimulatedSite("x", nodes=3, gpus_per_node=4).inventory()
    chosen = pick(inventory, uuids(inventory.nodes[1])[:2], 2)
    assert [device.uuid for device in chosen] == uuids(inventory.nodes[1])[2:]


def test_a_gang_wider_than_a_leaf_takes_the_fullest_first():
    inventory = SimulatedSite("x", nodes=6, gpus_per_node=2, nodes_per_leaf=2).inventory()
    taken = uuids(inventory.nodes[0])
    assert len({device.leaf for device in pick(inventory, taken, 8, Shape(kinds=("h100",)))}) == 2
    assert pick(inventory, taken, 11) is None
    assert pick(inventory, taken, 1, Shape(kinds=("a100",))) is None


def test_constraints_are_kept():
    inventory = SimulatedSite("x", nodes=4, gpus_per_node=2, nodes_per_leaf=2).inventory()
    assert len({d.node for d in pick(inventory, (), 4, Shape(spread="node"))}) == 4
    assert pick(inventory, (), 3, Shape(spread="leaf")) is None
    assert len({d.leaf for d in pick(inventory, (), 4, Shape(same_leaf=True))}) == 1
    assert pick(inventory, (), 5, Shape(same_leaf=True)) is None
    exact = inventory.nodes[3].gpus[1].uuid
    assert [d.uuid for d in pick(inventory, (), 1, Shape(devices=(exact,)))] == [exact]
    assert pick(inventory, (exact,), 1, Shape(devices=(exact,))) is None
    assert pick(inventory, (), 1, Shape(memory_min_bytes=81 << 30)) is None


def test_a_fraction_comes_from_one_card_the_fullest_that_has_it():
    inventory = SimulatedSite("x", nodes=1, gpus_per_node=4).inventory()
    cards = uuids(inventory.nodes[0])
    used = {cards[1]: 700, cards[2]: 500, cards[3]: 800}
    assert [d.uuid for d in pick(inventory, used, 1, Shape(milli=250))] == [cards[1]]
    assert [d.uuid for d in pick(inventory, used, 1, Shape(milli=600))] == [cards[0]], "never split over two"
    assert pick(inventory, {**used, cards[0]: 401}, 1, Shape(milli=600)) is None


def test_a_card_that_is_cut_is_leased_by_slice():
    slices = (Slice("MIG-a", "1g.10gb", 10 << 30), Slice("MIG-b", "2g.20gb", 20 << 30))
    cut = Gpu("GPU-0", 0, "h100", 80 << 30, 0, slices)
    inventory = Inventory((Node("gpu01", "leaf01", (cut, Gpu("GPU-1", 1, "h100", 80 << 30, 0))),), "simulated")
    assert [device.uuid for device in inventory.devices()] == ["MIG-a", "MIG-b", "GPU-1"]
    assert [d.uuid for d in pick(inventory, (), 1)] == ["GPU-1"], "who does not name a slice gets a card"
    assert [d.uuid for d in pick(inventory, (), 1, Shape(kinds=("h100/1g.10gb",)))] == ["MIG-a"]
    assert pick(inventory, (), 2) is None
