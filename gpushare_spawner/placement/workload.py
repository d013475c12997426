"""What a cluster is asked for: kinds of requests and how often each comes. Pure data; time comes in as an argument."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpushare_spawner.placement.request import Demand

HALF_LIFE_SECONDS = 7 * 86400.0
"""After so long a spawn counts half. A week: notebooks follow the days of a week, and courses change by terms."""
PRIOR = 1.0
"""Every template counts as if it had been spawned so often just now: before there is any spawn all count the same."""
STEPS = 20
"""Popularities are rounded to 1/20 of the most popular one's, so that one more spawn seldom changes the workload, and
what strategies have computed stays valid."""


@dataclass(frozen=True)
class Popular:
    """A kind of request and how much of the workload it is."""

    demand: Demand
    popularity: float
    """In any unit; `Workload` divides by the sum."""


@dataclass(frozen=True)
class Workload:
    """The requests that are expected. Memory is not looked at."""

    kinds: tuple[Popular, ...] = ()

    @property
    def cpu_per_gpu(self) -> float:
        """Millicores that are requested for each GPU, on average over the workload; 0 where nothing is requested."""
        gpus = sum(kind.popularity * kind.demand.units * kind.demand.count for kind in self.kinds) / 100
        cpu = sum(kind.popularity * kind.demand.cpu for kind in self.kinds)
        return cpu / gpus if gpus else 0.0


NO_WORKLOAD = Workload()


class RecentSpawns:
    """How often each template was spawned recently; older spawns count less."""

    def __init__(self, half_life: float = HALF_LIFE_SECONDS) -> None:
        self._half_life = half_life
        self._counts: dict[str, tuple[float, float]] = {}

    def spawned(self, template: str, now: float) -> None:
        """Count a spawn; ``now`` in seconds on any clock that all calls share."""
        self._counts[template] = (self.count(template, now) + 1.0, now)

    def count(self, template: str, now: float) -> float:
        """Return the spawns of a template, each halved once for every half-life that has passed since."""
        count, at = self._counts.get(template, (0.0, now))
        return count * math.pow(0.5, max(0.0, now - at) / self._half_life)

    def workload(self, templates: Mapping[str, Demand], now: float) -> Workload:
        """Return the workload of these templates; others count nothing."""
        counts = {name: self.count(name, now) + PRIOR for name in templates}
        most = max(counts.values(), default=PRIOR)
        popularity: dict[Demand, float] = {}
        for name in sorted(templates):
            steps = max(1, round(counts[name] / most * STEPS))
            popularity[templates[name]] = popularity.get(templates[name], 0.0) + steps
        return workload_of(popularity.items())


def workload_of(popularity: Iterable[tuple[Demand, float]]) -> Workload:
    """Return the workload of these demands with their popularities; what is not popular at all is left out."""
    return Workload(tuple(Popular(demand, value) for demand, value in popularity if value > 0))
