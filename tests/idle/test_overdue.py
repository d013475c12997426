"""Idleness as the hub alone sees it."""

from __future__ import annotations

import pytest

from gpushare_spawner.idle import overdue


@pytest.mark.parametrize(
    ("last_activity", "started", "timeout", "max_age", "reason"),
    [
        (400, 0, 600, 0, "no activity for 10 min"),
        (401, 0, 600, 0, None),
        (None, 400, 600, 0, "no activity for 10 min"),
        (None, None, 600, 600, None),
        (999, 0, 600, 1000, "16 min 40 s old"),
        (0, 0, 0, 0, None),
        (2000, 2000, 1, 1, None),  # a clock that was set back
        (999, 999, 1, 0, "no activity for 1 s"),
        (1000, 998, 0, 1, "2 s old"),  # one second is a limit too, and the age counts from the start
        (1000, 940, 600, 60, "1 min old"),
    ],
)
def test_overdue(last_activity, started, timeout, max_age, reason):
    assert overdue(last_activity, started, 1000, timeout, max_age) == reason
