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
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.ledger_check import check_ledger
from gpushare_spawner.model.layers import Placement
from gpushare_spawner.model.report import GpuReport
from gpushare_spawner.model.share import UNITS_PER_GPU, Share
from gpushare_spawner.placement.capacity import UNRATED, Best, FreeCapacity, Pricing, Rated
from gpushare_spawner.placement.ledger import Ledger
from gpushare_spawner.placement.node import Allocation, NodeCapacity, NodeResources
from gpushare_spawner.placement.request import Demand, PlacementRequest, Workload, workload_of
from gpushare_spawner.placement.strategy import BestFit, RatingStrategy, StrandingAwareFgd, places

TRACES = ("default", "gpushare40", "gpushare100")
SEEDS = range(42, 52)
DATA_VARIABLE = "GPUSHARE_OPENB"
ROOT = Path(__file__).parents[1]

ARRIVALS = 1.3
"""GPUs that the arrivals ask for, in parts of the GPUs that there are."""
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
            row.get("gpu_spec") or "",
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
    """All kinds of pods by CPU, GPUs and models with their numbers; memory is ignored."""
    kinds = Counter(pod.demand(memory=False) for pod in pods)
    return workload_of((demand, float(count)) for demand, count in kinds.items())


class Fgd(StrandingAwareFgd):
    """The paper's FGD on the product's measure of fragmentation: its own score, no stranding."""

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload, stranding=0.0)

    def steps(self, more: float) -> int:
        """Minus the paper's score, a whole number from 0 to 100 of a difference in thousandths of a GPU."""
        thousandths = more * MILLI / UNITS_PER_GPU
        # the tolerance is for rounding errors, as in the default strategy
        return -int(100 / (1 + math.exp(thousandths / MILLI)) + 1e-9)

    def pricing(self, totals: Sequence[int]) -> Pricing | None:
        """None: the paper's FGD has no prices."""
        return None


@dataclass(frozen=True)
class PaperBestFit(RatingStrategy):
    """The paper's best fit: takes the node with the least CPU and GPUs left, in steps of 1 % of the largest node."""

    largest: Node

    def rate(self, demand: Demand, node: NodeCapacity) -> Rated:
        """Rate by what is left afterwards; then by the free units of the GPU. The least is best."""
        free = sum(gpu.free for gpus in node.healthy.values() for gpu in gpus) - demand.total_units
        left = ((node.resources.cpu or 0) - demand.cpu) / self.largest.cpu + free / UNITS_PER_GPU / self.largest.gpus
        return min(place.rated(node, -int(100 - 50 * left), place.free) for place in places(demand, node))


class Random:
    """Takes a random node that fits, and a random GPU there."""

    def __init__(self) -> None:
        self._chance = random.Random(1)

    def choose(self, request: PlacementRequest, capacity: FreeCapacity) -> Best | None:
        """See `gpushare_spawner.placement.strategy.Strategy`."""
        return self.best(request.demand, capacity)

    def best(self, demand: Demand, capacity: FreeCapacity) -> Best | None:
        """Return a random place; None if there is none."""
        fitting = sorted(capacity.admitted(demand, UNRATED))
        if not fitting:
            return None
        node = capacity.nodes[self._chance.choice(fitting)]
        return Best(node.name, self._chance.choice(places(demand, node)).rated(node).gpus)


LARGEST = Node("largest", cpu=128_000, memory=0, gpus=8, model="")
"""The most that a node of openb has."""

STRATEGIES: dict[str, Callable[[Workload], RatingStrategy | Random]] = {
    "ours": StrandingAwareFgd,
    "fgd": Fgd,
    "best_fit": lambda workload: BestFit(),
    "random": lambda workload: Random(),
    "paper_best_fit": lambda workload: PaperBestFit(LARGEST),
}


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


class Cluster:
    """The nodes of openb in a ledger, with the pods that a strategy has placed there."""

    def __init__(self, nodes: Sequence[Node], strategy: RatingStrategy | Random) -> None:
        self.ledger = Ledger()
        self.gpus = sum(node.gpus for node in nodes)
        self._strategy = strategy
        self._left = {node.name: (node.cpu, node.memory) for node in nodes}
        for node in nodes:
            cards = [
                GpuReport(index=index, uuid=f"{node.name}-{index}", model=node.model, memory_bytes=0)
                for index in range(node.gpus)
            ]
            self.ledger.put_node(node.name, cards)
            self._use(node.name, 0, 0)

    def place(self, number: int, pod: Pod) -> str | None:
        """Place a pod; return its node, or None if it fits nowhere."""
        demand = pod.demand()
        request = PlacementRequest(Share(1), demand.cpu, demand.memory, demand.models)
        placed: Placement | Best | None
        if pod.gpus:
            request = replace(request, share=Share(demand.units, demand.count))
            placed = self.ledger.place(request, self._strategy)
        elif isinstance(self._strategy, Random):
            placed = self._strategy.best(demand, self.ledger.capacity)
        else:
            placed = self.ledger.capacity.best(demand, self._strategy)
        if placed is None:
            return None
        self._use(placed.node, pod.cpu, pod.memory)
        if pod.gpus:
            self.ledger.add(Allocation(str(number), placed.gpus, demand.units, effective_units=demand.units))
        return placed.node

    def remove(self, number: int, pod: Pod, node: str) -> None:
        """Remove a placed pod."""
        self._use(node, -pod.cpu, -pod.memory)
        if pod.gpus:
            self.ledger.remove(str(number))

    def _use(self, node: str, cpu: int, memory: int) -> None:
        free_cpu, free_memory = self._left[node]
        self._left[node] = (free_cpu - cpu, free_memory - memory)
        self.ledger.put_resources(node, NodeResources(*self._left[node]))


def allocated(data: Path, trace: str, seed: int, name: str) -> float:
    """Percent of the GPUs that are allocated after all pods of a trace have come."""
    nodes, pods = read_nodes(data), read_pods(data, trace)
    cluster = Cluster(nodes, STRATEGIES[name](workload(pods)))
    coming = arrivals(pods, cluster.gpus, seed)
    given = sum(pod.gpu_milli for number, pod in enumerate(coming) if cluster.place(number, pod) is not None)
    check_ledger(cluster.ledger)
    return 100 * given / (cluster.gpus * MILLI)


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
