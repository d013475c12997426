"""The environment of a notebook server with a share."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.model.layers import LAYER_VARIABLE, OBSERVES, LayerName


@dataclass(frozen=True)
class Libraries:
    """Paths of the libraries that the agent provides."""

    preload: Path
    """libgpushare.so."""
    simulated_driver: Path | None = None
    """Folder of the simulated driver; None on a machine with real GPUs."""


def session_environment(gpus: Iterable[Gpu], socket: Path, libraries: Libraries) -> dict[str, str]:
    """Return the variables for the server.

    LD_PRELOAD is appended to an existing value, LD_LIBRARY_PATH is prepended.
    """
    chosen = list(gpus)
    environment = {
        "LD_PRELOAD": str(libraries.preload),
        "GPUSHARE_SOCKET": str(socket),
        "CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in chosen),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    if libraries.simulated_driver is not None and any(gpu.simulated for gpu in chosen):
        environment["LD_LIBRARY_PATH"] = str(libraries.simulated_driver)
        environment["SIMGPU_STATE"] = simulated_state()
    return environment


def observed_environment(gpus: Iterable[Gpu], socket: Path, libraries: Libraries) -> dict[str, str]:
    """Return the variables for a server on GPUs that another layer shares: the library only reports GPU work."""
    return session_environment(gpus, socket, libraries) | OBSERVES


def mps_environment(
    gpu: Gpu, socket: Path, pipes: Path, units: int, memory_bytes: int, libraries: Libraries
) -> dict[str, str]:
    """Return the variables for a server that has its part of the GPU through MPS.

    The preload library only reports GPU work. Source: NVIDIA, "Multi-Process Service", appendix on environment
    variables.
    """
    return observed_environment([gpu], socket, libraries) | {
        LAYER_VARIABLE: LayerName.MPS.value,
        "CUDA_MPS_PIPE_DIRECTORY": str(pipes),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(units),
        # the GPU's number among the program's visible GPUs; whole MiB
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={max(1, memory_bytes // 2**20)}M",
    }


def mig_environment(gpu: Gpu, socket: Path, libraries: Libraries) -> dict[str, str]:
    """Return the variables for a server that has a MIG instance; the GPU itself enforces the limit."""
    return observed_environment([gpu], socket, libraries) | {
        LAYER_VARIABLE: LayerName.MIG.value,
        # for containers, and for programs that find their GPU without CUDA
        "NVIDIA_VISIBLE_DEVICES": gpu.uuid,
    }


def simulated_state() -> str:
    """Return the path of the file that all processes of one simulated machine share."""
    return os.environ.get("SIMGPU_STATE") or f"/dev/shm/simgpu-{os.getuid()}"
