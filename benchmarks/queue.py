"""How long small and big spawns wait in the queue when a big one waits for many GPUs, or for CPU: in virtual time.

``python -m benchmarks.queue [--seeds 1-3] [--days X] [--json]``

Servers with a quarter or a half of a GPU come and go on eight nodes of four GPUs: Poisson arrivals, lengths with a
lognormal distribution (median 40 min, sigma 1). Half of them end by a stop with a notice. Now and then a big spawn
comes. In ``gpu`` it is for four GPUs of a node; in ``cpu`` for a quarter of a GPU and 24 of a node's 32 cores, of which
the others use most. Spawns wait without a time-out. The queue, placement and estimates are the product's; the first day
teaches the hub how long sessions last and is not counted.

``ours``; ``first_fit``: nothing is held; ``hold_forever``: the GPUs that lack the least are held until the spawn
starts. ``needless_waits``: passes in which a small spawn waits although it would fit on held GPUs, or with held CPU,
and sessions like it end before the big spawn is expected to start there. ``calibration``: the part of big spawns that
started within the first interval that their user saw; four of five are meant to. All policies get the same spawns.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import math
import os
import random
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from statistics import fmean
from typing import Any

from benchmarks.ledger_check import check_ledger
from benchmarks.placement import seeds
from gpushare_spawner.model.report import GpuReport, Notice, Report
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement.departures import Departures
from gpushare_spawner.placement.feed import EntrySource, LedgerFeed
from gpushare_spawner.placement.node import Allocation, NodeResources, Requested
from gpushare_spawner.placement.request import workload_of
from gpushare_spawner.placement.strategy import StrandingAwareFgd
from gpushare_spawner.sharing.base import Tenant
from gpushare_spawner.spawner.queue.availability import WaitEstimates
from gpushare_spawner.spawner.queue.queue import LoopBreaks, PlacementCheck, Placer, SpawnQueue, Ticket
from gpushare_spawner.spawner.queue.snapshot import GpuInventory, GpuSnapshot, SpawnRequest, guaranteed_resources

POLICIES = ("ours", "first_fit", "hold_forever")
NODES, GPUS, CORES = 8, 4, 32
DAY = 86400.0
PASS_SECONDS = 30.0
"""Between two passes while spawns wait; the product's 1.5 s would change no figure by more."""
MEDIAN_SECONDS, SIGMA = 2400.0, 1.0
NOTICE_SECONDS = 300.0


def template(name: str, cores: float, **gpu: float) -> Template:
    """A template that guarantees CPU."""
    resources = {"cpu": {"guarantee": cores}}
    return Template.model_validate({"name": name, "display_name": name, "gpu": gpu, "resources": resources})


@dataclass(frozen=True)
class Scenario:
    """The templates with their parts of the arrivals; the last is the big one."""

    templates: tuple[Template, ...]
    parts: tuple[float, ...]
    every: float
    """Mean seconds between two arrivals."""


SCENARIOS = {
    "gpu": Scenario(
        (template("quarter", 1, fraction=0.25), template("half", 2, fraction=0.5), template("big", 4, count=4)),
        (0.6, 0.39, 0.01),
        60.0,
    ),
    "cpu": Scenario(
        (template("quarter", 4, fraction=0.25), template("half", 8, fraction=0.5), template("big", 24, fraction=0.25)),
        (0.6, 0.385, 0.015),
        120.0,
    ),
}


@dataclass
class Outcome:
    """What came of it."""

    waits: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    """Seconds, of big spawns and of the others."""
    needless: int = 0
    calibrated: list[bool] = field(default_factory=list)
    """Whether each big spawn with an estimate started within its first interval."""

    def mean_wait(self, is_big: bool) -> float:
        """Return the mean seconds that big spawns, or the others, have waited."""
        return fmean(self.waits[is_big] or [0.0])


@dataclass
class Hub:
    """A hub's queue on a cluster, in virtual time."""

    scenario: Scenario
    policy: str
    days: float
    seed: int
    warm_up: float = 1.0
    """Days that are not counted."""
    now: float = DAY
    outcome: Outcome = field(default_factory=Outcome)
    shown: dict[Ticket, tuple[float, float]] = field(default_factory=dict)
    """The first interval of each big spawn, as instants."""

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.feed, self.queue, self.estimates = LedgerFeed(), SpawnQueue(10_000), WaitEstimates()
        self.taken: defaultdict[str, int] = defaultdict(int)
        self.notices: dict[str, Notice] = {}
        self.lasts: dict[str, tuple[float, bool]] = {}
        """Seconds that each waiting spawn's session will last, and whether it ends with a notice: the same for each
        policy."""
        inventory = GpuInventory()
        for number in range(NODES):
            node = f"node-{number}"
            gpus = tuple(
                GpuReport(index=index, uuid=f"{node}-{index}", model="A100", memory_bytes=2**30)
                for index in range(GPUS)
            )
            self.feed.report(Report(node=node, published_at=0.0, gpus=gpus))
            inventory.put(node, gpus)
            self._count_cpu(node, 0)
        self.inventory = inventory
        self.requested = {one.name: guaranteed_resources(one) for one in self.scenario.templates}
        snapshot = GpuSnapshot(inventory)
        demands = [snapshot.request(one).demand for one in self.scenario.templates]
        self.strategy = StrandingAwareFgd(workload_of(zip(demands, self.scenario.parts, strict=True)))
        self.departures = Departures(self.feed.ledger, self.requested.__getitem__)

    @property
    def big(self) -> Template:
        return self.scenario.templates[-1]

    async def run(self) -> Outcome:
        """Let spawns come for so many days after the warm-up."""
        self.counts_from = self.now + self.warm_up * DAY
        arrivals, ends = self.now, self.counts_from + self.days * DAY
        events: list[tuple[float, int, str]] = []
        numbers = count()
        self.leaving = events
        while self.now < ends:
            next_pass = self.now + PASS_SECONDS if len(self.queue) else math.inf
            next_end = events[0][0] if events else math.inf
            self.now = min(arrivals, next_end, next_pass)
            if self.now == next_end:
                self._leave(heapq.heappop(events)[2])
            if self.now == arrivals:
                (chosen,) = self.chance.choices(self.scenario.templates, self.scenario.parts)
                request = SpawnRequest(Tenant(f"{chosen.name}-{next(numbers)}"), chosen)
                lasts, is_told = self.chance.lognormvariate(math.log(MEDIAN_SECONDS), SIGMA), self.chance.random() < 0.5
                self.lasts[request.session] = (lasts, is_told and lasts > NOTICE_SECONDS)
                self.queue.join(request, self.now)
                arrivals += self.chance.expovariate(1 / self.scenario.every)
            await self._pass()
        for ticket in self.queue:
            self._waited(ticket)
        check_ledger(self.feed.ledger)
        return self.outcome

    def _leave(self, session: str) -> None:
        told, _, name = session.partition(":")
        if told == "told":
            self.notices[name] = Notice(tier=Tier.STOPPED, at=self.now + NOTICE_SECONDS, reason="idle")
            return
        allocation, node = self.feed.ledger.allocations[name], self.feed.ledger.node_of(name)
        self.feed.drop(EntrySource.SEEN, name)
        self.notices.pop(name, None)
        self._count_cpu(str(node), -self.requested[allocation.template].cpu)

    def _count_cpu(self, node: str, more: int) -> None:
        self.taken[node] += more
        empty = NodeResources.of_empty_node(1000 * CORES, None)
        self.feed.resources(node, empty.less(Requested(self.taken[node])))

    async def _pass(self) -> None:
        """One pass over the queue, as `spawner.queue.reservations` makes it."""
        self.departures.follow(self.now)
        snapshot = GpuSnapshot(self.inventory, notices=tuple(self.notices.items()))
        departures, now = (self.departures, self.now) if self.policy == "ours" else (None, 0.0)
        check = PlacementCheck(snapshot, self.feed.ledger, self.strategy, departures=departures, now=now, monotonic=now)
        placer, breaks = Placer(check, self.feed, self.queue, "the simulation"), LoopBreaks(math.inf)
        for ticket in self.queue:
            placement = placer.place(ticket)
            if placement is not None:
                self._start(ticket, placement.node, placement.gpus)
                self.estimates.placed(ticket, snapshot, self.now)
            elif self.policy != "first_fit":
                await placer.hold(ticket, breaks)
        if self.policy == "ours" and len(self.queue):
            self._check_small_ones(check)
            intervals = await self.estimates.intervals(check, self.queue, self.now, self.now, breaks)
            for ticket in self.queue:
                ticket.publish(self.now)
                shown = intervals.get(ticket)
                if shown is not None and shown.earliest < shown.latest and ticket.request.template is self.big:
                    self.shown.setdefault(ticket, (self.now + 60 * shown.earliest, self.now + 60 * shown.latest))

    def _start(self, ticket: Ticket, node: str, gpus: tuple[str, ...]) -> None:
        self.queue.leave(ticket)
        self._waited(ticket)
        self.feed.hold(ticket.hold_name, None)
        request = ticket.request
        name, units = request.session, request.share.units
        lasts, is_told = self.lasts.pop(name)
        heapq.heappush(self.leaving, (self.now + lasts, 1, f"ends:{name}"))
        if is_told:
            heapq.heappush(self.leaving, (self.now + lasts - NOTICE_SECONDS, 0, f"told:{name}"))
        self._count_cpu(node, self.requested[request.template.name].cpu)
        allocation = Allocation(
            name, gpus, units, effective_units=units, opened_at=self.now, template=request.template.name
        )
        self.feed.put(EntrySource.SEEN, allocation)

    def _waited(self, ticket: Ticket) -> None:
        if ticket.joined >= self.counts_from:
            is_big = ticket.request.template is self.big
            self.outcome.waits[is_big].append(self.now - ticket.joined)
            if ticket in self.shown:
                earliest, latest = self.shown[ticket]
                self.outcome.calibrated.append(earliest <= self.now <= latest)

    def _check_small_ones(self, check: PlacementCheck) -> None:
        ledger = self.feed.ledger
        for ticket in self.queue:
            length = self.departures.lengths.expected(ticket.request.template.name)
            if ticket.request.template is self.big or length is None:
                continue
            for hold in ledger.holds.values():
                alone = ledger.of_node(hold.node)
                for name, other in ledger.holds.items():
                    if other.start >= self.now + length:
                        alone.hold(name, None)
                self.outcome.needless += alone.place(check.request_of(ticket)) is not None


def simulate(case: tuple[str, str, float, int]) -> Outcome:
    """Return what came of one case: scenario, policy, days, seed."""
    scenario, policy, days, seed = case
    return asyncio.run(Hub(SCENARIOS[scenario], policy, days, seed).run())


Figures = dict[str, Any]


def measure(scenario: str, options: argparse.Namespace) -> Figures:
    """Return the figures of one scenario: by policy the means of the seeds, and for ours what its estimates came to."""
    cases = [(scenario, policy, options.days, seed) for policy in POLICIES for seed in options.seeds]
    with ProcessPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
        outcomes = list(zip(cases, pool.map(simulate, cases), strict=True))
    runs = {policy: [outcome for case, outcome in outcomes if case[1] == policy] for policy in POLICIES}
    figures: Figures = {
        key: {policy: round(fmean(outcome.mean_wait(is_big) for outcome in of), 1) for policy, of in runs.items()}
        for key, is_big in (("small_wait_mean_s", False), ("big_wait_mean_s", True))
    }
    hits = [hit for outcome in runs["ours"] for hit in outcome.calibrated]
    figures["needless_waits"] = sum(outcome.needless for outcome in runs["ours"])
    figures["big_spawns"] = sum(len(outcome.waits[True]) for outcome in runs["ours"])
    figures["estimates"] = len(hits)
    figures["calibration"] = round(fmean(hits), 3) if hits else None
    return figures


def main() -> int:
    """Command line; 0 when the bars hold: no needless wait, and big spawns wait no longer than under first fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=seeds, default=[1, 2, 3])
    parser.add_argument("--days", type=float, default=4.0, help="days that are counted")
    parser.add_argument("--scenarios", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS))
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args()
    found: dict[str, Figures] = {}
    for scenario in options.scenarios:
        found[scenario] = measure(scenario, options)
        print(scenario, *(f"\n  {key}: {value}" for key, value in found[scenario].items()), flush=True)
    if options.json:
        keys = ("small_wait_mean_s", "big_wait_mean_s")
        means = {
            key: {policy: round(fmean(each[key][policy] for each in found.values()), 1) for policy in POLICIES}
            for key in keys
        }
        print(json.dumps({**means, "scenarios": found}))
    return 0 if all(map(meets_bars, found.values())) else 1


def meets_bars(figures: Figures) -> bool:
    """Return whether no small spawn waited needlessly, and big ones waited no longer than under first fit."""
    waits = figures["big_wait_mean_s"]
    return not figures["needless_waits"] and waits["ours"] <= waits["first_fit"]


if __name__ == "__main__":
    raise SystemExit(main())
