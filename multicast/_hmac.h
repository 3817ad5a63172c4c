#ifndef BROKERLESS_HMAC_H
#define BROKERLESS_HMAC_H

#include <stddef.h>
#include <stdint.h>

/* HMAC-SHA256 truncated to 128 bits. */
#define HMAC_TAG_BYTES 16

typedef struct {
    uint32_t inner[8], outer[8];
    int portable; /* do not use the processor's own instructions: for tests */
} HmacKey;

void hmac_prepare(HmacKey *out, const unsigned char *key, size_t size, int portable);
void hmac_tag(const HmacKey *key, const unsigned char *data, size_t size, unsigned char tag[HMAC_TAG_BYTES]);
/* Of two messages of `size` bytes, of which the second begins `apart` bytes after the first. */
void hmac_tags(const HmacKey *key, const unsigned char *data, ptrdiff_t apart, size_t size,
               unsigned char tags[2][HMAC_TAG_BYTES]);

#endif
