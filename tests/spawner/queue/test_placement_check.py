"""One share against one snapshot."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpushare_spawner.model.layers import Placement
from gpushare_spawner.model.share import Share
from gpushare_spawner.placement.ledger import NodeHold
from gpushare_spawner.placement.obstacles import Reason
from gpushare_spawner.placement.request import Demand, PlacementRequest
from gpushare_spawner.spawner.queue.queue import Verdict
from gpushare_spawner.spawner.queue.snapshot import LayerOutcome
from gpushare_spawner.wording.spawn_failures import EARLIER_FIRST

from .machine import Machine

A100 = frozenset({"A100"})


def test_a_share_that_fits_can_be_placed_now() -> None:
    machine = Machine()
    machine.hold("a", 60)
    verdict = machine.check().verdict(PlacementRequest(Share(25), models=A100))
    assert verdict == Verdict(LayerOutcome.NOW, Placement("a", ("GPU-a",)))


def test_a_share_that_others_leave_no_units_for_waits_and_the_reason_says_what_is_free() -> None:
    machine = Machine()
    machine.hold("a", 100)
    machine.hold("b", 90)
    verdict = machine.check().verdict(PlacementRequest(Share(25), models=A100))
    assert verdict.outcome is LayerOutcome.WAIT
    assert "at most 0.10 GPU is free" in verdict.why


@pytest.mark.parametrize(
    ("share", "models", "reason"),
    [(Share(100, 3), A100, Reason.TOO_BIG), (Share(25), frozenset({"H100"}), Reason.NO_MODEL)],
)
def test_a_share_that_no_gpu_can_ever_give_is_never_placed(
    share: Share, models: frozenset[str], reason: Reason
) -> None:
    verdict = Machine().check().verdict(PlacementRequest(share, models=models))
    assert (verdict.outcome, verdict.reason) == (LayerOutcome.NEVER, reason)


def test_a_share_that_no_node_of_now_can_take_waits_where_nodes_are_added() -> None:
    check = Machine().check()
    request = PlacementRequest(Share(100, 3), models=A100)
    never = check.verdict(request)
    waits = replace(check, nodes_are_added=True).verdict(request)
    assert never.outcome is LayerOutcome.NEVER
    assert waits == replace(never, outcome=LayerOutcome.WAIT)


def test_a_share_waits_while_gpus_are_missing_for_a_moment() -> None:
    verdict = Machine(awaited="Node c says nothing.").check().verdict(PlacementRequest(Share(100, 3), models=A100))
    assert verdict == Verdict(LayerOutcome.WAIT, why="Node c says nothing.")


def test_a_share_that_would_fit_on_a_gpu_that_is_kept_for_another_waits_for_the_earlier_spawns() -> None:
    machine = Machine()
    machine.hold("a", 100)
    check = machine.check()
    check.ledger.hold("earlier", NodeHold("b", ("GPU-b",), Demand(100, 1)))
    request = PlacementRequest(Share(25), models=A100)
    # not "needs 0.25 GPU, and at most 0.00 GPU is free"
    assert check.verdict(request) == Verdict(LayerOutcome.WAIT, why=EARLIER_FIRST)
    assert check.fits_without(request, ["earlier"])
    assert not check.fits_without(replace(request, node="a"), ["earlier"])
    assert not check.fits_without(replace(request, left_out=frozenset({"b"})), ["earlier"])


def test_a_share_that_fits_nowhere_waits_for_capacity_although_a_gpu_is_kept_for_another() -> None:
    machine = Machine()
    machine.hold("a", 100)
    machine.hold("b", 90)
    check = machine.check()
    check.ledger.hold("earlier", NodeHold("b", ("GPU-b",), Demand(5, 1)))
    assert "at most 0.05 GPU is free" in check.verdict(PlacementRequest(Share(25), models=A100)).why


def test_a_share_for_one_node_is_not_placed_on_another() -> None:
    machine = Machine()
    machine.hold("b", 90)
    assert machine.check().verdict(PlacementRequest(Share(25), models=A100, node="b")).outcome is LayerOutcome.WAIT
    assert machine.check().verdict(PlacementRequest(Share(25), models=A100, node="c")).outcome is LayerOutcome.NEVER
