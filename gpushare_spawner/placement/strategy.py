"""Strategies that choose the GPUs for a placement request, and the measure of the default strategy.

The default is fragmentation gradient descent (FGD) that also counts GPUs left without CPU. Fragmentation and
stranding are the parts of a node's free units that the expected workload cannot use. Fragmentation is the measure of
FGD: Weng, Yang, Yu, Wang, Tang, Yang, Zhang: Beware of Fragmentation: Scheduling GPU-Sharing Workloads with
Fragmentation Gradient Descent, USENIX ATC 2023, section 4. Stranding is ours. See docs/explanation/placement.md.
"""

from __future__ import annotations

import inspect
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.placement.capacity import Best, FreeCapacity, Rated, Rating
from gpushare_spawner.placement.node import NodeCapacity
from gpushare_spawner.placement.request import NO_WORKLOAD, Demand, PlacementRequest, Workload


class Strategy(Protocol):
    """Choice of a node and GPUs, without state. The ledger checks the choice and counts it."""

    def choose(self, request: PlacementRequest, capacity: FreeCapacity) -> Best | None:
        """Return a node and the UUIDs of ``request.share.count`` healthy GPUs of one model.

        None if no node is suitable. Each GPU has ``request.share.units`` free, and the node has the CPU and memory, as
        far as these are known. Equal requests and capacities must give equal answers. `FreeCapacity.best` finds the
        best node by the strategy's rating, and rates only changed nodes.
        """
        ...


def check_strategy(strategy: Any) -> None:
    """Raise TypeError, with the right signature, for an object whose `choose` differs from `Strategy`."""
    name = type(strategy).__name__
    choose = getattr(strategy, "choose", None)
    if not callable(choose):
        raise TypeError(f"placement_strategy {name} has no method choose(request, capacity)")
    try:
        signature = inspect.signature(choose)
    except (TypeError, ValueError):
        return  # built in: it has no signature
    try:
        signature.bind(None, None)
    except TypeError:
        raise TypeError(
            f"placement_strategy {name} has choose{signature}, for another version of this package. It must be "
            "choose(request, capacity) and return the node with its GPUs: "
            "see gpushare_spawner.placement.strategy.Strategy"
        ) from None


class RatingStrategy(Rating):
    """Base of our strategies: takes the node with the best rating. The first request of a kind can be prepared."""

    def choose(self, request: PlacementRequest, capacity: FreeCapacity) -> Best | None:
        """Choose as `Strategy` requires."""
        return capacity.best(request.demand, self, request.left_out, request.node)

    def prepare(self, request: PlacementRequest, capacity: FreeCapacity, limit: int) -> int:
        """Rate at most ``limit`` of the nodes that `choose` would rate; return the number of nodes that are left."""
        return capacity.prepare(request.demand, self, limit)


@dataclass(frozen=True)
class BestFit(RatingStrategy):
    """Strategy that fills the fullest GPU on which the share fits, so that whole GPUs stay whole.

    Unowned units come first. Lent units are taken only if no GPU has enough unowned units, and then as few as
    possible. Ties go to the first GPU by name of node and index.
    """

    def rate(self, demand: Demand, node: NodeCapacity) -> Rated:
        """Rate by lent units or GPUs, then unowned units or GPUs, then free ones: the fewest first."""
        return min(place.rated(node, place.lent, place.unowned, place.free) for place in places(demand, node))


@dataclass(frozen=True)
class Spread(RatingStrategy):
    """Strategy that takes the emptiest GPU of the emptiest node, so that sessions disturb each other least.

    Unowned units come first. Ties go to the first GPU by name of node and index.
    """

    def rate(self, demand: Demand, node: NodeCapacity) -> Rated:
        """Rate by lent units or GPUs, the fewest first; then by unowned units of GPU and node, the most first."""
        ownable = sum(gpu.ownable for gpus in node.healthy.values() for gpu in gpus)
        return min(place.rated(node, place.lent, -place.unowned, -ownable) for place in places(demand, node))


@dataclass(frozen=True)
class SmallestInstance(RatingStrategy):
    """Strategy that takes the smallest suitable MIG instance. Ties go to the first by node, index and UUID."""

    def rate(self, demand: Demand, node: NodeCapacity) -> Rated:
        """Rate by the size of the instance."""
        gpus = (gpu for model, gpus in node.healthy.items() if demand.accepts(model) for gpu in gpus)
        best = min((gpu for gpu in gpus if gpu.free >= demand.units), key=lambda gpu: gpu.preference)
        return Rated(best.preference, (best.uuid,))


class Place(NamedTuple):
    """GPUs of one node and model that a demand can have."""

    lent: int
    """Borrowed units of the GPU, or borrowed whole GPUs for a demand of several."""
    unowned: int
    """Unowned units of the GPU, or unowned whole GPUs of the node and model."""
    free: int
    """Free units of the GPU, or free whole GPUs of the node and model."""
    model: str
    positions: tuple[int, ...]
    """Positions of the GPUs among the node's healthy GPUs of the model."""

    def rated(self, node: NodeCapacity, *key: int) -> Rated:
        """Return this place of a node with a key. Ties go to the first by node and index."""
        if not self.positions:
            return Rated(key, ())
        gpus = [node.healthy[self.model][position] for position in self.positions]
        return Rated((*key, gpus[0].rank), tuple(gpu.uuid for gpu in gpus))


def places(demand: Demand, node: NodeCapacity) -> list[Place]:
    """Return the places of a node for a demand, one for each model and state; of equal GPUs the first by index.

    For a demand of several GPUs: the best set of each model. For a demand of none: one place without a GPU.
    """
    if not demand.count:
        return [Place(0, 0, 0, "", ())]
    matches: list[Place] = []
    units = demand.units
    for model, gpus in node.healthy.items():
        if not demand.accepts(model):
            continue
        if demand.count == 1:
            seen: set[tuple[int, int]] = set()
            for position, gpu in enumerate(gpus):
                unowned, free = gpu.unowned, gpu.free
                if free >= units and (unowned, free) not in seen:
                    seen.add((unowned, free))
                    lent = units - unowned if units > unowned else 0
                    matches.append(Place(lent, unowned, free, model, (position,)))
        else:
            whole = [position for position, gpu in enumerate(gpus) if gpu.free >= demand.units]
            if len(whole) >= demand.count:
                unowned = sum(gpus[position].unowned >= UNITS_PER_GPU for position in whole)
                # the least lent first, then the fullest, then the first
                whole.sort(key=lambda at: (max(0, UNITS_PER_GPU - gpus[at].unowned), gpus[at].unowned))
                lent = max(0, demand.count - unowned)
                matches.append(Place(lent, unowned, len(whole), model, tuple(whole[: demand.count])))
    return matches


CPU_RATIOS = (0.6, 0.8, 1.0)
"""Multiples of the CPU that the workload requests with each GPU. Stranding is the mean over them: later spawns request
less or more. Measured: see docs/explanation/placement.md."""
MOST_GPUS = 64
"""GPUs of one model on one node, as `Share.count` allows."""


Left = Sequence[tuple[str, Sequence[int]]]
"""Units left on each healthy GPU of a node (0 to 100), by model. Each model occurs once."""


@dataclass(frozen=True)
class _Bracket:
    """Wasted units times popularity, for the kinds of requests that a node's free CPU allows."""

    of_units: tuple[float, ...]
    """By the units left on one GPU, 0 to 100."""
    of_whole: tuple[float, ...]
    """By the number of whole GPUs: requests of more GPUs cannot use them."""


class Fragmentation:
    """Tables for one workload, which value a node by a few look-ups."""

    def __init__(self, workload: Workload, stranding: float) -> None:
        """Create the tables. ``stranding``: the weight of stranding beside fragmentation; 0: none."""
        self._workload = workload
        self._total = sum(kind.popularity for kind in workload.kinds) or 1.0
        self._steps = sorted({kind.demand.cpu for kind in workload.kinds if kind.demand.count})
        self._brackets: dict[str, Sequence[_Bracket]] = {}
        self._per_gpu = [ratio * workload.cpu_per_gpu for ratio in CPU_RATIOS]
        self._stranding = stranding if self._per_gpu[0] > 0 else 0.0

    def value(self, left: Left, cpu: int | None) -> float:
        """Return the expected waste of a node, in units of 1 % of a GPU.

        ``cpu``: free millicores, None if unknown.
        """
        bracket = self._bracket(cpu)
        wasted, units = 0.0, 0
        for model, gpus in left:
            table = self._table(model)[bracket]
            wasted += sum([table.of_units[gpu] for gpu in gpus]) + table.of_whole[gpus.count(UNITS_PER_GPU)]
            units += sum(gpus)
        return wasted + self._stranded(units, cpu)

    def values_after(self, left: Left, cpu: int | None, model: str, takes: Mapping[int, int]) -> dict[int, float]:
        """Return the `value` of a node after a GPU of a model has lost units, for several such GPUs at once.

        ``takes``: the units left on a GPU now, with the number of units that it would lose.
        """
        bracket = self._bracket(cpu)
        wasted, units, whole = 0.0, 0, 0
        for other, gpus in left:
            table = self._table(other)[bracket]
            wasted += sum([table.of_units[gpu] for gpu in gpus])
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
    """Return the tables for the kinds that a node's model and CPU allow; all units are wasted for other kinds."""
    others = 1.0 - sum(popularity for _, popularity in able)
    # between two requested amounts the number of larger requests is constant
    requested_units = sorted({demand.units for demand, _ in able})
    more_units = [
        others + sum(popularity for demand, popularity in able if demand.units > units)
        for units in [-1, *requested_units]
    ]
    of_units = [units * more_units[bisect_right(requested_units, units)] for units in range(UNITS_PER_GPU + 1)]
    requested_counts = sorted({demand.count for demand, _ in able})
    more_gpus = [
        sum(popularity for demand, popularity in able if demand.count > count) for count in [-1, *requested_counts]
    ]
    of_whole = [
        whole * UNITS_PER_GPU * more_gpus[bisect_right(requested_counts, whole)] for whole in range(MOST_GPUS + 1)
    ]
    return _Bracket(tuple(of_units), tuple(of_whole))


STRANDING_WEIGHT = 1.0
"""A GPU without CPU is as useless as a fragment that fits no request."""
STEP_UNITS = 4
"""Differences below 0.04 GPU are ignored; then the best fit decides. Measured: see docs/explanation/placement.md."""

MOST_PLACES = 2000
"""Size of the cache of best places, which is cleared when full. The cache helps where nodes have few distinct states.
Elsewhere states rarely repeat, and a larger cache would only add work for the garbage collector."""

_Best = tuple[tuple[int, int, int, int], str, tuple[int, ...]]
"""The key without the rank, the GPUs' model, and their positions among the node's healthy GPUs of that model."""


_State = tuple[tuple[object, ...], Left, float]
"""Common state of nodes with the same units and CPU left: a signature, the units, and the waste.

Tuples of numbers and strings, because Python's garbage collector does not track them: there is one for each node.
"""


class StrandingAwareFgd(RatingStrategy):
    """Strategy that takes the place with the least added waste, by the units that the expected workload could use.

    Unowned units come first. Lent units are taken only if no GPU has enough unowned units, and then as few as
    possible. Of nearly equal places (`STEP_UNITS`) the fullest GPU wins, then the first by name of node and index.
    The workload is fixed; `for_workload` returns a strategy for another workload.
    """

    def __init__(self, workload: Workload = NO_WORKLOAD, stranding: float = STRANDING_WEIGHT) -> None:
        """Create the strategy. ``stranding``: weight of GPUs without CPU; 0: FGD's measure alone."""
        self.workload = workload
        self.stranding = stranding
        self._fragmentation = Fragmentation(workload, stranding)
        self._best_places: dict[Demand, dict[tuple[object, ...], _Best]] = {}
        self._place_count = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.workload.kinds)} kinds of requests)"

    def for_workload(self, workload: Workload) -> StrandingAwareFgd:
        """Return the strategy for this workload; the same object if the workload is unchanged."""
        return self if workload == self.workload else type(self)(workload, self.stranding)

    def rate(self, demand: Demand, node: NodeCapacity) -> Rated:
        """Rate by lent units or GPUs, then the added waste in steps, then the fullest GPU: the least first."""
        state: _State | None = node.derived.get(self)
        if state is None:
            state = node.derived[self] = self._state(node)
        of_demand = self._best_places.get(demand)
        best = of_demand.get(state[0]) if of_demand is not None else None
        if best is None:
            best = self._best(demand, node, state)
            self._keep(demand, state, best)
        key, model, positions = best
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
        """Cache the best place, which is the same for equal nodes."""
        if self._place_count >= MOST_PLACES:
            self._best_places.clear()
            self._place_count = 0
        self._best_places.setdefault(demand, {})[state[0]] = best
        self._place_count += 1

    def _best(self, demand: Demand, node: NodeCapacity, state: _State) -> _Best:
        cpu = node.resources.cpu
        _, left, before = state
        after = None if cpu is None else cpu - demand.cpu
        candidates = places(demand, node)
        if demand.count == 1:
            values = self._values_of_one(demand.units, candidates, left, after)
        else:
            values = [self._fragmentation.value(_without(place, left), after) for place in candidates]
        return min(
            [
                ((place.lent, self.steps(value - before), place.unowned, place.free), place.model, place.positions)
                for place, value in zip(candidates, values, strict=True)
            ]
        )

    def steps(self, more: float) -> int:
        """Return the cost of additional waste (units of 1 % of a GPU), in steps."""
        # Subtract a tolerance for rounding errors, so that values that differ only by these do not fall into different
        # steps.
        return math.ceil(more / STEP_UNITS - 1e-9)

    def _values_of_one(self, units: int, candidates: Sequence[Place], left: Left, after: int | None) -> Sequence[float]:
        of_model = dict(left)
        takes: dict[str, dict[int, int]] = {}
        now = [of_model[place.model][place.positions[0]] for place in candidates]
        for place, ownable in zip(candidates, now, strict=True):
            takes.setdefault(place.model, {})[ownable] = min(ownable, units)
        values = {model: self._fragmentation.values_after(left, after, model, taken) for model, taken in takes.items()}
        return [values[place.model][ownable] for place, ownable in zip(candidates, now, strict=True)]


def _without(place: Place, left: Left) -> Left:
    return tuple(
        (model, [0 if position in place.positions else units for position, units in enumerate(gpus)])
        if model == place.model
        else (model, gpus)
        for model, gpus in left
    )
