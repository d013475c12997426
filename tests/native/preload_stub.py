"""Fixture: a driver that only answers, for what the simulated one has not got."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from gpushare_spawner.native.build import compiler

HERE = Path(__file__).parent


def compile_library(arguments: list[str], into: Path) -> None:
    """A shared library from these sources and flags."""
    command = [*compiler(), "-shared", "-fPIC", "-fvisibility=hidden", "-fno-sanitize=all", "-o", str(into), *arguments]
    subprocess.run(command, check=True)


@pytest.fixture(scope="session")
def stub_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stub driver as libcuda.so.1."""
    folder = tmp_path_factory.mktemp("stub")
    # -Bsymbolic: a driver's own functions call each other, whatever is loaded before it
    flags = ["-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic"]
    compile_library([*flags, str(HERE / "preload_stub_driver.c")], folder / "libcuda.so.1")
    return folder


@pytest.fixture(scope="session")
def stub_nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the stub NVML as libnvidia-ml.so.1."""
    folder = tmp_path_factory.mktemp("stub_nvml")
    flags = ["-Wl,-soname,libnvidia-ml.so.1", "-Wl,-Bsymbolic", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"]
    compile_library([*flags, str(HERE / "preload_stub_nvml.c")], folder / "libnvidia-ml.so.1")
    return folder


@pytest.fixture(scope="session")
def fast(tmp_path_factory: pytest.TempPathFactory, preload: Path) -> dict[str, str]:
    """The environment in which 30 s of the library's are 1.5 s."""
    clock = tmp_path_factory.mktemp("clock") / "libfastclock.so"
    compile_library([str(HERE / "preload_fast_clock.c"), "-ldl"], clock)
    return {"LD_PRELOAD": f"{clock}:{preload}"}
