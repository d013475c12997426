"""Engine `suspend`: all processes of a session leave the GPU, and come back, by the driver's checkpoint functions."""
