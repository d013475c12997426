"""Idle actions do not come in quiet hours, and come when these are over."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare_spawner.idle.policy import NoAction, QuietUntil, UnitsNeeded, decide
from gpushare_spawner.model.quota import Reclaim
from gpushare_spawner.model.share import IdleCause, Tier
from gpushare_spawner.model.template import Idle
from tests.idle.sessions import HOUR, IDLE, MINUTE, observed, told

ALL = frozenset({Tier.DOWNGRADED, Tier.RELEASED, Tier.STOPPED})


def quiet(begin: float, end: float, tiers: frozenset[Tier] = ALL) -> QuietUntil:
    """Quiet hours each day, from and to these seconds of it; later than a day: on the next one."""

    def until(tier: Tier, instant: float) -> float:
        for day in range(-1, 2):
            start = (instant // 86400 + day) * 86400 + begin
            if tier in tiers and start <= instant < start + end - begin:
                return start + end - begin
        return instant

    return until


def test_an_action_of_quiet_hours_comes_at_their_end_after_a_notice() -> None:
    night = quiet(0, HOUR)
    early = decide(IDLE, observed(), 20 * MINUTE, quiet_until=night)
    assert early.no_action is NoAction.NOT_YET
    assert early.upcoming is not None
    assert early.upcoming.tier is Tier.RELEASED  # at the same instant as the downgrade, so that is left out
    assert early.upcoming.at == HOUR
    assert early.decide_again_at == 55 * MINUTE
    notified = decide(IDLE, observed(), 55 * MINUTE, quiet_until=night)
    assert notified.no_action is NoAction.NOTICE_PERIOD
    due = decide(IDLE, observed(notice=told(notified)), HOUR, quiet_until=night)
    assert (due.no_action, due.tier) == (None, Tier.RELEASED)


def test_a_deeper_action_does_not_wait_for_one_that_quiet_hours_put_off() -> None:
    no_downgrades = quiet(0, 10 * HOUR, frozenset({Tier.DOWNGRADED}))
    found = decide(IDLE, observed(), MINUTE, quiet_until=no_downgrades)
    assert found.upcoming is not None
    assert (found.upcoming.tier, found.upcoming.at) == (Tier.RELEASED, 45 * MINUTE)


def test_a_service_that_comes_late_announces_the_action_anew() -> None:
    night = quiet(16 * MINUTE, HOUR)
    notified = decide(IDLE, observed(), 10 * MINUTE, quiet_until=night)
    assert notified.notice is not None
    assert notified.notice.at == 15 * MINUTE
    late = decide(IDLE, observed(notice=told(notified)), 17 * MINUTE, quiet_until=night)
    assert late.no_action is NoAction.NOTICE_PERIOD
    assert late.notice is not None
    assert late.notice.at == HOUR
    still = decide(IDLE, observed(notice=told(late)), 30 * MINUTE, quiet_until=night)
    assert still.notice == late.notice
    assert decide(IDLE, observed(notice=told(late)), HOUR, quiet_until=night).no_action is None


def test_a_late_notice_leads_to_no_action_in_quiet_hours() -> None:
    night = quiet(2 * HOUR, 8 * HOUR)
    found = decide(IDLE, observed(), 2 * HOUR - MINUTE, quiet_until=night)
    assert found.notice is not None
    assert found.notice.at == 8 * HOUR


def test_the_oldest_servers_wait_too_and_a_spawn_in_quota_does_not() -> None:
    night = quiet(0, 10 * HOUR)
    old = decide(Idle(), observed(gpu_busy=True), 5 * HOUR, max_age=HOUR, quiet_until=night)
    assert old.upcoming is not None
    assert (old.upcoming.cause, old.upcoming.at) == (IdleCause.MAX_AGE, 10 * HOUR)
    claimed = decide(IDLE, observed(), HOUR, reclaimed=UnitsNeeded(0, Reclaim(notice=60)), quiet_until=night)
    assert claimed.notice is not None
    assert (claimed.notice.cause, claimed.notice.at) == (IdleCause.RECLAIM, HOUR + 60)


@settings(deadline=None)
@given(
    begin=st.integers(0, 86399),
    length=st.integers(60, 82800),
    tiers=st.sets(st.sampled_from(sorted(ALL))).map(frozenset),
    step=st.sampled_from([120.0, 611.0, 3600.0]),
    max_age=st.sampled_from([0.0, 3 * HOUR]),
    start=st.integers(0, 86400),
)
def test_no_action_comes_in_its_quiet_hours_and_all_come_in_the_end(
    begin: int, length: int, tiers: frozenset[Tier], step: float, max_age: float, start: int
) -> None:
    until = quiet(begin, begin + length, tiers)
    changes: dict[str, Any] = {
        "tier": Tier.ACTIVE, "tier_since": float(start), "opened_at": float(start), "hub_last_activity": float(start),
    }  # fmt: skip
    now, notice, reached = float(start), None, []
    while now < start + 4 * 86400 and Tier.STOPPED not in reached:
        found = decide(IDLE, observed(**changes, notice=notice), now, max_age, quiet_until=until)
        if found.no_action is None:
            assert until(found.tier, now) == now
            assert notice is not None
            reached.append(found.tier)
            changes |= {"tier": found.tier, "tier_since": now}
            notice = None
        else:
            if found.upcoming is not None:
                assert until(found.upcoming.tier, found.upcoming.at) == found.upcoming.at
            notice = told(found)
        now += step
    assert reached[-1:] == [Tier.STOPPED]
    assert [tier.depth for tier in reached] == sorted(tier.depth for tier in reached)


@pytest.mark.parametrize("now", [MINUTE, 20 * MINUTE, 3 * HOUR, 9 * HOUR])
def test_without_quiet_hours_nothing_changes(now: float) -> None:
    assert decide(IDLE, observed(), now) == decide(IDLE, observed(), now, quiet_until=quiet(0, 60, frozenset()))
