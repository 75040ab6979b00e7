"""Looks at a msgpack object without building it: the plain twin of ext/fedpool/wire/_walk.pyx."""

# First byte -> bytes of fixed content to skip, or width of the length field.
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


def walk(payload: bytes, depth_max: int, map_max: int, array_max: int, objects_max: int) -> tuple[str, int]:
    """What is wrong with one object that is to fill the payload, in a word, and the value to tell; ("", 0) where nothing is."""
    position, objects, end = 0, 0, len(payload)
    pending = [1]  # objects still to come at each depth
    while pending:
        if pending[-1] == 0:
            pending.pop()
            continue
        pending[-1] -= 1
        objects += 1
        if objects > objects_max:
            return "many", objects
        if position >= end:
            return "short", 0
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
        elif first in _ARRAYS or first in _MAPS:
            is_map = first in _MAPS
            width = _MAPS[first] if is_map else _ARRAYS[first]
            count = int.from_bytes(payload[position : position + width], "big")
            if count > (map_max if is_map else array_max):
                return ("map" if is_map else "array"), count
            children = 2 * count if is_map else count
            position += width
        else:
            return "code", first
        if position > end:
            return "short", 0
        if children >= 0:
            pending.append(children)
            if len(pending) - 1 > depth_max:
                return "deep", depth_max
    return ("rest", end - position) if position != end else ("", 0)
