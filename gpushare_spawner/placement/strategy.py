"""How the GPUs for a placement request are chosen."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.placement.capacity_index import Best, Rated
from gpushare_spawner.placement.free_capacity import FreeCapacity
from gpushare_spawner.placement.node_capacity import NodeCapacity
from gpushare_spawner.placement.request import Demand, PlacementRequest
from gpushare_spawner.placement.workload import Workload


class Strategy(Protocol):
    """Chooses a node and GPUs; keeps no books. The ledger checks the choice and does the counting."""

    def choose(self, request: PlacementRequest, capacity: FreeCapacity) -> Best | None:
        """A node and the UUIDs of ``request.share.count`` healthy GPUs of one model there; None: no node will do.

        Each GPU has ``request.share.units`` free, and the node has the CPU and memory, as far as they are known. The
        same request and capacity must give the same answer. `FreeCapacity.best` finds the best node by a rating of
        yours, and rates only nodes that have changed.
        """
        ...


@runtime_checkable
class WorkloadStrategy(Protocol):
    """A strategy that looks at the spawns which are to be expected."""

    def choose(self, request: PlacementRequest, capacity: FreeCapacity) -> Best | None:
        """See `Strategy`."""
        ...

    def for_workload(self, workload: Workload) -> Strategy:
        """Return the strategy for this workload; the same object where the workload is the same as before."""
        ...


@runtime_checkable
class PreparedStrategy(Protocol):
    """A strategy whose work for the first request of a kind can be done in pieces."""

    def choose(self, request: PlacementRequest, capacity: FreeCapacity) -> Best | None:
        """See `Strategy`."""
        ...

    def prepare(self, request: PlacementRequest, capacity: FreeCapacity, limit: int) -> int:
        """Look at no more than ``limit`` nodes that `choose` would look at; return how many are left."""
        ...


def check_strategy(strategy: Any) -> None:
    """Raise TypeError, saying what would be right, for an object whose `choose` is not as `Strategy` has it."""
    name = type(strategy).__name__
    choose = getattr(strategy, "choose", None)
    if not callable(choose):
        raise TypeError(f"placement_strategy {name} has no method choose(request, capacity)")
    try:
        signature = inspect.signature(choose)
    except (TypeError, ValueError):
        return  # built in: it cannot be asked
    try:
        signature.bind(None, None)
    except TypeError:
        raise TypeError(
            f"placement_strategy {name} has choose{signature}, for another version of this package. It must be "
            "choose(request, capacity) and return the node with its GPUs: see gpushare_spawner.placement.Strategy"
        ) from None


@dataclass(frozen=True)
class BestFit:
    """Fills the fullest GPU on which the share fits, so that whole ones stay whole.

    Units that nobody owns come first; lent ones are taken only where no GPU has enough of the others, and then as
    few as possible. Ties go to the first GPU by name of node and index.
    """

    def choose(self, request: PlacementRequest, capacity: FreeCapacity) -> Best | None:
        """See `Strategy`."""
        return capacity.best(request.demand, self, request.left_out, request.node)

    def prepare(self, request: PlacementRequest, capacity: FreeCapacity, limit: int) -> int:
        """See `PreparedStrategy`."""
        return capacity.prepare(request.demand, self, limit)

    def rate(self, demand: Demand, node: NodeCapacity) -> Rated:
        """Lent units or GPUs, then units or GPUs that nobody owns, then free ones: the fewest first."""
        return min(place.rated(node, place.lent, place.unowned, place.free) for place in places(demand, node))


@dataclass(frozen=True)
class Spread:
    """Takes the emptiest GPU of the emptiest node, so that sessions disturb each other least.

    Units that nobody owns come first. Ties go to the first GPU by name of node and index.
    """

    def choose(self, request: PlacementRequest, capacity: FreeCapacity) -> Best | None:
        """See `Strategy`."""
        return capacity.best(request.demand, self, request.left_out, request.node)

    def prepare(self, request: PlacementRequest, capacity: FreeCapacity, limit: int) -> int:
        """See `PreparedStrategy`."""
        return capacity.prepare(request.demand, self, limit)

    def rate(self, demand: Demand, node: NodeCapacity) -> Rated:
        """Lent units or GPUs, the fewest first; then the most units that nobody owns, on the GPU and on the node."""
        ownable = sum(gpu.ownable for gpus in node.healthy.values() for gpu in gpus)
        return min(place.rated(node, place.lent, -place.unowned, -ownable) for place in places(demand, node))


@dataclass(frozen=True)
class SmallestInstance:
    """Takes the smallest MIG instance that holds the share; of equal ones the first by node, index and UUID."""

    def choose(self, request: PlacementRequest, capacity: FreeCapacity) -> Best | None:
        """See `Strategy`."""
        return capacity.best(request.demand, self, request.left_out, request.node)

    def rate(self, demand: Demand, node: NodeCapacity) -> Rated:
        """The size of the instance."""
        gpus = (gpu for model, gpus in node.healthy.items() if demand.accepts(model) for gpu in gpus)
        best = min((gpu for gpu in gpus if gpu.free >= demand.units), key=lambda gpu: gpu.preference)
        return Rated(best.preference, (best.uuid,))


class Place(NamedTuple):
    """GPUs of one node and model that a demand can have."""

    lent: int
    """What would be borrowed: units of the GPU, or whole GPUs where several are demanded."""
    unowned: int
    """Units of the GPU that nobody owns, or whole GPUs of the node and model."""
    free: int
    """Units of the GPU that are free, or whole GPUs of the node and model."""
    model: str
    positions: tuple[int, ...]
    """Of the GPUs among the node's healthy ones of the model."""

    def rated(self, node: NodeCapacity, *key: int) -> Rated:
        """Return this place of a node with a key; of equal ones the first by node and index is better."""
        if not self.positions:
            return Rated(key, ())
        gpus = [node.healthy[self.model][position] for position in self.positions]
        return Rated((*key, gpus[0].rank), tuple(gpu.uuid for gpu in gpus))


def places(demand: Demand, node: NodeCapacity) -> list[Place]:
    """Return the GPUs of a node that can take a demand, one for each model and state; of equal ones the first by index.

    For several GPUs: the best set of each model. One place without a GPU where none is demanded.
    """
    if not demand.count:
        return [Place(0, 0, 0, "", ())]
    found: list[Place] = []
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
                    found.append(Place(lent, unowned, free, model, (position,)))
        else:
            whole = [position for position, gpu in enumerate(gpus) if gpu.free >= demand.units]
            if len(whole) >= demand.count:
                unowned = sum(gpus[position].unowned >= UNITS_PER_GPU for position in whole)
                # those of which least is lent, then the fullest, then the first
                whole.sort(key=lambda at: (max(0, UNITS_PER_GPU - gpus[at].unowned), gpus[at].unowned))
                lent = max(0, demand.count - unowned)
                found.append(Place(lent, unowned, len(whole), model, tuple(whole[: demand.count])))
    return found
