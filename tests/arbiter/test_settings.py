"""Which constants an arbiter refuses."""

from __future__ import annotations

import pytest

from gpushare_spawner.arbiter.settings import ArbiterSettings


@pytest.mark.parametrize(
    "wrong",
    [
        {"overhead_bound": 0.0}, {"overhead_bound": 1.0, "interactive_overhead_bound": 1.0},
        {"interactive_overhead_bound": 0.024}, {"interactive_overhead_bound": 1.0}, {"bandwidth_memory": 1.0},
        {"min_time_slice": 0}, {"bandwidth_guess": 0}, {"switch_seconds": 0}, {"revoke_timeout": 0}, {"period": 0},
        {"pause": -1}, {"pause": float("nan")}, {"max_debt": float("inf")}, {"pause": "1"},
    ],
)  # fmt: skip
def test_a_setting_that_cannot_work_is_refused_and_named(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))}"):
        ArbiterSettings(**wrong)  # type: ignore[arg-type]


def test_the_limits_of_settings_are_allowed() -> None:
    limits = ArbiterSettings(
        overhead_bound=0.2, interactive_overhead_bound=0.2, bandwidth_memory=0, pause=0, min_time_slice=1e-9
    )
    assert limits.exclusive is False


def test_the_settings_that_ship_are_those_that_the_documents_state() -> None:
    """docs/explanation/arbiter.md, and the reasons beside the settings."""
    assert ArbiterSettings() == ArbiterSettings(
        overhead_bound=0.025,
        interactive_overhead_bound=0.20,
        min_time_slice=0.1,
        bandwidth_guess=8e9,
        bandwidth_memory=0.7,
        measured_from=16 * 1024 * 1024,
        switch_seconds=0.001,
        hand_off_credit=10.0,
        pause=1.0,
        surely_quiet=0.2,
        longest_quiet=1.5,
        long_pause=30.0,
        returning_pause=10.0,
        unnoticed_page_in=0.08,
        short_burst=5.0,
        max_debt=300.0,
        period=0.2,
        shortest_run=0.01,
        shortest_hold=0.015,
        pace=0.02,
        pace_alone=0.1,
        unpaced_after=1.0,
        revoke_timeout=10.0,
        usual_revoke_timeout=4.0,
        shortest_revoke_timeout=1.0,
        page_out_step=256 * 1024 * 1024,
        proven_after=1.0,
        memory_poll_interval=0.1,
        crowded=0.875,
        tolerance=1 / 64,
        doubt_for=60.0,
        context_bytes=0,
        exclusive=False,
    )


def test_settings_cannot_be_changed_while_they_are_in_use() -> None:
    with pytest.raises(AttributeError):
        ArbiterSettings().pace = 1.0  # type: ignore[misc]


@pytest.mark.parametrize("field", ["min_time_slice", "bandwidth_guess", "switch_seconds", "revoke_timeout", "period"])
def test_what_must_be_more_than_0_may_be_as_little_as_one_likes(field: str) -> None:
    small: dict[str, float] = {field: 1e-12}
    assert getattr(ArbiterSettings(**small), field) == 1e-12  # type: ignore[arg-type]
