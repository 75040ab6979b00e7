"""What becomes of a ledger's records when their time is over: their text goes, their hash stays, and so does every proof.

From time to time a site writes a seam: a record that says how things stand, followed by what is still in force, each as it was
written first (`fedpool.leasing.seams`). Records before a seam may be forgotten. Whoever verifies such a ledger takes the hashes of
what is forgotten, begins with the seam, and finds what it repeats by those hashes to be what was written.
"""

import base64
import binascii
import zlib
from collections.abc import Iterable, Iterator

from fedpool.errors import IntegrityError
from fedpool.ledger import merkle
from fedpool.ledger.records import Kept, LedgerSeam, decode

FORGOTTEN = b"\0"  # no record begins so: they are JSON
TEXT_BYTES_MAX = 1 << 17


def forgotten(record: bytes) -> bytes:
    """What stays in the place of a record."""
    return record if is_forgotten(record) else FORGOTTEN + merkle.leaf_hash(record)


def is_forgotten(record: bytes) -> bool:
    """Whether only the hash of a record is left."""
    return record.startswith(FORGOTTEN) and len(record) == len(FORGOTTEN) + merkle.HASH_BYTES


def leaf_of(record: bytes) -> bytes:
    """The leaf hash of a record, whether its text is left or not."""
    return record[len(FORGOTTEN) :] if is_forgotten(record) else merkle.leaf_hash(record)


def kept(number: int, record: bytes) -> Kept:
    """A record that is repeated at a seam."""
    return Kept(number=number, record=base64.b64encode(zlib.compress(record)).decode())


def text_of(said: Kept) -> bytes:
    """The record that is repeated.

    Raises:
        IntegrityError: it cannot be read.
    """
    try:
        unpacking = zlib.decompressobj()
        text = unpacking.decompress(base64.b64decode(said.record, validate=True), TEXT_BYTES_MAX)
        if not unpacking.eof or unpacking.unused_data:
            raise ValueError("it is cut short, or too long")
    except (ValueError, binascii.Error, zlib.error) as error:
        raise IntegrityError(f"record {said.number}, repeated at a seam, cannot be read: {error}") from None
    return text


def told(records: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """(number, record) of what is not forgotten, in order; where they begin with a seam, first what that repeats."""
    blind, to_come = False, 0
    for number, data in records:
        if is_forgotten(data):
            blind = True
            continue
        record = decode(data) if blind or to_come else None
        if isinstance(record, LedgerSeam) and blind:
            blind, to_come = False, record.kept
        elif isinstance(record, Kept) and to_come:
            to_come -= 1
            yield record.number, text_of(record)
        elif not blind:
            yield number, data
