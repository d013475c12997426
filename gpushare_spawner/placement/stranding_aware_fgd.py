"""The default strategy: fragmentation gradient descent that also sees GPUs that are left without CPU."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from gpushare_spawner.placement.capacity_index import Best, Rated
from gpushare_spawner.placement.fragmentation import Fragmentation
from gpushare_spawner.placement.free_capacity import FreeCapacity
from gpushare_spawner.placement.node_capacity import NodeCapacity
from gpushare_spawner.placement.request import Demand, PlacementRequest
from gpushare_spawner.placement.strategy import Place, places
from gpushare_spawner.placement.workload import NO_WORKLOAD, Workload

STRANDING_WEIGHT = 1.0
"""A GPU without CPU is as useless as a fragment that nobody wants."""
STEP_UNITS = 4
"""Differences below 0.04 GPU count as none; then the best fit decides. Measured: see docs/explanation/placement.md."""

Left = dict[str, list[int]]
"""Units that are left on each healthy GPU of a node, by model."""


MOST_STATES = 50_000
"""States of nodes whose values are kept; then they are forgotten and computed anew. About 1 kB each."""

_Best = tuple[tuple[int, int, int, int], str, tuple[int, ...]]
"""The key without the rank, the GPUs' model, and their positions among the node's healthy GPUs of that model."""


@dataclass(slots=True)
class _State:
    """What nodes have in common that have the same units and the same CPU left."""

    left: Left
    value: float
    rated: dict[Demand, _Best] = field(default_factory=dict)


class StrandingAwareFgd:
    """Takes the place that wastes least of what is left, by what the expected workload could use of it.

    Units that nobody owns come first; lent ones are taken only where no GPU has enough of the others, and then as
    few as possible. Of places that are about as good (`STEP_UNITS`) the fullest GPU wins, then the first by name of
    node and index. The workload is fixed; `for_workload` makes a strategy for another one.
    """

    def __init__(self, workload: Workload = NO_WORKLOAD, stranding: float = STRANDING_WEIGHT) -> None:
        """``stranding``: how much a GPU without CPU counts beside a fragment of a GPU; 0: FGD's measure alone."""
        self.workload = workload
        self.stranding = stranding
        self._fragmentation = Fragmentation(workload, stranding)
        self._states: dict[Hashable, _State] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.workload.kinds)} kinds of requests)"

    def for_workload(self, workload: Workload) -> StrandingAwareFgd:
        """Return the strategy for this workload: this one where it is the same."""
        return self if workload == self.workload else type(self)(workload, self.stranding)

    def choose(self, request: PlacementRequest, capacity: FreeCapacity) -> Best | None:
        """See `Strategy`."""
        return capacity.best(request.demand, self, request.left_out, request.node)

    def prepare(self, request: PlacementRequest, capacity: FreeCapacity, limit: int) -> int:
        """See `PreparedStrategy`."""
        return capacity.prepare(request.demand, self, limit)

    def rate(self, demand: Demand, node: NodeCapacity) -> Rated:
        """Lent units or GPUs, then how much more would be wasted, in steps, then the fullest GPU: the least first."""
        state: _State | None = node.derived.get(self)
        if state is None:
            state = node.derived[self] = self._state(node)
        known = state.rated.get(demand)
        if known is None:
            known = state.rated[demand] = self._best(demand, node, state)
        key, model, positions = known
        if not positions:
            return Rated(key, ())
        gpus = node.healthy[model]
        return Rated((*key, gpus[positions[0]].rank), tuple([gpus[position].uuid for position in positions]))

    def _state(self, node: NodeCapacity) -> _State:
        """What nodes in the state of this one have in common; equal nodes share one object."""
        units = tuple((model, tuple([(gpu.unowned, gpu.free) for gpu in gpus])) for model, gpus in node.healthy.items())
        signature = (node.resources.cpu, units)
        state = self._states.get(signature)
        if state is None:
            if len(self._states) >= MOST_STATES:
                self._states.clear()
            left = {model: [gpu.ownable for gpu in gpus] for model, gpus in node.healthy.items()}
            state = _State(left, self._fragmentation.value(left, node.resources.cpu))
            self._states[signature] = state
        return state

    def _best(self, demand: Demand, node: NodeCapacity, state: _State) -> _Best:
        cpu = node.resources.cpu
        after = None if cpu is None else cpu - demand.cpu
        found = places(demand, node)
        if demand.count == 1:
            values = self._values_of_one(demand.units, found, state.left, after)
        else:
            values = [self._fragmentation.value(_without(place, state.left), after) for place in found]
        return min(
            ((place.lent, self.steps(value - state.value), place.unowned, place.free), place.model, place.positions)
            for place, value in zip(found, values, strict=True)
        )

    def steps(self, more: float) -> int:
        """What it costs that so much more is wasted, in units of 1 % of a GPU; the more the higher."""
        return math.ceil(more / STEP_UNITS)

    def _values_of_one(self, units: int, found: Sequence[Place], left: Left, after: int | None) -> Sequence[float]:
        takes: dict[str, dict[int, int]] = {}
        now = [left[place.model][place.positions[0]] for place in found]
        for place, ownable in zip(found, now, strict=True):
            takes.setdefault(place.model, {})[ownable] = min(ownable, units)
        values = {model: self._fragmentation.values_after(left, after, model, taken) for model, taken in takes.items()}
        return [values[place.model][ownable] for place, ownable in zip(found, now, strict=True)]


def _without(place: Place, left: Mapping[str, Sequence[int]]) -> Left:
    after = {model: list(gpus) for model, gpus in left.items()}
    for position in place.positions:
        after[place.model][position] = 0
    return after
