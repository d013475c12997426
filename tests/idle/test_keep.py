"""Keeps: their limits, until when they hold, and that no clock makes one hold without end."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_spawner.idle.keep import (
    CLOCKS_DIFFER,
    DAY,
    KeepRule,
    WhyNoKeep,
    exempts,
    in_force,
    keep_in_force,
    keep_refused,
    keeps_left,
    recent,
)
from gpushare_spawner.idle.policy import NoAction, UnitsNeeded, decide
from gpushare_spawner.idle.use import Observation
from gpushare_spawner.model.controls import MOST_KEEPS, Controls, Exemption, Keep
from gpushare_spawner.model.quota import Reclaim
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.template import Idle, KeepLimits
from tests.idle.sessions import HOUR, IDLE, MINUTE, observed, told
from tests.idle.test_policy_properties import instants, sessions, templates
from tests.present import present

NOW = 1_000_000.0
RULE = KeepRule(longest=8 * HOUR, per_day=3, at_once=2)
KEEP = Keep(until=NOW + HOUR, since=NOW, by="ada")


def kept(until: float, since: float = 0.0) -> Keep:
    return Keep(until=until, since=since, by="ada")


# -- limits ------------------------------------------------------------------------------------------------------------


def why(rule: KeepRule, seconds: float, began: list[float], others: int) -> WhyNoKeep | None:
    refusal = keep_refused(rule, seconds, began, others, NOW)
    return refusal.why if refusal is not None else None


def test_a_user_may_keep_up_to_the_limits_and_not_beyond() -> None:
    assert why(RULE, 8 * HOUR, [NOW - HOUR] * 2, 1) is None
    assert why(RULE, 8 * HOUR + 1, [], 0) is WhyNoKeep.TOO_LONG
    assert why(RULE, HOUR, [NOW - HOUR] * 3, 0) is WhyNoKeep.TOO_OFTEN
    assert why(RULE, HOUR, [], 2) is WhyNoKeep.TOO_MANY


def test_a_limit_of_zero_lets_nobody_keep() -> None:
    for rule in (replace(RULE, longest=0), replace(RULE, per_day=0), replace(RULE, at_once=0)):
        assert why(rule, 0.5, [], 0) is WhyNoKeep.NOBODY


def test_the_user_may_keep_again_when_the_oldest_counted_keep_is_a_day_old() -> None:
    began = [NOW - DAY - 1, NOW - 20 * HOUR, NOW - 10 * HOUR, NOW - HOUR]
    refusal = present(keep_refused(RULE, HOUR, began, 0, NOW))
    assert refusal.again_at == NOW - 20 * HOUR + DAY
    assert keep_refused(RULE, HOUR, began, 0, present(refusal.again_at)) is None
    assert present(keep_refused(RULE, HOUR, [*began, NOW], 0, NOW)).again_at == NOW - 10 * HOUR + DAY


@given(
    st.floats(allow_nan=True, allow_infinity=True),
    st.lists(st.floats(0, 2e6), max_size=20),
    st.integers(0, 20),
    st.builds(KeepRule, st.floats(0, 1e6), st.integers(0, 16), st.integers(0, 5)),
)
def test_no_keep_beyond_the_limits(seconds: float, began: list[float], others: int, rule: KeepRule) -> None:
    if keep_refused(rule, seconds, began, others, NOW) is not None:
        return
    assert not math.isnan(seconds)
    assert seconds <= rule.longest
    assert others + 1 <= rule.at_once
    assert len(recent(began, NOW)) + 1 <= rule.per_day


# -- clocks ------------------------------------------------------------------------------------------------------------


def test_a_keep_ends_at_its_end() -> None:
    assert keep_in_force(KEEP, NOW + HOUR - 0.001)
    assert not keep_in_force(KEEP, NOW + HOUR)
    assert not keep_in_force(None, NOW)
    assert in_force(Controls(keep=KEEP), NOW + HOUR).keep is None


def test_an_exemption_ends_at_its_end_or_never() -> None:
    until = Exemption(until=NOW, by="root")
    assert exempts(until, NOW - 0.001)
    assert not exempts(until, NOW)
    assert exempts(Exemption(by="root"), 1e11)
    assert in_force(Controls(exemption=until), NOW).exemption is None


def test_a_keep_from_before_the_clock_was_set_back_holds_for_as_long_as_it_was_given_for() -> None:
    back = NOW - DAY
    keep = present(in_force(Controls(keep=KEEP, keeps=(NOW,)), back).keep)
    assert (keep.since, keep.until) == (back, back + HOUR)
    assert in_force(Controls(keep=KEEP, keeps=(NOW,)), back).keeps == (back,)
    # a few seconds between two machines are no clock that was set back
    assert in_force(Controls(keep=KEEP), NOW - CLOCKS_DIFFER).keep == KEEP


@given(st.lists(st.floats(-3 * DAY, 3 * DAY), max_size=30), st.floats(1, 8 * HOUR))
def test_no_clock_makes_a_keep_hold_for_longer_than_it_was_given_for_after_the_last_jump(
    jumps: list[float], seconds: float
) -> None:
    """The culler dates a keep anew in each round; after the last jump it ends after at most `seconds`, and a minute."""
    now = 10 * DAY
    controls = Controls(keep=kept(now + seconds, now), keeps=(now,))
    for jump in jumps:
        now = max(0.0, now + jump)
        controls = in_force(controls, now)
    left = controls.keep.until - now if controls.keep is not None else 0.0
    assert left <= seconds + CLOCKS_DIFFER
    assert all(instant <= now for instant in controls.keeps)
    assert len(controls.keeps) <= MOST_KEEPS
    assert in_force(controls, now) == controls


# -- decisions ---------------------------------------------------------------------------------------------------------


@given(templates(), sessions(), instants, st.integers(1, 10_000), st.integers(0, 20_000))
def test_a_kept_session_loses_nothing_before_the_end_whatever_the_clock_shows(
    idle: Idle, session: Observation, now: float, length: int, since: float
) -> None:
    decision = decide(idle, replace(session, keep=kept(now + length, since)), now)
    assert decision.tier is session.tier
    assert decision.units == session.effective_units
    assert decision.notice is None
    assert decision.no_action is NoAction.KEPT
    assert decision.decide_again_at == now + length


@given(templates(), sessions(), instants, st.integers(0, 10_000))
def test_a_keep_that_is_over_changes_nothing(idle: Idle, session: Observation, now: float, ago: int) -> None:
    over = replace(session, keep=kept(max(0.0, now - ago)))
    assert decide(idle, over, now) == decide(idle, session, now)


@given(templates(), sessions(), instants, st.none() | st.integers(1, 10_000))
def test_nothing_at_all_comes_to_an_exempt_session(
    idle: Idle, session: Observation, now: float, length: int | None
) -> None:
    until = None if length is None else now + length
    exempt = replace(session, exemption=Exemption(until=until, by="root"))
    for template in (idle, None):
        decision = decide(template, exempt, now, max_age=1.0, reclaimed=UnitsNeeded(0, Reclaim(enabled=True)))
        assert (decision.tier, decision.notice, decision.no_action) == (session.tier, None, NoAction.EXEMPT)
        assert decision.decide_again_at == until


def test_a_keep_does_not_hold_against_max_age_nor_against_a_claim() -> None:
    session = observed(keep=kept(100 * HOUR))
    aged = decide(IDLE, session, 24 * HOUR, max_age=24 * HOUR)
    assert present(aged.notice).tier is Tier.STOPPED
    claimed = decide(IDLE, session, HOUR, reclaimed=UnitsNeeded(0, Reclaim(enabled=True)))
    assert present(claimed.notice).tier is Tier.RELEASED


def test_after_its_end_idle_actions_come_again_each_with_its_notice() -> None:
    """The user keeps for ten hours and goes; rounds of a minute."""
    session, now, log = observed(keep=kept(10 * HOUR)), 0.0, []
    while now < 20 * HOUR:
        decision = decide(IDLE, session, now)
        if told(decision) != session.notice:
            log.append((now / HOUR, "told", present(decision.upcoming).tier))
            session = replace(session, notice=told(decision))
        if decision.tier is not session.tier:
            log.append((now / HOUR, "taken", decision.tier))
            if decision.tier is Tier.STOPPED:
                break
            session = replace(session, tier=decision.tier, tier_since=now, effective_units=decision.units, notice=None)
        now += MINUTE
    five, one = 5 * MINUTE / HOUR, MINUTE / HOUR
    expected = [
        (10, "told", Tier.DOWNGRADED), (10 + five, "taken", Tier.DOWNGRADED),
        (10 + five + one, "told", Tier.RELEASED), (10 + 2 * five + one, "taken", Tier.RELEASED),
        (10 + 2 * five + 2 * one, "told", Tier.STOPPED), (10 + 3 * five + 2 * one, "taken", Tier.STOPPED),
    ]  # fmt: skip
    assert [(round(at, 4), what, tier) for at, what, tier in log] == [
        (round(at, 4), what, tier) for at, what, tier in expected
    ]


def test_a_notice_that_stands_is_withdrawn_when_the_user_keeps_the_share() -> None:
    before = decide(IDLE, observed(), 12 * MINUTE)
    session = observed(notice=told(before), keep=kept(HOUR))
    decision = decide(IDLE, session, 12 * MINUTE)
    assert (decision.notice, decision.no_action) == (None, NoAction.KEPT)


@pytest.mark.parametrize(
    ("began", "left", "again_in"),
    [
        ([], 3, None),
        ([NOW - HOUR], 2, None),
        ([NOW - 25 * HOUR, NOW - HOUR], 2, None),
        ([NOW - 5 * HOUR, NOW - 2 * HOUR, NOW - HOUR], 0, 19 * HOUR),
        ([NOW - 5 * HOUR, NOW - 3 * HOUR, NOW - 2 * HOUR, NOW - HOUR], 0, 21 * HOUR),
    ],
)
def test_what_is_left_of_keeps_is_what_the_rule_then_allows(
    began: list[float], left: int, again_in: float | None
) -> None:
    rule = KeepRule(longest=8 * HOUR, per_day=3, at_once=2)
    found = keeps_left(rule, began, NOW)
    assert (found.left, found.again_at) == (left, None if again_in is None else NOW + again_in)
    for _ in range(left):
        assert keep_refused(rule, HOUR, began, 0, NOW) is None
        began = [*began, NOW]
    assert present(keep_refused(rule, HOUR, began, 0, NOW)).why is WhyNoKeep.TOO_OFTEN


def test_who_may_not_keep_has_no_keeps_and_no_instant_from_which_on() -> None:
    for rule in (KeepRule(0, 3, 2), KeepRule(HOUR, 0, 2), KeepRule(HOUR, 3, 0)):
        assert (keeps_left(rule, [], NOW).left, keeps_left(rule, [NOW], NOW).again_at) == (0, None)


def test_limits_that_a_template_does_not_give_have_their_defaults() -> None:
    assert KeepRule.of(None) == KeepRule.of(Idle()) == KeepRule(8 * HOUR, 2, 2)
    assert KeepRule.of(Idle(keep=KeepLimits(longest="12h"))) == KeepRule(12 * HOUR, 2, 2)
    assert KeepRule.of(Idle(keep=KeepLimits(longest=0, per_day=0, at_once=0))) == KeepRule(0, 0, 0)
