"""The default strategy: fragmentation gradient descent that also sees GPUs that are left without CPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpushare_spawner.placement.capacity_index import Best, Rated
from gpushare_spawner.placement.fragmentation import Fragmentation, Left
from gpushare_spawner.placement.free_capacity import FreeCapacity
from gpushare_spawner.placement.node_capacity import NodeCapacity
from gpushare_spawner.placement.request import Demand, PlacementRequest
from gpushare_spawner.placement.strategy import Place, places
from gpushare_spawner.placement.workload import NO_WORKLOAD, Workload

STRANDING_WEIGHT = 1.0
"""A GPU without CPU is as useless as a fragment that nobody wants."""
STEP_UNITS = 4
"""Differences below 0.04 GPU count as none; then the best fit decides. Measured: see docs/explanation/placement.md."""

MOST_KNOWN = 2000
"""Best places that are kept; then they are forgotten and computed anew. They serve clusters of nodes in few states; in
others hardly any state comes twice, and many would be work for the garbage collector."""

_Best = tuple[tuple[int, int, int, int], str, tuple[int, ...]]
"""The key without the rank, the GPUs' model, and their positions among the node's healthy GPUs of that model."""


_State = tuple[tuple[object, ...], Left, float]
"""What nodes have in common that have the same units and the same CPU left: a signature, the units, and what is wasted.

Tuples of numbers and strings: Python's garbage collector does not walk these, and there are as many as nodes."""


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
        self._known: dict[Demand, dict[tuple[object, ...], _Best]] = {}
        self._known_count = 0

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
        of_demand = self._known.get(demand)
        known = of_demand.get(state[0]) if of_demand is not None else None
        if known is None:
            known = self._best(demand, node, state)
            self._keep(demand, state, known)
        key, model, positions = known
        if not positions:
            return Rated(key, ())
        gpus = node.healthy[model]
        return Rated((*key, gpus[positions[0]].rank), tuple([gpus[position].uuid for position in positions]))

    def _state(self, node: NodeCapacity) -> _State:
        cpu = node.resources.cpu
        signature: list[object] = [cpu]
        for model, gpus in node.healthy.items():
            signature.append(model)
            for gpu in gpus:
                signature += (gpu.unowned, gpu.free)
        left = tuple([(model, tuple([gpu.ownable for gpu in gpus])) for model, gpus in node.healthy.items()])
        return (tuple(signature), left, self._fragmentation.value(left, cpu))

    def _keep(self, demand: Demand, state: _State, best: _Best) -> None:
        """Equal nodes have the same best place: it is computed once."""
        if self._known_count >= MOST_KNOWN:
            self._known.clear()
            self._known_count = 0
        self._known.setdefault(demand, {})[state[0]] = best
        self._known_count += 1

    def _best(self, demand: Demand, node: NodeCapacity, state: _State) -> _Best:
        cpu = node.resources.cpu
        _, left, before = state
        after = None if cpu is None else cpu - demand.cpu
        found = places(demand, node)
        if demand.count == 1:
            values = self._values_of_one(demand.units, found, left, after)
        else:
            values = [self._fragmentation.value(_without(place, left), after) for place in found]
        return min(
            [
                ((place.lent, self.steps(value - before), place.unowned, place.free), place.model, place.positions)
                for place, value in zip(found, values, strict=True)
            ]
        )

    def steps(self, more: float) -> int:
        """What it costs that so much more is wasted, in units of 1 % of a GPU; the more the higher."""
        # less the last bits of a sum: what is equal but for these must not be a step apart
        return math.ceil(more / STEP_UNITS - 1e-9)

    def _values_of_one(self, units: int, found: Sequence[Place], left: Left, after: int | None) -> Sequence[float]:
        of_model = dict(left)
        takes: dict[str, dict[int, int]] = {}
        now = [of_model[place.model][place.positions[0]] for place in found]
        for place, ownable in zip(found, now, strict=True):
            takes.setdefault(place.model, {})[ownable] = min(ownable, units)
        values = {model: self._fragmentation.values_after(left, after, model, taken) for model, taken in takes.items()}
        return [values[place.model][ownable] for place, ownable in zip(found, now, strict=True)]


def _without(place: Place, left: Left) -> Left:
    return tuple(
        (model, [0 if position in place.positions else units for position, units in enumerate(gpus)])
        if model == place.model
        else (model, gpus)
        for model, gpus in left
    )
