"""GPUs as kubelet devices."""
