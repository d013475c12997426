"""The memory engines managed and suspend side by side, with the loads of two other benchmarks. Simulated.

``python -m benchmarks.engines [--json]``; some minutes on two cores.

**Two jobs** of `benchmarks.oversubscription`, whose working sets do not fit on the GPU together: real processes under
a real agent on the simulated driver. `big_50` and `big_90` are the time of the two jobs one after the other, divided by
their makespan: 1 is as fast, more is faster. **Interactive**: `interactive_p95` is the 95th percentile, in seconds, of
the start delays of 12 sessions with the mixed load of `benchmarks.interactive`, in virtual time, three seeds together.

The engine managed moves memory by cuMemPrefetchAsync at the bandwidth of the bus, and only as much as must move. The
engine suspend moves all memory of a process and its CUDA context by the driver's checkpoint functions. What these cost
is not documented. CHECKPOINT_BANDWIDTH and CHECKPOINT_SECONDS are from reports of others; ``--checkpoint-bandwidth``
and ``--checkpoint-seconds`` set other figures.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from benchmarks import interactive, oversubscription
from benchmarks.interactive import Delays, start_delays
from benchmarks.oversubscription import SCALE, alone, arbitrated
from gpushare_spawner.arbiter.replay import CheckpointCosts
from gpushare_spawner.model.layers import MemoryEngine

Result = TypeVar("Result")
COLUMNS = ("big_50", "big_90")
SESSIONS = 12
CHECKPOINT_BANDWIDTH = 80e9 / 15
"""Bytes per second each way. NVIDIA/cuda-checkpoint, issue 29: about 15 s for a GPU of 80 GB with PCIe gen 5."""
CHECKPOINT_SECONDS = 0.3
"""Beside the bytes, for a checkpoint and for a restore. ai-dynamo/dynamo, pull request 7773: 0.26 s for the restore of
a process without much memory, by a helper that has called cuInit before."""
CONTEXT_BYTES = 300_000_000
"""GPU memory of a process's CUDA context: real drivers take 250 to 600 MiB. Both engines have it."""


def settings(checkpoints: CheckpointCosts) -> dict[str, str]:
    """Return the settings of the simulator, in the time and memory of `benchmarks.oversubscription`."""
    return {
        "SIMGPU_CONTEXT_MEMORY": str(round(checkpoints.context_bytes / SCALE)),
        "SIMGPU_CHECKPOINT_D2H": str(min(checkpoints.bandwidth, oversubscription.BANDWIDTH)),
        "SIMGPU_CHECKPOINT_H2D": str(min(checkpoints.bandwidth, oversubscription.BANDWIDTH)),
        "SIMGPU_RESTORE_MS": str(1000 * checkpoints.seconds / SCALE),
    }


def delays(seed: int, checkpoints: CheckpointCosts | None) -> Delays:
    """Return the start delays of the mixed load. `checkpoints`: None for the engine managed."""
    load = replace(interactive.LOADS["mixed"], horizon=interactive.MIXED_HORIZON)
    return start_delays(SESSIONS, load, interactive.SETTINGS, seed, checkpoints)


def run(job: Callable[[], Result]) -> Result:
    """One part of the benchmark, in a process of its own."""
    return job()


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument(
        "--checkpoint-bandwidth", type=float, default=CHECKPOINT_BANDWIDTH, metavar="BYTES_PER_SECOND",
        help="of a checkpoint and a restore; at most the bus's; default: %(default).3g",
    )  # fmt: skip
    parser.add_argument(
        "--checkpoint-seconds", type=float, default=CHECKPOINT_SECONDS, metavar="SECONDS",
        help="of each beside the bytes; default: %(default)s",
    )  # fmt: skip
    options = parser.parse_args()
    checkpoints = CheckpointCosts(options.checkpoint_bandwidth, options.checkpoint_seconds, CONTEXT_BYTES)
    more = settings(checkpoints)
    # the interactive runs compute, the others mostly sleep: one of each kind at a time disturbs neither
    with multiprocessing.Pool(1) as computing, multiprocessing.Pool(1) as sleeping:
        seeds = interactive.SEEDS
        waits = computing.map_async(
            run, [functools.partial(delays, seed, cost) for cost in (None, checkpoints) for seed in seeds], chunksize=1
        )
        makespans = sleeping.map(
            run,
            [
                *(functools.partial(alone, column, more) for column in COLUMNS),
                *(functools.partial(arbitrated, column, engine, more) for engine in MemoryEngine for column in COLUMNS),
            ],
            chunksize=1,
        )
        runs = waits.get()
    serial = {column: 2 * seconds for column, seconds in zip(COLUMNS, makespans, strict=False)}
    result: dict[str, object] = {}
    print(f"{'':10}" + "".join(f"{column + ' (makespan)':>22}" for column in COLUMNS) + f"{'interactive p95':>18}")
    for number, engine in enumerate(MemoryEngine):
        first = len(COLUMNS) * (1 + number)
        took = dict(zip(COLUMNS, makespans[first : first + len(COLUMNS)], strict=True))
        together = Delays.together(runs[number * len(seeds) : (number + 1) * len(seeds)])
        speedups = {column: round(serial[column] / took[column], 3) for column in COLUMNS}
        result[engine.value] = {
            **speedups,
            "interactive_p95": round(together.p95, 2),
            "interactive_p50": round(together.p50, 2),
            "interactive_cells": together.cells,
            "makespan_seconds": {column: round(seconds, 1) for column, seconds in took.items()},
        }
        cells = "".join(f"{f'{speedups[column]:.2f} ({took[column]:.0f} s)':>22}" for column in COLUMNS)
        print(f"{engine.value:10}{cells}{together.p95:16.1f} s")
    print(f"one after the other: {', '.join(f'{column} {seconds:.0f} s' for column, seconds in serial.items())}")
    result |= {
        "serial_seconds": {column: round(seconds, 1) for column, seconds in serial.items()},
        "checkpoint_bandwidth": checkpoints.bandwidth,
        "checkpoint_seconds": checkpoints.seconds,
        "context_bytes": checkpoints.context_bytes,
        "simulated": True,
    }
    if options.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
