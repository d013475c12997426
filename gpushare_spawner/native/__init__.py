"""Paths of the built C libraries. `python -m gpushare_spawner.native.build` builds them."""

from __future__ import annotations

from pathlib import Path

LIBRARIES = Path(__file__).parent / "lib"
"""Folder of the built ``libgpushare.so``."""


def preload_library() -> Path:
    """Return the path of libgpushare.so. Raises FileNotFoundError, with the command that builds it."""
    path = LIBRARIES / "libgpushare.so"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not built; run: python -m gpushare_spawner.native.build")
    return path


def simulated_driver() -> Path:
    """Return the folder of the simulated driver, for LD_LIBRARY_PATH.

    Raises FileNotFoundError, with the command that installs it.
    """
    try:
        import gpushare_simgpu
    except ImportError:
        raise FileNotFoundError(
            "the simulated driver is not installed: install the package gpushare-simgpu, in a checkout with "
            "`pip install packages/gpushare-simgpu`"
        ) from None
    return gpushare_simgpu.folder()
