#include "cuda/kernels/module.h"

#include <stdlib.h>
#include <string.h>

#include "cuda/streams/call_lock.h"
#include "cuda/streams/context.h"
#include "cuda/kernels/image.h"
#include "cuda/kernels/kernels.h"

static CUresult load(const void *image, struct context *context, struct log log, struct module **out) {
    LOCKABLE();
    struct image found = {0};
    REQUIRE(image && out, CUDA_ERROR_INVALID_VALUE);
    CUresult error = image_read(image, log, &found);
    if (error) return error;
    struct module *module = calloc(1, sizeof *module + found.count * sizeof *module->functions);
    REQUIRE(module, CUDA_ERROR_OUT_OF_MEMORY);
    module->magic = MODULE_MAGIC;
    module->context = context;
    module->count = found.count;
    for (unsigned i = 0; i < found.count; i++)
        module->functions[i] = (struct function){FUNCTION_MAGIC, found.kernels[i], module};
    *out = module;
    return CUDA_SUCCESS;
}

static CUresult load_file(const char *path, struct context *context, struct module **out) {
    LOCKABLE();
    CUresult error;
    REQUIRE(path && out, CUDA_ERROR_INVALID_VALUE);
    char *image = image_file(path, &error);
    if (!image) return error;
    error = load(image, context, (struct log){0}, out);
    free(image);
    return error;
}

static CUresult find(struct module *module, const char *name, struct function **out) {
    REQUIRE(module && module->magic == MODULE_MAGIC, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(out && name, CUDA_ERROR_INVALID_VALUE);
    for (unsigned i = 0; i < module->count; i++) {
        if (strcmp(module->functions[i].kernel->name, name) == 0) {
            *out = &module->functions[i];
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_NOT_FOUND;
}

static CUresult unload(struct module *module) {
    LOCKABLE();
    REQUIRE_INIT();
    REQUIRE(module && module->magic == MODULE_MAGIC, CUDA_ERROR_INVALID_HANDLE);
    /* launches in flight still refer to its functions */
    synchronize_everything();
    for (unsigned i = 0; i < module->count; i++) module->functions[i].magic = 0;
    module->magic = 0;
    free(module);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, int *options, void **values) {
    struct context *context;
    CUresult error = context_require(&context);
    return error ? error : load(image, context, image_log(count, options, values), module);
}

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    return cuModuleLoadDataEx(module, image, 0, NULL, NULL);
}

EXPORT CUresult cuModuleLoadFatBinary(CUmodule *module, const void *image) {
    return cuModuleLoadDataEx(module, image, 0, NULL, NULL);
}

EXPORT CUresult cuModuleLoad(CUmodule *module, const char *path) {
    struct context *context;
    CUresult error = context_require(&context);
    return error ? error : load_file(path, context, module);
}

EXPORT CUresult cuModuleUnload(CUmodule module) {
    return unload(module);
}

EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    REQUIRE_INIT();
    return find(module, name, function);
}

EXPORT CUresult cuModuleGetFunctionCount(unsigned *count, CUmodule module) {
    REQUIRE_INIT();
    REQUIRE(module && module->magic == MODULE_MAGIC, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(count, CUDA_ERROR_INVALID_VALUE);
    *count = module->count;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleEnumerateFunctions(CUfunction *functions, unsigned count, CUmodule module) {
    REQUIRE_INIT();
    REQUIRE(module && module->magic == MODULE_MAGIC, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(functions, CUDA_ERROR_INVALID_VALUE);
    for (unsigned i = 0; i < count && i < module->count; i++) functions[i] = &module->functions[i];
    return CUDA_SUCCESS;
}

/* The built-in kernels have no global variables. */
EXPORT CUresult cuModuleGetGlobal_v2(CUdeviceptr *address, size_t *bytes, CUmodule module, const char *name) {
    REQUIRE_INIT();
    REQUIRE(module && module->magic == MODULE_MAGIC, CUDA_ERROR_INVALID_HANDLE);
    return CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuModuleGetLoadingMode(int *mode) {
    REQUIRE_INIT();
    REQUIRE(mode, CUDA_ERROR_INVALID_VALUE);
    *mode = 1; /* eager */
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLibraryLoadData(CUlibrary *library, const void *code, int *jit_options, void **jit_values,
                                  unsigned jit_count, int *options, void **values, unsigned count) {
    REQUIRE_INIT();
    return load(code, NULL, image_log(jit_count, jit_options, jit_values), library);
}

EXPORT CUresult cuLibraryLoadFromFile(CUlibrary *library, const char *path, int *jit_options, void **jit_values,
                                      unsigned jit_count, int *options, void **values, unsigned count) {
    REQUIRE_INIT();
    return load_file(path, NULL, library);
}

EXPORT CUresult cuLibraryUnload(CUlibrary library) {
    return unload(library);
}

EXPORT CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) {
    REQUIRE_INIT();
    return find(library, name, kernel);
}

EXPORT CUresult cuLibraryGetKernelCount(unsigned *count, CUlibrary library) {
    return cuModuleGetFunctionCount(count, library);
}

EXPORT CUresult cuLibraryEnumerateKernels(CUkernel *kernels, unsigned count, CUlibrary library) {
    return cuModuleEnumerateFunctions(kernels, count, library);
}

EXPORT CUresult cuLibraryGetModule(CUmodule *module, CUlibrary library) {
    struct context *context;
    CUresult error = context_require(&context);
    if (error) return error;
    REQUIRE(library && library->magic == MODULE_MAGIC, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(module, CUDA_ERROR_INVALID_VALUE);
    *module = library;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuLibraryGetGlobal(CUdeviceptr *address, size_t *bytes, CUlibrary library, const char *name) {
    return cuModuleGetGlobal_v2(address, bytes, library, name);
}

EXPORT CUresult cuLibraryGetManaged(CUdeviceptr *address, size_t *bytes, CUlibrary library, const char *name) {
    return cuModuleGetGlobal_v2(address, bytes, library, name);
}

EXPORT CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel) {
    struct context *context;
    CUresult error = context_require(&context);
    if (error) return error;
    REQUIRE(kernel && kernel->magic == FUNCTION_MAGIC, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(function, CUDA_ERROR_INVALID_VALUE);
    *function = kernel;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuKernelGetLibrary(CUlibrary *library, CUkernel kernel) {
    REQUIRE_INIT();
    REQUIRE(kernel && kernel->magic == FUNCTION_MAGIC, CUDA_ERROR_INVALID_HANDLE);
    REQUIRE(library, CUDA_ERROR_INVALID_VALUE);
    *library = kernel->module;
    return CUDA_SUCCESS;
}
