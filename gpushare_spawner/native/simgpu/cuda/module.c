#include "module.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "context.h"
#include "kernels.h"

#define MAX_ENTRIES 256
#define NAME_LENGTH 128

/* Options of cuModuleLoadDataEx that give room for a message. */
enum { JIT_ERROR_LOG = 5, JIT_ERROR_LOG_SIZE = 6 };

struct log {
    char *text;
    size_t size;
};

static void complain(struct log log, const char *format, const char *name) {
    if (log.text && log.size) snprintf(log.text, log.size, format, name);
}

/* The text without comments, so that an .entry in one does not count. */
static char *without_comments(const char *text) {
    size_t length = strlen(text);
    char *plain = malloc(length + 1), *out = plain;
    if (!plain) return NULL;
    while (*text) {
        if (text[0] == '/' && text[1] == '/') {
            text += strcspn(text, "\n");
        } else if (text[0] == '/' && text[1] == '*') {
            const char *end = strstr(text + 2, "*/");
            text = end ? end + 2 : text + strlen(text);
            *out++ = ' ';
        } else {
            *out++ = *text++;
        }
    }
    *out = 0;
    return plain;
}

static int in_name(char c) {
    return isalnum((unsigned char)c) || c == '_' || c == '$' || c == '%';
}

/* Finds the next .entry; its name, and the text behind it. NULL when there is none. */
static const char *next_entry(const char *text, char name[NAME_LENGTH]) {
    while ((text = strstr(text, ".entry"))) {
        text += strlen(".entry");
        if (!isspace((unsigned char)*text)) continue;
        while (isspace((unsigned char)*text)) text++;
        size_t length = 0;
        while (in_name(*text)) {
            if (length < NAME_LENGTH - 1) name[length++] = *text;
            text++;
        }
        name[length] = 0;
        if (length) return text;
    }
    return NULL;
}

static CUresult read_ptx(const char *text, struct context *context, struct log log, struct module **out) {
    char name[NAME_LENGTH];
    const struct kernel *kernels[MAX_ENTRIES];
    unsigned count = 0;
    if (!strstr(text, ".version") || !strstr(text, ".target")) {
        complain(log, "%sthe image is not PTX text; the simulated GPU runs no machine code", "");
        return CUDA_ERROR_INVALID_IMAGE;
    }
    for (const char *at = text; (at = next_entry(at, name));) {
        const struct kernel *kernel = kernel_find(name);
        if (!kernel || count == MAX_ENTRIES) {
            complain(log, "the simulated GPU has no kernel named %s; it runs those of its kernels.ptx", name);
            return CUDA_ERROR_INVALID_PTX;
        }
        kernels[count++] = kernel;
    }
    struct module *module = calloc(1, sizeof *module + count * sizeof *module->functions);
    REQUIRE(module, CUDA_ERROR_OUT_OF_MEMORY);
    module->magic = MODULE_MAGIC;
    module->context = context;
    module->count = count;
    for (unsigned i = 0; i < count; i++) module->functions[i] = (struct function){FUNCTION_MAGIC, kernels[i], module};
    *out = module;
    return CUDA_SUCCESS;
}

static CUresult load(const void *image, struct context *context, struct log log, struct module **out) {
    REQUIRE(image && out, CUDA_ERROR_INVALID_VALUE);
    if (memcmp(image, "\177ELF", 4) == 0 || memcmp(image, "\x50\xed\x55\xba", 4) == 0) {
        complain(log, "%sthe simulated GPU runs no machine code: give it PTX", "");
        return CUDA_ERROR_INVALID_IMAGE;
    }
    char *text = without_comments(image);
    REQUIRE(text, CUDA_ERROR_OUT_OF_MEMORY);
    CUresult error = read_ptx(text, context, log, out);
    free(text);
    return error;
}

static CUresult load_file(const char *path, struct context *context, struct module **out) {
    REQUIRE(path && out, CUDA_ERROR_INVALID_VALUE);
    FILE *file = fopen(path, "rbe");
    REQUIRE(file, CUDA_ERROR_FILE_NOT_FOUND);
    fseek(file, 0, SEEK_END);
    long size = ftell(file);
    rewind(file);
    char *text = size >= 0 ? calloc(1, (size_t)size + 1) : NULL;
    CUresult error = CUDA_ERROR_INVALID_IMAGE;
    if (text && fread(text, 1, (size_t)size, file) == (size_t)size && size >= 4)
        error = load(text, context, (struct log){0}, out);
    free(text);
    fclose(file);
    return error;
}

static struct log log_of(unsigned count, const int *options, void *const *values) {
    struct log log = {0};
    for (unsigned i = 0; i < count && options && values; i++) {
        if (options[i] == JIT_ERROR_LOG) log.text = values[i];
        if (options[i] == JIT_ERROR_LOG_SIZE) log.size = (size_t)(uintptr_t)values[i];
    }
    return log;
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
    REQUIRE_INIT();
    REQUIRE(module && module->magic == MODULE_MAGIC, CUDA_ERROR_INVALID_HANDLE);
    /* launches in flight still name its functions */
    synchronize_everything();
    for (unsigned i = 0; i < module->count; i++) module->functions[i].magic = 0;
    module->magic = 0;
    free(module);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, int *options, void **values) {
    struct context *context;
    CUresult error = context_require(&context);
    return error ? error : load(image, context, log_of(count, options, values), module);
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
    return load(code, NULL, log_of(jit_count, jit_options, jit_values), library);
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
