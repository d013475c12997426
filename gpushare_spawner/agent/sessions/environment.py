"""The environment that a notebook server with a share is started with."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gpushare_spawner.agent.gpus.nvml import Gpu


@dataclass(frozen=True)
class Libraries:
    """What the agent hands out."""

    preload: Path
    """libgpushare.so."""
    simulated_driver: Path | None = None
    """Folder of the simulated driver; None on a machine with real GPUs."""


def session_environment(gpus: Iterable[Gpu], socket: Path, libraries: Libraries) -> dict[str, str]:
    """Variables for the server. LD_PRELOAD is appended to one that is there, LD_LIBRARY_PATH is prepended."""
    chosen = list(gpus)
    environment = {
        "GPUSHARE_SOCKET": str(socket),
        "LD_PRELOAD": str(libraries.preload),
        "CUDA_VISIBLE_DEVICES": ",".join(gpu.uuid for gpu in chosen),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    if libraries.simulated_driver is not None and any(gpu.simulated for gpu in chosen):
        environment["LD_LIBRARY_PATH"] = str(libraries.simulated_driver)
        environment["SIMGPU_STATE"] = simulated_state()
    return environment


def simulated_state() -> str:
    """The file that all processes of one simulated machine share."""
    return os.environ.get("SIMGPU_STATE") or f"/dev/shm/simgpu-{os.getuid()}"
