# Loops over ring words: encode, add or subtract a keystream, decode.
# Validation, chunking and documentation stand in fedpool/secagg/masks.py; _masks_reference.py is the plain twin.
from libc.math cimport isfinite
from libc.stdint cimport int32_t, int64_t, uint16_t, uint32_t

# Values are shifted up by 2^30 before truncation, so that truncation is floor; encoding.py proves |value| <= 2^30.
cdef double SHIFT = 1073741824.0
cdef int32_t SHIFT_WORD = 1073741824


def encode(const float[::1] values, const float[::1] base, const uint16_t[::1] rounding,
           double clip, double factor, uint32_t[::1] out):
    """Write floor((clip(values - base)) * factor + rounding / 2^16) as ring words; return (saturated, first_bad)."""
    cdef Py_ssize_t i, n = values.shape[0]
    cdef int64_t saturated = 0
    cdef int64_t bad = -1
    cdef bint based = base is not None
    cdef double x
    cdef double unit = 1.0 / 65536.0
    cdef int finite = 1
    with nogil:
        for i in range(n):
            finite &= isfinite(values[i]) != 0
        if finite:
            if based:
                for i in range(n):
                    x = <double>values[i] - <double>base[i]
                    saturated += (x > clip) | (x < -clip)
                    x = clip if x > clip else x
                    x = -clip if x < -clip else x
                    out[i] = <uint32_t>(<int32_t>(x * factor + rounding[i] * unit + SHIFT) - SHIFT_WORD)
            else:
                for i in range(n):
                    x = <double>values[i]
                    saturated += (x > clip) | (x < -clip)
                    x = clip if x > clip else x
                    x = -clip if x < -clip else x
                    out[i] = <uint32_t>(<int32_t>(x * factor + rounding[i] * unit + SHIFT) - SHIFT_WORD)
        else:
            for i in range(n):
                if not isfinite(values[i]):
                    bad = i
                    break
    return saturated, bad


def add(uint32_t[::1] words, const uint32_t[::1] stream):
    """words += stream, modulo 2^32."""
    cdef Py_ssize_t i, n = words.shape[0]
    with nogil:
        for i in range(n):
            words[i] += stream[i]


def subtract(uint32_t[::1] words, const uint32_t[::1] stream):
    """words -= stream, modulo 2^32."""
    cdef Py_ssize_t i, n = words.shape[0]
    with nogil:
        for i in range(n):
            words[i] -= stream[i]


def decode(const uint32_t[::1] words, const float[::1] base, double factor, float[::1] out):
    """out = base + centred(words) * factor, in double, rounded once to float32."""
    cdef Py_ssize_t i, n = words.shape[0]
    cdef bint based = base is not None
    with nogil:
        if based:
            for i in range(n):
                out[i] = <float>(<double>base[i] + <double><int32_t>words[i] * factor)
        else:
            for i in range(n):
                out[i] = <float>(<double><int32_t>words[i] * factor)
