"""The state file under a process that dies at the worst instant."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpushare_spawner.native import build
from tests.libraries import SIMGPU, simulated_driver

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


SIZE = """
import ctypes, locale
locale.setlocale(locale.LC_ALL, "")
assert locale.localeconv()["decimal_point"] == ","
nvml, device, memory, name = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p(), (ctypes.c_uint64 * 3)(), bytes(96)
assert nvml.nvmlInit_v2() == 0
assert nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0
assert nvml.nvmlDeviceGetMemoryInfo(device, memory) == 0
assert nvml.nvmlDeviceGetName(device, name, 96) == 0
print(memory[0] >> 20, name.rstrip(b"\\0").decode())
"""


def test_a_program_with_a_locale_of_decimal_commas_has_the_same_gpu(tmp_path: Path) -> None:
    made = subprocess.run(["localedef", "-i", "de_DE", "-f", "UTF-8", tmp_path / "de_DE"], capture_output=True)
    if not (tmp_path / "de_DE").is_dir():
        pytest.skip(f"no German locale can be made here: {made.stderr.decode()}")
    environment = os.environ | {
        "SIMGPU_STATE": str(tmp_path / "state"),
        "SIMGPU_MEMORY": "0.25GiB",
        "LD_LIBRARY_PATH": str(simulated_driver()),
        "LOCPATH": str(tmp_path),
        "LANG": "de_DE",
    }
    said = subprocess.check_output([sys.executable, "-c", SIZE], env=environment, text=True)
    assert said == "256 Simulated GPU 0.25 GiB\n"


UUIDS = """
import ctypes
nvml = ctypes.CDLL("libnvidia-ml.so.1")
assert nvml.nvmlInit_v2() == 0
for number in range(2):
    device, text = ctypes.c_void_p(), ctypes.create_string_buffer(96)
    assert nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(device)) == 0
    assert nvml.nvmlDeviceGetUUID(device, text, 96) == 0
    print(text.value.decode())
"""


def uuids_of(folder: Path, node: str | None) -> list[str]:
    """Of the GPUs of a node, whose state file is on the same path as that of every other node."""
    state = folder / "state"
    environment = os.environ | {
        "SIMGPU_STATE": str(state),
        "SIMGPU_MEMORY": "16MiB",
        "SIMGPU_DEVICES": "2",
        "LD_LIBRARY_PATH": str(simulated_driver()),
    }
    if node is not None:
        environment["SIMGPU_NODE"] = node
    done = subprocess.run([sys.executable, "-c", UUIDS], env=environment, capture_output=True, text=True, check=True)
    state.unlink()
    return done.stdout.split()


def test_gpus_of_two_nodes_have_different_uuids_and_those_of_one_node_keep_theirs(tmp_path: Path) -> None:
    found = [uuids_of(tmp_path, node) for node in ("worker-1", "worker-2", "w" * 253, None, "")]
    assert len({uuid for uuids in found[:4] for uuid in uuids}) == 8
    assert found[4] == found[3], "one machine has no name"
    assert uuids_of(tmp_path, "worker-1") == found[0]
