"""JupyterHub spawners that share NVIDIA GPUs between notebooks."""

__version__ = "0.1.0"
