"""How much of what a node has left the expected workload could not use: fragmentation and stranding.

Fragmentation is the measure of FGD: Weng, Yang, Yu, Wang, Tang, Yang, Zhang: Beware of Fragmentation: Scheduling
GPU-Sharing Workloads with Fragmentation Gradient Descent, USENIX ATC 2023, section 4. Stranding is ours. See
docs/explanation/placement.md.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.placement.request import Demand
from gpushare_spawner.placement.workload import Workload

CPU_RATIOS = (0.6, 0.8, 1.0)
"""Stranding is the mean over these multiples of the CPU that the workload asks for with each GPU: spawns to come ask
for less or for more. Measured: see docs/explanation/placement.md."""
MOST_GPUS = 64
"""Of one model on one node, as `Share.count` allows."""


Left = Sequence[tuple[str, Sequence[int]]]
"""Units that are left on each healthy GPU of a node (0 to 100), by model. Each model comes once."""


@dataclass(frozen=True)
class _Bracket:
    """What the kinds of requests that a node's free CPU allows make of its free units. Units times popularity."""

    of_units: tuple[float, ...]
    """By the units that are left on one GPU, 0 to 100."""
    of_whole: tuple[float, ...]
    """By the number of GPUs that are whole: they are no use to who wants more of them."""


class Fragmentation:
    """Tables for one workload, so that a node is valued by a few look-ups."""

    def __init__(self, workload: Workload, stranding: float) -> None:
        """``stranding``: the weight of stranding beside fragmentation; 0: none."""
        self._workload = workload
        self._total = sum(kind.popularity for kind in workload.kinds) or 1.0
        self._steps = sorted({kind.demand.cpu for kind in workload.kinds if kind.demand.count})
        self._brackets: dict[str, Sequence[_Bracket]] = {}
        self._per_gpu = [ratio * workload.cpu_per_gpu for ratio in CPU_RATIOS]
        self._stranding = stranding if self._per_gpu[0] > 0 else 0.0

    def value(self, left: Left, cpu: int | None) -> float:
        """Return what is expected to be wasted of a node, in units of 1 % of a GPU.

        ``cpu``: free millicores, None if not known.
        """
        bracket = self._bracket(cpu)
        wasted, units = 0.0, 0
        for model, gpus in left:
            table = self._table(model)[bracket]
            wasted += sum([table.of_units[one] for one in gpus]) + table.of_whole[gpus.count(UNITS_PER_GPU)]
            units += sum(gpus)
        return wasted + self._stranded(units, cpu)

    def values_after(self, left: Left, cpu: int | None, model: str, takes: Mapping[int, int]) -> dict[int, float]:
        """Return the `value` of a node after a GPU of a model has lost units, for several such GPUs at once.

        ``takes``: the units that are left on a GPU now, and how many of them it would lose.
        """
        bracket = self._bracket(cpu)
        wasted, units, whole = 0.0, 0, 0
        for other, gpus in left:
            table = self._table(other)[bracket]
            wasted += sum([table.of_units[one] for one in gpus])
            units += sum(gpus)
            if other == model:
                whole = gpus.count(UNITS_PER_GPU)
            else:
                wasted += table.of_whole[gpus.count(UNITS_PER_GPU)]
        table = self._table(model)[bracket]
        of_units, of_whole = table.of_units, table.of_whole
        stranded = {taken: self._stranded(units - taken, cpu) for taken in set(takes.values())}
        return {
            now: wasted
            - of_units[now]
            + of_units[now - taken]
            + of_whole[whole - (now == UNITS_PER_GPU and taken > 0)]
            + stranded[taken]
            for now, taken in takes.items()
        }

    def _bracket(self, cpu: int | None) -> int:
        return len(self._steps) if cpu is None else bisect_right(self._steps, cpu)

    def _stranded(self, units: int, cpu: int | None) -> float:
        if cpu is None or not self._stranding:
            return 0.0
        cpu_units = max(cpu, 0) * UNITS_PER_GPU
        stranded = 0.0
        for per_gpu in self._per_gpu:
            served = cpu_units / per_gpu
            if served < units:
                stranded += units - served
        return self._stranding * stranded / len(CPU_RATIOS)

    def _table(self, model: str) -> Sequence[_Bracket]:
        table = self._brackets.get(model)
        if table is None:
            kinds = [
                (kind.demand, kind.popularity / self._total)
                for kind in self._workload.kinds
                if kind.demand.count and kind.demand.accepts(model)
            ]
            steps = [-1, *self._steps]
            table = self._brackets[model] = [_bracket([kind for kind in kinds if kind[0].cpu <= cpu]) for cpu in steps]
        return table


def _bracket(able: Sequence[tuple[Demand, float]]) -> _Bracket:
    """Of the kinds that a node's model and CPU allow; to all others everything that is left is wasted."""
    others = 1.0 - sum(popularity for _, popularity in able)
    # between two amounts that are asked for the same requests ask for more
    units_asked = sorted({demand.units for demand, _ in able})
    more_units = [
        others + sum(popularity for demand, popularity in able if demand.units > units) for units in [-1, *units_asked]
    ]
    of_units = [units * more_units[bisect_right(units_asked, units)] for units in range(UNITS_PER_GPU + 1)]
    counts_asked = sorted({demand.count for demand, _ in able})
    more_gpus = [
        sum(popularity for demand, popularity in able if demand.count > count) for count in [-1, *counts_asked]
    ]
    of_whole = [whole * UNITS_PER_GPU * more_gpus[bisect_right(counts_asked, whole)] for whole in range(MOST_GPUS + 1)]
    return _Bracket(tuple(of_units), tuple(of_whole))
