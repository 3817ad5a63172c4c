/* HMAC-SHA256 of whole batches of packets: the trailers of `wire/auth.py`, which says what they are made of. The Python
 * code in `wire/pure.py` does the same with `hmac`, one packet at a time.
 *
 * SHA-256 is FIPS 180-4, with the processor's own instructions where it has them. A key is used as the two states of
 * RFC 2104 that remain when its padded blocks have been hashed, so each packet costs its own blocks and two more. */

#include "_hmac.h"

#include <string.h>

#define BLOCK_BYTES 64
#define DIGEST_BYTES 32

typedef void (*Compress)(uint32_t state[8], const unsigned char *data, size_t blocks);

static const uint32_t K[64] __attribute__((aligned(16))) = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static inline uint32_t get32(const unsigned char *p)
{
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static inline void put32(unsigned char *p, uint32_t v)
{
    p[0] = (unsigned char)(v >> 24);
    p[1] = (unsigned char)(v >> 16);
    p[2] = (unsigned char)(v >> 8);
    p[3] = (unsigned char)v;
}

static inline uint32_t rotate(uint32_t v, int n) { return v >> n | v << (32 - n); }

static void compress_portable(uint32_t state[8], const unsigned char *data, size_t blocks)
{
    for (; blocks--; data += BLOCK_BYTES) {
        uint32_t w[64], s[8];
        for (int i = 0; i < 16; i++)
            w[i] = get32(data + 4 * i);
        for (int i = 16; i < 64; i++) {
            uint32_t a = w[i - 15], b = w[i - 2];
            w[i] = w[i - 16] + (rotate(a, 7) ^ rotate(a, 18) ^ a >> 3) + w[i - 7] +
                   (rotate(b, 17) ^ rotate(b, 19) ^ b >> 10);
        }
        memcpy(s, state, sizeof s);
        for (int i = 0; i < 64; i++) {
            uint32_t e = s[4], a = s[0];
            uint32_t t1 = s[7] + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25)) + ((e & s[5]) ^ (~e & s[6])) + K[i] +
                          w[i];
            uint32_t t2 = (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
            memmove(s + 1, s, 7 * sizeof s[0]);
            s[4] += t1;
            s[0] = t1 + t2;
        }
        for (int i = 0; i < 8; i++)
            state[i] += s[i];
    }
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>

__attribute__((target("sha,sse4.1"))) static void compress_sha_ni(uint32_t state[8], const unsigned char *data,
                                                                  size_t blocks)
{
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
    __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)state), 0xB1);
    __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(state + 4)), 0x1B);
    __m128i abef = _mm_alignr_epi8(cdab, efgh, 8), cdgh = _mm_blend_epi16(efgh, cdab, 0xF0);
    for (; blocks--; data += BLOCK_BYTES) {
        __m128i w[4], abef_before = abef, cdgh_before = cdgh;
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            if (i < 4)
                w[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(data + 16 * i)), swap);
            else
                w[i & 3] = _mm_sha256msg2_epu32(
                    _mm_add_epi32(_mm_sha256msg1_epu32(w[i & 3], w[(i + 1) & 3]),
                                  _mm_alignr_epi8(w[(i + 3) & 3], w[(i + 2) & 3], 4)),
                    w[(i + 3) & 3]);
            __m128i round = _mm_add_epi32(w[i & 3], _mm_load_si128((const __m128i *)(K + 4 * i)));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, round);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(round, 0x0E));
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    __m128i feba = _mm_shuffle_epi32(abef, 0x1B), dchg = _mm_shuffle_epi32(cdgh, 0xB1);
    _mm_storeu_si128((__m128i *)state, _mm_blend_epi16(feba, dchg, 0xF0));
    _mm_storeu_si128((__m128i *)(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

/* The same for two messages of one length at once: each has to wait for itself, so two take hardly longer than one. */
__attribute__((target("sha,sse4.1"))) static void compress_two(uint32_t one[8], uint32_t two[8],
                                                               const unsigned char *data, ptrdiff_t apart,
                                                               size_t blocks)
{
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
    uint32_t *states[2] = {one, two};
    __m128i abef[2], cdgh[2];
    for (int k = 0; k < 2; k++) {
        __m128i cdab = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)states[k]), 0xB1);
        __m128i efgh = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(states[k] + 4)), 0x1B);
        abef[k] = _mm_alignr_epi8(cdab, efgh, 8);
        cdgh[k] = _mm_blend_epi16(efgh, cdab, 0xF0);
    }
    for (; blocks--; data += BLOCK_BYTES) {
        __m128i w[2][4], abef_before[2] = {abef[0], abef[1]}, cdgh_before[2] = {cdgh[0], cdgh[1]};
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
#pragma GCC unroll 2
            for (int k = 0; k < 2; k++) {
                if (i < 4)
                    w[k][i] =
                        _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(data + k * apart + 16 * i)), swap);
                else
                    w[k][i & 3] = _mm_sha256msg2_epu32(
                        _mm_add_epi32(_mm_sha256msg1_epu32(w[k][i & 3], w[k][(i + 1) & 3]),
                                      _mm_alignr_epi8(w[k][(i + 3) & 3], w[k][(i + 2) & 3], 4)),
                        w[k][(i + 3) & 3]);
                __m128i round = _mm_add_epi32(w[k][i & 3], _mm_load_si128((const __m128i *)(K + 4 * i)));
                cdgh[k] = _mm_sha256rnds2_epu32(cdgh[k], abef[k], round);
                abef[k] = _mm_sha256rnds2_epu32(abef[k], cdgh[k], _mm_shuffle_epi32(round, 0x0E));
            }
        for (int k = 0; k < 2; k++) {
            abef[k] = _mm_add_epi32(abef[k], abef_before[k]);
            cdgh[k] = _mm_add_epi32(cdgh[k], cdgh_before[k]);
        }
    }
    for (int k = 0; k < 2; k++) {
        __m128i feba = _mm_shuffle_epi32(abef[k], 0x1B), dchg = _mm_shuffle_epi32(cdgh[k], 0xB1);
        _mm_storeu_si128((__m128i *)states[k], _mm_blend_epi16(feba, dchg, 0xF0));
        _mm_storeu_si128((__m128i *)(states[k] + 4), _mm_alignr_epi8(dchg, feba, 8));
    }
}

static Compress choose_compress(void)
{
    unsigned a, b, c, d;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) && b >> 29 & 1 && __get_cpuid(1, &a, &b, &c, &d) && c >> 19 & 1)
        return compress_sha_ni;
    return compress_portable;
}
#define TWO_AT_ONCE 1
#else
static Compress choose_compress(void) { return compress_portable; }
#endif

static Compress compress;

/* What a call with `portable` true used: so that tests compare both. */
static Compress compress_for(int portable)
{
    if (compress == NULL)
        compress = choose_compress();
    return portable ? compress_portable : compress;
}

static const uint32_t INITIAL[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};

/* The last blocks of a message: its last bytes, fewer than a block, and the padding of so many bytes in all. Returns how
 * many blocks: 1 or 2. */
static size_t pad(unsigned char tail[2 * BLOCK_BYTES], const unsigned char *rest, size_t size, size_t total)
{
    size_t blocks = size + 9 > BLOCK_BYTES ? 2 : 1;
    uint64_t bits = (uint64_t)total * 8;
    memset(tail, 0, 2 * BLOCK_BYTES);
    memcpy(tail, rest, size);
    tail[size] = 0x80;
    put32(tail + blocks * BLOCK_BYTES - 8, (uint32_t)(bits >> 32));
    put32(tail + blocks * BLOCK_BYTES - 4, (uint32_t)bits);
    return blocks;
}

static void put_digest(unsigned char digest[DIGEST_BYTES], const uint32_t state[8])
{
    for (int i = 0; i < 8; i++)
        put32(digest + 4 * i, state[i]);
}

/* Go on from `state`, which has hashed `before` bytes (whole blocks), to the end. */
static void finish(Compress run, uint32_t state[8], const unsigned char *data, size_t size, size_t before,
                   unsigned char digest[DIGEST_BYTES])
{
    unsigned char tail[2 * BLOCK_BYTES];
    size_t rest = size % BLOCK_BYTES;
    run(state, data, size / BLOCK_BYTES);
    run(state, tail, pad(tail, data + size - rest, rest, before + size));
    put_digest(digest, state);
}

void hmac_prepare(HmacKey *out, const unsigned char *key, size_t size, int portable)
{
    Compress run = compress_for(portable);
    unsigned char block[BLOCK_BYTES] = {0};
    if (size > BLOCK_BYTES) {
        uint32_t state[8];
        memcpy(state, INITIAL, sizeof state);
        finish(run, state, key, size, 0, block);
    } else {
        memcpy(block, key, size);
    }
    for (int i = 0; i < BLOCK_BYTES; i++)
        block[i] ^= 0x36;
    memcpy(out->inner, INITIAL, sizeof out->inner);
    run(out->inner, block, 1);
    for (int i = 0; i < BLOCK_BYTES; i++)
        block[i] ^= 0x36 ^ 0x5c;
    memcpy(out->outer, INITIAL, sizeof out->outer);
    run(out->outer, block, 1);
    out->portable = portable;
}

void hmac_tag(const HmacKey *key, const unsigned char *data, size_t size, unsigned char tag[HMAC_TAG_BYTES])
{
    Compress run = compress_for(key->portable);
    uint32_t state[8];
    unsigned char digest[DIGEST_BYTES];
    memcpy(state, key->inner, sizeof state);
    finish(run, state, data, size, BLOCK_BYTES, digest);
    memcpy(state, key->outer, sizeof state);
    finish(run, state, digest, DIGEST_BYTES, BLOCK_BYTES, digest);
    memcpy(tag, digest, HMAC_TAG_BYTES);
}

void hmac_tags(const HmacKey *key, const unsigned char *data, ptrdiff_t apart, size_t size,
               unsigned char tags[2][HMAC_TAG_BYTES])
{
#ifdef TWO_AT_ONCE
    Compress run = compress_for(key->portable);
    if (run == compress_sha_ni) {
        size_t rest = size % BLOCK_BYTES, whole = size - rest, blocks = 0;
        uint32_t states[2][8];
        unsigned char tails[2][2 * BLOCK_BYTES], digest[DIGEST_BYTES];
        memcpy(states[0], key->inner, sizeof states[0]);
        memcpy(states[1], key->inner, sizeof states[1]);
        compress_two(states[0], states[1], data, apart, whole / BLOCK_BYTES);
        for (int k = 0; k < 2; k++)
            blocks = pad(tails[k], data + k * apart + whole, rest, BLOCK_BYTES + size);
        compress_two(states[0], states[1], tails[0], sizeof tails[0], blocks);
        for (int k = 0; k < 2; k++) {
            put_digest(digest, states[k]);
            pad(tails[k], digest, DIGEST_BYTES, BLOCK_BYTES + DIGEST_BYTES);
            memcpy(states[k], key->outer, sizeof states[k]);
        }
        compress_two(states[0], states[1], tails[0], sizeof tails[0], 1);
        for (int k = 0; k < 2; k++) {
            put_digest(digest, states[k]);
            memcpy(tags[k], digest, HMAC_TAG_BYTES);
        }
        return;
    }
#endif
    hmac_tag(key, data, size, tags[0]);
    hmac_tag(key, data + apart, size, tags[1]);
}
