"""What is left on the GPUs, and the best fit among them."""

from __future__ import annotations

import pytest

from gpushare_spawner.model.share import Share
from gpushare_spawner.placement import FreeCapacity, Ledger
from gpushare_spawner.placement.capacity_index import CapacityIndex, Found
from tests.placement.reports import active, gpu, report


def test_of_two_reports_of_one_instant_the_one_that_came_last_counts():
    reports = [report("n", [gpu("a")], at=1.0), report("n", [gpu("b")], at=1.0)]
    assert list(FreeCapacity(reports).gpus) == ["b"]
    assert list(FreeCapacity(reversed(reports)).gpus) == ["a"]


def test_a_gpu_that_two_nodes_report_counts_once_and_hides_none_of_the_others():
    capacity = FreeCapacity([report("n1", [gpu("a", 0)]), report("n2", [gpu("a", 0), gpu("b", 3)])])
    assert [(one.uuid, one.node, one.index, one.rank) for one in capacity.gpus.values()] == [
        ("a", "n1", 0, 0),
        ("b", "n2", 3, 1),
    ]
    assert [(node.name, [one.uuid for one in node.gpus]) for node in capacity.nodes] == [("n1", ["a"]), ("n2", ["b"])]


def test_an_unhealthy_gpu_is_known_and_is_not_in_its_nodes_room():
    capacity = FreeCapacity([report("n", [gpu("a", 0), gpu("b", 1, healthy=False)])])
    assert list(capacity.gpus) == ["a", "b"]
    assert [[one.uuid for one in node.gpus] for node in capacity.nodes] == [["a"]]
    assert capacity.models == ["A100"]
    capacity.update("b", 10, 20)
    assert (capacity.gpus["b"].unowned, capacity.gpus["b"].free) == (10, 20)


def test_a_gpu_of_exactly_100_unowned_units_is_a_whole_one():
    capacity = FreeCapacity([report("n", [gpu("a", 0), gpu("b", 1)])])
    assert (capacity.nodes[0].unowned, capacity.nodes[0].free) == (2, 2)
    assert capacity.tightest_node(2, ["A100"]) is capacity.nodes[0]
    capacity.update("b", 99, 100)
    assert (capacity.nodes[0].unowned, capacity.nodes[0].free) == (1, 2)
    capacity.update("b", 99, 99)
    assert (capacity.nodes[0].unowned, capacity.nodes[0].free) == (1, 1)


def lent(units: dict[str, tuple[str, int]]) -> Ledger:
    """A GPU of each model, of which an idle session owns some units."""
    gpus = [gpu(name, number, model) for number, (name, (model, _)) in enumerate(units.items())]
    return Ledger.of([report("n", gpus, [active(f"on-{name}", name, held) for name, (_, held) in units.items()])])


@pytest.mark.parametrize("order", [("a", "b", "c"), ("c", "b", "a"), ("b", "a", "c")])
def test_among_models_too_as_few_lent_units_as_possible_are_taken(order):
    owned = {"a": ("A100", 80), "b": ("H100", 60), "c": ("T4", 70)}
    ledger = lent({name: owned[name] for name in order})
    for name in order:
        ledger.replace(active(f"on-{name}", name, owned[name][1]).with_effective(0))
    found = ledger.place(Share(50))
    assert (found.gpus, found.borrowed) == (("b",), 10)


def test_among_equals_the_gpu_with_less_room_to_lend_is_taken_and_then_the_first():
    """Unowned units are the same on each: b has fewer free ones, so a and c keep theirs for larger shares."""
    ledger = lent({"a": ("T4", 70), "b": ("A100", 70), "c": ("H100", 70)})
    for name, effective in (("a", 0), ("b", 40), ("c", 0)):
        ledger.replace(active(f"on-{name}", name, 70).with_effective(effective))
    assert ledger.place(Share(50)).gpus == ("b",)
    assert ledger.place(Share(80)).gpus == ("a",)


@pytest.mark.parametrize("models", [("A100", "T4"), ("T4", "A100")])
def test_of_two_nodes_the_one_that_needs_fewer_lent_gpus_is_taken(models):
    """Each node has two GPUs free; of those of the second, one belongs to nobody."""
    nodes = [
        report(
            "n1", [gpu("a", 0, models[0]), gpu("b", 1, models[0])], [active("on-a", "a", 9), active("on-b", "b", 9)]
        ),
        report("n2", [gpu("c", 0, models[1]), gpu("d", 1, models[1])], [active("on-c", "c", 9)]),
    ]
    ledger = Ledger.of(nodes)
    for name in "abc":
        ledger.replace(active(f"on-{name}", name, 9).with_effective(0))
    assert ledger.place(Share(count=2)).node == "n2"


def test_whole_gpus_that_nobody_owns_come_before_lent_ones_of_the_same_node():
    ledger = Ledger.of([report("n", [gpu("a", 0), gpu("b", 1), gpu("c", 2)], [active("idle", "a", 1)])])
    ledger.replace(active("idle", "a", 1).with_effective(0))
    assert ledger.place(Share(count=2)).gpus == ("b", "c")
    assert ledger.place(Share(count=3)).gpus == ("b", "c", "a")


def test_a_rank_that_is_not_in_a_bucket_cannot_be_taken_out_of_it():
    index = CapacityIndex()
    index.put(5, 10, 20)
    for missing in (3, 7):
        with pytest.raises(KeyError, match=str(missing)):
            index.take(missing, 10, 20)
    assert index.tightest(10, 20) == Found(10, 20, 5)
    index.take(5, 10, 20)
    assert index.tightest(0, 0) is None


def test_the_tightest_bucket_has_the_least_first_number_and_then_the_least_second():
    index = CapacityIndex()
    for rank, (first, second) in enumerate([(30, 40), (20, 60), (20, 50), (10, 90), (20, 50)]):
        index.put(rank, first, second)
    assert index.tightest(15, 45) == Found(20, 50, 2)
    assert index.tightest(15, 55) == Found(20, 60, 1)
    assert index.tightest(15, 70) is None
    assert index.nearest_below(20, 40) == Found(10, 90, 3)
    assert index.nearest_below(31, 45) == Found(20, 50, 2)
    assert index.nearest_below(10, 0) is None


def test_numbers_below_zero_count_as_zero():
    index = CapacityIndex()
    index.put(1, -5, -7)
    assert index.tightest(0, 0) == Found(0, 0, 1)
    index.take(1, -1, -1)
    assert index.tightest(0, 0) is None


def test_the_fullest_gpu_and_the_fullest_node_are_found_among_all_models():
    models = ["A100", "H100", "T4"]
    ledger = lent({"a": ("A100", 20), "b": ("H100", 40), "c": ("T4", 30)})
    assert ledger.capacity.tightest_gpu(50, models).uuid == "b"
    assert ledger.capacity.tightest_gpu(65, models).uuid == "c"
    sizes = {"A100": 4, "H100": 2, "T4": 3}
    nodes = [report(model, [gpu(f"{model}{n}", n, model) for n in range(size)]) for model, size in sizes.items()]
    assert FreeCapacity(nodes).tightest_node(2, models).name == "H100"
    assert FreeCapacity(nodes).tightest_node(3, models).name == "T4"
