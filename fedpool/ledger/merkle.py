"""Merkle trees as RFC 9162 hashes them (section 2.1): roots, proofs that an entry is in one, proofs that one continues another.

A tree is known by the hashes of its complete subtrees: node (level, index) covers the leaves index·2^level to (index + 1)·2^level.
A node, once complete, never changes; that is why appending and proving cost O(log n).
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from fedpool.errors import IntegrityError

HASH_BYTES = 32
EMPTY_ROOT = hashlib.sha256(b"").digest()

Nodes: TypeAlias = Callable[[int, int], bytes]  # (level, index) -> hash of a complete subtree


def leaf_hash(entry: bytes) -> bytes:
    """The hash of an entry; a leaf is never taken for a node."""
    return hashlib.sha256(b"\x00" + entry).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """The hash of two subtrees side by side."""
    return hashlib.sha256(b"\x01" + left + right).digest()


class Frontier:
    """What is needed of a tree in order to append to it: its largest complete subtrees, from the left.

    Args:
        size: leaves.
        peaks: their hashes, one for each bit of `size`, the highest first.
    """

    def __init__(self, size: int = 0, peaks: Sequence[bytes] = ()) -> None:
        if len(peaks) != size.bit_count():
            raise IntegrityError(f"a tree of {size} leaves has {size.bit_count()} peaks, not {len(peaks)}")
        self.size = size
        self.peaks = list(peaks)

    @classmethod
    def of(cls, nodes: Nodes, size: int) -> "Frontier":
        """The frontier of a tree whose nodes are there."""
        return cls(size, [nodes(level, index) for level, index in peaks(size)])

    def append(self, leaf: bytes) -> list[tuple[int, int, bytes]]:
        """Take in the hash of one more entry; returns (level, index, hash) of every subtree that is complete with it."""
        level, index, found = 0, self.size, leaf
        complete = [(level, index, found)]
        while index & 1:
            level, index, found = level + 1, index >> 1, node_hash(self.peaks.pop(), found)
            complete.append((level, index, found))
        self.peaks.append(found)
        self.size += 1
        return complete

    def root(self) -> bytes:
        """The root of the tree as it is now."""
        if not self.peaks:
            return EMPTY_ROOT
        found = self.peaks[-1]
        for peak in reversed(self.peaks[:-1]):
            found = node_hash(peak, found)
        return found


def peaks(size: int) -> Iterator[tuple[int, int]]:
    """(level, index) of the largest complete subtrees of a tree, from the left."""
    start = 0
    for level in reversed(range(size.bit_length())):
        if size >> level & 1:
            yield level, start >> level
            start += 1 << level


def root(nodes: Nodes, size: int) -> bytes:
    """The root of the first `size` leaves."""
    return Frontier.of(nodes, size).root()


def _range_hash(nodes: Nodes, first: int, last: int) -> bytes:
    """The hash of the leaves first..last - 1, a subtree of some tree; `first` is a multiple of its size rounded up."""
    count = last - first
    level = count.bit_length() - 1
    if count == 1 << level:
        return nodes(level, first >> level)
    split = first + (1 << level)
    return node_hash(_range_hash(nodes, first, split), _range_hash(nodes, split, last))


def _split(count: int) -> int:
    """The largest power of two below a count."""
    return 1 << ((count - 1).bit_length() - 1)


def inclusion_proof(nodes: Nodes, index: int, size: int) -> list[bytes]:
    """The hashes that lead from leaf `index` to the root of `size` leaves; the leaf's neighbour first.

    Raises:
        IntegrityError: there is no such leaf.
    """
    if not 0 <= index < size:
        raise IntegrityError(f"a log of {size} entries has no entry {index}")
    first, last, proof = 0, size, []
    while last - first > 1:
        split = first + _split(last - first)
        if index < split:
            proof.append(_range_hash(nodes, split, last))
            last = split
        else:
            proof.append(_range_hash(nodes, first, split))
            first = split
    return proof[::-1]


def consistency_proof(nodes: Nodes, old: int, new: int) -> list[bytes]:
    """The hashes that show that the first `old` of `new` leaves are the tree there was.

    Raises:
        IntegrityError: `old` is larger than `new`.
    """
    if not 0 <= old <= new:
        raise IntegrityError(f"a log of {new} entries does not continue one of {old}")
    if old in (0, new):
        return []
    first, last, whole, proof = 0, new, True, []
    while last != old:
        split = first + _split(last - first)
        if old <= split:
            proof.append(_range_hash(nodes, split, last))
            last = split
        else:
            proof.append(_range_hash(nodes, first, split))
            first, whole = split, False
    if not whole:
        proof.append(_range_hash(nodes, first, last))
    return proof[::-1]


def require_inclusion(leaf: bytes, index: int, size: int, proof: Sequence[bytes], expected: bytes) -> None:
    """Check that a leaf is in a tree (RFC 9162, 2.1.3.2).

    Raises:
        IntegrityError: the proof does not show it.
    """
    if not 0 <= index < size:
        raise IntegrityError(f"a log of {size} entries has no entry {index}")
    left, last, found = index, size - 1, leaf
    for step in proof:
        if last == 0:
            raise IntegrityError(f"the proof for entry {index} of {size} is too long")
        if left & 1 or left == last:
            found = node_hash(step, found)
            while left and not left & 1:
                left, last = left >> 1, last >> 1
        else:
            found = node_hash(found, step)
        left, last = left >> 1, last >> 1
    if last or found != expected:
        raise IntegrityError(f"the proof does not show entry {index} in the log of {size} entries")


def require_consistency(old: int, new: int, old_root: bytes, new_root: bytes, proof: Sequence[bytes]) -> None:
    """Check that a tree continues another (RFC 9162, 2.1.4.2).

    Raises:
        IntegrityError: the proof does not show it: history was rewritten, or the proof is not of these trees.
    """
    if not 0 <= old <= new:
        raise IntegrityError(f"a log of {new} entries does not continue one of {old}")
    wrong = IntegrityError(f"the log of {new} entries is not shown to continue the log of {old}")
    if old in (0, new):
        if proof or old_root != (new_root if old else EMPTY_ROOT):
            raise wrong
        return
    steps = list(proof)
    if old & (old - 1) == 0:
        steps.insert(0, old_root)
    if not steps:
        raise wrong
    left, last = old - 1, new - 1
    while left & 1:
        left, last = left >> 1, last >> 1
    before = after = steps[0]
    for step in steps[1:]:
        if last == 0:
            raise wrong
        if left & 1 or left == last:
            before, after = node_hash(step, before), node_hash(step, after)
            while left and not left & 1:
                left, last = left >> 1, last >> 1
        else:
            after = node_hash(after, step)
        left, last = left >> 1, last >> 1
    if last or before != old_root or after != new_root:
        raise wrong
