# Loops over ring words without the GIL: encode, add keystreams, sum, decode. The loops themselves are in _ring.h and _ctr.h.
# Validation, chunking and documentation stand in fedpool/secagg/masks.py; _masks_reference.py is the plain twin.
from libc.stdint cimport int8_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

ctypedef fused word:
    uint16_t
    uint32_t
    uint64_t

cdef extern from "_ring.h" nogil:
    int64_t ring_bad(const float *values, int64_t n)
    int64_t ring_encode2(const float *values, const float *base, const uint16_t *rounding, int64_t n,
                         double clip, double factor, uint16_t *out)
    int64_t ring_encode4(const float *values, const float *base, const uint16_t *rounding, int64_t n,
                         double clip, double factor, uint32_t *out)
    int64_t ring_encode8(const float *values, const float *base, const uint16_t *rounding, int64_t n,
                         double clip, double factor, uint64_t *out)
    void ring_decode2(const uint16_t *words, const float *base, int64_t n, int lift, double factor, float *out)
    void ring_decode4(const uint32_t *words, const float *base, int64_t n, int lift, double factor, float *out)
    void ring_decode8(const uint64_t *words, const float *base, int64_t n, int lift, double factor, float *out)
    void ring_sum2(uint16_t *words, const uint16_t *other, int64_t n, int negative)
    void ring_sum4(uint32_t *words, const uint32_t *other, int64_t n, int negative)
    void ring_sum8(uint64_t *words, const uint64_t *other, int64_t n, int negative)

cdef extern from "_ctr.h" nogil:
    ctypedef struct ctr_schedule:
        pass
    int ctr_is_here()
    void ctr_expand(ctr_schedule *schedule, const uint8_t *key)
    void ctr_add(const ctr_schedule *schedule, int negative, int width, uint64_t offset, uint8_t *out, int64_t size)


def has_keystream():
    """Whether this processor has the instructions that `keystream` needs."""
    return bool(ctr_is_here())


def keystream(word[::1] words, const uint8_t[::1] keys, const int8_t[::1] signs, uint64_t offset):
    """Add or subtract the keystreams of the keys (32 bytes each), from that byte offset onwards."""
    cdef Py_ssize_t i
    cdef ctr_schedule schedule
    if words.shape[0] == 0:
        return
    with nogil:
        for i in range(signs.shape[0]):
            ctr_expand(&schedule, &keys[32 * i])
            ctr_add(&schedule, signs[i] < 0, sizeof(word), offset, <uint8_t *>&words[0], words.shape[0] * sizeof(word))


def encode(const float[::1] values, const float[::1] base, const uint16_t[::1] rounding,
           double clip, double factor, word[::1] out):
    """Add floor(clip(values - base) * factor + rounding / 2^16) to the words; return (saturated, first_bad)."""
    cdef int64_t saturated = 0, bad, n = values.shape[0]
    cdef const float *from_base = NULL
    if n == 0:
        return 0, -1
    if base is not None:
        from_base = &base[0]
    with nogil:
        bad = ring_bad(&values[0], n)
        if bad < 0:
            if word is uint16_t:
                saturated = ring_encode2(&values[0], from_base, &rounding[0], n, clip, factor, &out[0])
            elif word is uint32_t:
                saturated = ring_encode4(&values[0], from_base, &rounding[0], n, clip, factor, &out[0])
            else:
                saturated = ring_encode8(&values[0], from_base, &rounding[0], n, clip, factor, &out[0])
    return saturated, bad


cdef void total(word *words, const word *other, int64_t n, int negative) noexcept nogil:
    if word is uint16_t:
        ring_sum2(words, other, n, negative)
    elif word is uint32_t:
        ring_sum4(words, other, n, negative)
    else:
        ring_sum8(words, other, n, negative)


def add(word[::1] words, const word[::1] other):
    """words += other in the ring."""
    if words.shape[0]:
        with nogil:
            total(&words[0], &other[0], words.shape[0], 0)


def subtract(word[::1] words, const word[::1] other):
    """words -= other in the ring."""
    if words.shape[0]:
        with nogil:
            total(&words[0], &other[0], words.shape[0], 1)


def decode(const word[::1] words, const float[::1] base, int lift, double factor, float[::1] out):
    """out = base + centred(words) * factor, in double, rounded once to float32; `lift` upper bits of a word mean nothing."""
    cdef int64_t n = words.shape[0]
    cdef const float *from_base = NULL
    if n == 0:
        return
    if base is not None:
        from_base = &base[0]
    with nogil:
        if word is uint16_t:
            ring_decode2(&words[0], from_base, n, lift, factor, &out[0])
        elif word is uint32_t:
            ring_decode4(&words[0], from_base, n, lift, factor, &out[0])
        else:
            ring_decode8(&words[0], from_base, n, lift, factor, &out[0])
