"""The spawns that are to be expected, for placement strategies that look ahead.

What a strategy makes of them stands in `placement`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gpushare_spawner.model.template import Template
from gpushare_spawner.placement import RecentSpawns, Strategy, WorkloadStrategy
from gpushare_spawner.spawner.queue.snapshot import GpuSnapshot


class ExpectedWorkload:
    """Counts the spawns of each template, and gives a strategy the workload that they make.

    ``templates`` returns those that can be spawned now. The counts live in this hub process: after a restart all
    templates count the same again.
    """

    def __init__(self, templates: Callable[[], Iterable[Template]]) -> None:
        self._templates = templates
        self._spawns = RecentSpawns()

    def offered(self) -> list[Template]:
        """The templates of now that ask for a GPU."""
        return [template for template in self._templates() if template.gpu is not None]

    def spawned(self, template: str, now: float) -> None:
        """Count a spawn that got its place; ``now``: seconds on a monotonic clock."""
        self._spawns.spawned(template, now)

    def strategy(self, strategy: Strategy, snapshot: GpuSnapshot, now: float) -> Strategy:
        """Return the strategy for the workload of now; one that looks at no workload comes back as it is."""
        if not isinstance(strategy, WorkloadStrategy):
            return strategy
        demands = {
            template.name: snapshot.request(template).demand for template in self.offered() if snapshot.native(template)
        }
        return strategy.for_workload(self._spawns.workload(demands, now))
