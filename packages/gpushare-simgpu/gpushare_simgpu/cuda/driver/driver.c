#include "cuda/driver/driver.h"

struct driver driver;
