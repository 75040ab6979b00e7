"""Control frames: a u32 length, then one msgpack map. Everything a peer could use to exhaust memory is bounded here.

The structure is walked before anything is built: a mebibyte of nested empty arrays would otherwise become tens of
megabytes of objects.
"""

import struct
from typing import Any

import msgpack

from fedpool import kernels
from fedpool.errors import LocalProtocolError, PeerProtocolError
from fedpool.wire import _walk_reference

_kernel = kernels.chosen(_walk_reference)

# Specification constants.
FRAME_BYTES_MAX = 1 << 20
DEPTH_MAX = 32
ARRAY_ITEMS_MAX = 65_536
OBJECTS_MAX = 200_000
# An answer that is too large for a frame travels in pieces; this bounds the whole.
PIECE_BYTES = 512 * 1024
WHOLE_BYTES_MAX = 32 << 20
WHOLE_OBJECTS_MAX = 4_000_000
WHOLE_ITEMS_MAX = 1_000_000

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


def cut(body: Any) -> list[bytes]:
    """An answer's body in pieces, for one that no frame holds.

    Raises:
        LocalProtocolError: it would be over the limit the peer enforces.
    """
    whole: bytes = msgpack.packb(body)
    if len(whole) > WHOLE_BYTES_MAX:
        raise LocalProtocolError(f"an answer of {len(whole)} bytes; the limit is {WHOLE_BYTES_MAX}")
    return [whole[at : at + PIECE_BYTES] for at in range(0, len(whole), PIECE_BYTES)]


def join(pieces: list[bytes]) -> Any:
    """The body that was cut into these pieces.

    Raises:
        PeerProtocolError: it is none.
    """
    whole = b"".join(pieces)
    _walk(whole, WHOLE_ITEMS_MAX, WHOLE_OBJECTS_MAX)
    return _unpack(whole, WHOLE_ITEMS_MAX)


def _parse(payload: bytes) -> dict[str, Any]:
    _walk(payload, ARRAY_ITEMS_MAX, OBJECTS_MAX)
    frame = _unpack(payload, ARRAY_ITEMS_MAX)
    if not isinstance(frame, dict):
        raise PeerProtocolError("a control frame is not a map")
    return frame


def _unpack(payload: bytes, items_max: int) -> Any:
    try:
        return msgpack.unpackb(payload, strict_map_key=True, max_map_len=items_max, max_array_len=items_max)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise PeerProtocolError(f"a control frame is not valid msgpack: {error}") from None


def _walk(payload: bytes, items_max: int, objects_max: int) -> None:
    """Check depth, counts and completeness without building anything (msgpack specification, formats)."""
    found, value = _kernel.walk(payload, DEPTH_MAX, items_max, items_max, objects_max)
    match found:
        case "":
            return
        case "many":
            raise PeerProtocolError(f"a control frame of more than {objects_max} objects")
        case "short":
            raise PeerProtocolError("a control frame ends inside an object")
        case "array":
            raise PeerProtocolError(f"an array of {value} items; the limit is {items_max}")
        case "map":
            raise PeerProtocolError(f"a map of {value} entries; the limit is {items_max}")
        case "code":
            raise PeerProtocolError(f"a control frame holds an extension type or an unused code (0x{value:02x})")
        case "deep":
            raise PeerProtocolError(f"a control frame nested more than {DEPTH_MAX} deep")
        case _:
            raise PeerProtocolError(f"{value} bytes after the end of a control frame's map")
