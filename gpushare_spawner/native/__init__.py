"""The C parts: where the built libraries lie. `python -m gpushare_spawner.native.build` builds them."""

from __future__ import annotations

from pathlib import Path

LIBRARIES = Path(__file__).parent / "lib"
"""Built libraries: ``libgpushare.so``, and a folder ``simgpu`` with ``libcuda.so.1`` and ``libnvidia-ml.so.1``."""


def preload_library() -> Path:
    """Path of libgpushare.so. Raises FileNotFoundError, saying how to build it."""
    return _built(LIBRARIES / "libgpushare.so")


def simgpu_folder() -> Path:
    """Folder of the simulated driver, for LD_LIBRARY_PATH. Raises FileNotFoundError, saying how to build it."""
    return _built(LIBRARIES / "simgpu" / "libcuda.so.1").parent


def _built(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not built; run: python -m gpushare_spawner.native.build")
    return path
