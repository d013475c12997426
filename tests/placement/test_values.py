"""Requests, resources, workloads and answers are values: they can be kept and compared, and not changed."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest

from gpushare_spawner.placement.node import Allocation, NodeResources, Requested
from gpushare_spawner.placement.obstacles import Shortage, Unplaceable
from gpushare_spawner.placement.request import Demand, PlacementRequest, Workload
from gpushare_spawner.placement.strategy import BestFit, Spread


@pytest.mark.parametrize(
    "kind", [Allocation, Demand, NodeResources, PlacementRequest, Requested, Shortage, Unplaceable, Workload]
)
def test_a_value_cannot_be_changed(kind: type) -> None:
    with pytest.raises(FrozenInstanceError):
        setattr(object.__new__(kind), fields(kind)[0].name, None)


@pytest.mark.parametrize("kind", [BestFit, Spread])
def test_strategies_without_settings_are_equal(kind: type) -> None:
    assert kind() == kind()
    assert hash(kind()) == hash(kind())
