"""Nodes in the order in which a strategy prefers them, kept up to date by what changes."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Any, NamedTuple, Protocol, runtime_checkable

from gpushare_spawner.placement.node_capacity import NodeCapacity
from gpushare_spawner.placement.obstacle import Obstacle, fits, obstacle_of
from gpushare_spawner.placement.request import Demand

MOST_ENTRIES = 1_000_000
"""Nodes in all indexes together, of about 250 bytes each. The index that was not asked for longest is forgotten."""


class Rated(NamedTuple):
    """The best place on a node. A lower ``key`` is better; all keys of one rating compare with each other."""

    key: tuple[Any, ...]
    gpus: tuple[str, ...]
    """UUIDs."""


class Rating(Protocol):
    """How a strategy compares nodes. Equal ratings (by ``==``) share an index."""

    def rate(self, demand: Demand, node: NodeCapacity) -> Rated:
        """Rate the best place on a node on which the demand fits; equal for equal demands and nodes in equal state."""
        ...

    def __hash__(self) -> int: ...


@runtime_checkable
class AdmittingRating(Rating, Protocol):
    """A rating of nodes that need not be able to take the demand now."""

    def admits(self, demand: Demand, node: NodeCapacity) -> bool:
        """Whether to rate a node."""
        ...


def admission(rating: Rating) -> Callable[[Demand, NodeCapacity], bool]:
    """Return what says which nodes are rated: those on which the demand fits, if the rating does not say otherwise."""
    return rating.admits if isinstance(rating, AdmittingRating) else fits


class Best(NamedTuple):
    """A node and the UUIDs of its GPUs."""

    node: str
    gpus: tuple[str, ...]


@dataclass(frozen=True)
class _Unrated:
    """For an index of which only the obstacles are asked."""

    def rate(self, demand: Demand, node: NodeCapacity) -> Rated:
        return Rated((), ())


UNRATED = _Unrated()


class ChangeLog:
    """The names of nodes that have changed, in order; the oldest are forgotten."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._first = 0

    @property
    def end(self) -> int:
        """How many changes there have been."""
        return self._first + len(self._names)

    def add(self, name: str, keep: int) -> None:
        """Note a change; at least the last ``keep`` of them can be asked for."""
        self._names.append(name)
        if len(self._names) > 2 * keep + 1000:
            forgotten = len(self._names) - keep
            del self._names[:forgotten]
            self._first += forgotten

    def since(self, position: int) -> list[str] | None:
        """Return the names noted since then; None where some are forgotten."""
        return self._names[position - self._first :] if position >= self._first else None


Entry = tuple[tuple[Any, ...], str, tuple[str, ...]]
"""A node in the heap: the key of its rating, its name, its GPUs."""


class CapacityIndex:
    """The nodes for one demand and one rating: a heap of those that can take it, and the obstacles of the others.

    A node that has changed is rated again when the index is asked next; its old entry in the heap is skipped when it
    comes up.
    """

    def __init__(self, demand: Demand, rating: Rating, nodes: Mapping[str, NodeCapacity], changes: ChangeLog) -> None:
        self._demand = demand
        self._rating = rating
        self._nodes = nodes
        self._changes = changes
        self._admits = admission(rating)
        self._seen = changes.end
        self._changed = set(nodes)
        self._heap: list[Entry] = []
        self._entries: dict[str, Entry] = {}
        self._unexplained: set[str] | None = None
        """None: nobody has asked for obstacles yet."""
        self._obstacle_of: dict[str, Obstacle] = {}
        self._obstacles: Counter[Obstacle] = Counter()
        self._equal: dict[Obstacle, Obstacle] = {}

    def restart(self, rating: Rating) -> None:
        """Begin anew with another rating.

        The containers stay the same objects: those that the garbage collector leaves out (`gc.freeze`) stay left out,
        and new ones, as large as the cluster, would be work for it.
        """
        self._rating = rating
        self._admits = admission(rating)
        self._seen = self._changes.end
        self._changed.update(self._nodes)
        self._heap.clear()
        self._entries.clear()
        self._unexplained = None
        self._obstacle_of.clear()
        self._obstacles.clear()
        self._equal.clear()

    def refresh(self, limit: int | None = None) -> int:
        """Rate nodes that have changed, at most ``limit`` of them; return how many are left."""
        if self._seen != self._changes.end:
            names = self._changes.since(self._seen)
            # where changes are forgotten, nodes that the index knows may be gone
            self._changed.update(names if names is not None else (*self._nodes, *self._entries, *self._obstacle_of))
            self._seen = self._changes.end
        if not self._changed:
            return 0
        chosen = list(islice(self._changed, limit))
        # many at once: making the heap anew is cheaper than one push each
        at_once = len(chosen) > len(self._heap) // 4
        demand, entries, nodes, admits = self._demand, self._entries, self._nodes, self._admits
        for name in chosen:
            node = nodes.get(name)
            if node is not None and admits(demand, node := node.left_for(demand)):
                rated = self._rating.rate(demand, node)
                entry = entries[name] = (rated.key, name, rated.gpus)
                if not at_once:
                    heappush(self._heap, entry)
            else:
                entries.pop(name, None)
        # only now: after an error above they are rated again
        self._changed.difference_update(chosen)
        if self._unexplained is not None:
            self._unexplained.update(chosen)
        if at_once or len(self._heap) > 2 * len(entries) + 64:
            self._heap[:] = entries.values()
            heapify(self._heap)
        return len(self._changed)

    def best(self, left_out: frozenset[str]) -> Best | None:
        """Return the best node that is not left out; None: no node can take the demand."""
        self.refresh()
        aside = []
        found: Best | None = None
        while self._heap and found is None:
            entry = self._heap[0]
            _, name, gpus = entry
            if self._entries.get(name) is not entry:
                heappop(self._heap)
            elif name in left_out:
                aside.append(heappop(self._heap))
            else:
                found = Best(name, gpus)
        for entry in aside:
            heappush(self._heap, entry)
        return found

    def admitted(self) -> Set[str]:
        """Return the nodes that are rated."""
        self.refresh()
        return self._entries.keys()

    def obstacles(self) -> tuple[Mapping[Obstacle, int], int]:
        """Return how many nodes have which obstacle, and how many nodes can take the demand."""
        self.explain()
        return self._obstacles, len(self._entries)

    def explain(self, limit: int | None = None) -> int:
        """Find the obstacles of nodes that have changed, at most of ``limit`` nodes; return how many are left."""
        unrated = self.refresh(limit)
        if self._unexplained is None:
            self._unexplained = set(self._nodes) - self._changed
        chosen = list(islice(self._unexplained, limit))
        for name in chosen:
            before = self._obstacle_of.pop(name, None)
            if before is not None:
                self._obstacles[before] -= 1
                if not self._obstacles[before]:
                    del self._obstacles[before]
                    self._equal.pop(before, None)
            node = self._nodes.get(name)
            if node is not None and name not in self._entries:
                obstacle = obstacle_of(self._demand, node.left_for(self._demand))
                # one object for all nodes in the same situation: they are many, and each is work for the collector
                self._obstacle_of[name] = self._equal.setdefault(obstacle, obstacle)
                self._obstacles[obstacle] += 1
        self._unexplained.difference_update(chosen)
        return unrated + len(self._unexplained)


class CapacityIndexes:
    """The indexes that are in use, one for each demand and rating."""

    def __init__(self, nodes: Mapping[str, NodeCapacity]) -> None:
        self._nodes = nodes
        self._indexes: OrderedDict[tuple[Demand, Rating], CapacityIndex] = OrderedDict()
        self._retired: dict[Demand, CapacityIndex] = {}
        self._changes = ChangeLog()

    def changed(self, node: str) -> None:
        """Note that a node has changed, is new or is gone."""
        self._changes.add(node, keep=2 * len(self._nodes))

    @property
    def version(self) -> int:
        """How many changes there have been: while it is the same, so is what all indexes say."""
        return self._changes.end

    def of(self, demand: Demand, rating: Rating) -> CapacityIndex:
        """Return the index for a demand and a rating; its nodes may have to be rated first."""
        key = (demand, rating)
        index = self._indexes.get(key)
        if index is None:
            index = self._retired.pop(demand, None)
            if index is None:
                index = CapacityIndex(demand, rating, self._nodes, self._changes)
            else:
                index.restart(rating)
            self._indexes[key] = index
            self._keep_to(max(1, MOST_ENTRIES // max(1, len(self._nodes))))
        else:
            self._indexes.move_to_end(key)
        return index

    def retire(self, rating: object) -> None:
        """Use the indexes of a rating that will not be asked for again for the next rating of the same demands."""
        self._retired = {demand: self._indexes.pop((demand, one)) for demand, one in [*self._indexes] if one == rating}

    def obstacles(self, demand: Demand) -> tuple[Mapping[Obstacle, int], int]:
        """Return how many nodes have which obstacle, and how many nodes can take the demand."""
        return self._any_of(demand).obstacles()

    def explain(self, demand: Demand, limit: int) -> int:
        """Find obstacles for later calls of `obstacles`, on at most ``limit`` nodes; return how many are left."""
        return self._any_of(demand).explain(limit)

    def _keep_to(self, most: int) -> None:
        """Forget indexes so that there are no more than ``most``."""
        while self._retired and len(self._indexes) + len(self._retired) > most:
            self._retired.popitem()
        while len(self._indexes) > most:
            self._indexes.popitem(last=False)

    def _any_of(self, demand: Demand) -> CapacityIndex:
        # obstacles are the same in every index of the demand
        asked = (
            index
            for (known, rating), index in reversed(self._indexes.items())
            if known == demand and admission(rating) is fits
        )
        return next(asked, None) or self.of(demand, UNRATED)
