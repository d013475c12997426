"""What placement costs, and how much of a cluster it fills.

``python -m benchmarks.placement [--trace NAME] [--seeds 42-51] [--data FOLDER] [--json]``

- **Time**: 1,000 shares are placed on 10,000 and on 100,000 GPUs by the default strategy. The GPUs are half full before
  the clock starts; a tenth of the sessions there is idle and lends its units. Every share is entered into the ledger,
  so that each finds another one. A scan over all nodes must give the same places. ``look``: one node reports something
  new, and the ledger is brought up to date from all reports.
- **Event loop**: for how long the hub's event loop is blocked, see `benchmarks.placement_loop`.
- **Allocation**: the openb experiment, see `benchmarks.placement_trace`; without the traces it is skipped.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import placement_loop, placement_trace
from benchmarks.ledger_check import check_ledger
from benchmarks.placement_cluster import GIB, SHARES, cluster, resources
from gpushare_spawner.model.layers import Placement
from gpushare_spawner.model.report import Report
from gpushare_spawner.model.share import Share
from gpushare_spawner.placement.capacity import Best, FreeCapacity
from gpushare_spawner.placement.feed import LedgerFeed
from gpushare_spawner.placement.ledger import Ledger
from gpushare_spawner.placement.node import Allocation
from gpushare_spawner.placement.obstacles import fits
from gpushare_spawner.placement.request import PlacementRequest, workload_of
from gpushare_spawner.placement.strategy import StrandingAwareFgd
from gpushare_spawner.spawner.queue.queue import NODES_AT_ONCE

LOOKS = 200
SCANNED = 200
"""Shares that are placed by a scan too."""


@dataclass(frozen=True)
class Scan:
    """A rating without an index: looks at every node. Gives the same answers."""

    rating: StrandingAwareFgd

    def choose(self, request: PlacementRequest, capacity: FreeCapacity) -> Best | None:
        """See `gpushare_spawner.placement.strategy.Strategy`."""
        counts = [self.rating.count(node) for node in capacity.nodes.values()]
        pricing = self.rating.pricing([sum(numbers) for numbers in zip(*counts, strict=True)])
        best = min(
            (
                (pricing(place.key, place.loss) if pricing is not None else place.key, node.name, place.gpus)
                for node in capacity.nodes.values()
                if fits(request.demand, node)
                for place in self.rating.rate_all(request.demand, node)
            ),
            default=None,
        )
        return Best(*best[1:]) if best is not None else None


def request(share: Share) -> PlacementRequest:
    """A share with CPU and memory in proportion."""
    return PlacementRequest(share, cpu=round(8000 * share.fraction), memory=round(32 * GIB * share.fraction))


def filled(reports: Sequence[Report]) -> tuple[LedgerFeed, float]:
    """The ledger of these nodes, and the seconds that it took to make it."""
    started = time.thread_time()
    feed = LedgerFeed()
    feed.follow(reports)
    for report in reports:
        feed.ledger.put_resources(report.node, resources(report))
    return feed, time.thread_time() - started


def prepare(ledger: Ledger, strategy: StrandingAwareFgd) -> list[float]:
    """Milliseconds of each piece of the preparation for all shares, as the queue does it."""
    times = []
    for share in SHARES:
        left = 1
        while left:
            started = time.thread_time()
            left = ledger.capacity.prepare(request(share).demand, strategy, NODES_AT_ONCE)
            times.append((time.thread_time() - started) * 1e3)
    return times


def measure(ledger: Ledger, shares: Sequence[Share], strategy: object) -> tuple[list[float], list[Placement | None]]:
    """Milliseconds of each placement with its entry into the ledger, and where the shares went."""
    times: list[float] = []
    places: list[Placement | None] = []
    for number, share in enumerate(shares):
        started = time.thread_time()
        place = ledger.place(request(share), strategy)  # type: ignore[arg-type]
        if place is not None:
            ledger.add(Allocation(f"new-{number}", place.gpus, share.units, place.borrowed, share.units, 1.0))
        times.append((time.thread_time() - started) * 1e3)
        places.append(place)
    return times, places


def looks(feed: LedgerFeed, reports: list[Report], seed: int) -> list[float]:
    """Milliseconds to bring the ledger up to date from all reports when one of them is new."""
    chance = random.Random(seed)
    times = []
    for number in range(LOOKS):
        changed = chance.randrange(len(reports))
        reports[changed] = reports[changed].model_copy(update={"published_at": 1.0 + number, "sessions": ()})
        started = time.thread_time()
        feed.follow(reports)
        times.append((time.thread_time() - started) * 1e3)
    return times


def quantile(values: Sequence[float], part: float) -> float:
    """The value that this part of the values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def latency(gpus: int, count: int, seed: int, scan: bool) -> tuple[dict[str, float], bool]:
    """Times in milliseconds, and whether the scan gave the same places (True where none was made)."""
    reports = cluster(gpus, seed)
    shares = random.Random(seed).choices(SHARES, k=count)
    expected = workload_of([(request(share).demand, 1.0) for share in SHARES])
    feed, built = filled(reports)
    # the garbage collector need not walk the reports of the simulated cluster
    gc.collect()
    gc.freeze()
    strategy = StrandingAwareFgd(expected)
    prepared = prepare(feed.ledger, strategy)
    times, places = measure(feed.ledger, shares, strategy)
    check_ledger(feed.ledger)
    agree = True
    if scan:
        _, scanned = measure(filled(reports)[0].ledger, shares[:SCANNED], Scan(StrandingAwareFgd(expected)))
        agree = scanned == places[:SCANNED]
    looked = looks(feed, reports, seed)
    placed = sum(place is not None for place in places)
    print(f"\n{count} shares on {gpus} GPUs, {placed} placed; Python {platform.python_version()}")
    print(f"{'ms':28}{'p50':>9}{'p99':>9}{'max':>9}")
    for name, values in (("a placement", times), ("a look, one node changed", looked)):
        print(f"{name:28}{quantile(values, 0.5):9.3f}{quantile(values, 0.99):9.3f}{max(values):9.3f}")
    print(f"the ledger from nothing: {built * 1e3:.0f} ms; scan agrees: {'yes' if agree else 'NO'}")
    figures = {
        "p50_ms": quantile(times, 0.5),
        "p99_ms": quantile(times, 0.99),
        "max_ms": max(times),
        "look_p50_ms": quantile(looked, 0.5),
        "look_p99_ms": quantile(looked, 0.99),
        "build_ms": built * 1e3,
        "prepare_piece_ms": max(prepared),
    }
    return {name: round(value, 4) for name, value in figures.items()}, agree


def seeds(text: str) -> list[int]:
    """42-51, or 42,43. Raises ValueError."""
    first, dash, last = text.partition("-")
    return list(range(int(first), int(last) + 1)) if dash else [int(one) for one in text.split(",")]


def allocation(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Percent allocated by strategy and trace, the mean over the seeds; empty where there are no traces."""
    data = placement_trace.find_data(options.data)
    if data is None:
        print(
            "\nThe openb traces were not found, so allocation is not measured: name their folder with --data or with "
            f"the environment variable {placement_trace.DATA_VARIABLE}. They are in github.com/alibaba/clusterdata."
        )
        return {}
    found = placement_trace.run(data, options.trace, options.seeds, ("ours", "fgd", "best_fit"))
    print(f"\nGPUs allocated in percent, mean (least to most) of {len(options.seeds)} seeds")
    means: dict[str, dict[str, float]] = {}
    for name, traces in found.items():
        means[name] = {trace: round(sum(values) / len(values), 2) for trace, values in traces.items()}
        spread = (f"{trace} {means[name][trace]} ({min(v):.2f} to {max(v):.2f})" for trace, v in traces.items())
        print(f"{name:10}{', '.join(spread)}")
    return means


def main() -> int:
    """Command line; 0 when index and scan agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=10_000)
    parser.add_argument("--many-gpus", type=int, default=100_000, help="for the keys with 100k; 0: leave them out")
    parser.add_argument("--shares", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=1, help="of the clusters for the times")
    parser.add_argument("--trace", nargs="*", default=list(placement_trace.TRACES), help="none: leave allocation out")
    parser.add_argument("--seeds", type=seeds, default=list(placement_trace.SEEDS), help="of the openb experiment")
    parser.add_argument("--data", help="the folder with openb_node_list_gpu_node.csv.gz and openb_pod_list_*.csv.gz")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args()
    result: dict[str, object] = {"gpus": options.gpus, "shares": options.shares}
    times, agree = latency(options.gpus, options.shares, options.seed, scan=True)
    result |= times | {"agree": agree}
    if options.many_gpus:
        times, _ = latency(options.many_gpus, options.shares, options.seed, scan=False)
        result |= {name.replace("_ms", "_100k_ms"): value for name, value in times.items()}
    result["loop_ms"] = placement_loop.run(options.gpus, options.shares, options.seed)["loop_ms"]
    if options.many_gpus:
        result["loop_100k_ms"] = placement_loop.run(options.many_gpus, options.shares, options.seed)["loop_ms"]
    if options.trace:
        means = allocation(options)
        if means:
            result |= {"allocated": means["ours"], "fgd": means["fgd"], "best_fit": means["best_fit"]}
    if options.json:
        print(json.dumps(result))
    return 0 if agree else 1


if __name__ == "__main__":
    raise SystemExit(main())
