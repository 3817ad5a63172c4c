/* Keyed BLAKE2s (RFC 7693), of one message or of sixteen of one length at once: each of its words is then a vector of
 * sixteen words, one of each message. */

#include <string.h>

#include "_mac.h"

#define BLOCK_BYTES 64

static const uint32_t IV[8] = {0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A,
                               0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19};

static inline uint32_t little(uint32_t v)
{
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    v = __builtin_bswap32(v);
#endif
    return v;
}

#define ROTATE(v, n) ((v) >> (n) | (v) << (32 - (n)))
#define MIX(a, b, c, d, x, y)    \
    a += b + m[x];               \
    d = ROTATE(d ^ a, 16);       \
    c += d;                      \
    b = ROTATE(b ^ c, 12);       \
    a += b + m[y];               \
    d = ROTATE(d ^ a, 8);        \
    c += d;                      \
    b = ROTATE(b ^ c, 7);
#define ROUND(s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15) \
    MIX(v[0], v[4], v[8], v[12], s0, s1)                                            \
    MIX(v[1], v[5], v[9], v[13], s2, s3)                                            \
    MIX(v[2], v[6], v[10], v[14], s4, s5)                                           \
    MIX(v[3], v[7], v[11], v[15], s6, s7)                                           \
    MIX(v[0], v[5], v[10], v[15], s8, s9)                                           \
    MIX(v[1], v[6], v[11], v[12], s10, s11)                                         \
    MIX(v[2], v[7], v[8], v[13], s12, s13)                                          \
    MIX(v[3], v[4], v[9], v[14], s14, s15)
/* The compression function of the RFC (3.2) for words of that type. `bytes` counts all so far; `last` is all ones in the
 * last block, otherwise 0. */
#define COMPRESS(type)                                                 \
    do {                                                               \
        type v[16];                                                    \
        for (int i = 0; i < 8; i++) {                                  \
            v[i] = h[i];                                               \
            v[i + 8] = (h[i] ^ h[i]) + IV[i];                          \
        }                                                              \
        v[12] ^= (uint32_t)bytes;                                      \
        v[13] ^= (uint32_t)((uint64_t)bytes >> 32);                    \
        v[14] ^= last;                                                 \
        ROUND(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)    \
        ROUND(14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3)    \
        ROUND(11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4)    \
        ROUND(7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8)    \
        ROUND(9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13)    \
        ROUND(2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9)    \
        ROUND(12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11)    \
        ROUND(13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10)    \
        ROUND(6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5)    \
        ROUND(10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0)    \
        for (int i = 0; i < 8; i++)                                    \
            h[i] ^= v[i] ^ v[i + 8];                                   \
    } while (0)

static void compress(uint32_t h[8], const unsigned char *block, size_t bytes, uint32_t last)
{
    uint32_t m[16];
    memcpy(m, block, sizeof m);
    for (int i = 0; i < 16; i++)
        m[i] = little(m[i]);
    COMPRESS(uint32_t);
}

static void put_tag(unsigned char tag[MAC_TAG_BYTES], const uint32_t h[8])
{
    for (int i = 0; i < MAC_TAG_BYTES / 4; i++) {
        uint32_t v = little(h[i]);
        memcpy(tag + 4 * i, &v, sizeof v);
    }
}

void mac_prepare(MacKey *out, const unsigned char *key, size_t size, int least)
{
    unsigned char block[BLOCK_BYTES] = {0};
    memcpy(out->state, IV, sizeof out->state);
    out->state[0] ^= 0x01010000 | (uint32_t)size << 8 | MAC_TAG_BYTES;
    memcpy(block, key, size);
    compress(out->state, block, BLOCK_BYTES, 0);
    out->least = least;
}

static void tag_one(const uint32_t state[8], const unsigned char *data, size_t size, unsigned char tag[MAC_TAG_BYTES])
{
    uint32_t h[8];
    unsigned char tail[BLOCK_BYTES] = {0};
    size_t bytes = BLOCK_BYTES; /* the key */
    memcpy(h, state, sizeof h);
    for (; size > BLOCK_BYTES; data += BLOCK_BYTES, size -= BLOCK_BYTES)
        compress(h, data, bytes += BLOCK_BYTES, 0);
    memcpy(tail, data, size);
    compress(h, tail, bytes + size, UINT32_MAX);
    put_tag(tag, h);
}

#if defined(__x86_64__) && defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define HAS_LANES 1
#endif
#endif

#ifdef HAS_LANES
typedef uint32_t Lanes __attribute__((vector_size(4 * MAC_LANES)));

/* One step of transposing a matrix: squares of `d` words by `d` change places. */
#define ABOVE(i, d) ((i) & (d) ? MAC_LANES + (i) - (d) : (i))
#define BELOW(i, d) ((i) & (d) ? MAC_LANES + (i) : (i) + (d))
#define PICK(of, d)                                                                                               \
    __builtin_shufflevector(a, b, of(0, d), of(1, d), of(2, d), of(3, d), of(4, d), of(5, d), of(6, d), of(7, d), \
                            of(8, d), of(9, d), of(10, d), of(11, d), of(12, d), of(13, d), of(14, d), of(15, d))
#define EXCHANGE(d)                   \
    for (int i = 0; i < 16; i++) {    \
        if (i & (d))                  \
            continue;                 \
        Lanes a = m[i], b = m[i + d]; \
        m[i] = PICK(ABOVE, d);        \
        m[i + d] = PICK(BELOW, d);    \
    }

/* `shuffles`: the processor is quick at exchanging words between whole vectors. */
static inline __attribute__((always_inline)) void compress_lanes(Lanes h[8], const unsigned char *blocks[MAC_LANES],
                                                                 size_t at, size_t bytes, uint32_t last, int shuffles)
{
    Lanes m[16];
    if (shuffles) {
        for (int k = 0; k < MAC_LANES; k++)
            memcpy(&m[k], blocks[k] + at, sizeof m[k]);
        EXCHANGE(1)
        EXCHANGE(2)
        EXCHANGE(4)
        EXCHANGE(8)
    } else {
        uint32_t words[16][MAC_LANES];
        for (int k = 0; k < MAC_LANES; k++) {
            uint32_t of_one[16];
            memcpy(of_one, blocks[k] + at, sizeof of_one);
            for (int i = 0; i < 16; i++)
                words[i][k] = of_one[i];
        }
        memcpy(m, words, sizeof m);
    }
    COMPRESS(Lanes);
}

/* Fewer than MAC_LANES messages: the last one fills the other lanes. */
static inline __attribute__((always_inline)) void tag_lanes(const uint32_t state[8], const unsigned char *data,
                                                            ptrdiff_t apart, size_t size, int messages,
                                                            unsigned char tags[][MAC_TAG_BYTES], int shuffles)
{
    Lanes h[8];
    const unsigned char *from[MAC_LANES];
    unsigned char tails[MAC_LANES][BLOCK_BYTES] = {{0}};
    size_t bytes = BLOCK_BYTES, whole = (size - 1) / BLOCK_BYTES * BLOCK_BYTES;
    for (int i = 0; i < 8; i++)
        h[i] = (Lanes){0} + state[i];
    for (int k = 0; k < MAC_LANES; k++)
        from[k] = data + (k < messages ? k : messages - 1) * apart;
    for (size_t at = 0; at < whole; at += BLOCK_BYTES)
        compress_lanes(h, from, at, bytes += BLOCK_BYTES, 0, shuffles);
    for (int k = 0; k < MAC_LANES; k++) {
        memcpy(tails[k], from[k] + whole, size - whole);
        from[k] = tails[k];
    }
    compress_lanes(h, from, 0, bytes + size - whole, UINT32_MAX, shuffles);
    for (int k = 0; k < messages; k++) {
        uint32_t of_one[8];
        for (int i = 0; i < 8; i++)
            of_one[i] = h[i][k];
        put_tag(tags[k], of_one);
    }
}

typedef void Tags(const uint32_t *, const unsigned char *, ptrdiff_t, size_t, int, unsigned char[][MAC_TAG_BYTES]);

__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))) static void
tags_avx512(const uint32_t *state, const unsigned char *data, ptrdiff_t apart, size_t size, int messages,
            unsigned char tags[][MAC_TAG_BYTES])
{
    tag_lanes(state, data, apart, size, messages, tags, 1);
}

__attribute__((target("avx2"))) static void tags_avx2(const uint32_t *state, const unsigned char *data, ptrdiff_t apart,
                                                      size_t size, int messages, unsigned char tags[][MAC_TAG_BYTES])
{
    tag_lanes(state, data, apart, size, messages, tags, 0);
}

static Tags *choose(int least)
{
    if (least == 0 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        return tags_avx512;
    return __builtin_cpu_supports("avx2") ? tags_avx2 : NULL;
}
#endif

void mac_tags(const MacKey *key, const unsigned char *data, ptrdiff_t apart, size_t size, int messages,
              unsigned char tags[][MAC_TAG_BYTES])
{
#ifdef HAS_LANES
    /* All lanes together take as long as five messages one by one. */
    Tags *at_once = messages > 4 && key->least != 1 ? choose(key->least) : NULL;
    if (at_once != NULL) {
        at_once(key->state, data, apart, size, messages, tags);
        return;
    }
#endif
    for (int k = 0; k < messages; k++)
        tag_one(key->state, data + k * apart, size, tags[k]);
}
