// Loops over ring words: encode, decode, add, pack. Plain C that the compiler turns into vector instructions, twice on x86-64
// (for every machine and for AVX2, chosen at load time). What the arguments mean stands in fedpool/secagg/masks.py.
#ifndef FEDPOOL_SECAGG_RING_H
#define FEDPOOL_SECAGG_RING_H
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define RING_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define RING_CLONES
#endif

// Values are shifted up by 2^30 before truncation, so that truncation is floor; encoding.py proves |value| < 2^30.
#define RING_SHIFT 1073741824

// The first value that is NaN or infinite, or -1.
RING_CLONES static int64_t ring_bad(const float *values, int64_t n) {
    int32_t found = 0;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        memcpy(&bits, values + i, 4);
        found |= (bits & 0x7F800000u) == 0x7F800000u;
    }
    if (!found) return -1;
    for (int64_t i = 0; i < n; i++)
        if (!isfinite(values[i])) return i;
    return -1;
}

#define RING_ENCODE(NAME, WORD, FLOOR)                                                                             \
    RING_CLONES static int64_t NAME(const float *values, const float *base, const uint16_t *rounding, int64_t n,   \
                                    double clip, double factor, WORD *out) {                                       \
        int32_t saturated = 0;                                                                                     \
        if (base) {                                                                                                \
            for (int64_t i = 0; i < n; i++) {                                                                      \
                double x = (double)values[i] - (double)base[i];                                                    \
                saturated += (x > clip) | (x < -clip);                                                             \
                x = x > clip ? clip : x;                                                                           \
                x = x < -clip ? -clip : x;                                                                         \
                x = x * factor + (double)(int32_t)rounding[i] * (1.0 / 65536.0);                                   \
                out[i] += (WORD)FLOOR(x);                                                                          \
            }                                                                                                      \
        } else {                                                                                                   \
            for (int64_t i = 0; i < n; i++) {                                                                      \
                double x = (double)values[i];                                                                      \
                saturated += (x > clip) | (x < -clip);                                                             \
                x = x > clip ? clip : x;                                                                           \
                x = x < -clip ? -clip : x;                                                                         \
                x = x * factor + (double)(int32_t)rounding[i] * (1.0 / 65536.0);                                   \
                out[i] += (WORD)FLOOR(x);                                                                          \
            }                                                                                                      \
        }                                                                                                          \
        return saturated;                                                                                          \
    }

#define RING_FLOOR_SMALL(x) ((int32_t)((x) + (double)RING_SHIFT) - RING_SHIFT)
#define RING_FLOOR_LARGE(x) ((int64_t)floor(x))

RING_ENCODE(ring_encode2, uint16_t, RING_FLOOR_SMALL)
RING_ENCODE(ring_encode4, uint32_t, RING_FLOOR_SMALL)
RING_ENCODE(ring_encode8, uint64_t, RING_FLOOR_LARGE)

#define RING_DECODE(NAME, WORD, SIGNED, LIFT)                                                                      \
    RING_CLONES static void NAME(const WORD *words, const float *base, int64_t n, int lift, double factor, float *out) { \
        (void)lift;                                                                                                \
        if (base)                                                                                                  \
            for (int64_t i = 0; i < n; i++) out[i] = (float)((double)base[i] + (double)LIFT(words[i], SIGNED) * factor); \
        else                                                                                                       \
            for (int64_t i = 0; i < n; i++) out[i] = (float)((double)LIFT(words[i], SIGNED) * factor);             \
    }

#define RING_LIFT(word, SIGNED) ((SIGNED)(word))
// A ring of 24 bits is kept in words of 32 whose upper bits mean nothing.
#define RING_LIFT_SHORT(word, SIGNED) ((SIGNED)((word) << lift) >> lift)

RING_DECODE(ring_decode2, uint16_t, int16_t, RING_LIFT)
RING_DECODE(ring_decode4, uint32_t, int32_t, RING_LIFT_SHORT)
RING_DECODE(ring_decode8, uint64_t, int64_t, RING_LIFT)

#define RING_SUM(NAME, WORD)                                                                                       \
    RING_CLONES static void NAME(WORD *words, const WORD *other, int64_t n, int negative) {                        \
        if (negative)                                                                                              \
            for (int64_t i = 0; i < n; i++) words[i] -= other[i];                                                  \
        else                                                                                                       \
            for (int64_t i = 0; i < n; i++) words[i] += other[i];                                                  \
    }

RING_SUM(ring_sum2, uint16_t)
RING_SUM(ring_sum4, uint32_t)
RING_SUM(ring_sum8, uint64_t)

#endif
