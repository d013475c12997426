"""The GPUs that the demo shares: the machine's own, or simulated ones."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from gpushare_spawner.native import simulated_driver

SIMULATED = {"SIMGPU_DEVICES": "2", "SIMGPU_MEMORY": "16GiB", "SIMGPU_MODEL": "Simulated GPU 16 GiB"}


def own_gpus() -> list[str]:
    """Return the models of this machine's NVIDIA GPUs, by NVML; empty without a driver or without GPUs."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def simulated_state(folder: Path) -> Path:
    """Return the file in shared memory with the state of the simulated GPUs of the demo in that folder."""
    name = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
    shared = Path("/dev/shm")
    return (shared if os.access(shared, os.W_OK) else folder) / f"simgpu-demo-{os.getuid()}-{name}"


def simulated_environment(folder: Path) -> dict[str, str]:
    """Return the agent's environment: the simulated driver before any other, and the GPUs to simulate.

    Raises FileNotFoundError if the simulated driver is not built.
    """
    libraries = [str(simulated_driver()), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {**SIMULATED, "SIMGPU_STATE": str(simulated_state(folder)), "LD_LIBRARY_PATH": ":".join(libraries)}
