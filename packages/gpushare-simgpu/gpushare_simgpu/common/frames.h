/* The frames of a GPU: which page of whom lies in each, and which managed page leaves first. All with the GPU's lock
 * held. */
#ifndef SIMGPU_FRAMES_H
#define SIMGPU_FRAMES_H

#include "common/state.h"

enum claim { CLAIM_NONE, CLAIM_FREE, CLAIM_EVICTED };

/* Takes a frame for a page: a free one, else that of the managed page of anybody that has been there longest.
 * CLAIM_NONE when all of VRAM is plain memory. */
enum claim frames_claim(struct state *state, int gpu, uint32_t slot, uint64_t page, enum frame_kind kind,
                        uint32_t *number);

/* True when that many frames are free or can be taken from managed pages. */
int frames_fit(struct state *state, int gpu, uint64_t count);

/* True when the page is still in that frame. */
int frames_holds(struct state *state, int gpu, uint32_t number, uint32_t slot, uint64_t page);

/* A managed page counts as just come. */
void frames_use(struct state *state, int gpu, uint32_t number);

void frames_release(struct state *state, int gpu, uint32_t number);

/* Gives back every frame of a process. */
void frames_release_all(struct state *state, int gpu, uint32_t slot);

/* Makes lists and counts anew from the frames. */
void frames_rebuild(struct state *state, int gpu);

#endif
