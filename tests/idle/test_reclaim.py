"""When a session over quota makes way for a spawn in quota."""

from __future__ import annotations

from typing import Any

from gpushare_spawner.idle.policy import Decision, NoAction, UnitsNeeded, decide
from gpushare_spawner.model.quota import Reclaim
from gpushare_spawner.model.share import IdleCause, Tier
from gpushare_spawner.model.template import Idle
from tests.idle.sessions import HOUR, IDLE, MINUTE, observed, told

NEVER = Idle()
RULES = Reclaim.model_validate({"notice": "1m"})
STOPS = Reclaim.model_validate({"stop_after": "30m", "stop_notice": "5m"})


def with_claim(now: float, units: int = 0, rules: Reclaim = RULES, idle: Idle | None = NEVER, **seen: Any) -> Decision:
    return decide(idle, observed(**seen), now, reclaimed=UnitsNeeded(units, rules))


def test_an_idle_session_without_idle_actions_is_told_and_then_released() -> None:
    first = with_claim(HOUR)
    assert (first.tier, first.no_action) == (Tier.ACTIVE, NoAction.NOTICE_PERIOD)
    assert first.notice is not None
    assert (first.notice.tier, first.notice.at, first.notice.cause) == (Tier.RELEASED, HOUR + MINUTE, IdleCause.RECLAIM)
    assert first.decide_again_at == HOUR + MINUTE
    assert with_claim(HOUR + 59, notice=told(first)).no_action is NoAction.NOTICE_PERIOD
    then = with_claim(HOUR + MINUTE, notice=told(first))
    assert (then.tier, then.units, then.no_action) == (Tier.RELEASED, 0, None)


def test_a_busy_session_is_told_and_makes_way_all_the_same() -> None:
    first = with_claim(HOUR, units=10, gpu_busy=True, kernels_busy=1)
    then = with_claim(HOUR + MINUTE, units=10, gpu_busy=True, kernels_busy=1, notice=told(first))
    assert (then.tier, then.units, then.no_action) == (Tier.DOWNGRADED, 10, None)


def test_a_session_makes_way_though_its_template_is_gone() -> None:
    assert decide(None, observed(), HOUR).no_action is NoAction.TEMPLATE_GONE
    first = with_claim(HOUR, idle=None)
    assert with_claim(HOUR + MINUTE, idle=None, notice=told(first)).tier is Tier.RELEASED


def test_the_notice_is_withdrawn_when_nobody_waits_any_longer() -> None:
    first = with_claim(HOUR)
    after = decide(NEVER, observed(notice=told(first)), HOUR + 30)
    assert (after.tier, after.notice) == (Tier.ACTIVE, None)


def test_what_is_needed_beyond_the_notice_is_taken_after_a_notice_of_its_own() -> None:
    first = with_claim(HOUR, units=10)
    assert with_claim(HOUR + 50, units=5, notice=told(first)).notice == first.notice
    then = with_claim(HOUR + MINUTE, units=5, notice=told(first))
    assert (then.tier, then.units) == (Tier.DOWNGRADED, 10)
    rest = with_claim(HOUR + MINUTE, units=5, tier=Tier.DOWNGRADED, effective_units=10, yields=True)
    assert rest.notice is not None
    assert (rest.notice.units, rest.notice.at) == (5, HOUR + 2 * MINUTE)


def test_a_session_that_keeps_more_than_its_notice_says_makes_way_no_later() -> None:
    first = with_claim(HOUR, units=0)
    less = with_claim(HOUR + 50, units=10, notice=told(first))
    assert less.notice is not None
    assert (less.notice.tier, less.notice.units, less.notice.at) == (Tier.DOWNGRADED, 10, HOUR + MINUTE)
    then = with_claim(HOUR + MINUTE, units=12, notice=told(less))
    assert (then.tier, then.units, then.no_action) == (Tier.DOWNGRADED, 12, None)


def test_needs_that_change_in_each_round_do_not_put_it_off() -> None:
    notice, now = None, HOUR
    for number in range(20):
        decision = with_claim(now, units=5 + number % 7, notice=notice)
        if decision.tier is not Tier.ACTIVE:
            break
        notice, now = told(decision), now + 10
    assert (decision.tier, now) == (Tier.DOWNGRADED, HOUR + MINUTE)


def test_the_template_s_own_action_goes_first_where_it_comes_sooner() -> None:
    # downgraded after 15 min, told 5 min before
    first = decide(IDLE, observed(), 10 * MINUTE)
    soon = with_claim(14.5 * MINUTE, idle=IDLE, notice=told(first))
    assert soon.notice is not None
    assert (soon.notice.tier, soon.notice.cause, soon.notice.at) == (Tier.DOWNGRADED, IdleCause.IDLE, 15 * MINUTE)
    early = with_claim(11 * MINUTE, idle=IDLE, notice=told(first))
    assert early.notice is not None
    assert (early.notice.tier, early.notice.cause, early.notice.at) == (Tier.RELEASED, IdleCause.RECLAIM, 12 * MINUTE)
    at_once = with_claim(14 * MINUTE, idle=IDLE, notice=told(first))
    assert at_once.notice is not None
    assert (at_once.notice.tier, at_once.notice.cause, at_once.notice.at) == (
        Tier.RELEASED,
        IdleCause.RECLAIM,
        15 * MINUTE,
    )


def test_a_session_that_made_way_stays_so_while_the_spawn_waits() -> None:
    made: dict[str, Any] = {"tier": Tier.RELEASED, "effective_units": 0, "yields": True}
    decision = with_claim(7 * HOUR, idle=IDLE, **made)
    assert (decision.tier, decision.no_action, decision.notice) == (Tier.RELEASED, NoAction.YIELDS, None)


def test_the_template_still_stops_a_session_that_made_way() -> None:
    made: dict[str, Any] = {"tier": Tier.RELEASED, "effective_units": 0, "yields": True}
    assert with_claim(8 * HOUR - 5 * MINUTE - 1, idle=IDLE, **made).notice is None
    first = with_claim(8 * HOUR - 5 * MINUTE, idle=IDLE, **made)
    assert first.notice is not None
    assert first.notice.at == 8 * HOUR
    assert (first.notice.tier, first.notice.cause) == (Tier.STOPPED, IdleCause.IDLE)
    last = with_claim(8 * HOUR + 5 * MINUTE, idle=IDLE, notice=told(first), **made)
    assert last.tier is Tier.STOPPED


def test_no_server_is_stopped_unless_the_quotas_say_so() -> None:
    made: dict[str, Any] = {"tier": Tier.RELEASED, "effective_units": 0, "yields": True}
    assert with_claim(99 * HOUR, **made).tier is Tier.RELEASED
    first = with_claim(HOUR, rules=STOPS, **made)
    assert first.notice is not None
    assert (first.notice.tier, first.notice.at, first.notice.cause) == (
        Tier.STOPPED, HOUR + 5 * MINUTE, IdleCause.RECLAIM,
    )  # fmt: skip
    assert with_claim(HOUR + 5 * MINUTE, rules=STOPS, notice=told(first), **made).tier is Tier.STOPPED


def test_a_stop_waits_for_quiet_kernels_and_the_hub_s_word_and_comes_only_after_the_units() -> None:
    made: dict[str, Any] = {"tier": Tier.RELEASED, "effective_units": 0, "yields": True}
    doings: tuple[dict[str, Any], ...] = (
        {"kernels_busy": 1},
        {"gpu_busy": True},
        {"hub_last_activity": None},
        {"yields": False},
    )
    for doing in doings:
        assert with_claim(9 * HOUR, rules=STOPS, **(made | doing)).notice is None
    early = with_claim(24 * MINUTE, rules=STOPS, **made)
    assert early.notice is None
    assert early.decide_again_at == 25 * MINUTE
    first = with_claim(9 * HOUR, rules=STOPS)
    assert first.notice is not None
    assert first.notice.tier is Tier.RELEASED
