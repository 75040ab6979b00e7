"""The layout of c2sp.org/tlog-tiles: a log as files that never change, so that anybody's verifier reads it over anything.

A tile of level L holds hashes of complete subtrees of 256^L leaves each, 256 when it is full; what lies between is computed.
Entries lie in bundles of 256, each entry preceded by its length.
"""

import struct
from collections.abc import Callable, Iterator, Sequence

from fedpool.errors import IntegrityError, UsageError
from fedpool.ledger.merkle import HASH_BYTES, Nodes, node_hash

HEIGHT = 8
WIDTH = 1 << HEIGHT
ENTRY_BYTES_MAX = 0xFFFF  # a bundle has two bytes for a length

_LENGTH = struct.Struct(">H")


def path(kind: str, index: int, width: int = WIDTH) -> str:
    """Where a tile lies.

    Args:
        kind: its level, or "entries".
        index: which, from the left.
        width: hashes or entries in it; one that is not full has a name of its own for every width.
    """
    groups = [f"{index % 1000:03d}"]
    while index := index // 1000:
        groups.insert(0, f"x{index % 1000:03d}")
    return f"tile/{kind}/{'/'.join(groups)}{'' if width == WIDTH else f'.p/{width}'}"


def tiles(size: int) -> Iterator[tuple[int, int, int]]:
    """(level, index, width) of every tile of a log of so many entries."""
    level = 0
    while count := size >> (HEIGHT * level):
        yield from ((level, index, WIDTH) for index in range(count // WIDTH))
        if count % WIDTH:
            yield level, count // WIDTH, count % WIDTH
        level += 1


def width(level: int, index: int, size: int) -> int:
    """How many hashes a tile has in a log of so many entries."""
    return min(WIDTH, (size >> (HEIGHT * level)) - index * WIDTH)


def nodes(read: Callable[[int, int, int], bytes], size: int) -> Nodes:
    """The nodes of a log of so many entries, from its tiles.

    Args:
        read: (level, index, width) -> the tile; called for the widest that this log has.
        size: entries.
    """

    def node(level: int, index: int) -> bytes:
        tile, above = divmod(level, HEIGHT)
        first, count = index << above, 1 << above
        number = first // WIDTH
        have = width(tile, number, size)
        data = read(tile, number, have)
        start = first % WIDTH
        if len(data) != have * HASH_BYTES or start + count > have:
            raise IntegrityError(
                f"{path(str(tile), number, have)} has {len(data)} bytes and should have {have * HASH_BYTES}"
            )
        hashes = [data[HASH_BYTES * at : HASH_BYTES * (at + 1)] for at in range(start, start + count)]
        while len(hashes) > 1:
            hashes = [node_hash(left, right) for left, right in zip(hashes[::2], hashes[1::2], strict=True)]
        return hashes[0]

    return node


def bundle(entries: Sequence[bytes]) -> bytes:
    """Entries as a file of the layout.

    Raises:
        UsageError: one is too long.
    """
    for entry in entries:
        if len(entry) > ENTRY_BYTES_MAX:
            raise UsageError(
                f"an entry of {len(entry)} bytes; the limit is {ENTRY_BYTES_MAX}", "put in its hash instead"
            )
    return b"".join(_LENGTH.pack(len(entry)) + entry for entry in entries)


def unbundle(data: bytes) -> list[bytes]:
    """The entries of a bundle.

    Raises:
        IntegrityError: it is cut short.
    """
    found, at = [], 0
    while at < len(data):
        if at + _LENGTH.size > len(data):
            raise IntegrityError("a bundle of entries is cut short")
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + length > len(data):
            raise IntegrityError("a bundle of entries is cut short")
        found.append(data[at : at + length])
        at += length
    return found
