#include "common/uuid.h"

#include <stdio.h>
#include <string.h>

/* FNV-1a over the text, continuing from `hash`. */
static uint64_t fnv(uint64_t hash, const char *text) {
    for (; *text; text++) hash = (hash ^ (uint8_t)*text) * 1099511628211ull;
    return hash;
}

void uuid_make(uint8_t uuid[16], const char *name) {
    for (int half = 0; half < 2; half++) {
        uint64_t hash = fnv(fnv(14695981039346656037ull, half ? "1/" : "0/"), name);
        hash ^= hash >> 32;
        memcpy(uuid + 8 * half, &hash, 8);
    }
    uuid[6] = (uint8_t)((uuid[6] & 0x0f) | 0x50);
    uuid[8] = (uint8_t)((uuid[8] & 0x3f) | 0x80);
}

void uuid_text(const char *kind, const uint8_t u[16], char text[UUID_TEXT]) {
    snprintf(text, UUID_TEXT, "%.3s-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", kind, u[0],
             u[1], u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
}
