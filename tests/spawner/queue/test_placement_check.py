"""One share against one snapshot."""

from __future__ import annotations

import pytest

from gpushare_spawner.model.placement import Placement
from gpushare_spawner.model.share import Share
from gpushare_spawner.placement import PlacementRequest
from gpushare_spawner.spawner.queue.placement_check import Outcome, Verdict
from gpushare_spawner.wording.queue import EARLIER_FIRST

from .machine import Machine

NOBODY: frozenset[str] = frozenset()
A100 = frozenset({"A100"})
BOTH = frozenset({"A100", "L4"})


def test_a_share_that_fits_can_be_placed_now() -> None:
    machine = Machine()
    machine.hold("a", 60)
    verdict = machine.check().verdict(PlacementRequest(Share(25), models=A100), NOBODY)
    assert verdict == Verdict(Outcome.NOW, Placement("a", ("GPU-a",)))


def test_a_share_that_others_leave_no_units_for_waits_and_the_reason_says_what_is_free() -> None:
    machine = Machine()
    machine.hold("a", 100)
    machine.hold("b", 90)
    verdict = machine.check().verdict(PlacementRequest(Share(25), models=A100), NOBODY)
    assert verdict.outcome is Outcome.WAIT
    assert "at most 0.10 GPU is free" in verdict.why


@pytest.mark.parametrize(
    ("share", "models", "unsuitable"), [(Share(100, 3), A100, False), (Share(25), frozenset({"H100"}), True)]
)
def test_a_share_that_no_gpu_can_ever_give_is_never_placed(
    share: Share, models: frozenset[str], unsuitable: bool
) -> None:
    verdict = Machine().check().verdict(PlacementRequest(share, models=models), NOBODY)
    assert (verdict.outcome, verdict.unsuitable) == (Outcome.NEVER, unsuitable)


def test_a_share_waits_while_gpus_are_missing_for_a_moment() -> None:
    verdict = (
        Machine(awaited="Node c says nothing.").check().verdict(PlacementRequest(Share(100, 3), models=A100), NOBODY)
    )
    assert verdict == Verdict(Outcome.WAIT, why="Node c says nothing.")


def test_a_share_that_would_fit_on_a_model_that_is_held_back_waits_for_the_earlier_spawns() -> None:
    machine = Machine(models=("A100", "L4"))
    machine.hold("a", 100)
    verdict = machine.check().verdict(PlacementRequest(Share(25), models=BOTH), frozenset({"L4"}))
    # not "needs 0.25 GPU, and at most 1 GPU is free"
    assert verdict == Verdict(Outcome.WAIT, why=EARLIER_FIRST)


def test_a_share_that_fits_nowhere_waits_for_capacity_although_a_model_is_held_back() -> None:
    machine = Machine(models=("A100", "L4"))
    machine.hold("a", 100)
    machine.hold("b", 90)
    verdict = machine.check().verdict(PlacementRequest(Share(25), models=BOTH), frozenset({"L4"}))
    assert "at most 0.10 GPU is free" in verdict.why


def test_a_share_for_one_node_is_not_placed_on_another() -> None:
    machine = Machine()
    machine.hold("b", 90)
    assert machine.check().verdict(PlacementRequest(Share(25), models=A100, node="b"), NOBODY).outcome is Outcome.WAIT
    assert machine.check().verdict(PlacementRequest(Share(25), models=A100, node="c"), NOBODY).outcome is Outcome.NEVER
