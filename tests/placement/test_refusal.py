"""What people are told where there is no room."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from gpushare_spawner.model.report import GpuReport
from gpushare_spawner.model.share import Share
from gpushare_spawner.placement import Ledger, Reason
from gpushare_spawner.placement.ledger import any_model
from tests.placement.reports import active, gpu, report

SICK = [gpu("a", 0, healthy=False), gpu("b", 1, healthy=False)]
HALF_SICK = [gpu("a", 0), gpu("b", 1, healthy=False)]
SMALL = [gpu("a", 0, capacity=50), gpu("b", 1, capacity=40)]
MODELS = [gpu("a", 0, "T4"), gpu("b", 1, "A100"), gpu("c", 2, "T4")]


@pytest.mark.parametrize(
    ("gpus", "share", "reason", "message"),
    [
        ([], Share(1), Reason.NO_GPUS, "No GPU is known: no agent has reported one. Is the agent running?"),
        (MODELS, Share(1), Reason.NO_MODEL, "No GPU is of a model that the template asks for. There is: A100, T4."),
        (SICK, Share(1), Reason.UNHEALTHY, "All GPUs that would do (2) are out of order. The agent's log says more."),
        (HALF_SICK, Share(count=2), Reason.UNHEALTHY,
         "GPUs that would do for 2 GPUs are out of order. The agent's log says more."),
        (HALF_SICK, Share(count=3), Reason.TOO_BIG, "3 GPUs are more than any node has: at most 1 of one model."),
        (SMALL, Share(51), Reason.TOO_BIG, "0.51 GPU is more than any GPU may give: at most 0.50 of one."),
    ],
)  # fmt: skip
def test_a_refusal_says_what_stands_in_the_way_and_how_much_there_is(
    gpus: Sequence[GpuReport], share: Share, reason: Reason, message: str
):
    accepts: Callable[[str], bool] = any_model if gpus is not MODELS else lambda model: model == "H100"
    refusal = Ledger.of([report("n", gpus)] if gpus else []).refusal(share, accepts)
    assert (refusal.reason, str(refusal)) == (reason, message)
    assert (refusal.best_units, refusal.best_count) == (0, 0)
    assert refusal.may_pass == (reason is Reason.UNHEALTHY)


@pytest.mark.parametrize(
    ("owned", "share", "message", "units", "count"),
    [
        ((100, 100), Share(50), "All GPUs are full: 0.50 GPU is wanted, and at most 0.00 is free on one GPU.", 0, 0),
        ((60, 99), Share(50), "All GPUs are full: 0.50 GPU is wanted, and at most 0.40 is free on one GPU.", 40, 0),
        ((1, 1), Share(count=2),
         "All GPUs are full: 2 GPUs of one node are wanted, and at most 0 are free on one node.", 99, 0),
        ((1, 0), Share(count=2),
         "All GPUs are full: 2 GPUs of one node are wanted, and at most 1 is free on one node.", 100, 1),
        ((1, 0, 0), Share(count=3),
         "All GPUs are full: 3 GPUs of one node are wanted, and at most 2 are free on one node.", 100, 2),
    ],
)  # fmt: skip
def test_where_all_is_full_the_best_that_is_free_is_named(
    owned: Sequence[int], share: Share, message: str, units: int, count: int
):
    gpus = [gpu(f"g{number}", number) for number in range(len(owned))]
    held = [active(f"s{number}", f"g{number}", units) for number, units in enumerate(owned) if units]
    ledger = Ledger.of([report("n", gpus, held)])
    assert ledger.place(share) is None
    refusal = ledger.refusal(share)
    assert (refusal.reason, str(refusal)) == (Reason.FULL, message)
    assert (refusal.best_units, refusal.best_count) == (units, count)
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
    assert "at most 0.80 of one" in str(ledger.refusal(Share(90), lambda model: model.startswith("H")))


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
