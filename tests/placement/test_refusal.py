"""Why no GPU can take a share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from gpushare_spawner.model.report import GpuReport
from gpushare_spawner.model.share import Share
from gpushare_spawner.placement import Ledger, Reason, Refusal
from gpushare_spawner.placement.ledger import any_model
from tests.placement.reports import active, gpu, report

SICK = [gpu("a", 0, healthy=False), gpu("b", 1, healthy=False)]
HALF_SICK = [gpu("a", 0), gpu("b", 1, healthy=False)]
SMALL = [gpu("a", 0, capacity=50), gpu("b", 1, capacity=40)]
MODELS = [gpu("a", 0, "T4"), gpu("b", 1, "A100"), gpu("c", 2, "T4")]


@pytest.mark.parametrize(
    ("gpus", "share", "expected"),
    [
        ([], Share(1), Refusal(Reason.NO_GPUS, Share(1))),
        (MODELS, Share(1), Refusal(Reason.NO_MODEL, Share(1), models=("A100", "T4"))),
        (SICK, Share(1), Refusal(Reason.UNHEALTHY, Share(1), suitable=2)),
        (HALF_SICK, Share(count=2), Refusal(Reason.UNHEALTHY, Share(count=2), suitable=2)),
        (HALF_SICK, Share(count=3), Refusal(Reason.TOO_BIG, Share(count=3), most_units=100, most_count=1, suitable=2)),
        (SMALL, Share(51), Refusal(Reason.TOO_BIG, Share(51), most_units=50, most_count=0, suitable=2)),
    ],
)
def test_a_refusal_says_what_stands_in_the_way_and_how_much_there_is(
    gpus: Sequence[GpuReport], share: Share, expected: Refusal
):
    accepts: Callable[[str], bool] = any_model if gpus is not MODELS else lambda model: model == "H100"
    refusal = Ledger.of([report("n", gpus)] if gpus else []).refusal(share, accepts)
    assert refusal == expected
    assert refusal.may_pass == (refusal.reason is Reason.UNHEALTHY)


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
def test_where_all_is_full_the_best_that_is_free_is_named(owned: Sequence[int], share: Share, units: int, count: int):
    gpus = [gpu(f"g{number}", number) for number in range(len(owned))]
    held = [active(f"s{number}", f"g{number}", units) for number, units in enumerate(owned) if units]
    ledger = Ledger.of([report("n", gpus, held)])
    assert ledger.place(share) is None
    refusal = ledger.refusal(share)
    assert (refusal.reason, refusal.best_units, refusal.best_count) == (Reason.FULL, units, count)
    assert refusal.may_pass


def test_a_share_that_is_as_big_as_a_gpu_may_give_can_wait_for_it():
    ledger = Ledger.of([report("n", SMALL, [active("s", "a", 10)])])
    refusal = ledger.refusal(Share(50))
    assert (refusal.reason, refusal.best_units) == (Reason.FULL, 40)


def test_only_gpus_of_the_wanted_models_count():
    """The free A100 helps nobody who wants an H100; nor does its capacity."""
    gpus = [gpu("a", 0, "A100"), gpu("h", 1, "H100", capacity=80)]
    ledger = Ledger.of([report("n", gpus, [active("s", "h", 50)])])
    refusal = ledger.refusal(Share(60), lambda model: model.startswith("H"))
    assert (refusal.reason, refusal.best_units, refusal.best_count) == (Reason.FULL, 30, 0)
    assert ledger.refusal(Share(90), lambda model: model.startswith("H")).most_units == 80


def test_gpus_of_two_nodes_or_two_models_do_not_add_up():
    apart = [report("n1", [gpu("a", 0), gpu("b", 1, healthy=False)]), report("n2", [gpu("c", 0, "T4")])]
    assert Ledger.of(apart).refusal(Share(count=2)).reason is Reason.UNHEALTHY
    mixed = [report("n", [gpu("a", 0, "T4"), gpu("b", 1, healthy=False)])]
    assert Ledger.of(mixed).refusal(Share(count=2)).reason is Reason.TOO_BIG


def test_the_node_with_the_most_counts_whichever_it_is():
    small = report("small", [gpu("s0", 0)])
    large = report("large", [gpu(f"l{number}", number) for number in range(3)], [active("s", "l0", 10)])
    for nodes in ([small, large], [large, small]):
        refusal = Ledger.of(nodes).refusal(Share(count=3))
        assert (refusal.reason, refusal.best_count) == (Reason.FULL, 2)
