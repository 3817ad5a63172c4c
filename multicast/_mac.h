#ifndef BROKERLESS_MAC_H
#define BROKERLESS_MAC_H

#include <stddef.h>
#include <stdint.h>

/* Keyed BLAKE2s (RFC 7693) with a tag of 128 bits. */
#define MAC_TAG_BYTES 16
#define MAC_KEY_BYTES 32
/* So many packets at once, where the processor has registers for it. */
#define MAC_LANES 16

typedef struct {
    uint32_t state[8];
    int least; /* for tests: 1 one by one, 2 no more than AVX2; otherwise 0 */
} MacKey;

/* `size` is 1 to MAC_KEY_BYTES. */
void mac_prepare(MacKey *out, const unsigned char *key, size_t size, int least);
/* Of up to MAC_LANES messages of `size` bytes (at least one), each of which begins `apart` bytes after the one before. */
void mac_tags(const MacKey *key, const unsigned char *data, ptrdiff_t apart, size_t size, int messages,
              unsigned char tags[][MAC_TAG_BYTES]);

#endif
