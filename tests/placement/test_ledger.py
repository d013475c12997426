"""The ledger: where shares go, and why they do not."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from benchmarks.ledger_check import check_ledger
from gpushare_spawner.model.share import Share
from gpushare_spawner.placement.capacity import Best, FreeCapacity
from gpushare_spawner.placement.ledger import Ledger, LedgerError
from gpushare_spawner.placement.node import Allocation, NodeResources, Requested
from gpushare_spawner.placement.obstacles import Reason
from gpushare_spawner.placement.request import PlacementRequest
from gpushare_spawner.placement.strategy import BestFit
from tests.placement.reports import active, gpu, ledger_of, report, request
from tests.present import present


def two_gpus(*allocations: Allocation, capacity: int = 100) -> Ledger:
    """A node with the GPUs a and b."""
    return ledger_of([report("n", [gpu("a", 0, capacity=capacity), gpu("b", 1, capacity=capacity)], allocations)])


def test_best_fit_takes_the_fullest_gpu_that_has_room() -> None:
    ledger = two_gpus(active("s", "b", 50))
    assert present(ledger.place(request(50))).gpus == ("b",)
    assert present(ledger.place(request(51))).gpus == ("a",)


def test_ties_go_to_the_first_node_and_index() -> None:
    nodes = [report(node, [gpu(f"{node}1", 1), gpu(f"{node}0", 0)]) for node in ("n2", "n1")]
    ledger = ledger_of(nodes)
    assert {present(ledger.place(request(10))).gpus for _ in range(5)} == {("n10",)}
    assert present(ledger.place(request(10))).node == "n1"


def test_unowned_units_are_preferred_to_lent_ones() -> None:
    idle = active("idle", "a", 100).with_effective(10)
    ledger = two_gpus(idle, active("s", "b", 50))
    first = present(ledger.place(request(40)))
    assert (first.gpus, first.borrowed) == (("b",), 0)
    second = present(ledger.place(request(60)))
    assert (second.gpus, second.borrowed) == (("a",), 60)
    assert ledger.place(request(91)) is None


def test_as_few_lent_units_as_possible() -> None:
    a = active("on-a", "a", 80).with_effective(0)
    b = active("on-b", "b", 60).with_effective(0)
    placement = present(two_gpus(a, b).place(request(50)))
    assert (placement.gpus, placement.borrowed) == (("b",), 10)


def test_the_owner_comes_back_and_the_borrower_yields() -> None:
    owner = active("owner", "a", 75).with_effective(0)
    ledger = ledger_of([report("n", [gpu("a")], [owner])])
    placement = present(ledger.place(request(50)))
    assert placement.borrowed == 25
    ledger.add(active("guest", placement.gpus, 50, placement.borrowed, opened_at=1.0))
    assert ledger.guaranteed("guest") == 50
    ledger.replace(owner.with_effective(75))
    assert (ledger.guaranteed("owner"), ledger.guaranteed("guest")) == (75, 25)
    check_ledger(ledger)
    ledger.remove("owner")
    assert [*ledger.convert_borrowed()] == ["guest"]
    assert ledger.allocations["guest"].borrowed_units == 0
    assert ledger.allocations["guest"].owned_units == 50
    assert ledger.unowned_units("a") == 50
    check_ledger(ledger)


def test_several_whole_gpus_lie_on_one_node_and_are_of_one_model() -> None:
    ledger = ledger_of(
        [
            report("big", [gpu(f"big{i}", i) for i in range(4)]),
            report("mixed", [gpu("m0", 0), gpu("m1", 1, model="T4")]),
            report("small", [gpu("small0", 0), gpu("small1", 1)]),
        ]
    )
    assert present(ledger.place(request(count=2))).gpus == ("small0", "small1")
    ledger.add(active("s", "small0", 1))
    assert present(ledger.place(request(count=2))).gpus == ("big0", "big1")
    assert ledger.place(request(count=5)) is None
    assert ledger.why_unplaceable(request(count=5)).reason is Reason.TOO_BIG


def test_several_whole_gpus_may_be_lent_ones() -> None:
    ledger = two_gpus(active("idle", "a", 30).with_effective(0))
    placement = present(ledger.place(request(count=2)))
    assert (set(placement.gpus), placement.borrowed) == ({"a", "b"}, 30)
    ledger.add(active("guest", placement.gpus, 100, placement.borrowed, opened_at=1.0))
    check_ledger(ledger)
    ledger.replace(active("idle", "a", 30))
    assert ledger.guaranteed("guest") == 70


def test_unhealthy_gpus_get_nothing() -> None:
    ledger = ledger_of([report("n", [gpu("a", healthy=False)])])
    assert ledger.place(request(1)) is None
    assert ledger.free_units("a") == 0
    why = ledger.why_unplaceable(request(1))
    assert why.reason is Reason.UNHEALTHY
    assert why.may_pass


def test_a_cordoned_gpu_is_capacity_that_is_not_there_and_keeps_its_sessions() -> None:
    ann = active("ann", "a", 40)
    ledger = ledger_of([report("n", [gpu("a"), gpu("b", 1)], [ann])])
    ledger.put_node("n", [gpu("a", cordoned=True), gpu("b", 1)])
    placed = ledger.place(request(30))
    assert placed is not None
    assert placed.gpus == ("b",), "best fit would have taken a"
    assert ledger.free_units("a") == 0
    assert ledger.guaranteed("ann") == 40
    ledger.put_node("n", [gpu("a", cordoned=True), gpu("b", 1, cordoned=True)])
    assert ledger.place(request(1)) is None
    why = ledger.why_unplaceable(request(1))
    assert (why.reason, why.may_pass) == (Reason.CORDONED, True)
    ledger.put_node("n", [gpu("a"), gpu("b", 1, cordoned=True)])
    back = ledger.place(request(60))
    assert back is not None
    assert back.gpus == ("a",)


def test_only_accepted_models() -> None:
    wanted = request(50, "NVIDIA H100 80GB")
    ledger = ledger_of([report("n", [gpu("a", 0, "NVIDIA A100"), gpu("h", 1, "NVIDIA H100 80GB")])])
    assert present(ledger.place(wanted)).gpus == ("h",)
    why = ledger_of([report("n", [gpu("a", 0, "NVIDIA A100")])]).why_unplaceable(wanted)
    assert why.reason is Reason.NO_MODEL
    assert "NVIDIA A100" in str(why)
    assert not why.may_pass


def test_a_share_bigger_than_any_gpu() -> None:
    why = two_gpus(capacity=50).why_unplaceable(request(75))
    assert why.reason is Reason.TOO_BIG
    assert (why.share, why.most_units) == (Share(75), 50)


def test_full_says_how_much_is_free_at_best() -> None:
    ledger = two_gpus(active("s", "a", 80), active("t", "b", 70))
    assert ledger.place(request(50)) is None
    why = ledger.why_unplaceable(request(50))
    assert (why.reason, why.best_units, why.best_count) == (Reason.FULL, 30, 0)
    assert why.may_pass


def test_gpus_out_of_order_may_get_well() -> None:
    ledger = ledger_of([report("n", [gpu("a", 0), gpu("b", 1, healthy=False)])])
    assert ledger.why_unplaceable(request(count=2)).reason is Reason.UNHEALTHY


def test_no_agent_no_gpu() -> None:
    assert ledger_of([]).place(request(1)) is None
    assert ledger_of([]).why_unplaceable(request(1)).reason is Reason.NO_GPUS


def test_overcommitted_gpus_hold_more() -> None:
    ledger = two_gpus(active("s", "a", 100), capacity=150)
    assert present(ledger.place(request(50))).gpus == ("a",)
    assert present(ledger.place(request(51))).gpus == ("b",)


def test_reservations_count_until_they_are_reported() -> None:
    gpus = [gpu("a")]
    reservation = active("s", "a", 60)
    before = ledger_of([report("n", gpus)], [reservation])
    assert before.free_units("a") == 40
    after = ledger_of([report("n", gpus, [reservation])], [reservation])
    assert after.free_units("a") == 40


def test_the_newest_report_of_a_node_counts() -> None:
    old = report("n", [gpu("a")], [active("s", "a", 60)], at=1.0)
    new = report("n", [gpu("a")], at=2.0)
    assert ledger_of([new, old]).free_units("a") == 100


def test_a_session_on_a_gpu_that_is_gone_disturbs_nobody() -> None:
    ledger = ledger_of([report("n", [gpu("a")], [active("s", "lost", 60)])])
    assert ledger.free_units("a") == 100
    assert ledger.guaranteed("s") == 0
    ledger.remove("s")
    check_ledger(ledger)


def test_a_session_enters_once() -> None:
    ledger = two_gpus(active("s", "a", 10))
    with pytest.raises(ValueError, match="already"):
        ledger.add(active("s", "b", 10))
    assert ledger.remove("nobody") is None


def test_too_much_owned_is_found() -> None:
    ledger = two_gpus(active("s", "a", 60), active("t", "a", 60))
    with pytest.raises(LedgerError, match="120 units are owned"):
        check_ledger(ledger)


@dataclass
class Always:
    """A strategy with one answer."""

    node: str
    gpus: tuple[str, ...]

    def choose(self, request: PlacementRequest, capacity: FreeCapacity) -> Best:
        return Best(self.node, self.gpus)


def test_another_strategy_can_be_used() -> None:
    ledger = two_gpus(active("s", "a", 60))
    assert present(ledger.place(request(30), Always("n", ("b",)))).gpus == ("b",)
    assert present(ledger.place(request(30), BestFit())).gpus == ("a",)


@pytest.mark.parametrize(
    ("node", "gpus", "wrong"),
    [
        ("n", ("a",), "not all have so much free"),
        ("n", ("b", "b"), "the share lies on 1 of them"),
        ("n", ("a", "b"), "the share lies on 1 of them"),
        ("n", ("lost",), "they are not GPUs of that node"),
        ("m", ("b",), "they are not GPUs of that node"),
        ("lost", ("b",), "they are not GPUs of that node"),
        ("n", ("sick",), "not all are healthy, not cordoned, and of a model that will do"),
        ("n", ("t4",), "not all are healthy, not cordoned, and of a model that will do"),
        ("m", ("other",), "the node lacks cpu"),
    ],
)
def test_what_a_strategy_may_not_choose_is_named_with_the_share(node: str, gpus: tuple[str, ...], wrong: str) -> None:
    cards = [gpu("a", 0), gpu("b", 1), gpu("sick", 2, healthy=False), gpu("t4", 3, model="T4")]
    ledger = ledger_of([report("n", cards, [active("s", "a", 60)]), report("m", [gpu("other")])])
    ledger.put_resources("m", NodeResources(cpu=500))
    with pytest.raises(LedgerError) as error:
        ledger.place(request(50, "A100", cpu=1000), Always(node, gpus))
    assert str(error.value) == f"{Always(node, gpus)!r} chose {', '.join(gpus)} of node {node} for 0.50 GPU: {wrong}"


def test_whole_gpus_of_two_models_are_no_choice() -> None:
    ledger = ledger_of([report("n", [gpu("a", 0), gpu("t4", 1, model="T4")])])
    with pytest.raises(LedgerError, match="they are of several models"):
        ledger.place(request(count=2), Always("n", ("a", "t4")))


def test_a_node_that_the_request_excludes_is_no_choice() -> None:
    for wanted in (request(50, left_out=frozenset({"n"})), request(50, node="m")):
        with pytest.raises(LedgerError, match="the request excludes that node"):
            two_gpus().place(wanted, Always("n", ("a",)))


def test_where_no_model_will_do_there_is_no_place() -> None:
    assert two_gpus().place(PlacementRequest(Share(30), models=frozenset())) is None


def test_cpu_memory_and_pods_of_a_node_count_where_they_are_known() -> None:
    ledger = ledger_of([report("n1", [gpu("a")]), report("n2", [gpu("b")])])
    wanted = request(30, cpu=2000, memory=2**30)
    assert present(ledger.place(wanted)).node == "n1"
    for short in (NodeResources(cpu=1999), NodeResources(memory=2**30 - 1), NodeResources(pods=0)):
        ledger.put_resources("n1", short)
        assert present(ledger.place(wanted)).node == "n2"
    ledger.put_resources("n1", NodeResources(cpu=2000, memory=2**30, pods=1))
    assert present(ledger.place(wanted)).node == "n1"


def test_what_a_reservation_takes_of_its_node_counts_until_the_node_counts_it() -> None:
    ledger = ledger_of([report("n", [gpu("a"), gpu("b", 1)])])
    ledger.put_resources("n", NodeResources(cpu=3000, memory=4 * 2**30, pods=9))
    reservation = replace(active("s", ("a", "b"), 10), uncounted=Requested(cpu=2000, memory=2**30, pods=1))
    ledger.add(reservation)
    assert ledger.capacity.nodes["n"].resources == NodeResources(1000, 3 * 2**30, 8)
    ledger.replace(active("s", ("a", "b"), 10))
    assert ledger.capacity.nodes["n"].resources == NodeResources(3000, 4 * 2**30, 9)
    ledger.replace(reservation)
    ledger.put_resources("n", NodeResources(cpu=2500))
    assert ledger.capacity.nodes["n"].resources == NodeResources(500)
    ledger.remove("s")
    assert ledger.capacity.nodes["n"].resources == NodeResources(2500)


def test_ineligible_nodes_and_nodes_that_are_left_out_get_nothing() -> None:
    ledger = ledger_of([report("n1", [gpu("a")]), report("n2", [gpu("b")])])
    assert present(ledger.place(request(30, ineligible=frozenset({"n1"})))).node == "n2"
    assert present(ledger.place(request(30, left_out=frozenset({"n1"})))).node == "n2"
    assert ledger.place(request(30, left_out=frozenset({"n1", "n2"}))) is None
    assert present(ledger.place(request(30))).node == "n1"


def test_a_request_for_one_node_gets_no_other() -> None:
    ledger = ledger_of([report("n1", [gpu("a")]), report("n2", [gpu("b")], [active("s", "b", 80)])])
    assert present(ledger.place(request(20, node="n2"))).node == "n2"
    assert ledger.place(request(21, node="n2")) is None
    assert ledger.place(request(20, node="n2", left_out=frozenset({"n2"}))) is None
    assert ledger.place(request(20, node="lost")) is None


def test_a_node_that_goes_and_comes_back_finds_its_allocations() -> None:
    ledger = two_gpus(active("s", "a", 60))
    ledger.put_node("n", [])
    assert ledger.place(request(1)) is None
    assert (ledger.allocations["s"].gpus, ledger.guaranteed("s")) == (("a",), 0)
    ledger.put_node("n", [gpu("a", 0), gpu("b", 1)])
    assert (ledger.free_units("a"), ledger.guaranteed("s")) == (40, 60)
    ledger.put_node("n", [gpu("a", 0, healthy=False)])
    assert (ledger.free_units("a"), ledger.free_units("b"), ledger.guaranteed("s")) == (0, 0, 60)


def test_many_changes_at_once_are_what_they_are_one_after_the_other() -> None:
    at_once, stepwise = two_gpus(active("s", "a", 60)), two_gpus(active("s", "a", 60))
    changes = [active("s", "b", 30), active("t", "a", 50), active("t", "a", 20)]
    at_once.change(changes, drop=["s", "nobody"])
    stepwise.remove("s")
    for allocation in changes:
        stepwise.change([allocation])
    for ledger in (at_once, stepwise):
        check_ledger(ledger)
        assert (ledger.free_units("a"), ledger.free_units("b")) == (80, 70)
    with pytest.raises(KeyError, match="nobody"):
        at_once.replace(active("nobody", "a", 1))


def test_a_full_gpu_has_nothing_free_and_nothing_unowned_and_neither_has_an_unknown_one() -> None:
    ledger = two_gpus(active("s", "a", 100))
    assert (ledger.free_units("a"), ledger.unowned_units("a")) == (0, 0)
    assert (ledger.free_units("lost"), ledger.unowned_units("lost")) == (0, 0)
    over = two_gpus(active("s", "a", 100), active("t", "a", 30))
    assert (over.free_units("a"), over.unowned_units("a")) == (0, 0)


def test_the_check_names_the_gpu_and_what_is_wrong_with_it() -> None:
    ledger = ledger_of([report("n", [gpu("a", 3)], [active("s", "a", 60), active("t", "a", 60)])])
    with pytest.raises(LedgerError, match=r"^GPU 3 of n \(a\): 120 units are owned, its capacity is 100$"):
        check_ledger(ledger)
    ledger = ledger_of([report("n", [gpu("a", 3)], [active("s", "a", 60)])])
    ledger.capacity.update("a", 41, 40)
    with pytest.raises(
        LedgerError, match=r"^GPU 3 of n \(a\): 41 unowned and 40 free units are out of step with its sessions$"
    ):
        check_ledger(ledger)
