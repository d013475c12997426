/* The wrappers of NVML's functions, by name. */
#pragma once

/* The wrapper for a pointer of the real libnvidia-ml that was found under this name, or the pointer itself. Looks up
   NVML's functions the first time. Any thread; takes no lock of this library, but the dynamic linker's. */
void *nvml_table_find(void *pointer, const char *name);
