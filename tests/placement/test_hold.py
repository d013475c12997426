"""Which GPUs are kept for a request that waits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpushare_spawner.placement.ledger import NodeHold, able_nodes, cheapest_hold, yielding_nodes
from gpushare_spawner.placement.node import NodeResources, Requested
from gpushare_spawner.placement.request import Demand
from tests.placement.reports import active, gpu, ledger_of, report, request

CORE = 1000


def test_a_hold_is_for_what_the_request_asks_of_each_gpu_and_of_the_node() -> None:
    ledger = ledger_of([report("n", [gpu("a"), gpu("b", 1), gpu("c", 2)], [active("ada", "b", 60)])])
    wanted = request(count=2, cpu=3 * CORE, memory=2**30)
    assert cheapest_hold(ledger.capacity, wanted) == NodeHold("n", ("a", "c"), wanted.demand)


def test_whole_gpus_can_be_kept() -> None:
    ledger = ledger_of([report("n", [gpu("a")], [active("ada", "a", 25)])])
    hold = cheapest_hold(ledger.capacity, request(100))
    assert hold is not None
    assert hold.gpus == ("a",)


def test_gpus_that_are_too_small_or_of_another_model_or_unhealthy_are_not_kept() -> None:
    small, unhealthy = [gpu("s", capacity=99)], [gpu("u", healthy=False)]
    others = [report("small", small), report("unhealthy", unhealthy), report("other", [gpu("t", model="T4")])]
    ledger = ledger_of(others)
    assert cheapest_hold(ledger.capacity, request(100, "A100")) is None
    assert able_nodes(ledger.capacity, request(100, "A100")) == set()
    assert able_nodes(ledger.capacity, request(99, "A100")) == {"small"}


def test_the_node_on_which_least_has_to_become_free_is_kept() -> None:
    most, least = [active("ada", "a", 90)], [active("bob", "b", 30)]
    ledger = ledger_of([report("n1", [gpu("a")], most), report("n2", [gpu("b")], least)])
    hold = cheapest_hold(ledger.capacity, request(80))
    assert hold is not None
    assert hold.node == "n2"


def test_the_gpus_of_a_node_on_which_least_has_to_become_free_are_kept() -> None:
    held = [active("ada", "a", 50), active("bob", "b", 40), active("eve", "c", 60)]
    ledger = ledger_of([report("n", [gpu("a"), gpu("b", 1), gpu("c", 2)], held)])
    hold = cheapest_hold(ledger.capacity, request(count=2))
    assert hold is not None
    assert hold.gpus == ("b", "a")


def test_units_that_lack_on_all_claimed_gpus_count() -> None:
    node = report("n1", [gpu("a"), gpu("b", 1)], [active("ada", "a", 50), active("kim", "b", 50)])
    other = report("n2", [gpu("c"), gpu("d", 1)], [active("bob", "d", 90)])
    hold = cheapest_hold(ledger_of([node, other]).capacity, request(count=2))
    assert hold is not None
    assert hold.node == "n2"  # 90 units lack there, and 100 on the other


def test_what_is_free_beyond_a_request_does_not_count() -> None:
    node = report("n1", [gpu("a")], [active("ada", "a", 60)])
    other = report("n2", [gpu("b")], [active("bob", "b", 70)])
    hold = cheapest_hold(ledger_of([other, node]).capacity, request(20))
    assert hold is not None
    assert hold.node == "n1", "nothing lacks on either: the first by name"


def test_a_node_that_lacks_cpu_memory_or_pods_comes_after_one_that_lacks_units() -> None:
    for lacking in (NodeResources(cpu=CORE - 1), NodeResources(memory=2**30 - 1), NodeResources(pods=0)):
        ledger = ledger_of([report("n1", [gpu("a")]), report("n2", [gpu("b")], [active("ada", "b", 90)])])
        ledger.put_resources("n1", lacking)
        hold = cheapest_hold(ledger.capacity, request(50, cpu=CORE, memory=2**30))
        assert hold is not None
        assert hold.node == "n2", lacking


def test_a_node_that_has_just_enough_of_everything_comes_first() -> None:
    ledger = ledger_of([report("n1", [gpu("a")], [active("ada", "a", 60)]), report("n2", [gpu("b")])])
    ledger.put_resources("n1", NodeResources())
    ledger.put_resources("n2", NodeResources(cpu=CORE, memory=2**30, pods=1))
    hold = cheapest_hold(ledger.capacity, request(50, cpu=CORE, memory=2**30))
    assert hold is not None
    assert hold.node == "n2"


def test_a_node_that_the_request_must_not_use_is_not_kept() -> None:
    ledger = ledger_of([report("n1", [gpu("a")]), report("n2", [gpu("b")])])
    nodes = [
        cheapest_hold(ledger.capacity, request(50, **where))
        for where in ({"left_out": frozenset({"n1"})}, {"ineligible": frozenset({"n1"})}, {"node": "n2"})
    ]
    assert [hold and hold.node for hold in nodes] == ["n2", "n2", "n2"]
    assert able_nodes(ledger.capacity, request(50, ineligible=frozenset({"n1"}))) == {"n2"}


def test_a_node_that_could_not_take_the_request_if_it_were_empty_is_not_kept() -> None:
    ledger = ledger_of([report("n", [gpu("a")], [active("ada", "a", 25)])])
    ledger.put_resources("n", NodeResources.of_empty_node(8 * CORE, 2**30).less(Requested(cpu=CORE)))
    assert able_nodes(ledger.capacity, request(25, cpu=8 * CORE, memory=2**30)) == {"n"}
    for too_much in ({"cpu": 8 * CORE + 1}, {"memory": 2**30 + 1}):
        assert cheapest_hold(ledger.capacity, request(25, **too_much)) is None
        assert able_nodes(ledger.capacity, request(25, **too_much)) == set()


def test_a_node_where_the_end_of_all_sessions_would_not_leave_enough_is_not_kept() -> None:
    """Daemons never end: GPUs that are kept for them to end would stay idle until the wait is over."""
    ledger = ledger_of([report("n", [gpu("a")], [active("ada", "a", 25)])])
    whole = NodeResources.of_empty_node(8 * CORE, 2**30)
    ledger.put_resources("n", whole.less(Requested(7 * CORE, 2**29, 2), by_others=Requested(5 * CORE, 2**28, 1)))
    assert able_nodes(ledger.capacity, request(25, cpu=3 * CORE, memory=3 * 2**28)) == {"n"}
    assert able_nodes(ledger.capacity, request(25, cpu=0, memory=0)) == {"n"}
    for too_much in ({"cpu": 3 * CORE + 1}, {"memory": 3 * 2**28 + 1}):
        assert cheapest_hold(ledger.capacity, request(25, **too_much)) is None
        assert able_nodes(ledger.capacity, request(25, **too_much)) == set()


def test_a_node_where_others_request_more_than_it_has_is_claimed_for_what_requests_nothing() -> None:
    ledger = ledger_of([report("n", [gpu("a")], [active("ada", "a", 100)])])
    too_much = Requested(9 * CORE, 2**31, 2)
    ledger.put_resources("n", NodeResources.of_empty_node(8 * CORE, 2**30).less(too_much, by_others=too_much))
    assert able_nodes(ledger.capacity, request(25)) == {"n"}


def test_a_request_without_cpu_and_memory_fits_beside_a_hold_on_more_than_is_free() -> None:
    ledger = ledger_of([report("n", [gpu("a")])])
    ledger.put_resources("n", NodeResources(cpu=CORE, memory=2**30))
    ledger.hold("first", NodeHold("n", ("a",), Demand(25, 1, 2 * CORE, 2**31)))
    assert ledger.place(request(50)) is not None
    assert ledger.place(request(50, cpu=1)) is None
    assert ledger.place(request(50, memory=1)) is None


def test_of_two_models_the_one_that_lacks_less_is_claimed_and_of_equal_ones_the_first_by_index() -> None:
    held = [active("ada", "a", 60), active("bob", "b", 40)]
    ledger = ledger_of([report("n", [gpu("a", 0, "T4"), gpu("b", 1, "A100")], held)])
    hold = cheapest_hold(ledger.capacity, request(80))
    assert hold is not None
    assert hold.gpus == ("b",)
    ledger.replace(active("bob", "b", 60))
    hold = cheapest_hold(ledger.capacity, request(80))
    assert hold is not None
    assert hold.gpus == ("a",)


def test_a_request_fits_without_holds_on_a_node_that_it_may_use_and_on_no_other() -> None:
    ledger = ledger_of([report("n1", [gpu("a")]), report("n2", [gpu("b")], [active("ada", "b", 60)])])
    for name, node, uuid in (("first", "n1", "a"), ("second", "n2", "b")):
        ledger.hold(name, NodeHold(node, (uuid,), request(100).demand))
    assert ledger.fits_without(request(50), ["first", "unknown"])
    assert not ledger.fits_without(request(50), ["second"]), "too little is free there"
    assert ledger.fits_without(request(40), ["second"])
    assert not ledger.fits_without(request(40), ["unknown"])
    assert ledger.fits_without(request(50, node="n1"), ["first"])
    assert not ledger.fits_without(request(40, node="n2"), ["first"])
    assert not ledger.fits_without(request(50, left_out=frozenset({"n1"})), ["first"])


def test_nodes_where_sessions_need_only_yield_have_cpu_memory_and_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = {name: [active(f"{name}-user", f"gpu-{name}", 90)] for name in ("n1", "n2", "n3", "n4")}
    ledger = ledger_of([report(name, [gpu(f"gpu-{name}")], there) for name, there in sessions.items()])
    ledger.put_resources("n1", NodeResources(cpu=CORE - 1))
    ledger.put_resources("n2", NodeResources(cpu=CORE, memory=2**30, pods=1))
    ledger.put_resources("n3", NodeResources(cpu=CORE, memory=2**30, pods=0))
    asked = request(50, cpu=CORE, memory=2**30)
    assert yielding_nodes(ledger.capacity, asked) == ("n2", "n4")
    assert yielding_nodes(ledger.capacity, replace(asked, left_out=frozenset({"n2"}))) == ("n4",)
    assert yielding_nodes(ledger.capacity, replace(asked, node="n2")) == ("n2",)
    assert yielding_nodes(ledger.capacity, replace(asked, node="n1")) == ()
    monkeypatch.setattr("gpushare_spawner.placement.ledger.MOST_NODES", 1)
    assert yielding_nodes(ledger.capacity, asked) is None, "too many"
    assert yielding_nodes(ledger.capacity, replace(asked, left_out=frozenset({"n2"}))) == ("n4",)


def test_the_units_that_sessions_must_give_up_count_borrowed_units_and_holds() -> None:
    there = [active("ada", "a", 60), active("bob", "a", 60, borrowed=20)]
    ledger = ledger_of([report("n1", [gpu("a")], there)])
    assert ledger.missing_units("a", 10) == 30, "20 more are in use than the GPU has"
    ledger.change([ledger.allocations["ada"].with_effective(0)])
    assert ledger.missing_units("a", 10) == -30
    ledger.hold("eve", cheapest_hold(ledger.capacity, request(25)))
    assert ledger.missing_units("a", 10) == -5
