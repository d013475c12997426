"""The GPUs of this machine: what the driver tells of them, and who runs on each now."""
