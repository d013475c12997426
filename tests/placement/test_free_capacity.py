"""What is left on the GPUs, and the best fit among them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpushare_spawner.placement.capacity import FreeCapacity
from gpushare_spawner.placement.ledger import Ledger
from gpushare_spawner.placement.node import NodeResources
from tests.placement.reports import active, gpu, ledger_of, report, request
from tests.present import present


def test_of_two_reports_of_one_instant_the_one_that_came_last_counts() -> None:
    reports = [report("n", [gpu("a")], at=1.0), report("n", [gpu("b")], at=1.0)]
    assert list(ledger_of(reports).capacity.gpus) == ["b"]
    assert list(ledger_of(reversed(reports)).capacity.gpus) == ["a"]


@pytest.mark.parametrize("order", [("n1", "n2"), ("n2", "n1")])
def test_a_gpu_that_two_nodes_report_counts_once_and_hides_none_of_the_others(order: tuple[str, str]) -> None:
    gpus = {"n1": [gpu("a", 0)], "n2": [gpu("a", 0), gpu("b", 3)]}
    capacity = FreeCapacity()
    for name in order:
        capacity.put_node(name, gpus[name])
    assert {one.uuid: (one.node, one.index, one.rank) for one in capacity.gpus.values()} == {
        "a": ("n1", 0, ("n1", 0, "a")),
        "b": ("n2", 3, ("n2", 3, "b")),
    }
    assert {name: [one.uuid for one in node.gpus] for name, node in capacity.nodes.items()} == {
        "n1": ["a"],
        "n2": ["b"],
    }
    assert capacity.put_node("n1", []) == ["a", "b"]
    assert [one.uuid for one in capacity.nodes["n2"].gpus] == ["a", "b"]
    assert "n1" not in capacity.nodes


def test_a_node_that_only_reports_gpus_of_another_one_is_no_node_of_its_own() -> None:
    capacity = FreeCapacity()
    capacity.put_node("n1", [gpu("a")])
    capacity.put_node("n2", [gpu("a")])
    assert list(capacity.nodes) == ["n1"]
    capacity.put_node("n2", [])
    assert capacity.gpus["a"].node == "n1"


def test_an_unhealthy_gpu_is_known_and_is_not_offered() -> None:
    capacity = FreeCapacity()
    assert capacity.put_node("n", [gpu("b", 1, healthy=False), gpu("a", 0)]) == ["a", "b"]
    node = capacity.nodes["n"]
    assert [one.uuid for one in node.gpus] == ["a", "b"]
    assert {model: [one.uuid for one in gpus] for model, gpus in node.healthy.items()} == {"A100": ["a"]}
    capacity.update("b", 10, 20)
    assert (capacity.gpus["b"].unowned, capacity.gpus["b"].free) == (10, 20)
    assert node.most_free == {"A100": (100,)}


def test_a_report_that_changes_nothing_about_the_gpus_leaves_them_as_they_are() -> None:
    capacity = FreeCapacity()
    capacity.put_node("n", [gpu("a")])
    capacity.update("a", 30, 40)
    known = capacity.nodes["n"]
    assert capacity.put_node("n", [gpu("a").model_copy(update={"memory_used_bytes": 5})]) == ()
    assert capacity.nodes["n"] is known
    assert capacity.gpus["a"].free == 40
    for other in ({"healthy": False}, {"capacity_units": 50}, {"model": "T4"}, {"index": 7}):
        assert capacity.put_node("n", [gpu("a").model_copy(update=other)]) == ["a"]
    assert (capacity.gpus["a"].index, capacity.gpus["a"].free) == (7, 100)


def test_what_is_derived_of_a_node_is_forgotten_when_it_changes() -> None:
    capacity = FreeCapacity()
    capacity.put_node("n", [gpu("a")])
    node = capacity.nodes["n"]
    changes: tuple[Callable[[], object], ...] = (
        lambda: capacity.update("a", 50, 60),
        lambda: capacity.set_resources("n", NodeResources(cpu=1)),
    )
    for change in changes:
        node.derived["key"] = 1
        change()
        assert not node.derived
        node.derived["key"] = 1
        change()  # nothing changes
        assert node.derived == {"key": 1}
    assert node.most_free == {"A100": (60,)}


def test_resources_may_be_known_before_the_gpus() -> None:
    capacity = FreeCapacity()
    capacity.set_resources("n", NodeResources(cpu=1))
    capacity.put_node("n", [gpu("a")])
    assert capacity.nodes["n"].resources == NodeResources(cpu=1)
    capacity.set_resources("n", NodeResources())
    assert capacity.nodes["n"].resources == NodeResources()


@pytest.mark.parametrize(
    ("unowned", "free", "ownable"), [(30, 40, 30), (40, 30, 30), (-5, 10, 0), (10, -5, 0), (150, 140, 100)]
)
def test_what_a_newcomer_can_own_is_unowned_and_free_and_at_most_a_gpu(unowned: int, free: int, ownable: int) -> None:
    capacity = FreeCapacity()
    capacity.put_node("n", [gpu("a", capacity=150)])
    capacity.update("a", unowned, free)
    assert capacity.gpus["a"].ownable == ownable


def lent(units: dict[str, tuple[str, int]]) -> Ledger:
    """A GPU of each model, of which an idle session owns some units."""
    gpus = [gpu(name, number, model) for number, (name, (model, _)) in enumerate(units.items())]
    return ledger_of([report("n", gpus, [active(f"on-{name}", name, held) for name, (_, held) in units.items()])])


@pytest.mark.parametrize("order", [("a", "b", "c"), ("c", "b", "a"), ("b", "a", "c")])
def test_among_models_too_as_few_lent_units_as_possible_are_taken(order: tuple[str, str, str]) -> None:
    owned = {"a": ("A100", 80), "b": ("H100", 60), "c": ("T4", 70)}
    ledger = lent({name: owned[name] for name in order})
    for name in order:
        ledger.replace(active(f"on-{name}", name, owned[name][1]).with_effective(0))
    found = present(ledger.place(request(50)))
    assert (found.gpus, found.borrowed) == (("b",), 10)


def test_among_equals_the_gpu_with_less_room_to_lend_is_taken_and_then_the_first() -> None:
    """Unowned units are the same on each: b has fewer free ones, so a and c keep theirs for larger shares."""
    ledger = lent({"a": ("T4", 70), "b": ("A100", 70), "c": ("H100", 70)})
    for name, effective in (("a", 0), ("b", 40), ("c", 0)):
        ledger.replace(active(f"on-{name}", name, 70).with_effective(effective))
    assert present(ledger.place(request(50))).gpus == ("b",)
    assert present(ledger.place(request(80))).gpus == ("a",)


@pytest.mark.parametrize("models", [("A100", "T4"), ("T4", "A100")])
def test_of_two_nodes_the_one_that_needs_fewer_lent_gpus_is_taken(models: tuple[str, str]) -> None:
    """Each node has two GPUs free; of those of the second, one belongs to nobody."""
    nodes = [
        report(
            "n1", [gpu("a", 0, models[0]), gpu("b", 1, models[0])], [active("on-a", "a", 9), active("on-b", "b", 9)]
        ),
        report("n2", [gpu("c", 0, models[1]), gpu("d", 1, models[1])], [active("on-c", "c", 9)]),
    ]
    ledger = ledger_of(nodes)
    for name in "abc":
        ledger.replace(active(f"on-{name}", name, 9).with_effective(0))
    assert present(ledger.place(request(count=2))).node == "n2"


def test_whole_gpus_that_nobody_owns_come_before_lent_ones_of_the_same_node() -> None:
    ledger = ledger_of([report("n", [gpu("a", 0), gpu("b", 1), gpu("c", 2)], [active("idle", "a", 1)])])
    ledger.replace(active("idle", "a", 1).with_effective(0))
    assert present(ledger.place(request(count=2))).gpus == ("b", "c")
    assert present(ledger.place(request(count=3))).gpus == ("b", "c", "a")


def test_the_fullest_gpu_and_the_fullest_node_are_found_among_all_models() -> None:
    ledger = lent({"a": ("A100", 20), "b": ("H100", 40), "c": ("T4", 30)})
    assert present(ledger.place(request(50))).gpus == ("b",)
    assert present(ledger.place(request(65))).gpus == ("c",)
    sizes = {"A100": 4, "H100": 2, "T4": 3}
    nodes = [report(model, [gpu(f"{model}{n}", n, model) for n in range(size)]) for model, size in sizes.items()]
    assert present(ledger_of(nodes).place(request(count=2))).node == "H100"
    assert present(ledger_of(nodes).place(request(count=3))).node == "T4"
