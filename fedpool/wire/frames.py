"""Control frames: a u32 length, then one msgpack map. Everything a peer could use to exhaust memory is bounded here.

The structure is walked before anything is built: a mebibyte of nested empty arrays would otherwise become tens of
megabytes of objects.
"""

import struct
from typing import Any

import msgpack

from fedpool.errors import LocalProtocolError, PeerProtocolError

# Specification constants.
FRAME_BYTES_MAX = 1 << 20
DEPTH_MAX = 32
MAP_ENTRIES_MAX = 65_536
ARRAY_ITEMS_MAX = 65_536
OBJECTS_MAX = 200_000

_LENGTH = struct.Struct(">I")


class FrameReader:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def receive(self, data: bytes) -> list[dict[str, Any]]:
        """Add bytes; return the frames that are now complete.

        Raises:
            PeerProtocolError: a frame is too large, too deep, or no msgpack map with text keys. The stream is then unusable.
        """
        self._buffer += data
        frames = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > FRAME_BYTES_MAX:
                raise PeerProtocolError(
                    f"a control frame of {length} bytes; the limit is {FRAME_BYTES_MAX}",
                    "either the peer is no ibshell, or something else writes into its standard output",
                )
            if len(self._buffer) < _LENGTH.size + length:
                break
            payload = bytes(memoryview(self._buffer)[_LENGTH.size : _LENGTH.size + length])
            del self._buffer[: _LENGTH.size + length]
            frames.append(_parse(payload))
        return frames

    def end(self) -> None:
        """The stream has ended.

        Raises:
            PeerProtocolError: in the middle of a frame.
        """
        if self._buffer:
            raise PeerProtocolError(f"the stream ended inside a frame, after {len(self._buffer)} bytes of it")


def write(frame: dict[str, Any]) -> bytes:
    """Encode a frame.

    Raises:
        LocalProtocolError: it would be over the limit the peer enforces.
    """
    payload: bytes = msgpack.packb(frame)
    if len(payload) > FRAME_BYTES_MAX:
        raise LocalProtocolError(f"a control frame of {len(payload)} bytes; the limit is {FRAME_BYTES_MAX}")
    return _LENGTH.pack(len(payload)) + payload


def _parse(payload: bytes) -> dict[str, Any]:
    _walk(payload)
    try:
        frame = msgpack.unpackb(
            payload, strict_map_key=True, max_map_len=MAP_ENTRIES_MAX, max_array_len=ARRAY_ITEMS_MAX
        )
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise PeerProtocolError(f"a control frame is not valid msgpack: {error}") from None
    if not isinstance(frame, dict):
        raise PeerProtocolError("a control frame is not a map")
    return frame


# First byte -> (bytes of fixed content to skip, bytes of the length field, is a container, entries a length counts).
_FIXED = {
    0xC0: 0,
    0xC2: 0,
    0xC3: 0,
    0xCA: 4,
    0xCB: 8,
    0xCC: 1,
    0xCD: 2,
    0xCE: 4,
    0xCF: 8,
    0xD0: 1,
    0xD1: 2,
    0xD2: 4,
    0xD3: 8,
}
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_ARRAYS = {0xDC: 2, 0xDD: 4}
_MAPS = {0xDE: 2, 0xDF: 4}


def _walk(payload: bytes) -> None:
    """Check depth, counts and completeness without building anything (msgpack specification, formats)."""
    position, objects, end = 0, 0, len(payload)
    pending = [1]  # objects still to come at each depth
    while pending:
        if pending[-1] == 0:
            pending.pop()
            continue
        pending[-1] -= 1
        objects += 1
        if objects > OBJECTS_MAX:
            raise PeerProtocolError(f"a control frame of more than {OBJECTS_MAX} objects")
        if position >= end:
            raise PeerProtocolError("a control frame ends inside an object")
        first = payload[position]
        position += 1
        children = -1
        if first <= 0x7F or first >= 0xE0:
            continue
        if 0xA0 <= first <= 0xBF:
            position += first & 0x1F
        elif first in _SIZED:
            width = _SIZED[first]
            position += width + int.from_bytes(payload[position : position + width], "big")
        elif first in _FIXED:
            position += _FIXED[first]
        elif 0x90 <= first <= 0x9F:
            children = first & 0x0F
        elif 0x80 <= first <= 0x8F:
            children = 2 * (first & 0x0F)
        elif first in _ARRAYS:
            width = _ARRAYS[first]
            children = int.from_bytes(payload[position : position + width], "big")
            if children > ARRAY_ITEMS_MAX:
                raise PeerProtocolError(f"an array of {children} items; the limit is {ARRAY_ITEMS_MAX}")
            position += width
        elif first in _MAPS:
            width = _MAPS[first]
            entries = int.from_bytes(payload[position : position + width], "big")
            if entries > MAP_ENTRIES_MAX:
                raise PeerProtocolError(f"a map of {entries} entries; the limit is {MAP_ENTRIES_MAX}")
            children = 2 * entries
            position += width
        else:
            raise PeerProtocolError(f"a control frame holds an extension type or an unused code (0x{first:02x})")
        if position > end:
            raise PeerProtocolError("a control frame ends inside an object")
        if children >= 0:
            pending.append(children)
            if len(pending) - 1 > DEPTH_MAX:
                raise PeerProtocolError(f"a control frame nested more than {DEPTH_MAX} deep")
    if position != end:
        raise PeerProtocolError(f"{end - position} bytes after the end of a control frame's map")
