# Looks at a msgpack object without building it. What is refused and why stands in fedpool/wire/frames.py;
# _walk_reference.py is the plain twin.
from libc.stdint cimport int64_t, uint8_t

cdef enum:
    DEPTH = 256


cdef int64_t big(const uint8_t[::1] data, Py_ssize_t position, int width, Py_ssize_t end) noexcept nogil:
    # What there is of a length that the payload cuts off, as the twin reads it.
    cdef int64_t value = 0
    cdef Py_ssize_t i
    for i in range(position, min(position + width, end)):
        value = (value << 8) | data[i]
    return value


def walk(const uint8_t[::1] payload, int depth_max, int64_t map_max, int64_t array_max, int64_t objects_max):
    """What is wrong with one object that is to fill the payload, in a word, and the value to tell; ("", 0) where nothing is."""
    cdef Py_ssize_t position = 0, end = payload.shape[0]
    cdef int64_t objects = 0, children, count
    cdef int64_t[DEPTH] pending
    cdef int top = 0, width
    cdef uint8_t first
    cdef bint is_map
    if depth_max > DEPTH - 2:
        raise ValueError(depth_max)
    pending[0] = 1
    while top >= 0:
        if pending[top] == 0:
            top -= 1
            continue
        pending[top] -= 1
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
        elif 0x90 <= first <= 0x9F:
            children = first & 0x0F
        elif 0x80 <= first <= 0x8F:
            children = 2 * (first & 0x0F)
        elif first == 0xC4 or first == 0xD9:
            position += 1 + big(payload, position, 1, end)
        elif first == 0xC5 or first == 0xDA:
            position += 2 + big(payload, position, 2, end)
        elif first == 0xC6 or first == 0xDB:
            position += 4 + big(payload, position, 4, end)
        elif first == 0xC0 or first == 0xC2 or first == 0xC3:
            pass
        elif first == 0xCC or first == 0xD0:
            position += 1
        elif first == 0xCD or first == 0xD1:
            position += 2
        elif first == 0xCA or first == 0xCE or first == 0xD2:
            position += 4
        elif first == 0xCB or first == 0xCF or first == 0xD3:
            position += 8
        elif 0xDC <= first <= 0xDF:
            is_map = first >= 0xDE
            width = 2 if first == 0xDC or first == 0xDE else 4
            count = big(payload, position, width, end)
            if count > (map_max if is_map else array_max):
                return ("map" if is_map else "array"), count
            children = 2 * count if is_map else count
            position += width
        else:
            return "code", first
        if position > end:
            return "short", 0
        if children >= 0:
            top += 1
            pending[top] = children
            if top > depth_max:
                return "deep", depth_max
    if position != end:
        return "rest", end - position
    return "", 0
