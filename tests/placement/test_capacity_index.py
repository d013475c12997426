"""Nodes in the order of their ratings, kept up to date by what changes."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from gpushare_spawner.placement import capacity as capacity_index
from gpushare_spawner.placement.capacity import Best, ChangeLog, FreeCapacity, Rated, Rating
from gpushare_spawner.placement.node import NodeCapacity
from gpushare_spawner.placement.request import Demand
from tests.placement.reports import gpu

ONE = Demand(10, 1)


@dataclass(eq=False)
class Fullest(Rating):
    """Rates by free units, and notes what it was asked."""

    asked: list[str] = field(default_factory=list)

    def rate(self, demand: Demand, node: NodeCapacity) -> Rated:
        self.asked.append(node.name)
        return Rated((node.gpus[0].free,), (node.gpus[0].uuid,))


class Emptiest(Rating):
    """Rates by free units, the most first."""

    def rate(self, demand: Demand, node: NodeCapacity) -> Rated:
        return Rated((-node.gpus[0].free,), (node.gpus[0].uuid,))


def cluster(count: int = 5) -> FreeCapacity:
    """Nodes n0, n1, ... with a GPU each, named g0, g1, ..."""
    capacity = FreeCapacity()
    for number in range(count):
        capacity.put_node(f"n{number}", [gpu(f"g{number}")])
    return capacity


def test_only_nodes_that_have_changed_are_rated_again() -> None:
    capacity, rating = cluster(), Fullest()
    assert capacity.best(ONE, rating) == Best("n0", ("g0",))
    assert sorted(rating.asked) == ["n0", "n1", "n2", "n3", "n4"]
    rating.asked.clear()
    assert capacity.best(ONE, rating) == Best("n0", ("g0",))
    capacity.update("g3", 40, 40)
    capacity.update("g3", 50, 50)
    assert capacity.best(ONE, rating) == Best("n3", ("g3",))
    capacity.update("g3", 9, 9)
    capacity.update("g4", 90, 90)
    assert capacity.best(ONE, rating) == Best("n4", ("g4",))
    capacity.update("g3", 10, 10)
    assert capacity.best(ONE, rating) == Best("n3", ("g3",))
    assert rating.asked == ["n3", "n4", "n3"]


@dataclass(frozen=True)
class IfEmpty(Rating):
    """Rates nodes that could take the demand if they were empty."""

    def admits(self, demand: Demand, node: NodeCapacity) -> bool:
        return node.gpus[0].capacity >= demand.units

    def rate(self, demand: Demand, node: NodeCapacity) -> Rated:
        return Rated((-node.gpus[0].free,), (node.gpus[0].uuid,))


def test_a_rating_can_admit_nodes_that_cannot_take_the_demand_now() -> None:
    capacity, rating = cluster(3), IfEmpty()
    capacity.put_node("small", [gpu("tiny", capacity=5)])
    for number in range(3):
        capacity.update(f"g{number}", number, number)
    assert capacity.best(ONE, Fullest()) is None
    assert capacity.best(ONE, rating) == Best("n2", ("g2",))
    assert capacity.admitted(ONE, rating) == {"n0", "n1", "n2"}
    assert capacity.admitted(ONE, rating, only="n1") == {"n1"}
    assert capacity.admitted(ONE, rating, only="small") == set()
    # what nodes lack is not asked of such an index
    assert capacity.obstacles(ONE)[1] == 0


def test_what_was_computed_for_a_rating_can_be_forgotten() -> None:
    capacity, old, new = cluster(), Fullest(), Fullest()
    for rating in (old, new):
        capacity.best(ONE, rating)
        for node in capacity.nodes.values():
            node.derived[rating] = "known"
    for _ in capacity.forgetting(old):
        pass
    assert all(list(node.derived) == [new] for node in capacity.nodes.values())
    for rating, rated in ((old, 10), (new, 5)):
        capacity.best(ONE, rating)
        assert len(rating.asked) == rated


def test_the_index_of_a_forgotten_rating_serves_the_next_one() -> None:
    """Its containers are as large as the cluster: new ones would be work for the garbage collector."""
    capacity, many = cluster(), Demand(10, 2)
    old, new = Fullest(), Emptiest()
    for demand in (ONE, many):
        capacity.best(demand, old)
    capacity.obstacles(many)
    index = capacity._index(ONE, old)
    heap, entries = index._heaps[()], index._entries
    for number in range(5):
        capacity.update(f"g{number}", 20 + number, 20 + number)
    for _ in capacity.forgetting(old):
        pass
    capacity.update("g2", 0, 0)
    assert capacity.best(ONE, new) == Best("n4", ("g4",))
    assert capacity._index(ONE, new) is index
    assert (index._heaps[()] is heap, index._entries is entries) == (True, True)
    assert len(heap) == len(entries) == 4
    assert capacity.best(many, new) is None
    assert sum(capacity.obstacles(many)[0].values()) == 5


def test_the_indexes_of_forgotten_ratings_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity_index, "MOST_ENTRIES", 10)  # two indexes of five nodes
    capacity = cluster()
    for number in range(1, 6):
        rating = Fullest()
        for demand in (Demand(number, 1), ONE, Demand(number, 2)):
            capacity.best(demand, rating)
            assert len(capacity._indexes) + len(capacity._retired) <= 2
        for _ in capacity.forgetting(rating):
            pass
        assert not capacity._indexes


def test_nodes_in_the_same_situation_share_one_obstacle() -> None:
    capacity, many = cluster(), Demand(10, 2)
    obstacles, _ = capacity.obstacles(many)
    index = capacity._any_index(many)
    assert len({id(obstacle) for obstacle in index._obstacle_of.values()}) == len(obstacles) == 1
    capacity.put_node("n0", [])
    assert list(capacity.obstacles(many)[0].values()) == [4]


def test_nodes_that_come_and_go_are_noticed() -> None:
    capacity, rating = cluster(2), Fullest()
    assert capacity.best(ONE, rating, frozenset({"n0"})) == Best("n1", ("g1",))
    capacity.put_node("n0", [])
    capacity.put_node("a", [gpu("ga")])
    assert capacity.best(ONE, rating) == Best("a", ("ga",))
    capacity.put_node("a", [])
    capacity.put_node("n1", [])
    assert capacity.best(ONE, rating) is None


def test_a_node_that_is_left_out_once_is_there_the_next_time() -> None:
    capacity, rating = cluster(), Fullest()
    for number in range(3):
        capacity.update(f"g{number}", 20 + number, 20 + number)
    assert capacity.best(ONE, rating, frozenset({"n0", "n1"})) == Best("n2", ("g2",))
    assert capacity.best(ONE, rating) == Best("n0", ("g0",))
    assert capacity.best(ONE, rating, frozenset({f"n{number}" for number in range(5)})) is None
    assert capacity.best(ONE, rating) == Best("n0", ("g0",))


def test_a_node_can_be_asked_for_alone_without_an_index() -> None:
    capacity, rating = cluster(), Fullest()
    assert capacity.best(ONE, rating, only="n3") == Best("n3", ("g3",))
    assert rating.asked == ["n3"]
    assert capacity.best(ONE, rating, frozenset({"n3"}), only="n3") is None
    assert capacity.best(ONE, rating, only="lost") is None
    assert capacity.best(Demand(10, 2), rating, only="n3") is None


def test_an_index_can_be_made_in_steps() -> None:
    capacity, rating = cluster(), Fullest()
    assert [capacity.prepare(ONE, rating, 2) for _ in range(4)] == [3, 1, 0, 0]
    assert len(rating.asked) == 5
    capacity.update("g3", 40, 40)
    capacity.update("g2", 30, 30)
    assert capacity.prepare(ONE, rating, 1) == 1
    assert capacity.best(ONE, rating) == Best("n2", ("g2",))
    assert len(rating.asked) == 7


def test_a_query_also_rates_a_few_nodes_for_the_other_demands_of_late() -> None:
    capacity, rating, rare = cluster(60), Fullest(), Demand(11, 1)
    never, other = Demand(12, 1), Fullest()
    capacity.best(rare, rating)
    capacity.best(ONE, rating)
    capacity._index(never, rating)
    capacity.best(ONE, other)
    for number in range(20):
        capacity.update(f"g{number}", 50, 50)
        rating.asked.clear()
        capacity.best(ONE, rating)
        assert len(rating.asked) <= 2
    other.asked.clear()
    rating.asked.clear()
    assert capacity.best(rare, rating) == Best("n0", ("g0",))
    assert len(rating.asked) == capacity_index.LEFT_BEHIND
    assert other.asked == []
    for number in range(29):
        capacity.update(f"g{number}", 40, 40)
    rating.asked.clear()
    capacity.best(ONE, rating)
    assert len(rating.asked) == 29 + capacity_index.RATED_AHEAD, "of many changes only some are rated ahead"


def test_after_many_changes_the_heap_holds_the_nodes_and_little_more() -> None:
    capacity, rating = cluster(), Fullest()
    capacity.best(ONE, rating)
    for number in range(400):
        capacity.update("g1", 20 + number % 50, 20 + number % 50)
        assert capacity.best(ONE, rating) == Best("n1", ("g1",))
    index = capacity._index(ONE, rating)
    assert len(index._heaps[()]) <= 2 * 5 + 64


def test_an_index_that_was_not_asked_for_longer_than_the_log_goes_back_rates_all_nodes() -> None:
    capacity, rating, other = cluster(), Fullest(), Fullest()
    capacity.best(ONE, rating)
    rating.asked.clear()
    for number in range(5000):
        capacity.update("g1", number % 50, number % 50)
        capacity.best(ONE, other)
    assert len(capacity._changes._names) < 2000
    capacity.update("g2", 15, 15)
    assert capacity.best(ONE, rating) == Best("n2", ("g2",))
    assert sorted(rating.asked) == ["n0", "n1", "n2", "n3", "n4"]


def test_the_index_that_was_not_asked_for_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity_index, "MOST_ENTRIES", 10)
    capacity, rating = cluster(), Fullest()
    first, second, third = (Demand(units, 1) for units in (1, 2, 3))
    for demand in (first, second, first, third):
        capacity.best(demand, rating)
    rating.asked.clear()
    capacity.best(first, rating)
    assert rating.asked == []
    capacity.best(second, rating)
    assert len(rating.asked) == 5


def test_the_log_of_changes_forgets_the_oldest() -> None:
    log = ChangeLog()
    for number in range(1001):
        log.add(str(number), retain=0)
    assert log.end == 1001
    assert log.since(1001) == []
    assert log.since(1000) is None
    log.add("new", retain=0)
    assert log.since(1001) == ["new"]
    assert log.end == 1002


@pytest.mark.parametrize("keep", [5, 100])
def test_the_log_of_changes_keeps_as_many_as_it_must(keep: int) -> None:
    log = ChangeLog()
    for number in range(10_000):
        log.add(str(number), keep)
        if number >= keep:
            assert log.since(log.end - keep) == [str(one) for one in range(number - keep + 1, number + 1)]
    assert len(log._names) <= 2 * keep + 1000


@pytest.mark.parametrize(("nodes", "most", "kept"), [(1, 4, 4), (1, 0, 1), (5, 10, 2), (5, 4, 1)])
def test_as_many_indexes_are_kept_as_have_room_and_one_at_least(
    monkeypatch: pytest.MonkeyPatch, nodes: int, most: int, kept: int
) -> None:
    monkeypatch.setattr(capacity_index, "MOST_ENTRIES", most)
    capacity, rating = cluster(nodes), Fullest()
    for units in range(1, 7):
        capacity.best(Demand(units, 1), rating)
    assert len(capacity._indexes) == kept


def test_of_one_node_alone_either_it_can_or_its_obstacle_is_told() -> None:
    capacity = cluster(2)
    assert capacity.obstacles(ONE, "n0") == ({}, 1)
    capacity.update("g0", 9, 9)
    found, fitting = capacity.obstacles(ONE, "n0")
    assert (list(found.values()), fitting) == ([1], 0)
    assert capacity.obstacles(ONE, "lost") == ({}, 0)


def test_a_node_that_left_before_changes_were_forgotten_is_not_offered() -> None:
    """A quiet night on a cluster with an autoscaler: a node leaves, and idle actions go on until somebody looks."""
    capacity, rating, many = cluster(), Fullest(), Demand(10, 2)
    assert capacity.best(ONE, rating) == Best("n0", ("g0",))
    assert sum(capacity.obstacles(many)[0].values()) == 5
    capacity.put_node("n0", [])
    for number in range(1000 + 2 * 5 + 1):
        capacity.update("g1", number % 50, number % 50)
    capacity.update("g1", 0, 0)
    assert capacity._changes.since(0) is None, "changes were forgotten"
    assert capacity.best(ONE, rating) == Best("n2", ("g2",))
    assert capacity.admitted(ONE, rating) == {"n2", "n3", "n4"}
    assert sum(capacity.obstacles(many)[0].values()) == 4
