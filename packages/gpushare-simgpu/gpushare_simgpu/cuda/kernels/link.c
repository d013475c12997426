/* The driver's linker. It links the names of built-in kernels, which are the content of an image here. The result is
 * PTX text with an .entry for each kernel, which can be loaded as a module. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/streams/context.h"
#include "cuda/kernels/image.h"
#include "cuda/kernels/kernels.h"

#define LINK_MAGIC 0x4c494e4bu

enum input { INPUT_CUBIN, INPUT_PTX, INPUT_FATBINARY, INPUT_OBJECT, INPUT_LIBRARY, INPUT_NVVM };

struct link {
    uint32_t magic;
    struct log log;
    struct image image;
    char *linked; /* the result; belongs to the link, as with CUDA */
};

static int is_link(struct link *link) {
    return link && link->magic == LINK_MAGIC;
}

EXPORT CUresult cuLinkCreate_v2(unsigned count, int *options, void **values, CUlinkState *out) {
    struct context *context;
    CUresult error = context_require(&context);
    if (error) return error;
    REQUIRE(out && (count == 0 || (options && values)), CUDA_ERROR_INVALID_VALUE);
    struct link *link = calloc(1, sizeof *link);
    REQUIRE(link, CUDA_ERROR_OUT_OF_MEMORY);
    link->magic = LINK_MAGIC;
    link->log = image_log(count, options, values);
    *out = link;
    return CUDA_SUCCESS;
}

static CUresult add(struct link *link, int type, const void *data) {
    /* a library, such as libcudadevrt.a, contains functions that kernels call, and no kernels */
    if (type == INPUT_LIBRARY) return CUDA_SUCCESS;
    REQUIRE(type >= INPUT_CUBIN && type <= INPUT_NVVM, CUDA_ERROR_INVALID_VALUE);
    return image_read(data, link->log, &link->image);
}

EXPORT CUresult cuLinkAddData_v2(CUlinkState link, int type, void *data, size_t size, const char *name, unsigned count,
                                 int *options, void **values) {
    REQUIRE_INIT();
    REQUIRE(is_link(link) && !link->linked, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(data && size, CUDA_ERROR_INVALID_VALUE);
    /* PTX text may lack its final zero */
    char *copy = calloc(1, size + 64);
    REQUIRE(copy, CUDA_ERROR_OUT_OF_MEMORY);
    memcpy(copy, data, size);
    CUresult error = add(link, type, copy);
    free(copy);
    return error;
}

EXPORT CUresult cuLinkAddFile_v2(CUlinkState link, int type, const char *path, unsigned count, int *options,
                                 void **values) {
    CUresult error;
    REQUIRE_INIT();
    REQUIRE(is_link(link) && !link->linked, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(path, CUDA_ERROR_INVALID_VALUE);
    char *data = image_file(path, &error);
    if (!data) return error;
    error = add(link, type, data);
    free(data);
    return error;
}

EXPORT CUresult cuLinkComplete(CUlinkState link, void **out, size_t *size) {
    static const char HEAD[] = ".version 6.3\n.target sm_70\n.address_size 64\n";
    REQUIRE_INIT();
    REQUIRE(is_link(link), CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(out, CUDA_ERROR_INVALID_VALUE);
    if (!link->linked) {
        size_t room = sizeof HEAD, at = sizeof HEAD - 1;
        for (unsigned i = 0; i < link->image.count; i++) room += strlen(link->image.kernels[i]->name) + 32;
        if (!(link->linked = malloc(room))) return CUDA_ERROR_OUT_OF_MEMORY;
        memcpy(link->linked, HEAD, sizeof HEAD);
        for (unsigned i = 0; i < link->image.count; i++)
            at += (size_t)snprintf(link->linked + at, room - at, ".visible .entry %s() { ret; }\n",
                                   link->image.kernels[i]->name);
    }
    *out = link->linked;
    if (size) *size = strlen(link->linked) + 1;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLinkDestroy(CUlinkState link) {
    REQUIRE_INIT();
    REQUIRE(is_link(link), CUDA_ERROR_INVALID_HANDLE);
    link->magic = 0;
    free(link->linked);
    free(link);
    return CUDA_SUCCESS;
}
