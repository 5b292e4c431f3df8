/* HighwayHash with 64 bits (J. Alakuijala, B. Cox, J. Wassenberg: Fast keyed hash/pseudo-random function using SIMD
 * multiply and permute, arXiv:1612.06257). Knows nothing about Python; _core.c includes it. The key is 32 bytes.
 */
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define HAS_AVX2 1
#include <immintrin.h>
#endif

typedef struct {
    uint64_t v0[4], v1[4], m0[4], m1[4];
} Highway;

static uint64_t load_word(const char *bytes) {
    uint64_t word;
    memcpy(&word, bytes, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

static uint64_t swap_halves(uint64_t word) { return word << 32 | word >> 32; }

static void highway_start(Highway *h, const char *key) {
    static const uint64_t m0[4] = {0xdbe6d5d5fe4cce2f, 0xa4093822299f31d0, 0x13198a2e03707344, 0x243f6a8885a308d3};
    static const uint64_t m1[4] = {0x3bd39e10cb0ef593, 0xc0acf169b5f18a8c, 0xbe5466cf34e90c6c, 0x452821e638d01377};
    for (int i = 0; i < 4; i++) {
        uint64_t word = load_word(key + 8 * i);
        h->m0[i] = m0[i];
        h->m1[i] = m1[i];
        h->v0[i] = m0[i] ^ word;
        h->v1[i] = m1[i] ^ swap_halves(word);
    }
}

/* Byte `from` of a word, moved to byte `to`. */
#define BYTE(word, from, to) ((word) >> 8 * (from) & 0xff) << 8 * (to)

/* Add to each pair of words a permutation of the bytes of another pair. */
static void zip_bytes(uint64_t *to, const uint64_t *from) {
    for (int i = 0; i < 4; i += 2) {
        uint64_t a = from[i], b = from[i + 1];
        to[i] += BYTE(a, 3, 0) | BYTE(b, 4, 1) | BYTE(a, 2, 2) | BYTE(a, 5, 3) | BYTE(b, 6, 4) | BYTE(a, 1, 5) |
                 BYTE(b, 7, 6) | BYTE(a, 0, 7);
        to[i + 1] += BYTE(b, 3, 0) | BYTE(a, 4, 1) | BYTE(b, 2, 2) | BYTE(b, 5, 3) | BYTE(b, 1, 4) | BYTE(a, 6, 5) |
                     BYTE(b, 0, 6) | BYTE(a, 7, 7);
    }
}

static void highway_mix(Highway *h, const uint64_t *words) {
    for (int i = 0; i < 4; i++) {
        h->v1[i] += words[i] + h->m0[i];
        h->m0[i] ^= (h->v1[i] & 0xffffffff) * (h->v0[i] >> 32);
        h->v0[i] += h->m1[i];
        h->m1[i] ^= (h->v0[i] & 0xffffffff) * (h->v1[i] >> 32);
    }
    zip_bytes(h->v0, h->v1);
    zip_bytes(h->v1, h->v0);
}

/* Mix whole packets of 32 bytes. */
static void highway_packets(Highway *h, const char *data, int64_t packets) {
    Highway local = *h; /* which the data cannot alias */
    for (; packets > 0; packets--, data += 32) {
        uint64_t words[4];
        for (int i = 0; i < 4; i++) words[i] = load_word(data + 8 * i);
        highway_mix(&local, words);
    }
    *h = local;
}

#ifdef HAS_AVX2
__attribute__((target("avx2"))) static void highway_packets_avx2(Highway *h, const char *data, int64_t packets) {
    const __m256i bytes = _mm256_broadcastsi128_si256(_mm_setr_epi8(3, 12, 2, 5, 14, 1, 15, 0, 11, 4, 10, 13, 9, 6, 8, 7));
    __m256i v0 = _mm256_loadu_si256((const void *)h->v0), v1 = _mm256_loadu_si256((const void *)h->v1);
    __m256i m0 = _mm256_loadu_si256((const void *)h->m0), m1 = _mm256_loadu_si256((const void *)h->m1);
    for (; packets > 0; packets--, data += 32) {
        __m256i words = _mm256_loadu_si256((const void *)data);
        v1 = _mm256_add_epi64(v1, _mm256_add_epi64(words, m0));
        m0 = _mm256_xor_si256(m0, _mm256_mul_epu32(v1, _mm256_srli_epi64(v0, 32)));
        v0 = _mm256_add_epi64(v0, m1);
        m1 = _mm256_xor_si256(m1, _mm256_mul_epu32(v0, _mm256_srli_epi64(v1, 32)));
        v0 = _mm256_add_epi64(v0, _mm256_shuffle_epi8(v1, bytes));
        v1 = _mm256_add_epi64(v1, _mm256_shuffle_epi8(v0, bytes));
    }
    _mm256_storeu_si256((void *)h->v0, v0);
    _mm256_storeu_si256((void *)h->v1, v1);
    _mm256_storeu_si256((void *)h->m0, m0);
    _mm256_storeu_si256((void *)h->m1, m1);
}
#endif

/* Mix the last `size` bytes, 1 to 31. */
static void highway_rest(Highway *h, const char *data, int size) {
    char packet[32] = {0};
    uint64_t words[4];
    int whole = size & ~3, odd = size & 3;
    memcpy(packet, data, whole);
    if (size & 16) {
        memcpy(packet + 28, data + size - 4, 4);
    } else if (odd) {
        packet[16] = data[whole];
        packet[17] = data[whole + odd / 2];
        packet[18] = data[size - 1];
    }
    for (int i = 0; i < 4; i++) {
        uint32_t low = h->v1[i], high = h->v1[i] >> 32;
        h->v0[i] += (uint64_t)size << 32 | size;
        low = low << size | low >> (32 - size);
        high = high << size | high >> (32 - size);
        h->v1[i] = (uint64_t)high << 32 | low;
        words[i] = load_word(packet + 8 * i);
    }
    highway_mix(h, words);
}

static uint64_t highway_end(Highway *h) {
    for (int round = 0; round < 4; round++) {
        uint64_t words[4];
        for (int i = 0; i < 4; i++) words[i] = swap_halves(h->v0[i ^ 2]);
        highway_mix(h, words);
    }
    return h->v0[0] + h->v1[0] + h->m0[0] + h->m1[0];
}

/* Return the hash of `size` bytes, with AVX2 only if `avx2`, which the CPU must then have. */
static uint64_t highway_hash(const char *key, const char *data, int64_t size, int avx2) {
    Highway h;
    highway_start(&h, key);
#ifdef HAS_AVX2
    if (avx2)
        highway_packets_avx2(&h, data, size / 32);
    else
#endif
        highway_packets(&h, data, size / 32);
    (void)avx2;
    if (size % 32) highway_rest(&h, data + size / 32 * 32, size % 32);
    return highway_end(&h);
}

static int has_avx2(void) {
#ifdef HAS_AVX2
    return __builtin_cpu_supports("avx2") != 0;
#else
    return 0;
#endif
}
