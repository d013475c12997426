/* UUIDs as NVIDIA's tools write them: GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx, or MIG-... for a MIG instance. */
#ifndef SIMGPU_UUID_H
#define SIMGPU_UUID_H

#include <stdint.h>

#define UUID_TEXT 41 /* with the final zero */

/* Make the UUID of a name, in the form of a version 5 UUID; the same name always gives the same UUID. */
void uuid_make(uint8_t uuid[16], const char *name);

/* `kind` is "GPU" or "MIG". */
void uuid_text(const char *kind, const uint8_t uuid[16], char text[UUID_TEXT]);

#endif
