"""Idleness as the hub alone sees it."""

from __future__ import annotations

import pytest

from gpushare_spawner.idle.policy import Overdue, overdue
from gpushare_spawner.model.share import IdleCause


@pytest.mark.parametrize(
    ("last_activity", "started", "timeout", "max_age", "reason"),
    [
        (400, 0, 600, 0, Overdue(IdleCause.IDLE, 600)),
        (401, 0, 600, 0, None),
        (None, 400, 600, 0, Overdue(IdleCause.IDLE, 600)),
        (None, None, 600, 600, None),
        (999, 0, 600, 1000, Overdue(IdleCause.MAX_AGE, 1000)),
        (0, 0, 0, 0, None),
        (2000, 2000, 1, 1, None),  # a clock that was set back
        (999, 999, 1, 0, Overdue(IdleCause.IDLE, 1)),
        (1000, 998, 0, 1, Overdue(IdleCause.MAX_AGE, 2)),  # the age counts from the start
        (1000, 940, 600, 60, Overdue(IdleCause.MAX_AGE, 60)),
    ],
)
def test_overdue(
    last_activity: int | None, started: int | None, timeout: int, max_age: int, reason: Overdue | None
) -> None:
    assert overdue(last_activity, started, 1000, timeout, max_age) == reason
