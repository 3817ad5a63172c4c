/* CRC-32, as zlib has it. */
#include "speed.h"
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAVE_FOLDING 1
static int can_fold;
#if defined(__clang__) ? __clang_major__ >= 9 : __GNUC__ >= 10
#define HAVE_WIDE_FOLDING 1
static int can_fold_wide;
#endif
#endif

static uint32_t crc_table[8][256];

void
crc32_prepare(void)
{
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int k = 0; k < 8; k++)
            c = c & 1 ? 0xEDB88320u ^ (c >> 1) : c >> 1;
        crc_table[0][i] = c;
    }
    for (uint32_t i = 0; i < 256; i++)
        for (int t = 1; t < 8; t++)
            crc_table[t][i] = crc_table[0][crc_table[t - 1][i] & 0xFF] ^ (crc_table[t - 1][i] >> 8);
#ifdef HAVE_FOLDING
    __builtin_cpu_init();
    can_fold = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
#ifdef HAVE_WIDE_FOLDING
    can_fold_wide = can_fold && __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx512f");
#endif
#endif
}

/* Eight bytes a step, from tables. Takes and returns the inverted state. */
static uint32_t
crc_by_tables(uint32_t c, const uint8_t *p, size_t n)
{
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    while (n >= 8) {
        uint32_t a, b;
        memcpy(&a, p, 4);
        memcpy(&b, p + 4, 4);
        a ^= c;
        c = crc_table[7][a & 0xFF] ^ crc_table[6][(a >> 8) & 0xFF] ^ crc_table[5][(a >> 16) & 0xFF] ^
            crc_table[4][a >> 24] ^ crc_table[3][b & 0xFF] ^ crc_table[2][(b >> 8) & 0xFF] ^
            crc_table[1][(b >> 16) & 0xFF] ^ crc_table[0][b >> 24];
        p += 8;
        n -= 8;
    }
#endif
    while (n--)
        c = crc_table[0][(c ^ *p++) & 0xFF] ^ (c >> 8);
    return c;
}

#ifdef HAVE_WIDE_FOLDING
__attribute__((target("avx512f,vpclmulqdq"))) static inline __m512i
fold_wide(__m512i x, __m512i by, __m512i next)
{
    __m512i low = _mm512_clmulepi64_epi128(x, by, 0x00), high = _mm512_clmulepi64_epi128(x, by, 0x11);
    return _mm512_ternarylogic_epi64(low, high, next, 0x96);  /* xor of the three */
}

/* As the loop of `crc_by_folding`, 256 bytes a step: what comes out stands for the `n` bytes, a multiple of 256 and at
 * least 256, and is gone on with as if the last 64 of them had just been loaded. */
__attribute__((target("avx512f,vpclmulqdq"))) static void
fold_many(uint32_t c, const uint8_t *p, size_t n, __m128i x[4])
{
    const __m512i by_256 = _mm512_broadcast_i32x4(_mm_set_epi64x(0x01322d1430, 0x011542778a));
    const __m512i by_64 = _mm512_broadcast_i32x4(_mm_set_epi64x(0x01c6e41596, 0x0154442bd4));
    __m512i z[4];
    for (int i = 0; i < 4; i++)
        z[i] = _mm512_loadu_si512(p + 64 * i);
    z[0] = _mm512_xor_si512(z[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)c)));
    for (p += 256, n -= 256; n >= 256; p += 256, n -= 256)
        for (int i = 0; i < 4; i++)
            z[i] = fold_wide(z[i], by_256, _mm512_loadu_si512(p + 64 * i));
    for (int i = 1; i < 4; i++)
        z[0] = fold_wide(z[0], by_64, z[i]);
    _mm512_storeu_si512(x, z[0]);
}
#endif

#ifdef HAVE_FOLDING
/* Sixteen bytes a step by carry-less multiplication (Gopal et al., Intel, 2009), four steps side by side.
 * `n` is at least 64 and a multiple of 16. */
__attribute__((target("pclmul,sse4.1"))) static uint32_t
crc_by_folding(uint32_t c, const uint8_t *p, size_t n)
{
    const __m128i by_64 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
    const __m128i by_16 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
    const __m128i by_8 = _mm_set_epi64x(0, 0x0163cd6124);
    const __m128i barrett = _mm_set_epi64x(0x01f7011641, 0x01db710641);
    const __m128i low = _mm_setr_epi32(~0, 0, ~0, 0);
    __m128i x[4], y;
    size_t done = 64;
    for (int i = 0; i < 4; i++)
        x[i] = _mm_loadu_si128((const __m128i *)(p + 16 * i));
    x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128((int)c));
#ifdef HAVE_WIDE_FOLDING
    if (can_fold_wide && n >= 1024) {
        done = n & ~(size_t)255;
        fold_many(c, p, done, x);
    }
#endif
    for (p += done, n -= done; n >= 64; p += 64, n -= 64)
        for (int i = 0; i < 4; i++) {
            y = _mm_clmulepi64_si128(x[i], by_64, 0x00);
            x[i] = _mm_clmulepi64_si128(x[i], by_64, 0x11);
            x[i] = _mm_xor_si128(_mm_xor_si128(x[i], y), _mm_loadu_si128((const __m128i *)(p + 16 * i)));
        }
    for (int i = 1; i < 4; i++) {
        y = _mm_clmulepi64_si128(x[0], by_16, 0x00);
        x[0] = _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(x[0], by_16, 0x11), y), x[i]);
    }
    for (; n >= 16; p += 16, n -= 16) {
        y = _mm_clmulepi64_si128(x[0], by_16, 0x00);
        x[0] = _mm_xor_si128(_mm_clmulepi64_si128(x[0], by_16, 0x11), y);
        x[0] = _mm_xor_si128(x[0], _mm_loadu_si128((const __m128i *)p));
    }
    y = _mm_clmulepi64_si128(x[0], by_16, 0x10);
    x[0] = _mm_xor_si128(_mm_srli_si128(x[0], 8), y);
    y = _mm_srli_si128(x[0], 4);
    x[0] = _mm_xor_si128(_mm_clmulepi64_si128(_mm_and_si128(x[0], low), by_8, 0x00), y);
    y = _mm_clmulepi64_si128(_mm_and_si128(x[0], low), barrett, 0x10);
    y = _mm_clmulepi64_si128(_mm_and_si128(y, low), barrett, 0x00);
    return (uint32_t)_mm_extract_epi32(_mm_xor_si128(x[0], y), 1);
}
#endif

/* As zlib.crc32(data, value). */
uint32_t
crc32_of(uint32_t value, const uint8_t *p, size_t n)
{
    uint32_t c = ~value;
#ifdef HAVE_FOLDING
    if (n >= 64 && can_fold) {
        size_t part = n & ~(size_t)15;
        c = crc_by_folding(c, p, part);
        p += part;
        n -= part;
    }
#endif
    return ~crc_by_tables(c, p, n);
}

PyObject *
speed_crc32(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    (void)module;
    if (nargs < 1 || nargs > 2) {
        PyErr_SetString(PyExc_TypeError, "crc32(data, value=0)");
        return NULL;
    }
    unsigned long value = 0;
    if (nargs == 2) {
        value = PyLong_AsUnsignedLongMask(args[1]);
        if (value == (unsigned long)-1 && PyErr_Occurred())
            return NULL;
    }
    Py_buffer view;
    if (PyObject_GetBuffer(args[0], &view, PyBUF_SIMPLE) < 0)
        return NULL;
    uint32_t crc;
    if (view.len > 64 * 1024) {  /* long enough that other threads may have their turn */
        Py_BEGIN_ALLOW_THREADS
        crc = crc32_of((uint32_t)value, view.buf, (size_t)view.len);
        Py_END_ALLOW_THREADS
    }
    else
        crc = crc32_of((uint32_t)value, view.buf, (size_t)view.len);
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLong(crc);
}
