"""The spawns that a strategy is told to expect."""

from __future__ import annotations

from gpushare_spawner.model.template import Template
from gpushare_spawner.placement.strategy import BestFit, StrandingAwareFgd
from gpushare_spawner.spawner.queue.snapshot import ExpectedWorkload

from .machine import Machine

QUARTER = Template.model_validate(
    {
        "name": "quarter",
        "display_name": "Quarter",
        "gpu": {"fraction": 0.25},
        "resources": {"cpu": {"guarantee": "1500m"}, "memory": {"guarantee": "2Gi"}},
    }
)
WHOLE = Template.model_validate({"name": "whole", "display_name": "Whole", "gpu": {"count": 1, "models": ["A*"]}})
NO_GPU = Template.model_validate({"name": "cpu", "display_name": "CPU"})


def test_before_any_spawn_all_templates_with_a_gpu_are_expected_alike() -> None:
    snapshot = Machine(nodes={"a": ("A100",), "b": ("L4",)}).check().snapshot
    strategy = ExpectedWorkload(lambda: [QUARTER, WHOLE, NO_GPU]).strategy(StrandingAwareFgd(), snapshot, 0.0)
    assert isinstance(strategy, StrandingAwareFgd)
    kinds = [
        (kind.demand.units, kind.demand.cpu, set(kind.demand.models or ()), kind.popularity)
        for kind in strategy.workload.kinds
    ]
    assert kinds == [(25, 1500, {"A100", "L4"}, 1), (100, 0, {"A100"}, 1)]
    assert strategy.workload.kinds[0].demand.memory == 2 * 2**30


def test_what_is_spawned_often_is_expected_more_and_an_equal_workload_keeps_the_strategy() -> None:
    snapshot = Machine().check().snapshot
    expected = ExpectedWorkload(lambda: [QUARTER, WHOLE])
    before = expected.strategy(StrandingAwareFgd(), snapshot, 0.0)
    assert expected.strategy(before, snapshot, 1.0) is before
    for _ in range(9):
        expected.spawned("quarter", 1.0)
    after = expected.strategy(before, snapshot, 1.0)
    assert isinstance(after, StrandingAwareFgd)
    assert [kind.popularity for kind in after.workload.kinds] == [10, 1]


def test_a_strategy_that_looks_at_no_workload_is_left_as_it_is() -> None:
    strategy = BestFit()
    assert ExpectedWorkload(lambda: [QUARTER]).strategy(strategy, Machine().check().snapshot, 0.0) is strategy
