"""Why no GPU can take a share."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gpushare_spawner.model.report import GpuReport
from gpushare_spawner.model.share import Share
from gpushare_spawner.placement.node import NodeResources, Requested
from gpushare_spawner.placement.obstacles import Lacking, Obstacle, Reason, Shortage, Unplaceable
from gpushare_spawner.placement.request import Demand, PlacementRequest
from tests.placement.reports import active, gpu, ledger_of, report, request

SICK = [gpu("a", 0, healthy=False), gpu("b", 1, healthy=False)]
HALF_SICK = [gpu("a", 0), gpu("b", 1, healthy=False)]
CORDONED = [gpu("a", 0, cordoned=True), gpu("b", 1, healthy=False)]
SMALL = [gpu("a", 0, capacity=50), gpu("b", 1, capacity=40)]
MODELS = [gpu("a", 0, "T4"), gpu("b", 1, "A100"), gpu("c", 2, "T4")]


@pytest.mark.parametrize(
    ("gpus", "share", "expected"),
    [
        ([], Share(1), Unplaceable(Reason.NO_GPUS, Share(1))),
        (MODELS, Share(1), Unplaceable(Reason.NO_MODEL, Share(1), models=("A100", "T4"))),
        (SICK, Share(1), Unplaceable(Reason.UNHEALTHY, Share(1), suitable=2)),
        (HALF_SICK, Share(count=2), Unplaceable(Reason.UNHEALTHY, Share(count=2), suitable=2)),
        (CORDONED, Share(1), Unplaceable(Reason.CORDONED, Share(1), suitable=2)),
        (CORDONED, Share(count=2), Unplaceable(Reason.UNHEALTHY, Share(count=2), suitable=2)),
        (
            HALF_SICK,
            Share(count=3),
            Unplaceable(Reason.TOO_BIG, Share(count=3), most_units=100, most_count=1, suitable=2),
        ),
        (SMALL, Share(51), Unplaceable(Reason.TOO_BIG, Share(51), most_units=50, most_count=0, suitable=2)),
    ],
)
def test_a_refusal_says_what_stands_in_the_way_and_how_much_there_is(
    gpus: Sequence[GpuReport], share: Share, expected: Unplaceable
) -> None:
    models = frozenset({"H100"}) if gpus is MODELS else None
    why = ledger_of([report("n", gpus)] if gpus else []).why_unplaceable(PlacementRequest(share, models=models))
    assert why == expected
    assert why.may_pass == (why.reason in (Reason.UNHEALTHY, Reason.CORDONED))


@pytest.mark.parametrize(
    ("owned", "share", "units", "count"),
    [
        ((100, 100), Share(50), 0, 0),
        ((60, 99), Share(50), 40, 0),
        ((1, 1), Share(count=2), 99, 0),
        ((1, 0), Share(count=2), 100, 1),
        ((1, 0, 0), Share(count=3), 100, 2),
    ],
)
def test_where_all_is_full_the_best_that_is_free_is_named(
    owned: Sequence[int], share: Share, units: int, count: int
) -> None:
    gpus = [gpu(f"g{number}", number) for number in range(len(owned))]
    held = [active(f"s{number}", f"g{number}", units) for number, units in enumerate(owned) if units]
    ledger = ledger_of([report("n", gpus, held)])
    assert ledger.place(PlacementRequest(share)) is None
    why = ledger.why_unplaceable(PlacementRequest(share))
    assert (why.reason, why.best_units, why.best_count) == (Reason.FULL, units, count)
    assert why.may_pass


def test_a_share_that_is_as_big_as_a_gpu_may_give_can_wait_for_it() -> None:
    ledger = ledger_of([report("n", SMALL, [active("s", "a", 10)])])
    why = ledger.why_unplaceable(request(50))
    assert (why.reason, why.best_units) == (Reason.FULL, 40)


def test_only_gpus_of_the_wanted_models_count() -> None:
    """The free A100 helps nobody who wants an H100; nor does its capacity."""
    gpus = [gpu("a", 0, "A100"), gpu("h", 1, "H100", capacity=80)]
    ledger = ledger_of([report("n", gpus, [active("s", "h", 50)])])
    why = ledger.why_unplaceable(request(60, "H100"))
    assert (why.reason, why.best_units, why.best_count) == (Reason.FULL, 30, 0)
    assert ledger.why_unplaceable(request(90, "H100")).most_units == 80


def test_gpus_of_two_nodes_or_two_models_do_not_add_up() -> None:
    apart = [report("n1", [gpu("a", 0), gpu("b", 1, healthy=False)]), report("n2", [gpu("c", 0, "T4")])]
    assert ledger_of(apart).why_unplaceable(request(count=2)).reason is Reason.UNHEALTHY
    mixed = [report("n", [gpu("a", 0, "T4"), gpu("b", 1, healthy=False)])]
    assert ledger_of(mixed).why_unplaceable(request(count=2)).reason is Reason.TOO_BIG


def test_the_node_with_the_most_counts_whichever_it_is() -> None:
    small = report("small", [gpu("s0", 0)])
    large = report("large", [gpu(f"l{number}", number) for number in range(3)], [active("s", "l0", 10)])
    for nodes in ([small, large], [large, small]):
        why = ledger_of(nodes).why_unplaceable(request(count=3))
        assert (why.reason, why.best_count) == (Reason.FULL, 2)


def test_a_node_without_enough_cpu_or_memory_is_told_from_one_without_units() -> None:
    ledger = ledger_of([report(name, [gpu(name)]) for name in ("n1", "n2", "n3", "n4")])
    ledger.add(active("s", "n4", 90))
    ledger.put_resources("n1", NodeResources(cpu=500))
    ledger.put_resources("n2", NodeResources(cpu=1500))
    ledger.put_resources("n3", NodeResources(memory=7))
    wanted = request(50, cpu=2000, memory=8)
    assert ledger.place(wanted) is None
    why = ledger.why_unplaceable(wanted)
    assert (why.reason, why.may_pass, why.cpu, why.memory) == (Reason.NODES_FULL, True, 2000, 8)
    assert why.shortages == (Shortage(Lacking.CPU, 2, 1500), Shortage(Lacking.MEMORY, 1, 7))
    assert (
        ledger.why_unplaceable(request(5, cpu=2000)).reason is Reason.FULL
    )  # n4 can take it: nothing is short everywhere
    ledger.put_resources("n3", NodeResources(pods=0))
    assert Shortage(Lacking.PODS, 1, 0) in ledger.why_unplaceable(wanted).shortages


def test_nodes_that_are_too_small_even_if_nothing_ran_there_are_no_reason_to_wait() -> None:
    ledger = ledger_of([report(name, [gpu(name)]) for name in ("n1", "n2", "n3")])
    ledger.add(active("s", "n2", 90))
    for node, cpu, memory in (("n1", 2000, 8), ("n2", 4000, 8), ("n3", 8000, 7)):
        ledger.put_resources(node, NodeResources.of_empty_node(cpu, memory).less(Requested(cpu=1000)))
    why = ledger.why_unplaceable(request(50, cpu=5000, memory=8))
    assert (why.reason, why.may_pass) == (Reason.NODES_TOO_SMALL, False)
    assert why.shortages == (Shortage(Lacking.MOST_CPU, 2, 4000), Shortage(Lacking.MOST_MEMORY, 1, 7))
    # n2 would do if its session ended
    assert ledger.why_unplaceable(request(50, cpu=4000, memory=8)).reason is Reason.FULL
    # n1 and n2 are too small, and the GPU of n3 as well
    ledger.put_node("n3", [gpu("n3", capacity=40)])
    assert ledger.why_unplaceable(request(50, cpu=5000)).reason is Reason.NODES_TOO_SMALL


def test_nodes_that_keep_the_pod_out_are_an_admins_matter() -> None:
    ledger = ledger_of([report("n1", [gpu("a")]), report("n2", [gpu("b")], [active("s", "b", 60)])])
    why = ledger.why_unplaceable(request(50, ineligible=frozenset({"n1", "n2"})))
    assert (why.reason, why.may_pass) == (Reason.INELIGIBLE, False)
    why = ledger.why_unplaceable(request(50, ineligible=frozenset({"n1"})))
    assert (why.reason, why.best_units) == (Reason.FULL, 40)


def test_nodes_that_did_not_admit_the_pod_are_named() -> None:
    ledger = ledger_of([report("n1", [gpu("a")]), report("n2", [gpu("b")], [active("s", "b", 60)])])
    wanted = request(50, left_out=frozenset({"n1"}))
    assert ledger.place(wanted) is None
    why = ledger.why_unplaceable(wanted)
    assert (why.reason, why.left_out, why.may_pass) == (Reason.NOT_ADMITTED, ("n1",), True)


def test_of_a_request_for_one_node_only_that_node_is_looked_at() -> None:
    ledger = ledger_of([report("n1", [gpu("a")]), report("n2", [gpu("b")], [active("s", "b", 60)])])
    why = ledger.why_unplaceable(request(50, node="n2"))
    assert (why.reason, why.best_units) == (Reason.FULL, 40)
    assert ledger.why_unplaceable(request(50, node="lost")).reason is Reason.NO_GPUS
    assert ledger.why_unplaceable(request(count=2, node="n2")).reason is Reason.TOO_BIG


def test_a_request_that_fits_and_may_not_go_yet_reads_that_there_is_enough() -> None:
    why = ledger_of([report("n", [gpu("a")], [active("s", "a", 60)])]).why_unplaceable(request(30))
    assert (why.reason, why.best_units, why.best_count) == (Reason.FULL, 30, 1)


def test_what_is_not_said_counts_as_nothing() -> None:
    """Sentences and sums leave out what is 0."""
    none = Unplaceable(Reason.NO_GPUS, Share(25))
    assert not any((none.best_units, none.best_count, none.most_units, none.most_count, none.suitable))
    assert not any((none.cpu, none.memory))
    full = Obstacle(Lacking.UNITS)
    assert not any((full.suitable, full.most_units, full.most_count, full.free_units, full.free_count, full.left))


def test_the_most_that_is_free_anywhere_is_told() -> None:
    ledger = ledger_of([report(name, [gpu(name)]) for name in ("n1", "n2", "n3")])
    for name, units in (("n1", 80), ("n2", 60), ("n3", 90)):
        ledger.add(active(name, name, units))
    why = ledger.why_unplaceable(request(50))
    assert (why.reason, why.best_units) == (Reason.FULL, 40)


def test_a_request_that_names_no_cpu_and_memory_needs_none() -> None:
    ledger = ledger_of([report("n1", [gpu("a")])])
    ledger.put_resources("n1", NodeResources(cpu=0, memory=0, pods=1))
    assert ledger.place(request(50)) is not None
    assert Demand(50, 1) == Demand(50, 1, cpu=0, memory=0)
