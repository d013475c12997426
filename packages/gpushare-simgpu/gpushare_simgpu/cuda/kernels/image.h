/* Images of code: which built-in kernels they name. The simulated GPU runs no machine code; what it takes from PTX text
 * and from CUDA's ELF files are the names of their kernels. */
#ifndef SIMGPU_IMAGE_H
#define SIMGPU_IMAGE_H

#include <stddef.h>

#include "cuda/driver/driver.h"

#define IMAGE_KERNELS 256

struct image {
    unsigned count;
    const struct kernel *kernels[IMAGE_KERNELS];
};

/* Where the caller of a function with JIT options wants to read what is wrong; all 0: nowhere, and it goes to stderr.
 */
struct log {
    char *text;
    size_t size;
};

struct log image_log(unsigned count, const int *options, void *const *values);

/* Adds the kernels that an image names. CUDA_ERROR_INVALID_PTX, CUDA_ERROR_INVALID_IMAGE or CUDA_ERROR_OUT_OF_MEMORY
 * with the reason in the log. */
CUresult image_read(const void *image, struct log log, struct image *out);

/* A file as a text with a zero at its end, to be freed; NULL after setting the error. */
char *image_file(const char *path, CUresult *error);

#endif
