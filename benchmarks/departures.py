"""How much of the demand for GPUs is refused while sessions come and go, and how much is allocated when none leaves.

``python -m benchmarks.departures [--lists NAME...] [--loads X...] [--seeds 42-44] [--data FOLDER] [--json]``

Arrivals are a Poisson process; each pod is drawn from a list of Alibaba's openb trace and lives for a time with a
lognormal distribution (sigma 1.2). What does not fit is refused and does not come back. The load is the part of the
GPUs that all arrivals together would use. Every eighth node of openb is taken, in the order of its list. The first
mean lives are not counted. All strategies see the same arrivals.

``refused``: refused GPU demand as a fraction of the requested, by list, load and strategy, the mean of the seeds.
``refused_several``: the same of the requests for several GPUs. ``filling``: GPUs allocated in percent on all of openb
when nobody leaves, see `benchmarks.placement_trace`.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import os
import random
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from benchmarks import placement_trace
from benchmarks.ledger_check import check_ledger
from benchmarks.placement import seeds
from benchmarks.placement_trace import Cluster, Pod, read_nodes, read_pods, workload

LISTS = ("default", "gpushare40", "gpushare60", "gpuspec10", "cpu250", "multigpu20")
LOADS = (0.85, 0.9, 0.95)
SIGMA = 1.2
STRATEGIES = ("ours", "fgd", "best_fit", "random")


class Case(NamedTuple):
    """One simulation."""

    data: Path
    trace: str
    load: float
    strategy: str
    seed: int
    every: int
    """Takes each node whose number is a multiple of this one."""
    warm_up: float
    """Mean lives before refusals are counted."""
    measured: float
    """Mean lives for which refusals are counted."""


class Refused(NamedTuple):
    """Fractions of the requested GPUs."""

    of_all: float
    of_several: float


def simulate(case: Case) -> Refused:
    """Return what is refused while pods come and go."""
    pods = read_pods(case.data, case.trace)
    cluster = Cluster(read_nodes(case.data)[:: case.every], placement_trace.STRATEGIES[case.strategy](workload(pods)))
    chance = random.Random(case.seed)
    mean_gpus = sum(pod.gpu_milli for pod in pods) / len(pods) / placement_trace.MILLI
    rate = case.load * cluster.gpus / mean_gpus
    now = 0.0
    leaving: list[tuple[float, int]] = []
    placed: dict[int, tuple[Pod, str]] = {}
    requested: defaultdict[bool, int] = defaultdict(int)
    refused: defaultdict[bool, int] = defaultdict(int)
    number = 0
    while now < case.warm_up + case.measured:
        now += chance.expovariate(rate)
        pod = chance.choice(pods)
        life = chance.lognormvariate(-SIGMA * SIGMA / 2, SIGMA)
        while leaving and leaving[0][0] <= now:
            gone = heapq.heappop(leaving)[1]
            cluster.remove(gone, *placed.pop(gone))
        node = cluster.place(number, pod)
        if now > case.warm_up:
            requested[pod.gpus > 1] += pod.gpu_milli
            refused[pod.gpus > 1] += pod.gpu_milli if node is None else 0
        if node is not None:
            placed[number] = (pod, node)
            heapq.heappush(leaving, (now + life, number))
        number += 1
    check_ledger(cluster.ledger)
    return Refused(sum(refused.values()) / sum(requested.values()), refused[True] / max(1, requested[True]))


Figures = dict[str, dict[str, dict[str, float]]]
"""By list, load and strategy."""


def measure(options: argparse.Namespace, data: Path) -> tuple[Figures, Figures]:
    """Return what is refused, of all requests and of those for several GPUs; print each line when it is complete."""
    print(f"\nGPU demand refused in percent (of requests for several GPUs), mean of {len(options.seeds)} seeds")
    print(f"{'list':12}{'load':6}" + "".join(f"{strategy:>16}" for strategy in STRATEGIES), flush=True)
    rows = [(trace, load) for trace in options.lists for load in options.loads]
    cases = [
        Case(data, trace, load, strategy, seed, options.every, options.warm_up, options.measured)
        for trace, load in rows
        for strategy in STRATEGIES
        for seed in options.seeds
    ]
    of_all: Figures = {}
    of_several: Figures = {}
    with ProcessPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        results = pool.map(simulate, cases)
        for trace, load in rows:
            columns = ""
            for strategy in STRATEGIES:
                refused = list(islice(results, len(options.seeds)))
                for figures, values in (
                    (of_all, [result.of_all for result in refused]),
                    (of_several, [result.of_several for result in refused]),
                ):
                    figures.setdefault(trace, {}).setdefault(f"{load:.2f}", {})[strategy] = round(mean(values), 5)
                both = (100 * figures[trace][f"{load:.2f}"][strategy] for figures in (of_all, of_several))
                columns += f"{'{:.2f} ({:.1f})'.format(*both):>16}"
            print(f"{trace:12}{load:<6.2f}{columns}", flush=True)
    return of_all, of_several


def mean(values: Sequence[float]) -> float:
    """The mean of at least one value."""
    return math.fsum(values) / len(values)


def main() -> int:
    """Command line; 0 when ours refuses no more than FGD and best fit in every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lists", nargs="*", default=list(LISTS), help="of pods; none: departures are left out")
    parser.add_argument("--loads", nargs="+", type=float, default=list(LOADS))
    parser.add_argument("--seeds", type=seeds, default=[42, 43, 44])
    parser.add_argument("--every", type=int, default=8, help="take every such node; 8: 152 nodes with 688 GPUs")
    parser.add_argument("--warm-up", type=float, default=4.0, help="mean lives")
    parser.add_argument("--measured", type=float, default=10.0, help="mean lives")
    parser.add_argument("--filling", nargs="*", default=[*LISTS, "gpushare100"], help="lists; none: left out")
    parser.add_argument("--data", help="the folder with openb_node_list_gpu_node.csv.gz and openb_pod_list_*.csv.gz")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args()
    data = placement_trace.find_data(options.data)
    if data is None:
        parser.error(f"no openb traces: name their folder with --data or {placement_trace.DATA_VARIABLE}")
    of_all, of_several = measure(options, data) if options.lists else ({}, {})
    filling: dict[str, dict[str, float]] = {}
    if options.filling:
        found = placement_trace.run(data, options.filling, options.seeds, STRATEGIES)
        print(f"\nGPUs allocated in percent when nobody leaves, mean of {len(options.seeds)} seeds")
        for trace in options.filling:
            filling[trace] = {strategy: round(mean(found[strategy][trace]), 2) for strategy in STRATEGIES}
            print(f"{trace:12}" + ", ".join(f"{strategy} {value}" for strategy, value in filling[trace].items()))
    if options.json:
        print(json.dumps({"refused": of_all, "refused_several": of_several, "filling": filling}))
    best = [figures for loads in of_all.values() for figures in loads.values()]
    return 0 if all(figures["ours"] <= min(figures["fgd"], figures["best_fit"]) for figures in best) else 1


if __name__ == "__main__":
    raise SystemExit(main())
