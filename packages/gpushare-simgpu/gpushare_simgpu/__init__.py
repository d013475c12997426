"""A simulated NVIDIA driver and NVML: their paths, and the PTX of the kernels that the simulated GPU runs.

docs/reference/simgpu.md of gpushare-spawner describes what is simulated.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent

KERNELS = _PACKAGE / "kernels.ptx"
"""PTX text of the built-in kernels, which also run on a real GPU."""


def folder() -> Path:
    """Return the folder of ``libcuda.so.1`` and ``libnvidia-ml.so.1`` for LD_LIBRARY_PATH. Raises FileNotFoundError."""
    built = _PACKAGE / "lib"
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        if not (built / name).is_file():
            raise FileNotFoundError(
                f"{built / name} is not built; run: python -m gpushare_spawner.native.build {_PACKAGE}"
            )
    return built
