/* The frames of a GPU: the page in each frame with its owner, and the order in which managed pages are evicted. All
 * functions require the GPU's lock. */
#ifndef SIMGPU_FRAMES_H
#define SIMGPU_FRAMES_H

#include "common/state.h"

enum claim { CLAIM_NONE, CLAIM_FREE, CLAIM_EVICTED };

/* Take a frame for a page: a free frame, or the frame of the oldest managed page of any process. CLAIM_NONE if all of
 * VRAM is plain memory. */
enum claim frames_claim(struct state *state, int gpu, uint32_t slot, uint64_t page, enum frame_kind kind,
                        uint32_t *number);

/* Whether `count` frames are free or can be taken from managed pages. */
int frames_fit(struct state *state, int gpu, uint64_t count);

/* Whether the page is still in that frame. */
int frames_holds(struct state *state, int gpu, uint32_t number, uint32_t slot, uint64_t page);

/* Make a managed page the newest page. */
void frames_use(struct state *state, int gpu, uint32_t number);

void frames_release(struct state *state, int gpu, uint32_t number);

/* Release all frames of a process. */
void frames_release_all(struct state *state, int gpu, uint32_t slot);

/* Rebuild lists and counts from the frames. */
void frames_rebuild(struct state *state, int gpu);

#endif
