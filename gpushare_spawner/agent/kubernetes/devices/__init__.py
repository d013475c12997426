"""GPUs as devices of the kubelet."""
