"""Page-ins before the first launch of a submitted cell, in virtual time with the real arbiter. Measures no GPU.

``python -m benchmarks.anticipate [--json] [--quick]``; half an hour on two cores. The sessions, loads and the GPU are
those of `benchmarks.interactive`: 20 GB each on 80 GB with a bus of 25 GB/s. Each cell computes in Python for 0.5 s
before its first launch, and delays count from the launch until its first kernel can run. Between two cells with GPU
work a user runs 0 to 2 cells without. Of all cells 70 % have been run before with the same text; texts of cells with
and without GPU work differ. What the arbiter is told comes from `CellHistory` alone, which has to learn it.

- **After a release**: 8 sessions with short cells; shares are released after 5 min without GPU work. The 95th
  percentile of first launches after a release, with against without anticipation (`p95_ratio`), eight seeds together;
  `p95_ratio_12` with 12 sessions, where one launch in twenty finds all memory with sessions at work.
- **The engine suspend**: the same with 8 sessions of 8 GB on 40 GB and checkpoints of 5.3 GB/s and 0.3 s
  (`suspend_p95_ratio`); `suspend_p95_ratio_5s` with 5 s of Python before the launch.
- **Wrong guesses**: bytes paged out of sessions at work beyond those without anticipation (`extra_page_outs`), where
  three sessions work without a pause, five fill the rest of the GPU in turn, and each cell of theirs that is expected
  to use the GPU does not.
- **Density**: the largest number of sessions whose 95th percentile stays below 2 s, by load (`sessions_at_2s`), two
  seeds together; `sessions_at_2s_without` without anticipation.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.engines import CHECKPOINT_BANDWIDTH, CHECKPOINT_SECONDS, CONTEXT_BYTES
from benchmarks.interactive import BANDWIDTH, GB, LOADS, SETTINGS, TARGET, VRAM, WORKING_SET, Load, quantile
from gpushare_spawner.arbiter.anticipation import CellHistory
from gpushare_spawner.arbiter.replay import CheckpointCosts, VirtualClock, VirtualGpu, VirtualProcess

PYTHON = 0.5
"""Seconds of Python before a cell's first launch."""
RELEASE_AFTER = 300.0
KERNEL, PID = 1, 100
SEEDS = tuple(range(1, 9))
SEARCH_SEEDS = (1, 2)
KNOWN_TEXTS = 0.7
"""Fraction of the cells whose text has been run before."""
TEXTS = 8
"""Texts that a user runs again, of each kind."""
CHECKPOINTS = CheckpointCosts(CHECKPOINT_BANDWIDTH, CHECKPOINT_SECONDS, CONTEXT_BYTES)
BARS = {"short": 24, "mixed": 15, "long": 10}
START = {"short": 22, "mixed": 12, "long": 8}
"""Where the search for the largest number of sessions begins."""


@dataclass(frozen=True)
class World:
    """One GPU and its sessions. Bytes and seconds."""

    load: Load
    sessions: int
    anticipates: bool
    seed: int
    memory: int = WORKING_SET
    vram: int = VRAM
    checkpoints: CheckpointCosts | None = None
    workers: int = 0
    """Sessions beside them that work without a pause."""
    python: float = PYTHON
    launches: bool = True
    """Whether cells that were learned to use the GPU still use it after the first tenth of the time."""


@dataclass(frozen=True)
class Outcome:
    """What happened in a world."""

    delays: tuple[float, ...]
    """From each launch until its first kernel could run, in seconds."""
    after_release: tuple[float, ...]
    """Those of first launches after a release."""
    displaced: int
    """Bytes paged out of sessions with GPU work."""
    guesses_used: int
    guesses_unused: int


class Notebook:
    """A user: thinks, runs cells without GPU work, and then one with GPU work."""

    def __init__(self, world: World, number: int, gpu: VirtualGpu, clock: VirtualClock) -> None:
        self.world, self.gpu, self.clock = world, gpu, clock
        self.chance = random.Random(f"{world.seed}-{number}")
        self.texts = random.Random(f"texts-{world.seed}-{number}")
        self.process = VirtualProcess(str(number), world.memory)
        self.weight = max(1, 100 // (world.sessions + world.workers))
        self.history = CellHistory()
        self.cells = self.cell = self.launches = 0
        self.released = False
        self.returns: list[int] = []
        """Numbers of the delays that followed a release."""
        gpu.session(self.process.name, self.weight)
        gpu.connect(self.process)
        self.process.done = self.cell_over

    def think(self) -> None:
        """Pause, and run cells without GPU work in the pause."""
        pause = self.world.load.think * math.exp(self.chance.gauss(0, 1))
        for _ in range(self.texts.randrange(3)):
            self.clock.after(pause * self.texts.random(), self.run_without_gpu)
        self.clock.after(pause, self.run)
        serial = self.launches
        self.clock.after(RELEASE_AFTER, lambda: self.release(serial))

    def release(self, serial: int) -> None:
        """Release the share unless a cell with GPU work has been submitted since."""
        if serial == self.launches:
            self.released = True
            self.gpu.weigh(self.process.name, 0)

    def submit(self, gpu: bool) -> int:
        """Submit a cell with or without GPU work to the kernel, which is idle. Return its number."""
        self.cells += 1
        known = self.texts.random() < KNOWN_TEXTS
        text = self.texts.randrange(TEXTS) if known else self.texts.randrange(TEXTS, 2**60)
        self.history.submitted(KERNEL, PID, self.cells, 2 * text + gpu)
        self.history.started(KERNEL, self.cells, self.clock.now)
        expected = self.history.expected(KERNEL, self.clock.now)
        if self.world.anticipates and expected is not None:
            self.gpu.expect(self.process, expected)
        return self.cells

    def run_without_gpu(self) -> None:
        """Run a cell without GPU work, unless one is in progress."""
        if self.history.busy(KERNEL):
            return
        cell = self.submit(gpu=False)

        def over() -> None:
            self.history.ended(KERNEL, cell, self.clock.now)
            if self.world.anticipates:
                self.gpu.expect_no_more(self.process)

        self.clock.after(0.1 + self.texts.expovariate(0.5), over)

    def run(self) -> None:
        """Run a cell with GPU work, after one in progress."""
        if self.history.busy(KERNEL):
            self.clock.after(0.1, self.run)
            return
        self.launches += 1
        self.cell = self.submit(gpu=True)
        self.clock.after(self.world.python, self.launch)

    def launch(self) -> None:
        """Launch the cell's work: the agent restores the share."""
        if not self.world.launches and self.clock.now > self.world.load.horizon / 10:
            if self.world.anticipates:
                self.gpu.expect_no_more(self.process)
            self.cell_over()
            return
        if self.released:
            self.released = False
            self.returns.append(len(self.process.delays))
            self.gpu.weigh(self.process.name, self.weight)
        self.history.worked((PID,), self.clock.now)
        cells = self.world.load.cells
        _, median, sigma = self.chance.choices(cells, [part for part, _, _ in cells])[0]
        self.gpu.submit(self.process, median * math.exp(self.chance.gauss(0, sigma)))

    def cell_over(self) -> None:
        """End the cell with GPU work."""
        self.history.ended(KERNEL, self.cell, self.clock.now)
        self.think()


def run(world: World) -> Outcome:
    """Run a world, and leave out its first tenth."""
    clock = VirtualClock()
    gpu = VirtualGpu(clock, world.vram, BANDWIDTH, SETTINGS, world.checkpoints)
    for number in range(world.workers):
        worker = VirtualProcess(f"worker-{number}", world.memory)
        gpu.session(worker.name, max(1, 100 // (world.sessions + world.workers)))
        gpu.connect(worker)
        gpu.submit(worker, 1e9)
    notebooks = [Notebook(world, number, gpu, clock) for number in range(world.sessions)]
    for notebook in notebooks:
        notebook.think()
    clock.run(world.load.horizon)
    begun = world.load.horizon / 10
    delays, returns = [], []
    for notebook in notebooks:
        process = notebook.process
        delays += [delay for at, delay in process.delays if at > begun]
        if process.wants and not process.started and process.submitted > begun:
            delays.append(clock.now - process.submitted)
        returns += [process.delays[n][1] for n in notebook.returns if n < len(process.delays)]
    views = [gpu.arbiter.session_snapshot(process.session) for process in gpu.processes.values()]
    return Outcome(
        tuple(delays),
        tuple(returns),
        sum(process.displaced for process in gpu.processes.values()),
        sum(view.guesses_used for view in views),
        sum(view.guesses_unused for view in views),
    )


def together(worlds: list[World]) -> list[Outcome]:
    """Run worlds, each in a process of the pool."""
    with multiprocessing.Pool() as pool:
        return pool.map(run, worlds, chunksize=1)


def p95_of_returns(world: World) -> tuple[float, float, int]:
    """Return the 95th percentile of first launches after a release, without and with anticipation, and their number."""
    worlds = [replace(world, anticipates=anticipates, seed=seed) for anticipates in (False, True) for seed in SEEDS]
    outcomes = together(worlds)
    halves = outcomes[: len(SEEDS)], outcomes[len(SEEDS) :]
    without, with_it = ([delay for outcome in half for delay in outcome.after_release] for half in halves)
    return quantile(without, 0.95), quantile(with_it, 0.95), len(with_it)


def largest(job: tuple[str, bool]) -> tuple[int, dict[int, float]]:
    """Return the largest number of sessions whose delays stay below the bar, and the percentiles that were run."""
    load, anticipates = job
    p95: dict[int, float] = {}

    def good(sessions: int) -> bool:
        if sessions not in p95:
            runs = [run(World(LOADS[load], sessions, anticipates, seed)) for seed in SEARCH_SEEDS]
            p95[sessions] = quantile([delay for outcome in runs for delay in outcome.delays], 0.95)
        return p95[sessions] < TARGET

    sessions = START[load]
    while sessions > 4 and not good(sessions):
        sessions -= 1
    while good(sessions + 1):
        sessions += 1
    return sessions, p95


def main() -> int:
    """Command line; 0 when all bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--quick", action="store_true", help="without the search for the density")
    options = parser.parse_args()
    began = time.monotonic()
    short = LOADS["short"]
    small = World(short, 8, True, 1, memory=8 * GB, vram=40 * GB, checkpoints=CHECKPOINTS)
    result: dict[str, Any] = {"simulated": True}
    for name, world in (
        ("p95_ratio", World(short, 8, True, 1)),
        ("p95_ratio_12", World(short, 12, True, 1)),
        ("suspend_p95_ratio", small),
        ("suspend_p95_ratio_5s", replace(small, python=5.0)),
    ):
        without, with_it, returns = p95_of_returns(world)
        result[name] = round(with_it / without, 3)
        print(f"{name:22}{with_it:8.2f} s against {without:.2f} s of {returns} launches: {result[name]}")
    wrong = World(short, 5, False, 1, workers=3, launches=False)
    outcomes = together([replace(wrong, anticipates=a, seed=seed) for a in (False, True) for seed in SEEDS])
    displaced = [sum(o.displaced for o in half) for half in (outcomes[: len(SEEDS)], outcomes[len(SEEDS) :])]
    result["extra_page_outs"] = displaced[1] - displaced[0]
    result["wrong_guesses"] = sum(outcome.guesses_unused for outcome in outcomes)
    print(f"{result['wrong_guesses']} wrong guesses: {result['extra_page_outs']} more bytes left sessions at work")
    if not options.quick:
        jobs = [(load, anticipates) for load in ("long", "mixed", "short") for anticipates in (True, False)]
        with multiprocessing.Pool() as pool:
            found = dict(zip(jobs, pool.map(largest, jobs, chunksize=1), strict=True))
        for key, anticipates in (("sessions_at_2s", True), ("sessions_at_2s_without", False)):
            result[key] = {load: found[load, anticipates][0] for load in BARS}
            result[f"p95{key.removeprefix('sessions')}"] = {load: found[load, anticipates][1] for load in BARS}
            print(f"{key:22} {result[key]}")
    result["seconds"] = round(time.monotonic() - began, 1)
    met = result["p95_ratio"] <= 0.5 and result["extra_page_outs"] <= 0 and result["suspend_p95_ratio"] <= 0.5
    met = met and all(result.get("sessions_at_2s", BARS)[load] >= bar for load, bar in BARS.items())
    if options.json:
        print(json.dumps(result))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
