"""Two jobs on one GPU that is too small, or just large enough, for both: simulated, and scaled down in time.

    .venv/bin/python -m benchmarks.oversubscription [--json]

First: can the simulated GPU be trusted here? The jobs and the GPU of nvshare's evaluation (G. Alexopoulos, "nvshare:
Practical GPU Sharing Without Memory Size Constraints", thesis, table 12.2: Tesla P100 16 GB, PCIe gen3; two instances
of a job at once; working sets of 7.2 and 15.3 GB; half or nine tenths of the time on the GPU) are modelled with a few
parameters, see MODEL below, and run on the simulated driver: one job alone, both with no scheduler at all, both under
a first-come scheduler with nvshare's quantum of 30 s. The makespans are held against the table's.

Then the same jobs run with libgpushare.so under a real agent, and are held against one after the other, and against
no scheduler.

Everything is a real process using NVIDIA's Python bindings on the simulated driver. Time and memory are both scaled
by SCALE, so bandwidths are what they are. The agent's settings that are times are scaled too; its latencies cannot
be, so they weigh SCALE times as much as they would.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

import gpushare_simgpu

from benchmarks.first_come import FirstCome
from benchmarks.oversubscription_job import Phase, Shape
from gpushare_spawner import native
from gpushare_spawner.agent.control_socket import ControlSocket
from gpushare_spawner.agent.gpus.nvml import Nvml
from gpushare_spawner.agent.node import Node, NodeSettings
from gpushare_spawner.agent.sessions.environment import Libraries
from gpushare_spawner.agent.state_folder import StateFolder
from gpushare_spawner.arbiter.session import ArbiterSettings
from gpushare_spawner.clients.agent import AgentClient
from gpushare_spawner.model.control import AgentUnreachable, OpenRequest
from gpushare_spawner.model.layers import MemoryEngine
from gpushare_spawner.sharing.native import merged

SCALE = 25.0

TABLE = {
    # thesis, table 12.2; makespans in seconds
    "solo": {"small_50": 1318.0, "small_90": 692.0, "big_50": 1383.0, "big_90": 719.0},
    "serial": {"small_50": 2636.0, "small_90": 1384.0, "big_50": 2766.0, "big_90": 1438.0},
    "unscheduled": {"small_50": 1772.0, "small_90": 1128.0, "big_50": 11757.0, "big_90": 11434.0},
    "first_come": {"small_50": 2017.0, "small_90": 1366.0, "big_50": 2170.0, "big_90": 1521.0},
}
COLUMNS = tuple(TABLE["solo"])

# MODEL: what explains the table
GPU_BYTES = 16e9
WORKING_SET = {"small": 7.2e9, "big": 15.3e9}
BANDWIDTH = 12.3e9
"""Bytes per second each way, by faults as by prefetch: a swap of 30.6 GB costs 2.49 s, which is what the dependence
of big_90 on the quantum says (makespan = W*Q/(Q - s))."""
STARTUP = 58.0
"""Seconds on the CPU before the first GPU work."""
PHASE = (10.0, 20.0)
"""Shortest and longest GPU phase and CPU phase of the jobs of 50 %, in seconds, evenly spread; those of 90 % have one
GPU phase. Much less than 30 s: small_50 does not depend on the quantum."""
KERNEL = {"50": 0.16, "90": 0.25}
"""Seconds of a kernel, which touches the whole working set: where two thrash, each kernel faults it in."""
DUTY = 0.82
"""Part of a GPU phase in which kernels run; the rest is host time between them, spread evenly from half to one and a
half of its mean."""
CPU_CONTENTION = 0.6
"""By how much longer CPU phases take while both jobs are in one: they share the machine's cores."""
THRASHING_PART = 0.25
"""Thrashing is steady, and takes hours: a part of the work is enough to know its pace."""
QUANTUM = 30.0
NOTICE = 6.75
"""Seconds without GPU work until the first-come scheduler's client gives way: it looks every 5 s and wants 5 s of
quiet; that is in the mean between 5 and 7.5."""


def shapes(column: str, part: float = 1.0) -> list[Shape]:
    """The two jobs of a column, scaled. `part`: only so much of the work."""
    return [shape(column, part, number) for number in (1, 2)]


def shape(column: str, part: float, number: int) -> Shape:
    """One job. Chance is the same in every run and every row."""
    size, share = column.split("_")
    chance, between = random.Random(f"{share} {number}"), random.Random(number)
    kernel = KERNEL[share]
    gap = kernel / DUTY - kernel
    work = (TABLE["solo"][column] - STARTUP) * part
    phases = []
    while work > kernel:
        gpu = min(chance.uniform(*PHASE), work) if share == "50" else work
        cpu = min(chance.uniform(*PHASE), work - gpu) if share == "50" else 0.0
        gaps = [gap * between.uniform(0.5, 1.5) for _ in range(max(1, round(gpu / (kernel + gap))))]
        # Exactly the phase's length, whatever chance said.
        surplus = (sum(gaps) + len(gaps) * kernel - gpu) / len(gaps)
        gaps = [max(0.0, length - surplus) for length in gaps]
        phases.append(Phase([length / SCALE for length in gaps], cpu / SCALE))
        work -= gpu + cpu
    return Shape(round(WORKING_SET[size] / SCALE), kernel / SCALE, STARTUP / SCALE, CPU_CONTENTION, phases)


class Machine:
    """A simulated machine with one GPU, of its own. `more`: settings of the simulator beside those of MODEL."""

    def __init__(self, more: Mapping[str, str] = MappingProxyType({})) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="gs"))
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("GPUSHARE", "SIMGPU"))
        }
        self.environment |= {
            "LD_LIBRARY_PATH": str(gpushare_simgpu.folder()),
            "SIMGPU_STATE": str(self.folder / "simgpu"),
            "SIMGPU_DEVICES": "1",
            "SIMGPU_MEMORY": str(round(GPU_BYTES / SCALE)),
            "SIMGPU_PAGE": "262144",
            "SIMGPU_H2D": str(BANDWIDTH),
            "SIMGPU_D2H": str(BANDWIDTH),
            "SIMGPU_FAULT": str(BANDWIDTH),
            **more,
        }

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def run_jobs(
    jobs_shapes: list[Shape],
    environments: list[dict[str, str]],
    managed: bool,
    scheduler: FirstCome | None,
    folder: Path,
) -> float:
    """Start the jobs together; the time until the last one is done, in seconds of the table."""
    files = []
    for number, job_shape in enumerate(jobs_shapes):
        files.append(folder / f"job{number}.json")
        files[-1].write_text(json.dumps(dataclasses.asdict(job_shape)))
    cores = folder / "cores"
    cores.write_bytes(bytes(len(files)))
    ends = [scheduler.connect() if scheduler else None for _ in files]
    jobs = [
        subprocess.Popen(
            [
                sys.executable, "-m", "benchmarks.oversubscription_job", str(file),
                "managed" if managed else "plain", str(end.fileno() if end else -1), str(NOTICE / SCALE),
                str(cores), str(number),
            ],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            pass_fds=[end.fileno()] if end else [],
        )
        for number, (file, environment, end) in enumerate(zip(files, environments, ends, strict=True))
    ]  # fmt: skip
    try:
        if scheduler:
            scheduler.start()
        for job in jobs:
            assert job.stdout is not None
            if job.stdout.readline().strip() != "ready":
                raise RuntimeError("a job did not start, see above")
        for job in jobs:
            assert job.stdin is not None
            job.stdin.write("go\n")
            job.stdin.flush()
        took = []
        for job in jobs:
            assert job.stdout is not None
            line = job.stdout.readline()
            if not line:
                raise RuntimeError("a job ended early, see above")
            took.append(float(line))
        return max(took) * SCALE
    finally:
        for job, end in zip(jobs, ends, strict=True):
            assert job.stdin is not None
            with contextlib.suppress(OSError):
                job.stdin.write("end\n")
                job.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(10)
            job.kill()
            job.wait()
            if end:
                end.close()


def alone(column: str, more: Mapping[str, str] = MappingProxyType({})) -> float:
    """One job on an idle GPU. `more`: see `Machine`."""
    machine = Machine(more)
    try:
        return run_jobs(shapes(column)[:1], [machine.environment], True, None, machine.folder)
    finally:
        machine.close()


def unscheduled(column: str) -> float:
    """Two jobs, and nobody to decide. Where they thrash only a part of the work is done, and the rest is inferred."""
    machine = Machine()
    try:
        part = THRASHING_PART if column.startswith("big") else 1.0
        seconds = run_jobs(shapes(column, part), [machine.environment] * 2, True, None, machine.folder)
        return STARTUP + (seconds - STARTUP) / part
    finally:
        machine.close()


def first_come(column: str) -> float:
    """Two jobs under the first-come scheduler."""
    machine = Machine()
    scheduler = FirstCome(QUANTUM / SCALE)
    try:
        return run_jobs(shapes(column), [machine.environment] * 2, True, scheduler, machine.folder)
    finally:
        scheduler.close()
        machine.close()


def arbitrated(
    column: str, engine: MemoryEngine = MemoryEngine.MANAGED, more: Mapping[str, str] = MappingProxyType({})
) -> float:
    """Two jobs with libgpushare.so under the agent. `more`: see `Machine`."""
    machine = Machine(more)
    try:
        return asyncio.run(_arbitrated(machine, shapes(column), engine))
    finally:
        machine.close()


async def _arbitrated(machine: Machine, jobs: list[Shape], engine: MemoryEngine) -> float:
    agent = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.oversubscription", "--agent", str(machine.folder)], env=machine.environment
    )
    try:
        client = AgentClient(machine.folder / "control.sock")
        while True:
            if agent.poll() is not None:
                raise RuntimeError("the agent did not come up, see above")
            with contextlib.suppress(AgentUnreachable):
                gpu = (await client.report()).gpus[0].uuid
                break
            await asyncio.sleep(0.05)
        environments = []
        for name in ("first", "second"):
            request = OpenRequest(
                id=name, user=name, uid=os.getuid(), template="half", gpus=(gpu,), share_units=50, engine=engine
            )
            environments.append(merged(machine.environment, (await client.open(request)).environment))
        return await asyncio.to_thread(run_jobs, jobs, environments, False, None, machine.folder)
    finally:
        agent.send_signal(signal.SIGTERM)
        agent.wait()


def scaled_settings() -> ArbiterSettings:
    """The arbiter's defaults, in the benchmark's time and memory. What a hand-off costs beside the paging is not
    scaled."""
    standard = ArbiterSettings()
    return dataclasses.replace(
        standard,
        min_time_slice=standard.min_time_slice / SCALE,
        hand_off_credit=standard.hand_off_credit / SCALE,
        pause=standard.pause / SCALE,
        short_burst=standard.short_burst / SCALE,
        max_debt=standard.max_debt / SCALE,
        measured_from=round(standard.measured_from / SCALE),
        page_out_step=round(standard.page_out_step / SCALE),
    )


async def serve(folder: Path) -> None:
    """The agent, as ``gpushare agent`` runs it, with the scaled settings."""
    nvml = Nvml()
    libraries = Libraries(preload=native.preload_library(), simulated_driver=gpushare_simgpu.folder())
    state = StateFolder(folder)
    node = Node(NodeSettings(name="benchmark", arbiter=scaled_settings()), nvml.gpus(), nvml, state, libraries)
    control = ControlSocket(folder / "control.sock", node.requests.answer)
    await node.start()
    await control.start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()
    await control.close()
    await node.close()
    state.close()
    nvml.close()


KINDS = {"unscheduled": unscheduled, "solo": alone, "first_come": first_come, "arbiter": arbitrated}


def measure(parallel: int) -> dict[str, dict[str, float]]:
    """All rows and columns, several at a time: each has a machine of its own, and its processes mostly sleep.

    What is held against each other within 2 % runs last, half as many at a time.
    """
    first = [("unscheduled", "big_50"), ("unscheduled", "big_90")]  # the longest ones
    first += [(kind, column) for kind in ("first_come", "solo") for column in COLUMNS]
    last = [("arbiter", column) for column in reversed(COLUMNS)]
    last += [("unscheduled", "small_50"), ("unscheduled", "small_90")]
    makespans: dict[tuple[str, str], float] = {}
    for pairs, at_once in ((first, parallel), (last, max(1, parallel // 2))):
        with ThreadPoolExecutor(at_once) as pool:
            done = pool.map(lambda pair: KINDS[pair[0]](pair[1]), pairs)
            makespans |= dict(zip(pairs, done, strict=True))
    rows = {kind: {column: makespans[kind, column] for column in COLUMNS} for kind in KINDS}
    rows["serial"] = {column: 2 * seconds for column, seconds in rows["solo"].items()}
    return rows


def main() -> int:
    """Print the tables; 0 when all bars are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--parallel", type=int, default=5, metavar="N", help="runs at a time; default: %(default)s")
    parser.add_argument("--only", metavar="ROW:COLUMN", help="one run, for a closer look")
    parser.add_argument("--agent", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.agent is not None:
        asyncio.run(serve(options.agent))
        return 0
    if options.only:
        row, column = options.only.split(":")
        seconds, known = KINDS[row](column), TABLE.get(row, {}).get(column, math.nan)
        print(f"{row} {column}: {seconds:.0f} s (simulated), table: {known:.0f} s")
        return 0
    rows = measure(options.parallel)
    errors = {(row, column): rows[row][column] / TABLE[row][column] - 1 for row in TABLE for column in COLUMNS}
    worst = max(abs(error) for error in errors.values())
    speedup = {column: rows["serial"][column] / rows["arbiter"][column] for column in ("big_50", "big_90")}
    against = {column: rows["arbiter"][column] / rows["unscheduled"][column] for column in ("small_50", "small_90")}

    print("Makespan of two jobs, seconds; simulated (table 12.2 of the nvshare thesis, error)")
    print(f"  {'':<14}" + "".join(f"{column:>26}" for column in COLUMNS))
    for row in TABLE:
        cells = [f"{rows[row][c]:.0f} ({TABLE[row][c]:.0f}, {errors[row, c]:+.1%})" for c in COLUMNS]
        print(f"  {row:<14}" + "".join(f"{cell:>26}" for cell in cells))
    print(f"  {'arbiter':<14}" + "".join(f"{rows['arbiter'][column]:>26.0f}" for column in COLUMNS))
    bars = [
        ("the simulator lands within 10 % of the table", worst <= 0.10, f"{worst:.1%}"),
        ("big_50: at least 1.6 times serial", speedup["big_50"] >= 1.6, f"{speedup['big_50']:.2f}"),
        ("big_90: never below serial", speedup["big_90"] >= 1.0, f"{speedup['big_90']:.3f}"),
        *(
            (f"{column}: within 2 % of no scheduler", ratio <= 1.02, f"{ratio - 1:+.1%}")
            for column, ratio in against.items()
        ),
    ]
    for text, met, figure in bars:
        print(f"  {text}: {figure}, {'met' if met else 'missed'}")
    result = {
        "validation_max_error": worst,
        "speedup": speedup,
        "vs_unscheduled": against,
        "makespan_seconds": rows,
        "scale": SCALE,
        "simulated": True,
    }
    if options.json:
        print(json.dumps(result))
    return 0 if all(met for _, met, _ in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
