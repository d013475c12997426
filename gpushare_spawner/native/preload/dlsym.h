/* dlsym, through which programs find the driver. */
#pragma once

/* glibc's own dlsym; what it says about RTLD_NEXT is meant for this library. */
void *real_dlsym(void *handle, const char *name);
