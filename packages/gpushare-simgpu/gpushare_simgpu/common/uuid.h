/* UUIDs as NVIDIA's tools write them: GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx. */
#ifndef SIMGPU_UUID_H
#define SIMGPU_UUID_H

#include <stdint.h>
#include <stdio.h>

#define UUID_TEXT 41 /* with the final zero */

static inline void uuid_text(const uint8_t u[16], char text[UUID_TEXT]) {
    snprintf(text, UUID_TEXT, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1],
             u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
}

#endif
