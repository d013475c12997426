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
