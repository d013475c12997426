"""Engine `suspend`: the driver's checkpoint functions move all of a session's processes off the GPU and back."""
