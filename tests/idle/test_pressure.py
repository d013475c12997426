"""Idle shares that are taken only while a spawn waits: in one step, and after a short notice."""

from __future__ import annotations

from gpushare_spawner.idle.policy import NoAction, decide
from gpushare_spawner.model.share import Tier
from tests.idle.sessions import HOUR, IDLE, MINUTE, observed, told
from tests.present import present

NIGHT = 7 * HOUR


def test_a_session_is_released_without_a_downgrade_before() -> None:
    found = decide(IDLE, observed(), NIGHT, units_left=0)
    assert found.no_action is NoAction.NOTICE_PERIOD
    assert present(found.notice).tier is Tier.RELEASED
    due = decide(IDLE, observed(notice=told(found)), NIGHT + MINUTE, units_left=0)
    assert (due.no_action, due.tier, due.units) == (None, Tier.RELEASED, 0)


def test_the_notice_is_a_minute_and_never_longer_than_the_templates() -> None:
    assert present(decide(IDLE, observed(), NIGHT, units_left=0).notice).at == NIGHT + MINUTE
    short = IDLE.model_copy(update={"warn_before": 20.0})
    assert present(decide(short, observed(), NIGHT, units_left=0).notice).at == NIGHT + 20
    assert present(decide(IDLE, observed(), NIGHT).notice).at == NIGHT + 5 * MINUTE


def test_a_downgrade_is_enough_where_the_spawn_needs_no_more() -> None:
    found = decide(IDLE, observed(), NIGHT, units_left=10)
    assert (present(found.notice).tier, present(found.notice).units) == (Tier.DOWNGRADED, 10)


def test_a_milder_action_puts_no_spawn_off() -> None:
    release = decide(IDLE, observed(), NIGHT, units_left=0)
    later = decide(IDLE, observed(notice=told(release)), NIGHT + 30, units_left=10)
    assert later.notice == release.notice


def test_a_stop_that_is_announced_does_not_count_as_what_the_session_leaves() -> None:
    stop = decide(IDLE, observed(tier=Tier.RELEASED, tier_since=HOUR), 8 * HOUR - MINUTE)
    assert present(stop.notice).tier is Tier.STOPPED
    found = decide(IDLE, observed(notice=told(stop)), NIGHT, units_left=10)
    assert present(found.notice).tier is Tier.DOWNGRADED


def test_times_of_the_template_hold_under_pressure_too() -> None:
    early = decide(IDLE, observed(), 20 * MINUTE, units_left=0)
    assert early.no_action is NoAction.NOT_YET
    assert present(early.upcoming).at == 45 * MINUTE
    assert early.decide_again_at == 44 * MINUTE


def test_a_stop_comes_as_always() -> None:
    released = observed(tier=Tier.RELEASED, tier_since=HOUR)
    for units_left in (None, 0):
        assert present(decide(IDLE, released, NIGHT, units_left=units_left).upcoming).at == 8 * HOUR
