/* Images of code, and the built-in kernels that they name. The simulated GPU runs no machine code; from PTX text and
 * CUDA's ELF files it uses only the names of the kernels. */
#ifndef SIMGPU_IMAGE_H
#define SIMGPU_IMAGE_H

#include <stddef.h>

#include "cuda/driver/driver.h"

#define IMAGE_KERNELS 256

struct image {
    unsigned count;
    const struct kernel *kernels[IMAGE_KERNELS];
};

/* The buffer in which the caller of a function with JIT options expects error messages; all 0: none, and messages go to
 * stderr. */
struct log {
    char *text;
    size_t size;
};

struct log image_log(unsigned count, const int *options, void *const *values);

/* Add the kernels that an image names. CUDA_ERROR_INVALID_PTX, CUDA_ERROR_INVALID_IMAGE or CUDA_ERROR_OUT_OF_MEMORY,
 * with the reason in the log. */
CUresult image_read(const void *image, struct log log, struct image *out);

/* Read a file as zero-terminated text, which the caller frees; NULL after setting the error. */
char *image_file(const char *path, CUresult *error);

#endif
