"""How long it takes to place a share: 1,000 shares on 10,000 GPUs, beside a scan over all GPUs.

``python -m benchmarks.placement [--gpus 10000] [--shares 1000] [--json]``. The GPUs are half full before the clock
starts; a tenth of the sessions there is idle and lends its units. Every share is placed and entered, so each finds
another ledger.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from collections.abc import Callable, Sequence

from gpushare_spawner.model.report import GpuReport, Report, SessionReport
from gpushare_spawner.model.share import Share
from gpushare_spawner.placement import Allocation, BestFit, FreeCapacity, Ledger

GPUS_PER_NODE = 8
MODELS = ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA L40S", "Tesla T4")
SHARES = [Share(10), Share(25), Share(25), Share(50), Share(), Share(count=2), Share(count=4)]


class LinearScan:
    """BestFit by looking at every GPU: what the indexes are held against. Gives the same answers."""

    def choose(self, capacity: FreeCapacity, share: Share, models: Sequence[str]) -> tuple[str, ...] | None:
        """See `gpushare_spawner.placement.Strategy`; fractions and single GPUs only, the rest goes to BestFit."""
        if share.count > 1:
            return BestFit().choose(capacity, share, models)
        best: tuple[int, int, int, int] | None = None
        chosen: str | None = None
        for gpu in capacity.gpus.values():
            if not gpu.healthy or gpu.model not in models or gpu.free < share.units:
                continue
            lent = max(0, share.units - gpu.unowned)
            key = (lent, gpu.unowned, gpu.free, gpu.rank)
            if best is None or key < best:
                best, chosen = key, gpu.uuid
        return None if chosen is None else (chosen,)


def cluster(gpus: int, seed: int) -> list[Report]:
    """Nodes of eight GPUs of four models, about half full."""
    chance = random.Random(seed)
    reports = []
    for node in range((gpus + GPUS_PER_NODE - 1) // GPUS_PER_NODE):
        here = range(node * GPUS_PER_NODE, min(gpus, (node + 1) * GPUS_PER_NODE))
        model = MODELS[node % len(MODELS)]
        cards = [
            GpuReport(index=i % GPUS_PER_NODE, uuid=f"GPU-{i:05}", model=model, memory_bytes=80 * 2**30) for i in here
        ]
        sessions = []
        for card in cards:
            left = 100
            while chance.random() < 0.6:
                units = chance.choice((10, 25, 50, 100))
                if units > left:
                    break
                left -= units
                sessions.append(
                    SessionReport(
                        id=f"{card.uuid}-{left}",
                        user="somebody",
                        template="any",
                        gpus=(card.uuid,),
                        share_units=units,
                        tier_since=0,
                        effective_units=0 if chance.random() < 0.1 else units,
                        guaranteed_units=units,
                        opened_at=0,
                    )
                )
        reports.append(Report(node=f"node-{node:05}", published_at=0, gpus=tuple(cards), sessions=tuple(sessions)))
    return reports


def measure(
    ledger: Ledger, shares: Sequence[Share], place: Callable[[Share], object]
) -> tuple[list[float], list[object]]:
    """Milliseconds of each placement with its entry into the ledger, and where the shares went."""
    times: list[float] = []
    placements: list[object] = []
    for number, share in enumerate(shares):
        started = time.perf_counter()
        placement = place(share)
        if placement is not None:
            ledger.add(Allocation(f"new-{number}", placement.gpus, share.units, placement.borrowed, share.units, 1.0))  # type: ignore[attr-defined]
        times.append((time.perf_counter() - started) * 1e3)
        placements.append(placement)
    return times, placements


def quantile(values: Sequence[float], part: float) -> float:
    """The value that this part of the values does not exceed."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def main() -> int:
    """Command line; 0 when both ways agree."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=10_000)
    parser.add_argument("--shares", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args()
    reports = cluster(options.gpus, options.seed)
    shares = random.Random(options.seed).choices(SHARES, k=options.shares)
    started = time.perf_counter()
    indexed, scanned = Ledger.of(reports), Ledger.of(reports)
    built_ms = (time.perf_counter() - started) * 1e3 / 2
    linear = LinearScan()
    fast, where = measure(indexed, shares, indexed.place)
    slow, where_too = measure(scanned, shares, lambda share: scanned.place(share, strategy=linear))
    indexed.check()
    agree = where == where_too
    placed = sum(place is not None for place in where)
    print(f"{options.shares} shares on {options.gpus} GPUs, {placed} placed; Python {platform.python_version()}")
    print(f"{'ms per share':24}{'p50':>9}{'p99':>9}{'max':>9}")
    for name, times in (("indexed (BestFit)", fast), ("linear scan", slow)):
        print(f"{name:24}{quantile(times, 0.5):9.3f}{quantile(times, 0.99):9.3f}{max(times):9.3f}")
    print(f"building the ledger from the reports: {built_ms:.0f} ms; both ways agree: {'yes' if agree else 'NO'}")
    if options.json:
        result = {
            "gpus": options.gpus,
            "shares": options.shares,
            "placed": placed,
            "p50_ms": round(quantile(fast, 0.5), 4),
            "p99_ms": round(quantile(fast, 0.99), 4),
            "max_ms": round(max(fast), 4),
            "linear_p50_ms": round(quantile(slow, 0.5), 4),
            "linear_p99_ms": round(quantile(slow, 0.99), 4),
            "build_ms": round(built_ms, 1),
            "agree": agree,
        }
        print(json.dumps(result))
    return 0 if agree else 1


if __name__ == "__main__":
    raise SystemExit(main())
