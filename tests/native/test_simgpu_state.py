"""The state file under a process that dies at the worst instant."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from gpushare_spawner.native import build
from tests.libraries import SIMGPU

HERE = Path(__file__).parent
COMMON = SIMGPU / "common"


def test_killed_with_a_lock_held_and_the_lists_in_ruins(tmp_path: Path) -> None:
    program = tmp_path / "killed_in_lock"
    sources = [str(HERE / "simgpu_killed_in_lock.c"), *map(str, sorted(COMMON.glob("*.c")))]
    subprocess.run(
        [*build.compiler(), "-std=gnu11", "-g", "-pthread", f"-I{COMMON.parent}", "-o", str(program), *sources],
        check=True,
    )
    environment = os.environ | {"SIMGPU_STATE": str(tmp_path / "state"), "SIMGPU_MEMORY": "256MiB"}
    done = subprocess.run([program], env=environment, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "whole\n")
