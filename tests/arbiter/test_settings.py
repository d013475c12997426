"""The arbiter's settings."""

from __future__ import annotations

import pytest

from gpushare_spawner.arbiter.session import ArbiterSettings


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
        long_pause=30.0,
        returning_pause=10.0,
        unnoticed_page_in=0.08,
        short_burst=5.0,
        max_debt=300.0,
        period=0.2,
        shortest_run=0.01,
        shortest_hold=0.015,
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
        ArbiterSettings().pause = 1.0  # type: ignore[misc]
