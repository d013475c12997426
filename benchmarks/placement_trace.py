"""How much of a cluster's GPUs the strategies fill: the experiment of the FGD paper on Alibaba's openb traces.

Source: Weng and others, Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient Descent,
USENIX ATC 2023; the traces are in github.com/alibaba/clusterdata, cluster-trace-gpu-v2023.

The list of pods is shuffled, and pods drawn from it with replacement are appended until the arrivals ask for 130 % of
the GPUs. No pod leaves or tries again. The figure is the part of the GPUs that is allocated at the end, in percent.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.ledger_check import check_ledger
from gpushare_spawner.model.layers import Placement
from gpushare_spawner.model.report import GpuReport
from gpushare_spawner.model.share import UNITS_PER_GPU, Share
from gpushare_spawner.placement.capacity import Best
from gpushare_spawner.placement.ledger import Ledger
from gpushare_spawner.placement.node import Allocation, NodeResources
from gpushare_spawner.placement.request import Demand, PlacementRequest, Workload, workload_of
from gpushare_spawner.placement.strategy import BestFit, StrandingAwareFgd

TRACES = ("default", "gpushare40", "gpushare100")
SEEDS = range(42, 52)
DATA_VARIABLE = "GPUSHARE_OPENB"
ROOT = Path(__file__).parents[1]

ARRIVALS = 1.3
"""GPUs that the arrivals ask for, in parts of the GPUs that there are."""
POPULAR = 0.95
"""The workload has the most popular kinds of pods, until they are this part of the list."""
MILLI = 1000
"""The trace writes GPUs in thousandths; the ledger counts in units of 1 %."""


@dataclass(frozen=True)
class Node:
    """A line of the list of nodes; memory in bytes."""

    name: str
    cpu: int
    memory: int
    gpus: int
    model: str


@dataclass(frozen=True)
class Pod:
    """A line of a list of pods; ``milli`` of each of ``gpus`` GPUs; memory in bytes."""

    cpu: int
    memory: int
    gpus: int
    milli: int
    models: str
    """Those that will do, with "|" between them; empty: any."""

    @property
    def gpu_milli(self) -> int:
        """Thousandths of GPUs in all."""
        return self.gpus * self.milli

    def demand(self, memory: bool = True) -> Demand:
        """What it asks of a node; a part of 1 % counts as 1 %."""
        units = math.ceil(self.milli * UNITS_PER_GPU / MILLI) if self.gpus else 0
        models = frozenset(self.models.split("|")) if self.models else None
        return Demand(units, self.gpus, self.cpu, self.memory if memory else 0, models)


def find_data(given: str | None) -> Path | None:
    """Return the folder with the traces: the one given, else the environment's, else `data/openb` of a neighbour."""
    named = given or os.environ.get(DATA_VARIABLE)
    if named:
        return Path(named) if Path(named).is_dir() else None
    return next((found for above in ROOT.parents[:2] for found in sorted(above.glob("*/data/openb"))), None)


def read_nodes(data: Path) -> list[Node]:
    """The nodes that have GPUs. Raises FileNotFoundError, naming the file."""
    rows = _rows(data, "openb_node_list_gpu_node.csv")
    return [
        Node(row["sn"], int(row["cpu_milli"]), int(row["memory_mib"]) << 20, int(row["gpu"]), row["model"])
        for row in rows
        if int(row["gpu"]) > 0
    ]


def read_pods(data: Path, trace: str) -> list[Pod]:
    """The pods of a trace. Raises FileNotFoundError, naming the file."""
    return [
        Pod(
            int(row["cpu_milli"]),
            int(row["memory_mib"]) << 20,
            int(row["num_gpu"]),
            int(row["gpu_milli"]),
            row["gpu_spec"] or "",
        )
        for row in _rows(data, f"openb_pod_list_{trace}.csv")
    ]


def _rows(data: Path, name: str) -> Iterator[dict[str, str]]:
    packed = data / f"{name}.gz"
    if packed.exists():
        with gzip.open(packed, "rt", newline="") as lines:
            yield from csv.DictReader(io.StringIO(lines.read()))
    elif (data / name).exists():
        with (data / name).open(newline="") as lines:
            yield from csv.DictReader(lines)
    else:
        raise FileNotFoundError(f"{data} has neither {name}.gz nor {name}")


def workload(pods: Iterable[Pod]) -> Workload:
    """The most popular kinds of pods by CPU, GPUs and models; memory is not looked at."""
    kinds = Counter(pod.demand(memory=False) for pod in pods)
    most = POPULAR * kinds.total()
    chosen, count = [], 0
    for demand, pods_of_it in kinds.most_common():
        chosen.append((demand, float(pods_of_it)))
        count += pods_of_it
        if count >= most:
            break
    return workload_of(chosen)


class Fgd(StrandingAwareFgd):
    """The paper's FGD on the product's measure of fragmentation: its own score, no stranding."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload, stranding=0.0)

    def steps(self, more: float) -> int:
        """Minus the paper's score, a whole number from 0 to 100 of a difference in thousandths of a GPU."""
        thousandths = more * MILLI / UNITS_PER_GPU
        return -int(100 / (1 + math.exp(thousandths / MILLI)))


STRATEGIES: dict[str, Callable[[Workload], Any]] = {
    "sfgd": StrandingAwareFgd, "fgd": Fgd, "best_fit": lambda workload: BestFit(),
}  # fmt: skip


def arrivals(pods: Sequence[Pod], gpus: int, seed: int) -> list[Pod]:
    """The pods in the order in which they come."""
    chance = random.Random(seed)
    coming = list(pods)
    chance.shuffle(coming)
    asked = sum(pod.gpu_milli for pod in coming)
    while asked < ARRIVALS * gpus * MILLI:
        coming.append(chance.choice(pods))
        asked += coming[-1].gpu_milli
    return coming


def allocated(data: Path, trace: str, seed: int, name: str) -> float:
    """Percent of the GPUs that are allocated after all pods of a trace have come."""
    nodes, pods = read_nodes(data), read_pods(data, trace)
    strategy = STRATEGIES[name](workload(pods))
    ledger = Ledger()
    left = {node.name: (node.cpu, node.memory) for node in nodes}
    for node in nodes:
        cards = [
            GpuReport(index=index, uuid=f"{node.name}-{index}", model=node.model, memory_bytes=0)
            for index in range(node.gpus)
        ]
        ledger.put_node(node.name, cards)
        ledger.put_resources(node.name, NodeResources(*left[node.name]))
    gpus = sum(node.gpus for node in nodes)
    given = 0
    placed: Placement | Best | None
    for number, pod in enumerate(arrivals(pods, gpus, seed)):
        demand = pod.demand()
        if pod.gpus:
            share = Share(demand.units, demand.count)
            placed = ledger.place(PlacementRequest(share, demand.cpu, demand.memory, demand.models), strategy)
        else:
            placed = ledger.capacity.best(demand, strategy)
        if placed is None:
            continue
        cpu, memory = left[placed.node]
        left[placed.node] = (cpu - pod.cpu, memory - pod.memory)
        ledger.put_resources(placed.node, NodeResources(*left[placed.node]))
        if pod.gpus:
            ledger.add(Allocation(str(number), placed.gpus, demand.units, effective_units=demand.units))
            given += pod.gpu_milli
    check_ledger(ledger)
    return 100 * given / (gpus * MILLI)


def run(
    data: Path, traces: Sequence[str], seeds: Sequence[int], names: Sequence[str]
) -> dict[str, dict[str, list[float]]]:
    """Percent allocated by strategy, trace and seed, on all cores."""
    jobs = [(name, trace, seed) for name in names for trace in traces for seed in seeds]
    with ProcessPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        figures = pool.map(allocated, *zip(*((data, trace, seed, name) for name, trace, seed in jobs), strict=True))
        found: dict[str, dict[str, list[float]]] = {name: {trace: [] for trace in traces} for name in names}
        for (name, trace, _), figure in zip(jobs, figures, strict=True):
            found[name][trace].append(figure)
    return found
