"""What users do on shared or reserved GPUs, for `benchmarks.idleness`: sessions for the cluster of `gpushare plan`.

The queue, the ledger, the placement strategy, the arbiters and the idle policy are the product's
(gpushare_spawner/plan/cluster.py). Servers stay until the end of the run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from gpushare_spawner.arbiter.session import ArbiterSettings
from gpushare_spawner.model.template import Limits, Template
from gpushare_spawner.plan.cluster import PlannedCluster
from gpushare_spawner.plan.servers import PlannedBurst, ServerPlan

HOUR = 3600.0


@dataclass(frozen=True)
class Habits:
    """What the users of all sessions do. Each function draws from the session's own random numbers."""

    think: Callable[[random.Random], float]
    """Seconds between two cells."""
    work: Callable[[random.Random], float]
    """GPU seconds of a cell, alone on a whole GPU."""
    memory: Callable[[random.Random], int]
    """Bytes that a session's kernel uses."""

    def bursts(self, chance: random.Random, slices: int) -> Iterator[PlannedBurst]:
        """Yield a session's cells without end; each takes `slices` times as long as on a whole GPU."""
        while True:
            yield PlannedBurst(self.think(chance), self.work(chance) * slices)


@dataclass(frozen=True)
class Sharing:
    """A way to offer GPUs to sessions."""

    template: Template
    """Its `idle` is the policy."""
    slices: int = 1
    """Parts into which each GPU is divided for good, in memory and speed; a session has a whole part."""


@dataclass(frozen=True)
class Outcome:
    """What came of one run. GPU-hours are those of whole GPUs."""

    waits: tuple[float, ...]
    """Seconds that each server waited for capacity; one that still waits counts with its wait so far."""
    never: int
    """Servers that had none at the end."""
    delays: tuple[float, ...]
    """Seconds from the submission of each cell until its first kernel could run."""
    servers_per_gpu: float
    """That ran, on average over the run."""
    reserved: float
    """GPU-hours that the templates promised to servers while these ran."""
    delivered: float
    """GPU-hours for which cells ran."""
    idle: float
    """GPU-hours of `reserved` in which the session ran no cell."""
    recovered: float
    """GPU-hours of `idle` that other sessions could have: the share was downgraded or released."""


def run(
    gpus: int,
    memory: int,
    sharing: Sharing,
    habits: Habits,
    settings: ArbiterSettings,
    seed: int,
    arrivals: Sequence[float],
    horizon: float,
) -> Outcome:
    """Let users start servers at these instants. `memory`: bytes of a GPU."""
    slices = sharing.slices
    template = sharing.template.model_copy(update={"limits": Limits()})
    cluster = PlannedCluster(gpus * slices, memory // slices, [template], arbiter=settings)
    plans = []
    for number, arrived in enumerate(arrivals):
        name, chance = f"session-{number:03}", random.Random(f"{seed}-{number}")
        used = habits.memory(chance)
        plans.append(ServerPlan(name, name, template, arrived, partial(habits.bursts, chance, slices), memory=used))
    outcome = cluster.run(plans, horizon)
    use = outcome.use
    return Outcome(
        waits=outcome.waits,
        never=outcome.never,
        delays=outcome.delays,
        servers_per_gpu=outcome.server_seconds / horizon / gpus,
        reserved=use.reserved / slices,
        delivered=use.delivered / slices,
        idle=use.idle / slices,
        recovered=use.recovered / slices,
    )
