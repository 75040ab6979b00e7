"""Merkle trees against their definition in RFC 9162, written down as it stands there."""

import hashlib

import pytest

from fedpool.errors import IntegrityError
from fedpool.ledger import merkle, tiles

# Of the test data of Certificate Transparency, which many implementations share.
ENTRIES = ["", "00", "10", "2021", "3031", "40414243", "5051525354555657", "606162636465666768696a6b6c6d6e6f"]
ROOTS = [
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]
MOST = 70


def entry(number):
    return b"%d" % number


def split(count):
    power = 1
    while 2 * power < count:
        power *= 2
    return power


def mth(data):
    """MTH(D_n), RFC 9162, 2.1.1."""
    if not data:
        return hashlib.sha256().digest()
    if len(data) == 1:
        return hashlib.sha256(b"\0" + data[0]).digest()
    k = split(len(data))
    return hashlib.sha256(b"\1" + mth(data[:k]) + mth(data[k:])).digest()


def path(m, data):
    """PATH(m, D_n), 2.1.3.1."""
    if len(data) == 1:
        return []
    k = split(len(data))
    return [*path(m, data[:k]), mth(data[k:])] if m < k else [*path(m - k, data[k:]), mth(data[:k])]


def subproof(m, data, whole):
    """SUBPROOF(m, D_n, b), 2.1.4.1."""
    if m == len(data):
        return [] if whole else [mth(data)]
    k = split(len(data))
    if m <= k:
        return [*subproof(m, data[:k], whole), mth(data[k:])]
    return [*subproof(m - k, data[k:], False), mth(data[:k])]


class Log:
    """All nodes of a tree, in memory."""

    def __init__(self, entries):
        self.known = {}
        self.frontier = merkle.Frontier()
        for data in entries:
            for level, index, found in self.frontier.append(merkle.leaf_hash(data)):
                assert (level, index) not in self.known
                self.known[level, index] = found

    def node(self, level, index):
        return self.known[level, index]

    def tile(self, level, index, width):
        first = index * tiles.WIDTH
        return b"".join(self.known[level * tiles.HEIGHT, at] for at in range(first, first + width))


@pytest.fixture(scope="module")
def log():
    return Log(map(entry, range(MOST)))


def test_the_roots_of_certificate_transparency():
    frontier = merkle.Frontier()
    assert frontier.root().hex() == ROOTS[0]
    for data, expected in zip(ENTRIES, ROOTS[1:], strict=True):
        frontier.append(merkle.leaf_hash(bytes.fromhex(data)))
        assert frontier.root().hex() == expected


def test_roots_and_proofs_are_those_of_the_definition(log):
    data = [entry(number) for number in range(MOST)]
    roots = [mth(data[:size]) for size in range(MOST + 1)]
    for size in range(MOST + 1):
        assert merkle.root(log.node, size) == roots[size]
        for index in range(size):
            proof = merkle.inclusion_proof(log.node, index, size)
            assert proof == path(index, data[:size])
            merkle.require_inclusion(merkle.leaf_hash(data[index]), index, size, proof, roots[size])
        for old in range(1, size + 1):
            proof = merkle.consistency_proof(log.node, old, size)
            assert proof == subproof(old, data[:size], True)
            merkle.require_consistency(old, size, roots[old], roots[size], proof)
        assert merkle.consistency_proof(log.node, 0, size) == []
        merkle.require_consistency(0, size, merkle.EMPTY_ROOT, roots[size], [])


def damaged(proof):
    """Every proof that differs from one in one place."""
    for number, step in enumerate(proof):
        yield [*proof[:number], bytes([step[0] ^ 1]) + step[1:], *proof[number + 1 :]]
        yield [*proof[:number], *proof[number + 1 :]]
        yield [*proof[:number], step, *proof[number:]]
    for number in range(len(proof) - 1):
        yield [*proof[:number], proof[number + 1], proof[number], *proof[number + 2 :]]
    yield [*proof, bytes(32)]


def test_no_other_proof_shows_that_an_entry_is_in_a_log(log):
    for size in (1, 2, 3, 7, 8, 33):
        expected = merkle.root(log.node, size)
        for index in range(size):
            leaf, proof = log.node(0, index), merkle.inclusion_proof(log.node, index, size)
            for wrong in damaged(proof):
                with pytest.raises(IntegrityError):
                    merkle.require_inclusion(leaf, index, size, wrong, expected)
            for other in range(size):
                if other != index:
                    with pytest.raises(IntegrityError):
                        merkle.require_inclusion(leaf, other, size, proof, expected)
            with pytest.raises(IntegrityError):
                merkle.require_inclusion(leaf, size, size, proof, expected)


def test_no_other_proof_shows_that_a_log_continues_another(log):
    for new in (2, 3, 7, 8, 33):
        after = merkle.root(log.node, new)
        for old in range(1, new):
            before, proof = merkle.root(log.node, old), merkle.consistency_proof(log.node, old, new)
            for wrong in damaged(proof):
                with pytest.raises(IntegrityError):
                    merkle.require_consistency(old, new, before, after, wrong)
            for was, is_ in ((after, after), (before, before), (bytes(32), after), (before, bytes(32))):
                with pytest.raises(IntegrityError):
                    merkle.require_consistency(old, new, was, is_, proof)
    with pytest.raises(IntegrityError):
        merkle.require_consistency(3, 3, merkle.root(log.node, 3), merkle.root(log.node, 4), [])
    with pytest.raises(IntegrityError):
        merkle.require_consistency(4, 3, merkle.root(log.node, 4), merkle.root(log.node, 3), [])


def test_there_is_no_proof_of_what_is_not_there(log):
    with pytest.raises(IntegrityError, match="7 entries has no entry 7"):
        merkle.inclusion_proof(log.node, 7, 7)
    with pytest.raises(IntegrityError, match="does not continue one of 8"):
        merkle.consistency_proof(log.node, 8, 7)
    with pytest.raises(IntegrityError, match="3 leaves has 2 peaks"):
        merkle.Frontier(3, [bytes(32)])


def test_a_frontier_goes_on_where_a_log_ended(log):
    for size in range(MOST):
        frontier = merkle.Frontier.of(log.node, size)
        frontier.append(merkle.leaf_hash(entry(size)))
        assert frontier.root() == merkle.root(log.node, size + 1)


@pytest.mark.parametrize("size", [1, 255, 256, 257, 65_535, 65_536, 65_793])
def test_the_nodes_of_a_log_are_in_its_tiles(size):
    log = Log(map(entry, range(size)))
    read = set()

    def tile(level, index, width):
        read.add((level, index, width))
        return log.tile(level, index, width)

    nodes = tiles.nodes(tile, size)
    assert merkle.root(nodes, size) == log.frontier.root()
    for index in {0, 1, size // 3, size - 1} & set(range(size)):
        assert merkle.inclusion_proof(nodes, index, size) == merkle.inclusion_proof(log.node, index, size)
    for old in {1, size // 2, size - 1} - {0}:
        assert merkle.consistency_proof(nodes, old, size) == merkle.consistency_proof(log.node, old, size)
    assert read <= set(tiles.tiles(size)), "no tile is asked for that the log does not have"


def test_a_tile_that_is_cut_short_is_found():
    log = Log(map(entry, range(300)))
    nodes = tiles.nodes(lambda *which: log.tile(*which)[:-1], 300)
    with pytest.raises(IntegrityError, match=r"tile/0/000 has 8191 bytes and should have 8192"):
        nodes(0, 3)


def test_paths_and_bundles():
    assert tiles.path("0", 0) == "tile/0/000"
    assert tiles.path("1", 1_234_067) == "tile/1/x001/x234/067"
    assert tiles.path("entries", 1_000, 12) == "tile/entries/x001/000.p/12"
    assert list(tiles.tiles(0)) == []
    assert list(tiles.tiles(70_000)) == [
        *((0, index, 256) for index in range(273)),
        (0, 273, 112),
        (1, 0, 256),
        (1, 1, 17),
        (2, 0, 1),
    ]
    entries = [b"", b"a", b"x" * 65_535]
    assert tiles.unbundle(tiles.bundle(entries)) == entries
    for cut in (1, 2, 4, 6):
        with pytest.raises(IntegrityError, match="cut short"):
            tiles.unbundle(tiles.bundle(entries)[: 2 + cut])
