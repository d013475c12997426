"""What libgpushare.so adds to allocations.

``python -m benchmarks.allocation [--rounds 7] [--json]``. Two loops in C, with and without the library in turns, of
which the fastest batches are compared (benchmarks/launch.py says why). The library holds no lease: allocations need
none.

- Pairs of cuMemAlloc and cuMemFree, on a driver that answers at once (allocation_driver.c), so that what is measured
  is the library, with 0 and with 1000 other allocations there. Bar: at most 40 ns added to a pair.
- The memory of a training step with cuMemAllocAsync and cuMemFreeAsync, on the simulated driver: its own pool, which
  keeps nothing back, against the library's cache of freed blocks. Bar: no slower than the pool.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path

import gpushare_simgpu

from benchmarks.timed_calls import GrantingAgent, fastest, first_gpu, run
from gpushare_spawner.native import build, preload_library

HERE = Path(__file__).parent
BATCHES, PAIRS, STEPS, OTHERS = 20, 20_000, 40, 1000


def compile_all(folder: Path) -> Path:
    """The loop, and the driver that answers at once as libcuda.so.1 in a folder `null`. Raises CalledProcessError."""
    (folder / "null").mkdir()
    flags = ["-O2", "-std=gnu11", "-Wall", "-fno-sanitize=all"]
    library = [*flags, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic"]
    driver = [*library, "-o", str(folder / "null" / "libcuda.so.1"), str(HERE / "allocation_driver.c")]
    loop = [*flags, "-o", str(folder / "allocation_loop"), str(HERE / "allocation_loop.c"), "-ldl"]
    for command in (driver, loop):
        subprocess.run([*build.compiler(), *command], check=True)
    return folder / "allocation_loop"


def compare(rounds: int, program: Path, loop: list[str], bare: dict[str, str], shared: dict[str, str]) -> list[float]:
    """Nanoseconds without and with the library: the fastest batches of all rounds."""
    times: tuple[list[list[float]], list[list[float]]] = ([], [])
    for _ in range(rounds):
        for environment, into in zip((bare, shared), times, strict=True):
            into.append(run(program, loop, environment))
    return [fastest(one) for one in times]


class Setting:
    """The programs, and environments for them: the null driver and the simulated one, with and without the library."""

    def __init__(self, folder: Path) -> None:
        self.program = compile_all(folder)
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("SIMGPU_", "GPUSHARE_", "LD_"))}
        clean["SIMGPU_STATE"] = str(folder / "simgpu.state")
        self.simulated = clean | {"LD_LIBRARY_PATH": str(gpushare_simgpu.folder())}
        self.null = clean | {"LD_LIBRARY_PATH": str(folder / "null")}
        self.simulated_shared = self._shared(self.simulated, folder / "simulated.sock", first_gpu(self.simulated))
        self.null_shared = self._shared(self.null, folder / "null.sock", bytes([7]) * 16)

    @staticmethod
    def _shared(bare: dict[str, str], socket: Path, gpu: bytes) -> dict[str, str]:
        GrantingAgent(socket, gpu)
        return bare | {"LD_PRELOAD": str(preload_library()), "GPUSHARE_SOCKET": str(socket)}

    def pairs(self, rounds: int, others: int) -> list[float]:
        """Nanoseconds of cuMemAlloc with cuMemFree on the null driver, without and with the library."""
        loop = ["pairs", str(BATCHES), str(PAIRS), str(others)]
        return compare(rounds, self.program, loop, self.null, self.null_shared)

    def steps(self, rounds: int) -> list[float]:
        """Nanoseconds of a training step's allocations on the simulated driver, without and with the library."""
        loop = ["steps", str(BATCHES), str(STEPS), "0"]
        return compare(rounds, self.program, loop, self.simulated, self.simulated_shared)


def added_to_pairs(rounds: int) -> float:
    """Nanoseconds that the library adds to cuMemAlloc with cuMemFree."""
    with tempfile.TemporaryDirectory() as name:
        bare, shared = Setting(Path(name)).pairs(rounds, 0)
        return round(shared - bare, 1)


def measure(rounds: int) -> dict[str, float]:
    """All figures, nanoseconds."""
    with tempfile.TemporaryDirectory() as name:
        setting = Setting(Path(name))
        alone, among, steps = setting.pairs(rounds, 0), setting.pairs(rounds, OTHERS), setting.steps(rounds)
        return {
            "alloc_free_bare_ns": round(alone[0], 1),
            "alloc_free_added_ns": round(alone[1] - alone[0], 1),
            "alloc_free_added_ns_among_1000": round(among[1] - among[0], 1),
            "step_pool_ns": round(steps[0]),
            "step_shared_ns": round(steps[1]),
        }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="runs of each kind (default 7)")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args()
    figures = measure(options.rounds)
    added = f"{figures['alloc_free_added_ns']:.1f} ns (bar: 40)"
    print(f"cuMemAlloc + cuMemFree, null driver: {figures['alloc_free_bare_ns']:.1f} ns; added {added}")
    print(f"  among {OTHERS} other allocations: {figures['alloc_free_added_ns_among_1000']:.1f} ns added")
    pool, shared = figures["step_pool_ns"] / 1000, figures["step_shared_ns"] / 1000
    print(f"memory of a training step, simulated: {shared:.1f} us under libgpushare.so, driver's pool {pool:.1f} us")
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
