"""How long a cell waits until it runs, in virtual time with the real arbiter. Nothing here is measured on a GPU.

``python -m benchmarks.interactive [--full] [--json]``; some minutes on two cores. The settings are the shipped ones.

**Start delays.** Sessions on one GPU of 80 GB with a bus of 25 GB/s each way. Every session uses 20 GB, so four
fit, and has the same share. It thinks (lognormal, sigma 1) and then runs a cell that keeps the whole GPU busy:

| load | median think time | cells: median length alone, sigma (lognormal) |
|---|---|---|
| short | 120 s | 3.7 s, 1.36 |
| mixed | 120 s | four of five: 3 s, 1.0; one of five: 95 s, 0.7 |
| long | 600 s | 120 s, 1.36 |

The delay lasts from the submission of a cell until its first kernel can run, pages included. The parameters are
free in the figures that are to be beaten (14, 8 and 6 sessions below 2 s at the 95th percentile; with 12 sessions
of the mixed load 151 s, and 17 s with an overhead bound of 20 %). They were chosen so that the arbiter of commit
d601261 gives about these: three seeds over 3 to 12 h gave 13 to 14, 7 and 5 to 6 sessions, and with 12 sessions 120
and 181 s (bound 20 %: 19 and 25 s). The default run searches for the largest number of sessions, with the delays of
two seeds together; ``--full`` shows all from 4 to 20. The run with 12 sessions of the mixed load lasts for 4 h and has
three seeds, whose delays count together: one seed of two hours is too short for a stable 95th percentile (2 to 34 s).

**Immediate return.** 301 sessions come within 4 h to 32 such GPUs, each with 0.25 of one, placed by the real
ledger; who finds no capacity waits in a queue. Tasks take a median of 5 min (lognormal, sigma 1) with a quarter of
the GPU. Think times are drawn from the quantiles 0.5 min, p50 3, p75 7, p90 35, 700 min: sessions are busy for 24 %
of their time. Working sets are lognormal, median 8 GB, sigma 0.7, at most 20 GB. After 5 min without work the share
is released and lent; the next task restores it. Counted: first tasks after a release, and how many of them start
within 100 ms, with three seeds together. Only here `period` is 30 s instead of the shipped 0.2 s, since hours of 32
GPUs would take hours.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpushare_spawner.arbiter.replay import CheckpointCosts, VirtualClock, VirtualGpu, VirtualProcess
from gpushare_spawner.arbiter.session import ArbiterSettings
from gpushare_spawner.model.report import GpuReport, Report
from gpushare_spawner.model.share import Share
from gpushare_spawner.placement.feed import LedgerFeed
from gpushare_spawner.placement.node import Allocation
from gpushare_spawner.placement.request import PlacementRequest
from gpushare_spawner.plan.answers import pause_of

GB = 10**9
VRAM, BANDWIDTH, WORKING_SET = 80 * GB, 25e9, 20 * GB
HOURS = 3600.0
TARGET = 2.0
"""Seconds: bar for the 95th percentile of start delays."""
COUNTS = range(4, 21)
SETTINGS = ArbiterSettings()
MIXED_HORIZON = 4 * HOURS
"""Of the run with 12 sessions of the mixed load."""
SEEDS = (1, 2, 3)
SEARCH_SEEDS = (1, 2)


@dataclass(frozen=True)
class Load:
    """What the sessions of one GPU do. Seconds."""

    think: float
    """Median."""
    cells: tuple[tuple[float, float, float], ...]
    """(part of the cells, median GPU seconds, sigma)."""
    horizon: float
    """How long they are watched."""


LOADS = {
    "short": Load(120.0, ((1.0, 3.7, 1.36),), 2 * HOURS),
    "mixed": Load(120.0, ((0.8, 3.0, 1.0), (0.2, 95.0, 0.7)), 2 * HOURS),
    "long": Load(600.0, ((1.0, 120.0, 1.36),), 8 * HOURS),
}
START = {"short": 16, "mixed": 10, "long": 7}
"""Where the search for the largest number of sessions begins."""


@dataclass(frozen=True)
class Delays:
    """The result of one run."""

    p50: float
    p95: float
    cells: int
    busy: float
    """Part of the time for which the GPU ran cells."""
    delays: tuple[float, ...] = field(default=(), repr=False)
    """Of each cell, in seconds."""

    @classmethod
    def together(cls, runs: Sequence[Delays]) -> Delays:
        """The runs as one: all their delays, the sum of their cells."""
        delays = [delay for run in runs for delay in run.delays]
        cells, busy = sum(run.cells for run in runs), sum(run.busy for run in runs) / len(runs)
        return cls(quantile(delays, 0.5), quantile(delays, 0.95), cells, busy, tuple(delays))


def quantile(values: list[float], part: float) -> float:
    """The value that this part of the values does not exceed; 0 of none."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))] if values else 0.0


def start_delays(
    sessions: int, load: Load, settings: ArbiterSettings, seed: int = 1, checkpoints: CheckpointCosts | None = None
) -> Delays:
    """Run so many sessions on one GPU. `checkpoints`: of the engine suspend; None: of the engine managed."""
    clock = VirtualClock()
    gpu = VirtualGpu(clock, VRAM, BANDWIDTH, settings, checkpoints)
    kernels = []
    for number in range(sessions):
        chance = random.Random(f"{seed}-{number}")
        kernel = VirtualProcess(str(number), WORKING_SET)
        gpu.session(kernel.name, max(1, 100 // sessions))
        gpu.connect(kernel)

        def cell(kernel: VirtualProcess = kernel, chance: random.Random = chance) -> None:
            _, median, sigma = chance.choices(load.cells, [part for part, _, _ in load.cells])[0]
            gpu.submit(kernel, median * math.exp(chance.gauss(0, sigma)))

        def think(chance: random.Random = chance, cell: Callable[[], None] = cell) -> None:
            clock.after(load.think * math.exp(chance.gauss(0, 1)), cell)

        kernel.done = think
        kernels.append(kernel)
        think()
    clock.run(load.horizon)
    begun = load.horizon / 10
    delays = [delay for kernel in kernels for at, delay in kernel.delays if at > begun]
    delays += [clock.now - k.submitted for k in kernels if k.wants and not k.started and k.submitted > begun]
    return Delays(
        quantile(delays, 0.5),
        quantile(delays, 0.95),
        sum(kernel.bursts for kernel in kernels),
        sum(kernel.gpu_seconds for kernel in kernels) / load.horizon,
        tuple(delays),
    )


def largest(name: str) -> tuple[int, dict[int, Delays]]:
    """The largest number of sessions whose delays stay below the bar, by search, and what was run for it."""
    runs: dict[int, Delays] = {}

    def good(sessions: int) -> bool:
        if sessions not in runs:
            runs[sessions] = Delays.together([start_delays(sessions, LOADS[name], SETTINGS, s) for s in SEARCH_SEEDS])
        return runs[sessions].p95 < TARGET

    sessions = START[name]
    while sessions > COUNTS[0] and not good(sessions):
        sessions -= 1
    while sessions < COUNTS[-1] and good(sessions + 1):
        sessions += 1
    return sessions, runs


# -- immediate return ------------------------------------------------------------------------------------------------

GPUS, SESSIONS, UNITS = 32, 301, 25
RELEASE_AFTER = 300.0
IMMEDIATE = 0.1


def think_time(chance: random.Random) -> float:
    """Seconds between two tasks."""
    return pause_of(chance.random())


class Cluster:
    """GPUs with the real ledger and arbiters; sessions that come, work, pause, are released and return."""

    def __init__(self, settings: ArbiterSettings, seed: int) -> None:
        self.clock = VirtualClock()
        self.seed = seed
        self.chances: dict[str, random.Random] = {}
        """By session, so that what a session does depends on no other: runs with other settings compare."""
        cards = tuple(
            GpuReport(index=number, uuid=f"GPU-{number:02}", model="A100", memory_bytes=VRAM) for number in range(GPUS)
        )
        self.ledger = LedgerFeed().follow([Report(node="node", published_at=0, gpus=cards, sessions=())])
        self.gpus = {card.uuid: VirtualGpu(self.clock, VRAM, BANDWIDTH, settings) for card in cards}
        self.queue: list[VirtualProcess] = []
        self.released: set[str] = set()
        self.returns: list[float] = []
        """Start delays of first tasks after a release, seconds."""
        self.starts: list[float] = []
        self.tasks: dict[str, int] = {}
        self.weights: dict[str, int] = {}

    def run(self, horizon: float) -> None:
        """Let the sessions come, and the time go by."""
        for number in range(SESSIONS):
            name = f"session-{number}"
            chance = self.chances[name] = random.Random(f"{self.seed}-{number}")
            kernel = VirtualProcess(name, min(20 * GB, int(8 * GB * math.exp(chance.gauss(0, 0.7)))))
            self.clock.at(chance.uniform(0, 4 * HOURS), lambda kernel=kernel: self.arrive(kernel))  # type: ignore[misc]
        self.clock.run(horizon)

    def arrive(self, kernel: VirtualProcess) -> None:
        """A user wants a server."""
        self.queue.append(kernel)
        self.place()

    def place(self) -> None:
        """Start the servers for which there is capacity, in order."""
        while self.queue:
            placement = self.ledger.place(PlacementRequest(Share(UNITS)))
            if placement is None:
                return
            kernel = self.queue.pop(0)
            (uuid,) = placement.gpus
            self.ledger.add(
                Allocation(kernel.name, placement.gpus, UNITS, placement.borrowed, UNITS, opened_at=self.clock.now)
            )
            gpu = self.gpus[uuid]
            gpu.session(kernel.name, UNITS)
            gpu.connect(kernel)
            kernel.done = lambda kernel=kernel, gpu=gpu, uuid=uuid: self.pause(kernel, gpu, uuid)  # type: ignore[misc]
            self.reweigh(uuid)
            pause = think_time(self.chances[kernel.name])
            self.clock.after(pause, lambda k=kernel, g=gpu, u=uuid: self.work(k, g, u))  # type: ignore[misc]

    def reweigh(self, uuid: str) -> None:
        """What sessions are guaranteed on a GPU has changed."""
        for kernel in self.gpus[uuid].processes.values():
            active = self.ledger.allocations[kernel.name].effective_units > 0
            weight = max(1, self.ledger.guaranteed(kernel.name)) if active else 0
            if weight != self.weights.get(kernel.name):
                self.weights[kernel.name] = weight
                self.gpus[uuid].weigh(kernel.name, weight)

    def pause(self, kernel: VirtualProcess, gpu: VirtualGpu, uuid: str) -> None:
        """A task is over: the user thinks, and the share is released if that takes long."""
        number = self.tasks[kernel.name] = self.tasks.get(kernel.name, 0) + 1
        self.starts.append(kernel.delays[-1][1])
        if kernel.name in self.released:
            self.released.discard(kernel.name)
            self.returns.append(kernel.delays[-1][1])
        self.clock.after(think_time(self.chances[kernel.name]), lambda: self.work(kernel, gpu, uuid))
        self.clock.after(RELEASE_AFTER, lambda: self.release(kernel, uuid, number))

    def release(self, kernel: VirtualProcess, uuid: str, number: int) -> None:
        """Nothing has happened since that task."""
        if self.tasks.get(kernel.name) == number and not kernel.wants:
            self.released.add(kernel.name)
            self.ledger.replace(self.ledger.allocations[kernel.name].with_effective(0))
            self.reweigh(uuid)
            self.place()

    def work(self, kernel: VirtualProcess, gpu: VirtualGpu, uuid: str) -> None:
        """The next task."""
        if self.ledger.allocations[kernel.name].effective_units < UNITS:
            self.ledger.replace(self.ledger.allocations[kernel.name].with_effective(UNITS))
            self.reweigh(uuid)
        gpu.submit(kernel, 300 * math.exp(self.chances[kernel.name].gauss(0, 1)) * UNITS / 100)


@dataclass(frozen=True)
class Returns:
    """Tasks of the cluster, and how many of them started within 100 ms."""

    returns: int
    """First tasks after a release."""
    soon: int
    tasks: int
    tasks_soon: int


def immediate_return(settings: ArbiterSettings, seed: int = 1) -> Returns:
    """Run the cluster for ten hours."""
    cluster = Cluster(settings, seed)
    cluster.run(10 * HOURS)
    soon = sum(delay <= IMMEDIATE for delay in cluster.returns)
    all_soon = sum(delay <= IMMEDIATE for delay in cluster.starts)
    return Returns(len(cluster.returns), soon, len(cluster.starts), all_soon)


def one_job(job: tuple[str, Any]) -> object:
    """One part of the benchmark, in a process of its own."""
    name, argument = job
    if name == "largest":
        return largest(str(argument))
    if name == "delays":
        load, sessions, settings, seed = argument
        return start_delays(sessions, load, settings, seed)
    return immediate_return(replace(SETTINGS, period=30.0), int(str(argument)))


def main() -> int:
    """Command line; 0 when all bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="all numbers of sessions from 4 to 20")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args()
    began = time.monotonic()
    before = replace(SETTINGS, interactive_overhead_bound=SETTINGS.overhead_bound)
    mixed = replace(LOADS["mixed"], horizon=MIXED_HORIZON)
    every = [(load, sessions) for load in LOADS for sessions in COUNTS] if options.full else []
    # the long ones first: the last job of a pool leaves a core without work
    parts: dict[str, list[tuple[str, Any]]] = {
        "largest": [("largest", load) for load in LOADS],
        "now": [("delays", (mixed, 12, SETTINGS, seed)) for seed in SEEDS],
        "old": [("delays", (mixed, 12, before, seed)) for seed in SEEDS],
        "immediate": [("immediate", seed) for seed in SEEDS],
        "every": [("delays", (LOADS[load], sessions, SETTINGS, 1)) for load, sessions in every],
    }
    with multiprocessing.Pool() as pool:
        results = iter(pool.map(one_job, [job for jobs in parts.values() for job in jobs], chunksize=1))
    done: dict[str, list[Any]] = {name: [next(results) for _ in jobs] for name, jobs in parts.items()}
    at_most = {}
    print(f"{'load':8}{'sessions':>10}{'p50 s':>9}{'p95 s':>9}{'cells':>8}{'busy':>7}")
    for load, (sessions, runs) in zip(LOADS, done["largest"], strict=True):
        at_most[load] = sessions
        for count, run in sorted(runs.items()):
            print(f"{load:8}{count:10}{run.p50:9.2f}{run.p95:9.2f}{run.cells:8}{run.busy:7.2f}")
    for (load, sessions), run in zip(every, done["every"], strict=True):
        print(f"{load:8}{sessions:10}{run.p50:9.2f}{run.p95:9.2f}{run.cells:8}{run.busy:7.2f}")
    now, old = Delays.together(done["now"]), Delays.together(done["old"])
    returns = sum(one.returns for one in done["immediate"])
    part = sum(one.soon for one in done["immediate"]) / returns
    all_part = sum(one.tasks_soon for one in done["immediate"]) / sum(one.tasks for one in done["immediate"])
    result = {
        "sessions_at_2s": at_most,
        "p95_delay_12_mixed": round(now.p95, 2),
        "p95_delay_12_mixed_by_seed": [round(run.p95, 2) for run in done["now"]],
        "p95_delay_12_mixed_batch_bound": round(old.p95, 2),
        "p95_delay_12_mixed_batch_bound_by_seed": [round(run.p95, 2) for run in done["old"]],
        "cells_12_mixed": now.cells,
        "cells_12_mixed_batch_bound": old.cells,
        "immediate_return": round(part, 4),
        "immediate_return_by_seed": [round(one.soon / one.returns, 4) for one in done["immediate"]],
        "returns": returns,
        "immediate_starts": round(all_part, 4),
        "seconds": round(time.monotonic() - began, 1),
    }
    bars = (
        at_most["short"] >= 16
        and at_most["mixed"] >= 10
        and at_most["long"] >= 7
        and result["p95_delay_12_mixed"] < 20
        and now.cells >= old.cells
        and part >= 0.95
    )
    by_seed = ", ".join(f"{run.p95:.1f}" for run in done["now"])
    print(f"12 sessions, mixed: p99 {quantile(list(now.delays), 0.99):.2f} s, longest {max(now.delays):.2f} s")
    print(f"12 sessions, mixed: p95 {now.p95:.2f} s (seeds by themselves: {by_seed} s), {now.cells} cells")
    old_p95, old_cells = result["p95_delay_12_mixed_batch_bound"], result["cells_12_mixed_batch_bound"]
    print(f"the same with the bound of batch work throughout: p95 {old_p95} s, {old_cells} cells")
    print(f"{returns} returns after a release: {part:.2%} start within 100 ms; of all tasks {all_part:.1%}")
    if options.json:
        print(json.dumps(result))
    return 0 if bars else 1


if __name__ == "__main__":
    sys.exit(main())
