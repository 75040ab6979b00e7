"""Bulk frames: a fixed header and raw bytes, for objects too large for control frames. Resumable by offset.

Whoever needs an object sends WANT with the offset it has; the other side answers with DATA frames from there, the last one
flagged. An object's id is the first half of the SHA-256 of its name; its whole hash travels on the control channel, in
signed messages. The checksum is the header's alone: it tells a header from bytes that are none. What the frame carries is
authenticated by SSH and hashed from end to end.
"""

import hashlib
import struct
import zlib
from typing import NamedTuple

from fedpool.errors import PeerProtocolError

# Specification constants.
MAGIC = 0x4942  # "IB"
WANT = 1
DATA = 2
MISSING = 3
FLAG_LAST = 1
ID_BYTES = 16
PAYLOAD_BYTES_MAX = 1 << 20

# Tuning: asyncssh copes best with writes of half a mebibyte.
CHUNK_BYTES = 512 * 1024

_HEADER = struct.Struct(">HBBIQ16s")
_CHECKSUM = struct.Struct(">I")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size


class Frame(NamedTuple):
    """One bulk frame."""

    kind: int
    object_id: bytes
    offset: int
    payload: bytes = b""
    last: bool = False


def object_id(name: str) -> bytes:
    """The id of the object with this name."""
    return hashlib.sha256(name.encode()).digest()[:ID_BYTES]


def write(frame: Frame) -> bytes:
    """Encode a frame."""
    flags = FLAG_LAST if frame.last else 0
    header = _HEADER.pack(MAGIC, frame.kind, flags, len(frame.payload), frame.offset, frame.object_id)
    return b"".join((header, _CHECKSUM.pack(zlib.crc32(header)), frame.payload))


class BulkReader:
    """Cuts a byte stream into bulk frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def receive(self, data: bytes) -> list[Frame]:
        """Add bytes; return the frames that are now complete.

        Raises:
            PeerProtocolError: no bulk frame, too large, or damaged.
        """
        self._buffer += data
        frames, position = [], 0
        view = memoryview(self._buffer)
        try:
            while len(view) - position >= HEADER_BYTES:
                magic, kind, flags, length, offset, identity = _HEADER.unpack_from(view, position)
                (checksum,) = _CHECKSUM.unpack_from(view, position + _HEADER.size)
                if magic != MAGIC or kind not in (WANT, DATA, MISSING):
                    raise PeerProtocolError("the bulk stream is out of step: no frame header where one belongs")
                if length > PAYLOAD_BYTES_MAX:
                    raise PeerProtocolError(f"a bulk frame of {length} bytes; the limit is {PAYLOAD_BYTES_MAX}")
                if zlib.crc32(view[position : position + _HEADER.size]) != checksum:
                    raise PeerProtocolError(f"the header of a bulk frame at offset {offset} is damaged")
                if len(view) - position < HEADER_BYTES + length:
                    break
                payload = bytes(view[position + HEADER_BYTES : position + HEADER_BYTES + length])
                frames.append(Frame(kind, identity, offset, payload, bool(flags & FLAG_LAST)))
                position += HEADER_BYTES + length
        finally:
            view.release()
        del self._buffer[:position]
        return frames
