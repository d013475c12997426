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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from gpushare_spawner.model.share import MOST_GPUS, UNITS_PER_GPU
from gpushare_spawner.placement.capacity import Best, FreeCapacity, Key, Loss, PricedRating, Pricing, Rated, Rating
from gpushare_spawner.placement.node import GpuCapacity, NodeCapacity
from gpushare_spawner.placement.request import NO_WORKLOAD, UNCONDITIONAL, Demand, PlacementRequest, Workload


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
    """Raise TypeError, with the right signature, for an object with a `choose` that differs from `Strategy`."""
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
    """Base of our strategies: takes the node with the best rating."""

    def choose(self, request: PlacementRequest, capacity: FreeCapacity) -> Best | None:
        """Choose as `Strategy` requires."""
        return capacity.best(request.demand, self, request.left_out, request.node)


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


_Place = tuple[tuple[int, ...], str, tuple[int, ...], Loss]
"""The key without the rank, the GPUs' model, their positions among the node's healthy GPUs of that model, the loss."""


class Place(NamedTuple):
    """GPUs of one node and model that a demand can have."""

    lent: int
    """Borrowed units of the GPU, or GPUs with borrowed units for a demand of several."""
    unowned: int
    """Unowned units of the GPU, or GPUs of the node and model with so many unowned units."""
    free: int
    """Free units of the GPU, or GPUs of the node and model with so many free units."""
    model: str
    positions: tuple[int, ...]
    """Positions of the GPUs among the node's healthy GPUs of the model."""

    def rated(self, node: NodeCapacity, *key: int) -> Rated:
        """Return this place of a node with a key. Ties go to the first by node and index."""
        return _rated(node, (key, self.model, self.positions, ()))


NO_GPU = Place(0, 0, 0, "", ())
"""The place of a demand without a GPU."""


def places(demand: Demand, node: NodeCapacity) -> list[Place]:
    """Return the places of a node with the least lent, one for each model and state; of equal GPUs the first by index.

    For a demand of several GPUs: the best set of each model. For a demand of none: one place without a GPU.
    """
    if not demand.count:
        return [NO_GPU]
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
            able = _fullest(gpus, units)
            chosen = able[: demand.count]
            if demand.last_units:
                others = able[: demand.count - 1]
                chosen = [*others, *[at for at in _fullest(gpus, demand.last_units) if at not in others][:1]]
            if len(chosen) == demand.count:
                unowned = sum([gpus[at].unowned >= units for at in able])
                lent = sum([gpus[at].unowned < left for at, left in zip(chosen, demand.each, strict=True)])
                matches.append(Place(lent, unowned, len(able), model, tuple(chosen)))
    if len(matches) > 1:
        least = min(matches).lent
        matches = [place for place in matches if place.lent == least]
    return matches


def _fullest(gpus: Sequence[GpuCapacity], units: int) -> list[int]:
    """Return the positions of GPUs with at least `units` free: first the GPUs that lend the least, then the fullest."""
    able = [position for position, gpu in enumerate(gpus) if gpu.free >= units]
    return sorted(able, key=lambda at: (max(0, units - gpus[at].unowned), gpus[at].unowned))


CPU_RATIOS = (0.6, 0.8, 1.0)
"""Multiples of the CPU that the workload requests with each GPU. Stranding is the mean over them: later spawns request
less or more. Measured: see docs/explanation/placement.md."""


Left = Sequence[tuple[str, Sequence[int]]]
"""Units left on each healthy GPU of a node (0 to 100), by model. Each model occurs once."""


class _Bracket(NamedTuple):
    """Wasted units times popularity, for the kinds of requests that a node's free CPU allows."""

    of_units: tuple[float, ...]
    """By the units left on one GPU, 0 to 100."""
    of_whole: tuple[float, ...]
    """By the number of whole GPUs: requests of more GPUs cannot use them."""
    of_parts: tuple[tuple[Demand, float], ...]
    """The kinds of requests for several GPUs that are not all whole."""


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
        return self.values_after(left, cpu, [NO_GPU], 0)[0]

    def values_after(
        self, left: Left, cpu: int | None, places: Sequence[Place], taken: int, last: int = 0
    ) -> list[float]:
        """Return for each place the `value` of the node after the place's GPUs have lost ``taken`` units each.

        ``left``: before; a GPU with less than ``taken`` units loses all. ``cpu``: free millicores afterwards. ``last``:
        units that the last GPU of each place loses if these are fewer; 0: as many.
        """
        bracket = len(self._steps) if cpu is None else bisect_right(self._steps, cpu)
        wasted, units = 0.0, 0
        of_model = {}
        for model, gpus in left:
            of_units, of_whole, of_parts = self._table(model)[bracket]
            whole = gpus.count(UNITS_PER_GPU)
            wasted += sum([of_units[gpu] for gpu in gpus]) + of_whole[whole]
            if of_parts:
                wasted += _of_parts(of_parts, gpus)
            units += sum(gpus)
            of_model[model] = (gpus, of_units, of_whole, whole, of_parts)
        values = []
        for place in places:
            value, remaining = wasted, units
            if place.positions:
                gpus, of_units, of_whole, whole, of_parts = of_model[place.model]
                whole_taken = 0
                if of_parts:
                    value += _of_parts(of_parts, _taken(gpus, place.positions, taken, last)) - _of_parts(of_parts, gpus)
                for position in place.positions:
                    now, less = gpus[position], taken if not last or position != place.positions[-1] else last
                    later = now - less if now > less else 0
                    value += of_units[later] - of_units[now]
                    remaining -= now - later
                    whole_taken += now == UNITS_PER_GPU
                value += of_whole[whole - whole_taken] - of_whole[whole]
            values.append(value + self._stranded(remaining, cpu))
        return values

    def _stranded(self, units: int, cpu: int | None) -> float:
        if cpu is None or not self._stranding:
            return 0.0
        cpu_units = max(cpu, 0) * UNITS_PER_GPU
        if cpu_units >= units * self._per_gpu[-1]:
            return 0.0
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
    requested_units = sorted({demand.least_units for demand, _ in able})
    more_units = [
        others + sum(popularity for demand, popularity in able if demand.least_units > units)
        for units in [-1, *requested_units]
    ]
    of_units = [units * more_units[bisect_right(requested_units, units)] for units in range(UNITS_PER_GPU + 1)]
    whole_gpus = [(demand.count, popularity) for demand, popularity in able if not demand.is_part_of_several]
    requested_counts = sorted({count for count, _ in whole_gpus})
    more_gpus = [
        sum(popularity for number, popularity in whole_gpus if number > count) for count in [-1, *requested_counts]
    ]
    of_whole = [
        whole * UNITS_PER_GPU * more_gpus[bisect_right(requested_counts, whole)] for whole in range(MOST_GPUS + 1)
    ]
    return _Bracket(tuple(of_units), tuple(of_whole), tuple(kind for kind in able if kind[0].is_part_of_several))


def _of_parts(kinds: Sequence[tuple[Demand, float]], gpus: Sequence[int]) -> float:
    """Return the waste for kinds of several GPUs, not all of them whole: GPUs with enough units, if too few."""
    return sum(
        popularity * sum([left for left in gpus if left >= demand.least_units])
        for demand, popularity in kinds
        if not demand.most_requests(gpus)
    )


def _taken(gpus: Sequence[int], positions: Sequence[int], taken: int, last: int) -> tuple[int, ...]:
    """Return the units left on GPUs of one model after those at some positions lost units, see `values_after`."""
    after = list(gpus)
    for position in positions:
        after[position] = max(0, gpus[position] - (taken if not last or position != positions[-1] else last))
    return tuple(after)


SCARCITY_DECAY = 0.2
"""How fast the price of a scarce kind of request falls with the number of them that fit: by a factor e for every 0.2
times the square root of the cluster's GPUs. The number that fits varies by about this root. Measured, as the weight
below: see docs/explanation/placement.md."""
SCARCITY_WEIGHT = 11.5
"""GPUs of expected loss per GPU that a lost request would use, times the square root of the cluster's GPUs: about so
many requests come in the mean life of a session while the number that fits stays in the range of one decay."""
MOST_SCARCE = 64
"""Scarce kinds that have a price, those of the largest part of the demand for GPUs first."""
UNLIMITED = 1 << 30
"""Number of requests for which CPU is no limit."""
LEAST_PRICE = 1e-3
"""Units of 1 % of a GPU. If all prices are lower, none counts."""


_Fitting = tuple[tuple[int, int, int], ...]
"""Scarce kinds of which a node can take requests: position of the kind, number of requests, and with enough CPU."""
_State = tuple[tuple[object, ...], Left, float, _Fitting]
"""Common state of nodes with the same units and CPU left: a signature, the units, the waste, `Scarcity.fitting`.

Tuples of numbers and strings, because Python's garbage collector does not track them: there is one for each node.
"""


_PLAIN = Demand(1, 1)
"""The scarce kinds are counted on the part of a node that is left for any demand of the native layer."""


class _ScarceKind(NamedTuple):
    demand: Demand
    weight: float
    """Expected GPUs of the kind for each request of the workload."""


class Scarcity:
    """Prices of placements that take the last places for kinds of requests that few GPUs can serve.

    Such kinds request several GPUs of one node, or only some of the models. They find no place while single GPUs of
    other nodes and models are free. The expected loss is the GPUs that they request times the probability that none
    fits, which falls exponentially with the number of requests that fit now. Kinds with conditions have no price: where
    they fit depends on the sessions.
    """

    def __init__(self, workload: Workload) -> None:
        """Select the scarce kinds of a workload."""
        requested = [kind for kind in workload.kinds if kind.demand.count]
        total = sum(kind.popularity for kind in workload.kinds) or 1.0
        named = frozenset[str]().union(*(kind.demand.models or () for kind in requested))
        everywhere = (None,) if any(kind.demand.models is None for kind in requested) else (named,)
        kinds = [
            _ScarceKind(kind.demand, kind.popularity / total * kind.demand.total_units / UNITS_PER_GPU)
            for kind in requested
            if (kind.demand.count > 1 or kind.demand.models not in everywhere)
            and kind.demand.conditions is UNCONDITIONAL
        ]
        self.kinds = sorted(kinds, key=lambda kind: -kind.weight)[:MOST_SCARCE]
        groups: dict[tuple[object, ...], list[int]] = {}
        for position, (demand, _) in enumerate(self.kinds):
            groups.setdefault((demand.models, demand.count, demand.units, demand.last_units), []).append(position)
        self._groups = [(self.kinds[group[0]].demand, group) for group in groups.values()]
        """Kinds that differ only in CPU, each group with one of their demands."""
        self._has_parts = any(demand.is_part_of_several for demand, _ in self._groups)
        self._fewer_of: dict[tuple[object, ...], Sequence[int]] = {}

    def fitting(self, left: Left, cpu: int | None) -> _Fitting:
        """Return the kinds of which a node can take requests. ``cpu``: free millicores; None: unknown."""
        fitting: list[tuple[int, int, int]] = []
        for demand, group in self._groups:
            enough = sum([demand.most_requests(gpus) for model, gpus in left if demand.accepts(model)])
            if enough:
                of_group = [(kind, min(enough, self._most(kind, cpu)), enough) for kind in group]
                fitting += [entry for entry in of_group if entry[1]]
        return tuple(fitting)

    def losses(self, state: _State, cpu: int | None, demand: Demand, places: Sequence[Place]) -> list[Loss]:
        """Return for each place of a demand how many requests of each kind the node can no longer take afterwards.

        ``cpu``: free millicores of the node.
        """
        _, left, _, fitting = state
        if not fitting:
            return [()] * len(places)
        after = None if cpu is None else cpu - demand.cpu
        kinds = [(kind, now, enough, self._most(kind, after)) for kind, now, enough in fitting]
        of_model = dict(left)
        losses = []
        for place in places:
            gpus = of_model.get(place.model, ())
            fewer = self._fewer(place.model, gpus, place.positions, demand)
            loss = [
                (kind, now - later)
                for kind, now, enough, most in kinds
                if (later := most if most < enough - fewer[kind] else enough - fewer[kind]) < now
            ]
            losses.append(tuple(loss))
        return losses

    def _most(self, kind: int, cpu: int | None) -> int:
        """Return how many requests of a kind so many free millicores allow; None: unknown."""
        requested = self.kinds[kind].demand.cpu
        return (cpu if cpu > 0 else 0) // requested if cpu is not None and requested > 0 else UNLIMITED

    def _fewer(self, model: str, gpus: Sequence[int], positions: Sequence[int], taken: Demand) -> Sequence[int]:
        """Return by kind how many requests fewer the GPUs of one model can take after a placement.

        ``gpus``: the units left on each before; ``positions``: of the GPUs for the demand ``taken``.
        """
        whole, now = gpus.count(UNITS_PER_GPU), [gpus[position] for position in positions]
        key = (model, gpus if self._has_parts else whole, *now, taken.units, taken.last_units)
        fewer = self._fewer_of.get(key)
        if fewer is None:
            if len(self._fewer_of) >= MOST_PLACES:
                self._fewer_of.clear()
            after = _taken(gpus, positions, taken.units, taken.last_units)
            whole_later = whole - now.count(UNITS_PER_GPU)
            by_kind = [0] * len(self.kinds)
            for demand, group in self._groups:
                if demand.accepts(model):
                    count, units = demand.count, demand.units
                    if demand.is_part_of_several:
                        lost = demand.most_requests(gpus) - demand.most_requests(after)
                    elif count == 1:
                        lost = sum([gpus[at] // units - after[at] // units for at in positions])
                    else:
                        lost = whole // count - whole_later // count
                    for kind in group:
                        by_kind[kind] = lost
            fewer = self._fewer_of[key] = tuple(by_kind)
        return fewer

    def prices(self, totals: Sequence[int], gpus: int) -> list[float]:
        """Return the price of each kind for one lost request, in units of 1 % of a GPU.

        ``totals``: the number of requests of each kind that fit on the cluster of ``gpus`` GPUs.
        """
        root = math.sqrt(max(gpus, 1))
        most = SCARCITY_WEIGHT * root * UNITS_PER_GPU
        return [
            most * kind.weight * math.exp(-max(0, total - 1) / (SCARCITY_DECAY * root))
            for total, kind in zip(totals, self.kinds, strict=True)
        ]


STRANDING_WEIGHT = 1.0
"""A GPU without CPU is as useless as a fragment that fits no request."""
STEP_UNITS = 4
"""Differences below 0.04 GPU are ignored; then the best fit decides. Measured: see docs/explanation/placement.md."""

MOST_PLACES = 2000
"""Size of the cache of best places, which is cleared when full. The cache helps where nodes have few distinct states.
Elsewhere states rarely repeat, and a larger cache would only add work for the garbage collector."""


class StrandingAwareFgd(RatingStrategy, PricedRating):
    """Strategy that takes the place with the least added waste and the least expected loss of scarce requests.

    Waste is what the expected workload cannot use. Unowned units come first. Lent units are taken only if no GPU has
    enough unowned units, and then as few as possible. Of nearly equal places (`STEP_UNITS`) the fullest GPU wins, then
    the first by name of node and index. The workload is fixed; `for_workload` returns a strategy for another workload.
    """

    def __init__(self, workload: Workload = NO_WORKLOAD, stranding: float = STRANDING_WEIGHT) -> None:
        """Create the strategy. ``stranding``: weight of GPUs without CPU; 0: none."""
        self.workload = workload
        self.stranding = stranding
        self._fragmentation = Fragmentation(workload, stranding)
        self._scarcity = Scarcity(workload)
        self._best_places: dict[Demand, dict[tuple[object, ...], tuple[_Place, ...]]] = {}
        self._place_count = 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.workload.kinds)} kinds of requests)"

    def for_workload(self, workload: Workload) -> StrandingAwareFgd:
        """Return the strategy for this workload; the same object if the workload has hardly changed."""
        return self if self.workload.resembles(workload) else type(self)(workload, self.stranding)

    def rate(self, demand: Demand, node: NodeCapacity) -> Rated:
        """Rate by lent units or GPUs, then the added waste in steps, then the fullest GPU: the least first."""
        return min(self.rate_all(demand, node))

    def rate_all(self, demand: Demand, node: NodeCapacity) -> Sequence[Rated]:
        """Return the best place by `rate` for each loss of scarce requests."""
        state = self._state(node)
        # the scarce kinds can use GPUs that are closed to this demand
        plain = state if node.origin is None else self._state(node.origin.left_for(_PLAIN))
        signature = (state[0], plain[0])
        of_demand = self._best_places.get(demand)
        best = of_demand.get(signature) if of_demand is not None else None
        if best is None:
            best = self._best(demand, node, state, plain)
            self._cache(demand, signature, best)
        return [_rated(node, place) for place in best]

    def count(self, node: NodeCapacity) -> Sequence[int]:
        """Return the number of GPUs, and of requests of each scarce kind that the node can take."""
        kinds = self._scarcity.kinds
        if not kinds:
            return ()
        numbers = [sum(map(len, node.healthy.values())), *[0] * len(kinds)]
        for kind, now, _ in self._state(node.left_for(_PLAIN))[3]:
            numbers[kind + 1] = now
        return tuple(numbers)

    def pricing(self, totals: Sequence[int]) -> Pricing | None:
        """Return the pricing by the number of scarce requests that fit on the cluster; None if all prices are 0."""
        prices = self._scarcity.prices(totals[1:], totals[0]) if totals else []
        if max(prices, default=0.0) < LEAST_PRICE:
            return None

        def with_price(key: Key, loss: Loss) -> Key:
            if not loss:
                return key
            price = sum([prices[kind] * number for kind, number in loss])
            return (key[0], key[1] + self.steps(price), *key[2:])

        return with_price

    def _state(self, node: NodeCapacity) -> _State:
        state: _State | None = node.derived.get(self)
        if state is None:
            cpu = node.resources.cpu
            signature: list[object] = [cpu]
            for model, gpus in node.healthy.items():
                signature.append(model)
                for gpu in gpus:
                    signature += (gpu.unowned, gpu.free)
            left = tuple([(model, tuple([gpu.ownable for gpu in gpus])) for model, gpus in node.healthy.items()])
            waste = self._fragmentation.value(left, cpu)
            state = (tuple(signature), left, waste, self._scarcity.fitting(left, cpu))
            node.derived[self] = state
        return state

    def _cache(self, demand: Demand, signature: tuple[object, ...], best: tuple[_Place, ...]) -> None:
        """Cache the best places, which are the same for equal nodes."""
        if self._place_count >= MOST_PLACES:
            self._best_places.clear()
            self._place_count = 0
        self._best_places.setdefault(demand, {})[signature] = best
        self._place_count += 1

    def _best(self, demand: Demand, node: NodeCapacity, state: _State, plain: _State) -> tuple[_Place, ...]:
        cpu = node.resources.cpu
        _, left, waste, _ = state
        candidates = places(demand, node)
        after = None if cpu is None else cpu - demand.cpu
        values = self._fragmentation.values_after(left, after, candidates, demand.units, demand.last_units)
        best: dict[Loss, _Place] = {}
        losses = self._scarcity.losses(plain, cpu, demand, candidates)
        for place, value, loss in zip(candidates, values, losses, strict=True):
            key = (place.lent, self.steps(value - waste), place.unowned, place.free)
            rated = (key, place.model, place.positions, loss)
            best[loss] = min(rated, best.get(loss, rated))
        return tuple(best.values())

    def steps(self, more: float) -> int:
        """Return the cost of additional waste (units of 1 % of a GPU), in steps."""
        # Subtract a tolerance for rounding errors, so that values that differ only by these do not fall into different
        # steps.
        return math.ceil(more / STEP_UNITS - 1e-9)


def _rated(node: NodeCapacity, place: _Place) -> Rated:
    key, model, positions, loss = place
    if not positions:
        return Rated(key, (), loss)
    gpus = node.healthy[model]
    return Rated((*key, gpus[positions[0]].rank), tuple([gpus[position].uuid for position in positions]), loss)
