"""What libgpushare.so adds to a kernel launch, in nanoseconds and system calls, beside the bare simulated driver.

``python -m benchmarks.launch [--rounds 9] [--json]``. A C program launches a kernel that the simulated driver
checks and drops (SIMGPU_NULL_LAUNCH=1), so that what is measured is the call itself. Runs with and without the
library take turns; each run is many batches, and the fastest batches of all runs are compared. Where another program
keeps the second hardware thread of the core busy, driver and library both take nearly twice their time, for some runs
and not for others; no batch is faster than the code. The keys that end in ``_median`` compare the medians of the same
runs, that neighbour's part included.
The library holds a lease all the while, granted by an agent in this program. System calls are counted with ptrace
on the launching thread, between the first and the last launch; those of the library's background thread are shown
per second.

``added_ns_by_streams``: the same for 1, 8 and 32 streams per thread in turn, in CPU time of the launching threads, the
worse of 1 and 4 threads. The other figures of that kind are for 8 streams and one thread: in a process with two
contexts (one of the streams is the default stream), while another thread captures a graph, and under a lease with a
pace. ``added_ns_default_two_contexts`` is for the default stream alone, in a process with two contexts.

``alloc_free_added_ns``: what it adds to cuMemAlloc with cuMemFree (benchmarks/allocation.py).

Bars: at most 10 ns added (by streams too), 0 system calls per launch, at most 40 ns added to an allocation and its
free.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gpushare_simgpu

from benchmarks import allocation
from benchmarks.timed_calls import GrantingAgent, fastest, first_gpu, run
from gpushare_spawner.native import build, preload_library

HERE = Path(__file__).parent
PTX = gpushare_simgpu.KERNELS
BATCHES, LAUNCHES, COUNTED = 40, 50_000, 10_000_000
STREAMS, THREADS, STREAM_BATCHES = (1, 8, 32), (1, 4), 10
PACE = 20_000_000
"""Nanoseconds."""


def compile_loop(folder: Path) -> Path:
    """The program that launches. Raises CalledProcessError."""
    program = folder / "launch_loop"
    command = [*build.compiler(), "-O2", "-std=gnu11", "-Wall", "-fno-sanitize=all", "-pthread", "-o", str(program)]
    subprocess.run([*command, str(HERE / "launch_loop.c"), "-ldl"], check=True)
    return program


def median(runs: list[list[float]]) -> float:
    """The median over the runs of each run's median batch."""
    return statistics.median(map(statistics.median, runs))


class Added(NamedTuple):
    """Nanoseconds that the library adds to a launch."""

    fastest: float
    median: float

    @classmethod
    def between(cls, without: list[list[float]], with_: list[list[float]]) -> Added:
        """Compare the batches of runs without and with the library."""
        return cls(fastest=fastest(with_) - fastest(without), median=median(with_) - median(without))


def added_by_streams(
    program: Path, bare: dict[str, str], shared: dict[str, str], rounds: int, cases: Sequence[tuple[int, int, str]]
) -> list[Added]:
    """What the library adds for each (streams, threads, kind), in CPU time.

    The cases take turns in each round: a machine that is slower for some seconds is so for all of them.
    """
    batches: dict[tuple[int, int, str], tuple[list[list[float]], list[list[float]]]] = {c: ([], []) for c in cases}
    for _ in range(rounds):
        for streams, threads, kind in cases:
            loop = ["--streams", str(streams), str(threads), kind, str(PTX), str(STREAM_BATCHES), str(LAUNCHES)]
            for environment, into in zip((bare, shared), batches[streams, threads, kind], strict=True):
                into.append(run(program, loop, environment))
    return [Added.between(without, with_) for without, with_ in batches.values()]


def measure(rounds: int) -> dict[str, Any]:
    """All figures, nanoseconds and counts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bare = {key: value for key, value in os.environ.items() if not key.startswith(("SIMGPU_", "GPUSHARE_", "LD_"))}
        bare |= {
            "SIMGPU_STATE": str(folder / "simgpu.state"),
            "SIMGPU_NULL_LAUNCH": "1",
            "LD_LIBRARY_PATH": str(gpushare_simgpu.folder()),
        }
        shared = bare | {"LD_PRELOAD": str(preload_library()), "GPUSHARE_SOCKET": str(folder / "session.sock")}
        program = compile_loop(folder)
        agent = GrantingAgent(folder / "session.sock", first_gpu(bare))
        loop = [str(PTX), str(BATCHES), str(LAUNCHES)]
        times: tuple[list[list[float]], list[list[float]]] = ([], [])
        for _ in range(rounds):
            for environment, into in zip((bare, shared), times, strict=True):
                into.append(run(program, loop, environment))
        if agent.grants != rounds:
            raise SystemExit(
                f"the library asked for {agent.grants} leases in {rounds} runs: it was not under the program"
            )
        added = partial(added_by_streams, program, bare, shared)
        in_turn = [(streams, threads, "plain") for streams in STREAMS for threads in THREADS]
        others = [(8, 1, "contexts"), (1, 1, "contexts"), (8, 1, "capture")]
        figures = added(rounds, [*in_turn, *others])
        by_streams = {str(n): figures[at * len(THREADS) :][: len(THREADS)] for at, n in enumerate(STREAMS)}
        contexts, default, capture = (one.fastest for one in figures[len(in_turn) :])
        agent.pace = PACE
        [paced] = added(min(rounds, 5), [(8, 1, "plain")])
        agent.pace = 0
        counting = ["--count", str(PTX), str(COUNTED)]
        bare_calls = run(program, counting, bare)
        milliseconds, own, background = run(program, counting, shared)
        total = Added.between(*times)
        return {
            "bare_ns": round(fastest(times[0]), 2),
            "shared_ns": round(fastest(times[1]), 2),
            "added_ns": round(total.fastest, 2),
            "added_ns_median": round(total.median, 2),
            "added_ns_by_streams": {n: round(max(one.fastest for one in of), 2) for n, of in by_streams.items()},
            "added_ns_by_streams_median": {n: round(max(one.median for one in of), 2) for n, of in by_streams.items()},
            "added_ns_two_contexts": round(contexts, 2),
            "added_ns_default_two_contexts": round(default, 2),
            "added_ns_during_capture": round(capture, 2),
            "added_ns_paced": round(paced.fastest, 2),
            "syscalls_per_launch": own / COUNTED,
            "bare_syscalls_per_launch": bare_calls[1] / COUNTED,
            "background_syscalls_per_second": round(background / milliseconds * 1000, 1),
        }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="runs of each kind (default 9)")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args()
    figures = measure(options.rounds) | {"alloc_free_added_ns": allocation.added_to_pairs(options.rounds)}
    print(f"cuLaunchKernel on the simulated driver (null launch), {platform.machine()}, {os.cpu_count()} cores")
    rows = [
        ("bare driver", f"{figures['bare_ns']:.2f} ns"),
        ("under libgpushare.so", f"{figures['shared_ns']:.2f} ns"),
        ("added", f"{figures['added_ns']:.2f} ns (bar: 10; medians: {figures['added_ns_median']:.2f})"),
        *(
            (
                f"added, {n} streams in turn",
                f"{ns:.2f} ns (bar: 10; medians: {figures['added_ns_by_streams_median'][n]:.2f})",
            )
            for n, ns in figures["added_ns_by_streams"].items()
        ),
        ("added, two contexts", f"{figures['added_ns_two_contexts']:.2f} ns (bar: 10)"),
        ("  in the default stream", f"{figures['added_ns_default_two_contexts']:.2f} ns (bar: 10)"),
        ("added, capture elsewhere", f"{figures['added_ns_during_capture']:.2f} ns"),
        ("added, paced lease", f"{figures['added_ns_paced']:.2f} ns"),
        ("added, cuMemAlloc + cuMemFree", f"{figures['alloc_free_added_ns']:.1f} ns (bar: 40)"),
        ("system calls per launch", f"{figures['syscalls_per_launch']:.4f} (bar: 0)"),
        ("background thread, traced", f"{figures['background_syscalls_per_second']:.0f} system calls per second"),
    ]
    for name, value in rows:
        print(f"  {name:<29} {value}")
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
