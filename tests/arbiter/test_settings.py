"""Which constants an arbiter refuses."""

from __future__ import annotations

import pytest

from gpushare_spawner.arbiter import ArbiterSettings


@pytest.mark.parametrize(
    "wrong",
    [
        {"overhead_bound": 0.0}, {"overhead_bound": 1.0, "interactive_overhead_bound": 1.0},
        {"interactive_overhead_bound": 0.024}, {"interactive_overhead_bound": 1.0}, {"bandwidth_memory": 1.0},
        {"min_quantum": 0}, {"bandwidth_guess": 0}, {"switch_seconds": 0}, {"revoke_timeout": 0}, {"period": 0},
        {"pause": -1}, {"pause": float("nan")}, {"max_debt": float("inf")}, {"pause": "1"},
    ],
)  # fmt: skip
def test_a_setting_that_cannot_work_is_refused_and_named(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ArbiterSettings(**wrong)  # type: ignore[arg-type]


def test_the_limits_of_settings_are_allowed() -> None:
    limits = ArbiterSettings(
        overhead_bound=0.2, interactive_overhead_bound=0.2, bandwidth_memory=0, pause=0, min_quantum=1e-9
    )
    assert limits.exclusive is False
