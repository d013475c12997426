#include "cuda/kernels/image.h"

#include <ctype.h>
#include <elf.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/kernels/kernels.h"

#define NAME_LENGTH 512
#define MACHINE     190 /* EM_CUDA */

/* Options of the load and link calls that provide a buffer for a message. */
enum { JIT_ERROR_LOG = 5, JIT_ERROR_LOG_SIZE = 6 };

#define ONLY_NAMED "the simulated GPU runs only its built-in kernels, by name (those of its kernels.ptx)"

struct log image_log(unsigned count, const int *options, void *const *values) {
    struct log log = {0};
    for (unsigned i = 0; i < count && options && values; i++) {
        if (options[i] == JIT_ERROR_LOG) log.text = values[i];
        if (options[i] == JIT_ERROR_LOG_SIZE) log.size = (size_t)(uintptr_t)values[i];
    }
    return log;
}

/* Report a reason. Without a buffer from the caller it goes to stderr, because the error code alone does not contain
 * it. */
__attribute__((format(printf, 2, 3))) static void complain(struct log log, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    if (log.text && log.size) {
        vsnprintf(log.text, log.size, format, arguments);
    } else {
        char line[NAME_LENGTH + 256];
        vsnprintf(line, sizeof line, format, arguments);
        fprintf(stderr, "simgpu: %s\n", line);
    }
    va_end(arguments);
}

static CUresult add(const char *name, CUresult error, struct log log, struct image *out) {
    const struct kernel *kernel = kernel_find(name);
    if (!kernel) {
        complain(log, ONLY_NAMED ", and has none named %s", name);
        return error;
    }
    if (out->count == IMAGE_KERNELS) {
        complain(log, "the simulated GPU takes at most %d kernels in one module", IMAGE_KERNELS);
        return error;
    }
    out->kernels[out->count++] = kernel;
    return CUDA_SUCCESS;
}

/* Return the text without comments, so that an .entry in a comment is ignored. */
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

/* Find the next .entry: its name, and the text behind it. NULL if there is none. */
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

static CUresult read_ptx(const char *text, struct log log, struct image *out) {
    char name[NAME_LENGTH];
    if (!strstr(text, ".version") || !strstr(text, ".target")) {
        complain(log, "the image is neither PTX text nor a CUDA ELF file; " ONLY_NAMED);
        return CUDA_ERROR_INVALID_IMAGE;
    }
    for (const char *at = text; (at = next_entry(at, name));) {
        CUresult error = add(name, CUDA_ERROR_INVALID_PTX, log, out);
        if (error) return error;
    }
    return CUDA_SUCCESS;
}

/* Every kernel of a CUDA ELF file has its parameters in a section .nv.constant0.NAME. Like the driver, this function
 * trusts the file's own offsets, because the call does not pass the length. */
static CUresult read_elf(const unsigned char *image, struct log log, struct image *out) {
    static const char PREFIX[] = ".nv.constant0.";
    Elf64_Ehdr header;
    Elf64_Shdr section, names;
    /* if the header is not CUDA's, nothing after it is read */
    int fits = image[EI_CLASS] == ELFCLASS64;
    if (fits) memcpy(&header, image, sizeof header);
    if (!fits || header.e_machine != MACHINE || header.e_shentsize != sizeof section ||
        header.e_shstrndx >= header.e_shnum) {
        complain(log, "the image is an ELF file, but not one of CUDA; " ONLY_NAMED);
        return CUDA_ERROR_INVALID_IMAGE;
    }
    memcpy(&names, image + header.e_shoff + header.e_shstrndx * sizeof names, sizeof names);
    for (unsigned i = 0; i < header.e_shnum; i++) {
        memcpy(&section, image + header.e_shoff + i * sizeof section, sizeof section);
        if (section.sh_name >= names.sh_size) continue;
        const char *name = (const char *)image + names.sh_offset + section.sh_name;
        if (strncmp(name, PREFIX, sizeof PREFIX - 1) != 0) continue;
        CUresult error = add(name + sizeof PREFIX - 1, CUDA_ERROR_INVALID_IMAGE, log, out);
        if (error) return error;
    }
    return CUDA_SUCCESS;
}

CUresult image_read(const void *image, struct log log, struct image *out) {
    if (memcmp(image, ELFMAG, SELFMAG) == 0) return read_elf(image, log, out);
    if (memcmp(image, "\x50\xed\x55\xba", 4) == 0) {
        complain(
            log,
            "the image is a fat binary, which the simulated GPU does not unpack: give it PTX. Besides, " ONLY_NAMED);
        return CUDA_ERROR_INVALID_IMAGE;
    }
    char *text = without_comments(image);
    REQUIRE(text, CUDA_ERROR_OUT_OF_MEMORY);
    CUresult error = read_ptx(text, log, out);
    free(text);
    return error;
}

char *image_file(const char *path, CUresult *error) {
    FILE *file = fopen(path, "rbe");
    *error = CUDA_ERROR_FILE_NOT_FOUND;
    if (!file) return NULL;
    fseek(file, 0, SEEK_END);
    long size = ftell(file);
    rewind(file);
    /* large enough for the smallest object that image_read reads */
    char *text = size >= 0 ? calloc(1, (size_t)size + sizeof(Elf64_Ehdr) + 1) : NULL;
    *error = CUDA_SUCCESS;
    if (!text || fread(text, 1, (size_t)size, file) != (size_t)size) {
        *error = CUDA_ERROR_INVALID_IMAGE;
        free(text);
        text = NULL;
    }
    fclose(file);
    return text;
}
