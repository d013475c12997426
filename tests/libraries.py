"""The compiled C libraries, as their sources are now."""

from __future__ import annotations

import fcntl
from pathlib import Path

import gpushare_simgpu

from gpushare_spawner import native
from gpushare_spawner.native import build

NATIVE = Path(native.__file__).parent
SIMGPU = Path(gpushare_simgpu.__file__).parent


def preload_library() -> Path:
    """libgpushare.so. Compiled first where a source is newer. Raises BuildError."""
    _compile_if_older(NATIVE)
    return native.preload_library()


def simulated_driver() -> Path:
    """The folder of libcuda.so.1 and libnvidia-ml.so.1. Compiled first where a source is newer. Raises BuildError."""
    _compile_if_older(SIMGPU)
    return gpushare_simgpu.folder()


def _compile_if_older(folder: Path) -> None:
    # one process compiles, the others wait for it: several at a time would take minutes
    with (folder / "libraries.toml").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sources = [path for path in folder.rglob("*") if path.suffix in (".c", ".h", ".map", ".toml")]
        built = [path.stat().st_mtime for path in (folder / "lib").glob("*.so*")]
        if not built or min(built) < max(path.stat().st_mtime for path in sources):
            build.build(folder)
