// AES-256-CTR keystream, added to ring words in registers: no keystream is ever written to memory.
//
// Needs VAES and AVX2 (found at run time, see ctr_is_here); elsewhere the keystream comes from the `cryptography` package and
// is added by ring.h. FIPS 197 section 5.2 for the key expansion, SP 800-38A section 6.5 for the counter mode; the counter is
// the absolute byte offset divided by 16, big-endian. AES instructions take the same time whatever key and data are.
#ifndef FEDPOOL_SECAGG_CTR_H
#define FEDPOOL_SECAGG_CTR_H
#include <stdint.h>
#include <string.h>

#define CTR_BLOCK 16
#define CTR_ROUNDS 15

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

typedef struct {
    __m128i key[CTR_ROUNDS];
} ctr_schedule;

static int ctr_is_here(void) {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("aes") && __builtin_cpu_supports("vaes");
}

#define CTR_TARGET __attribute__((target("avx2,aes,vaes")))

CTR_TARGET static __m128i ctr_mix(__m128i key, __m128i assist) {
    key = _mm_xor_si128(key, _mm_slli_si128(key, 4));
    key = _mm_xor_si128(key, _mm_slli_si128(key, 8));
    return _mm_xor_si128(key, assist);
}

// RCON must be a constant of the instruction, hence a macro.
#define CTR_EXPAND(i, rcon)                                                                                     \
    s->key[i] = ctr_mix(s->key[(i) - 2], _mm_shuffle_epi32(_mm_aeskeygenassist_si128(s->key[(i) - 1], rcon), 0xFF)); \
    if ((i) + 1 < CTR_ROUNDS)                                                                                   \
    s->key[((i) + 1) % CTR_ROUNDS] =                                                                            \
        ctr_mix(s->key[(i) - 1], _mm_shuffle_epi32(_mm_aeskeygenassist_si128(s->key[i], 0), 0xAA))

CTR_TARGET static void ctr_expand(ctr_schedule *s, const uint8_t *key) {
    s->key[0] = _mm_loadu_si128((const __m128i *)key);
    s->key[1] = _mm_loadu_si128((const __m128i *)(key + 16));
    CTR_EXPAND(2, 0x01);
    CTR_EXPAND(4, 0x02);
    CTR_EXPAND(6, 0x04);
    CTR_EXPAND(8, 0x08);
    CTR_EXPAND(10, 0x10);
    CTR_EXPAND(12, 0x20);
    CTR_EXPAND(14, 0x40);
}

CTR_TARGET static void ctr_one(const ctr_schedule *s, uint64_t counter, uint8_t *out) {
    __m128i x = _mm_xor_si128(_mm_set_epi64x((int64_t)__builtin_bswap64(counter), 0), s->key[0]);
    for (int r = 1; r < CTR_ROUNDS - 1; r++) x = _mm_aesenc_si128(x, s->key[r]);
    _mm_storeu_si128((__m128i *)out, _mm_aesenclast_si128(x, s->key[CTR_ROUNDS - 1]));
}

// What is left at either end of a vector, less than a block at a time: words never straddle blocks.
#define CTR_SOME(TYPE)                                                                                    \
    for (int64_t i = 0; i < count; i += (int64_t)sizeof(TYPE)) {                                          \
        TYPE word, mask;                                                                                  \
        memcpy(&word, out + i, sizeof(TYPE));                                                             \
        memcpy(&mask, from + i, sizeof(TYPE));                                                            \
        word = (TYPE)(negative ? word - mask : word + mask);                                              \
        memcpy(out + i, &word, sizeof(TYPE));                                                             \
    }

static void ctr_some(uint8_t *out, const uint8_t *from, int64_t count, int width, int negative) {
    switch (width) {
    case 1: CTR_SOME(uint8_t) break;
    case 2: CTR_SOME(uint16_t) break;
    case 4: CTR_SOME(uint32_t) break;
    default: CTR_SOME(uint64_t) break;
    }
}

// Sixteen blocks at a time in eight registers of two: enough to hide the latency of the instruction.
#define CTR_LANES 8
#define CTR_STEP (CTR_LANES * 32)

#define CTR_MANY(ADD)                                                                                     \
    for (; size >= CTR_STEP; size -= CTR_STEP, out += CTR_STEP) {                                         \
        __m256i x[CTR_LANES];                                                                             \
        for (int l = 0; l < CTR_LANES; l++) {                                                             \
            x[l] = _mm256_xor_si256(_mm256_shuffle_epi8(counters, swap), first);                          \
            counters = _mm256_add_epi64(counters, two);                                                   \
        }                                                                                                 \
        for (int r = 1; r < CTR_ROUNDS - 1; r++) {                                                        \
            const __m256i key = _mm256_broadcastsi128_si256(s->key[r]);                                   \
            for (int l = 0; l < CTR_LANES; l++) x[l] = _mm256_aesenc_epi128(x[l], key);                   \
        }                                                                                                 \
        for (int l = 0; l < CTR_LANES; l++) {                                                             \
            __m256i *place = (__m256i *)(out + 32 * l);                                                   \
            const __m256i word = _mm256_loadu_si256(place);                                               \
            const __m256i mask = _mm256_aesenclast_epi128(x[l], last);                                    \
            _mm256_storeu_si256(place, ADD(word, mask));                                                  \
        }                                                                                                 \
    }

CTR_TARGET static void ctr_add(const ctr_schedule *s, int negative, int width, uint64_t offset, uint8_t *out,
                               int64_t size) {
    uint8_t block[CTR_BLOCK];
    const int64_t skip = (int64_t)(offset % CTR_BLOCK);
    uint64_t counter = offset / CTR_BLOCK;
    if (skip && size) {
        const int64_t head = size < CTR_BLOCK - skip ? size : CTR_BLOCK - skip;
        ctr_one(s, counter++, block);
        ctr_some(out, block + skip, head, width, negative);
        out += head;
        size -= head;
    }
    const __m256i swap = _mm256_broadcastsi128_si256(_mm_set_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    const __m256i first = _mm256_broadcastsi128_si256(s->key[0]);
    const __m256i last = _mm256_broadcastsi128_si256(s->key[CTR_ROUNDS - 1]);
    const __m256i two = _mm256_set_epi64x(0, 2, 0, 2);
    __m256i counters = _mm256_set_epi64x(0, (int64_t)counter + 1, 0, (int64_t)counter);
    counter += (uint64_t)(size / CTR_STEP) * (CTR_STEP / CTR_BLOCK);
    if (negative) {
        switch (width) {
        case 1: CTR_MANY(_mm256_sub_epi8) break;
        case 2: CTR_MANY(_mm256_sub_epi16) break;
        case 4: CTR_MANY(_mm256_sub_epi32) break;
        default: CTR_MANY(_mm256_sub_epi64) break;
        }
    } else {
        switch (width) {
        case 1: CTR_MANY(_mm256_add_epi8) break;
        case 2: CTR_MANY(_mm256_add_epi16) break;
        case 4: CTR_MANY(_mm256_add_epi32) break;
        default: CTR_MANY(_mm256_add_epi64) break;
        }
    }
    while (size > 0) {
        const int64_t count = size < CTR_BLOCK ? size : CTR_BLOCK;
        ctr_one(s, counter++, block);
        ctr_some(out, block, count, width, negative);
        out += count;
        size -= count;
    }
}

#else

typedef struct {
    uint8_t nothing;
} ctr_schedule;

static int ctr_is_here(void) { return 0; }
static void ctr_expand(ctr_schedule *s, const uint8_t *key) { (void)s, (void)key; }
static void ctr_add(const ctr_schedule *s, int negative, int width, uint64_t offset, uint8_t *out, int64_t size) {
    (void)s, (void)negative, (void)width, (void)offset, (void)out, (void)size;
}

#endif
#endif
