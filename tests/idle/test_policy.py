"""The policy, case by case. Instants are seconds since the session was opened."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpushare_spawner.idle.policy import NoAction, decide, fair_notice
from gpushare_spawner.model.report import Notice, SessionReport
from gpushare_spawner.model.share import IdleCause, Share, Tier
from gpushare_spawner.model.template import Idle
from tests.idle.sessions import HOUR, IDLE, MINUTE, observed, told
from tests.present import present

ACTIVE, DOWNGRADED, RELEASED, STOPPED = Tier


def notice(tier: Tier, at: float, units: int = 0) -> Notice:
    return Notice(tier=tier, at=at, reason="as told", effective_units=units)


def test_nothing_happens_before_the_notice_is_due() -> None:
    decision = decide(IDLE, observed(), now=10 * MINUTE - 1)
    assert decision.tier is ACTIVE
    assert decision.notice is None
    upcoming = present(decision.upcoming)
    assert (upcoming.tier, upcoming.at, upcoming.units) == (DOWNGRADED, 15 * MINUTE, 10)
    assert decision.decide_again_at == 10 * MINUTE
    assert (decision.no_action, decision.units, decision.idle_since) == (NoAction.NOT_YET, 25, 0.0)


def test_each_step_is_announced_five_minutes_before() -> None:
    decision = decide(IDLE, observed(), now=10 * MINUTE)
    assert decision.tier is ACTIVE
    assert (present(decision.notice).tier, present(decision.notice).at) == (DOWNGRADED, 15 * MINUTE)
    assert present(decision.notice).units == 10
    assert (present(decision.notice).after, present(decision.notice).cause) == (15 * MINUTE, IdleCause.IDLE)
    assert decision.decide_again_at == 15 * MINUTE
    assert decision.upcoming == decision.notice
    assert (decision.no_action, decision.units, decision.idle_since) == (NoAction.NOTICE_PERIOD, 25, 0.0)


def test_a_standing_notice_is_told_again_until_its_time() -> None:
    session = observed(notice=notice(DOWNGRADED, 16 * MINUTE, 10), last_gpu_activity=MINUTE)
    decision = decide(IDLE, session, now=12 * MINUTE)
    assert (decision.tier, decision.units, decision.no_action) == (ACTIVE, 25, NoAction.NOTICE_PERIOD)
    assert decision.notice == decision.upcoming
    assert present(decision.notice).at == 16 * MINUTE
    assert (decision.decide_again_at, decision.idle_since) == (16 * MINUTE, MINUTE)


def test_a_due_action_says_which_work_would_make_it_void_and_that_the_user_had_notice() -> None:
    session = observed(notice=notice(DOWNGRADED, 16 * MINUTE, 10), last_gpu_activity=MINUTE)
    decision = decide(IDLE, session, now=16 * MINUTE)
    assert (decision.tier, decision.idle_since, decision.decide_again_at) == (DOWNGRADED, MINUTE, None)
    assert decision.notice == decision.upcoming
    assert (present(decision.upcoming).tier, present(decision.upcoming).at) == (DOWNGRADED, 16 * MINUTE)


@pytest.mark.parametrize(
    ("at", "stands"),
    [(14 * MINUTE + 59, True), (14 * MINUTE + 58.9, False), (15 * MINUTE + 1, True), (15 * MINUTE + 1.1, False)],
)
def test_an_announced_instant_may_differ_by_a_second_from_the_exact_one(at: float, stands: bool) -> None:
    """Earlier: work has overtaken it. Later: the user may keep the notice, but does not wait longer than that."""
    decision = decide(IDLE, observed(notice=notice(DOWNGRADED, at, 10)), now=10 * MINUTE)
    assert present(decision.notice).at == (at if stands else 15 * MINUTE)


def test_a_late_pass_shows_when_the_action_will_come_and_an_early_one_when_it_is_due() -> None:
    assert present(decide(IDLE, observed(), now=10 * MINUTE - 1).upcoming).at == 15 * MINUTE
    assert present(decide(IDLE, observed(), now=10 * MINUTE + 7).upcoming).at == 15 * MINUTE + 7


def test_an_action_that_is_due_before_its_full_notice_is_told_at_its_exact_instant() -> None:
    """A notice that was cut to half of the wait is not stretched by an early pass."""
    early = decide(Idle(release_after=60, warn_before="5m"), observed(last_gpu_activity=0.0), now=29)
    assert (early.notice, present(early.upcoming).at) == (None, 60)


@pytest.mark.parametrize(
    ("tier", "next_tier", "units", "after"),
    [(ACTIVE, DOWNGRADED, 10, 15 * MINUTE), (DOWNGRADED, RELEASED, 0, 45 * MINUTE), (RELEASED, STOPPED, 0, 8 * HOUR)],
)
def test_each_action_says_after_how_much_idleness_it_comes(
    tier: Tier, next_tier: Tier, units: int, after: float
) -> None:
    upcoming = present(decide(IDLE, observed(tier=tier), now=MINUTE).upcoming)
    assert (upcoming.tier, upcoming.units, upcoming.after) == (next_tier, units, after)


def test_the_end_of_an_old_server_says_that_work_does_not_help() -> None:
    action = present(decide(IDLE, observed(gpu_busy=True), now=MINUTE, max_age=HOUR).upcoming)
    assert (action.tier, action.units, action.at) == (STOPPED, 0, HOUR)
    assert (action.cause, action.after) == (IdleCause.MAX_AGE, HOUR)


def test_a_maximum_age_of_a_second_is_one() -> None:
    assert present(decide(IDLE, observed(), now=1, max_age=1).notice).tier is STOPPED


def test_the_next_pass_is_at_the_next_action_or_at_the_notice_of_the_end_whichever_comes_first() -> None:
    """The notice of the downgrade comes at 10 min, that of the end before it, with it or after it."""
    for max_age, again in ((14 * MINUTE, 9 * MINUTE), (15 * MINUTE, 10 * MINUTE), (16 * MINUTE, 10 * MINUTE)):
        assert decide(IDLE, observed(), now=MINUTE, max_age=max_age).decide_again_at == again
    # no further pass is needed: the action is due
    due = observed(notice=notice(DOWNGRADED, 15 * MINUTE, 10))
    assert decide(IDLE, due, now=15 * MINUTE, max_age=24 * HOUR).decide_again_at is None


@pytest.mark.parametrize(("tier", "since"), [(ACTIVE, 50.0), (DOWNGRADED, 30.0), (RELEASED, 30.0)])
def test_only_an_active_session_counts_from_its_tiers_beginning(tier: Tier, since: float) -> None:
    assert observed(tier=tier, tier_since=50.0, last_gpu_activity=30.0).gpu_idle_since == since
    assert observed(tier=tier, tier_since=20.0, last_gpu_activity=30.0).gpu_idle_since == 30.0
    assert observed(tier=tier, tier_since=20.0, opened_at=40.0, last_gpu_activity=30.0).gpu_idle_since == 40.0
    assert observed(tier=RELEASED, tier_since=20.0, opened_at=10.0).gpu_idle_since == 10.0


@pytest.mark.parametrize("latest", ["gpu", "hub", "kernel"])
def test_a_session_is_quiet_since_the_latest_of_its_signs_of_life(latest: str) -> None:
    signs = {"gpu": 30.0, "hub": 20.0, "kernel": 10.0} | {latest: 90.0}
    session = observed(
        last_gpu_activity=signs["gpu"], hub_last_activity=signs["hub"], last_kernel_activity=signs["kernel"]
    )
    assert session.quiet_since == 90.0
    assert replace(session, hub_last_activity=None).quiet_since is None


@pytest.mark.parametrize(
    ("tier", "next_tier", "units", "due"),
    [(ACTIVE, DOWNGRADED, 10, 15 * MINUTE), (DOWNGRADED, RELEASED, 0, 45 * MINUTE), (RELEASED, STOPPED, 0, 8 * HOUR)],
)
def test_an_action_comes_when_its_time_has_come_and_the_user_had_notice(
    tier: Tier, next_tier: Tier, units: int, due: float
) -> None:
    session = observed(tier=tier, notice=notice(next_tier, due, units))
    assert decide(IDLE, session, now=due - 1).tier is tier
    decision = decide(IDLE, session, now=due)
    assert (decision.tier, decision.units, decision.no_action) == (next_tier, units, None)


def test_without_a_notice_no_action_comes_however_idle_and_the_notice_is_full() -> None:
    """As after an outage of the service, or when a template was made stricter."""
    decision = decide(IDLE, observed(), now=7 * HOUR)
    assert decision.tier is ACTIVE
    assert (present(decision.notice).tier, present(decision.notice).at) == (DOWNGRADED, 7 * HOUR + 5 * MINUTE)


def test_one_action_at_a_time_however_late() -> None:
    now, session, seen = 7.5 * HOUR, observed(), []
    while now < 10 * HOUR:
        decision = decide(IDLE, session, now)
        if decision.tier is not session.tier:
            seen.append((decision.tier, (now - 7.5 * HOUR) / MINUTE))
            session = replace(session, tier=decision.tier, effective_units=decision.units, tier_since=now)
            if decision.tier is STOPPED:
                break
        session = replace(session, notice=told(decision))
        now += MINUTE
    # 5 minutes of notice for each, and a round between an action and the next notice
    assert seen == [(DOWNGRADED, 5), (RELEASED, 11), (STOPPED, 30)]


def test_a_late_notice_is_kept_and_not_pushed_on_by_each_pass() -> None:
    session = observed(notice=told(decide(IDLE, observed(), now=7 * HOUR)))
    decision = decide(IDLE, session, now=7 * HOUR + 3 * MINUTE)
    assert present(decision.notice).at == 7 * HOUR + 5 * MINUTE
    assert decide(IDLE, session, now=7 * HOUR + 5 * MINUTE).tier is DOWNGRADED


def test_work_takes_a_notice_back() -> None:
    session = observed(notice=notice(DOWNGRADED, 15 * MINUTE, 10))
    busy = decide(IDLE, replace(session, gpu_busy=True), now=14 * MINUTE)
    assert (busy.tier, busy.notice, busy.no_action) == (ACTIVE, None, NoAction.GPU_BUSY)
    worked = decide(IDLE, replace(session, last_gpu_activity=13 * MINUTE), now=16 * MINUTE)
    assert (worked.tier, worked.notice) == (ACTIVE, None)


def test_a_notice_from_before_the_last_work_counts_for_nothing() -> None:
    """Told at 10 min, service dead, work at 14 min, service back when it is idle for long again."""
    session = observed(notice=notice(DOWNGRADED, 15 * MINUTE, 10), last_gpu_activity=14 * MINUTE)
    decision = decide(IDLE, session, now=2 * HOUR)
    assert decision.tier is ACTIVE
    assert present(decision.notice).at == 2 * HOUR + 5 * MINUTE


def test_gpu_idleness_decides_even_if_a_cell_runs_and_the_tab_is_open() -> None:
    session = observed(
        kernels_busy=1,
        last_kernel_activity=15 * MINUTE,
        hub_last_activity=15 * MINUTE,
        notice=notice(DOWNGRADED, 15 * MINUTE, 10),
    )
    assert decide(IDLE, session, now=15 * MINUTE).tier is DOWNGRADED


@pytest.mark.parametrize(
    ("signs", "why"),
    [
        ({"kernels_busy": 1}, NoAction.KERNEL_BUSY),
        ({"gpu_busy": True}, NoAction.GPU_BUSY),
        ({"hub_last_activity": None}, NoAction.ACTIVITY_UNKNOWN),
    ],
)
def test_what_keeps_a_server_from_being_stopped_at_all(signs: dict[str, Any], why: NoAction) -> None:
    session = observed(tier=RELEASED, notice=notice(STOPPED, 8 * HOUR), **signs)
    decision = decide(IDLE, session, now=20 * HOUR)
    assert (decision.tier, decision.notice, decision.no_action) == (RELEASED, None, why)


@pytest.mark.parametrize("sign", ["last_gpu_activity", "hub_last_activity", "last_kernel_activity"])
def test_stop_counts_from_the_last_activity_of_any_kind(sign: str) -> None:
    session = observed(tier=RELEASED, **{sign: 3 * HOUR})
    decision = decide(IDLE, session, now=10 * HOUR)
    assert present(decision.upcoming).tier is STOPPED
    assert present(decision.upcoming).at == 11 * HOUR


def test_activity_while_the_stop_is_announced_moves_it() -> None:
    session = observed(tier=RELEASED, hub_last_activity=60.0, notice=notice(STOPPED, 8 * HOUR))
    decision = decide(IDLE, session, now=8 * HOUR)
    assert decision.tier is RELEASED
    assert present(decision.notice).at == 8 * HOUR + 5 * MINUTE  # due a minute from now, but the notice is five


def test_an_active_session_counts_from_when_it_came_up_again() -> None:
    """An agent that was restarted may not know of the burst that brought it up."""
    session = observed(tier_since=2 * HOUR)
    assert present(decide(IDLE, session, now=2 * HOUR + MINUTE).upcoming).at == 2 * HOUR + 15 * MINUTE


def test_going_down_is_no_activity() -> None:
    session = observed(tier=DOWNGRADED, tier_since=15 * MINUTE)
    assert present(decide(IDLE, session, now=20 * MINUTE).upcoming).at == 45 * MINUTE


def test_steps_that_the_template_leaves_out() -> None:
    idle = Idle(release_after="45m")
    assert present(decide(idle, observed(), now=MINUTE).upcoming).tier is RELEASED
    done = decide(idle, observed(tier=RELEASED), now=99 * HOUR)
    assert (done.tier, done.upcoming, done.no_action) == (RELEASED, None, NoAction.NO_FURTHER_ACTION)
    assert decide(Idle(), observed(), now=99 * HOUR).upcoming is None


def test_a_downgrade_that_would_take_nothing_is_left_out() -> None:
    small = observed(share=Share(units=10), effective_units=10)
    assert present(decide(IDLE, small, now=MINUTE).upcoming).tier is RELEASED


def test_a_template_that_is_gone_changes_nothing_and_says_so() -> None:
    session = observed(notice=notice(DOWNGRADED, 15 * MINUTE, 10))
    decision = decide(None, session, now=99 * HOUR, max_age=HOUR)
    assert (decision.tier, decision.units, decision.notice) == (ACTIVE, 25, None)
    assert decision.no_action == NoAction.TEMPLATE_GONE


def test_a_changed_template_is_announced_anew() -> None:
    """The user was told of 0.10; it must not become 0.05 without a word."""
    session = observed(notice=notice(DOWNGRADED, 15 * MINUTE, 10))
    decision = decide(IDLE.model_copy(update={"downgrade_to": 0.05}), session, now=15 * MINUTE)
    assert (decision.tier, present(decision.notice).units, present(decision.notice).at) == (ACTIVE, 5, 20 * MINUTE)


def test_a_step_that_comes_sooner_than_announced_keeps_its_notice() -> None:
    session = observed(notice=notice(DOWNGRADED, 5 * HOUR, 10))
    assert present(decide(IDLE, session, now=20 * MINUTE).notice).at == 25 * MINUTE


def test_a_clock_that_was_set_back_culls_nobody_early() -> None:
    session = observed(opened_at=10 * HOUR, tier_since=10 * HOUR, last_gpu_activity=11 * HOUR)
    decision = decide(IDLE, session, now=9 * HOUR)
    assert (decision.tier, decision.notice) == (ACTIVE, None)
    assert present(decision.upcoming).at == 11 * HOUR + 15 * MINUTE


@pytest.mark.parametrize(
    ("warn_before", "wait", "notice"), [(300, 900, 300), (300, 300, 300), (300, 60, 30), (0, 60, 0), (300, 299, 149.5)]
)
def test_the_notice_is_shortened_where_the_wait_is_short(warn_before: int, wait: int, notice: float) -> None:
    assert fair_notice(warn_before, wait) == notice


def test_a_short_wait_between_two_steps_shortens_the_second_ones_notice() -> None:
    idle = Idle(downgrade_after=20, downgrade_to=0.1, release_after=40, warn_before="5m")
    worked = observed(last_gpu_activity=0.0)
    assert decide(idle, worked, now=9).notice is None
    assert present(decide(idle, worked, now=10).notice).at == 20
    downgraded = observed(tier=DOWNGRADED, tier_since=20, last_gpu_activity=0.0)
    assert decide(idle, downgraded, now=29).notice is None
    assert present(decide(idle, downgraded, now=30).notice).at == 40


def test_without_a_notice_a_step_still_is_announced_first() -> None:
    idle = Idle(release_after=60, warn_before=0)
    worked = observed(last_gpu_activity=0.0)
    first = decide(idle, worked, now=60)
    assert (first.tier, present(first.notice).at) == (ACTIVE, 60)
    assert decide(idle, replace(worked, notice=told(first)), now=60).tier is RELEASED


def test_max_age_stops_busy_sessions_too_but_not_unannounced() -> None:
    busy = observed(gpu_busy=True, kernels_busy=1)
    assert decide(IDLE, busy, now=HOUR, max_age=24 * HOUR).notice is None
    warned = decide(IDLE, busy, now=24 * HOUR - 5 * MINUTE, max_age=24 * HOUR)
    assert (warned.tier, present(warned.notice).tier, present(warned.notice).at) == (ACTIVE, STOPPED, 24 * HOUR)
    assert (present(warned.notice).cause, present(warned.notice).after) == (IdleCause.MAX_AGE, 24 * HOUR)
    stopped = decide(IDLE, replace(busy, notice=told(warned)), now=24 * HOUR, max_age=24 * HOUR)
    assert stopped.tier is STOPPED


def test_max_age_leaves_the_idle_steps_before_it_alone() -> None:
    decision = decide(IDLE, observed(), now=10 * MINUTE, max_age=24 * HOUR)
    assert present(decision.notice).tier is DOWNGRADED
    near = decide(IDLE, observed(), now=5 * MINUTE, max_age=13 * MINUTE)
    assert near.decide_again_at == 8 * MINUTE  # the notice of the end comes before that of the downgrade
    assert present(decide(IDLE, observed(), now=8 * MINUTE, max_age=13 * MINUTE).notice).tier is STOPPED


def test_an_observation_from_a_report() -> None:
    from gpushare_spawner.idle.use import Observation

    told = notice(DOWNGRADED, 20.0, 10)
    session = SessionReport(
        id="ann", user="ann", template="quarter", gpus=("GPU-0",), share_units=25, tier=RELEASED, tier_since=6,
        effective_units=3, guaranteed_units=25, opened_at=5, waiting=True, last_gpu_activity=7, kernels=None,
        kernels_busy=None, last_kernel_activity=8, notice=told,
    )  # fmt: skip
    assert Observation.of(session, hub_last_activity=9) == Observation(
        share=Share(units=25), tier=RELEASED, tier_since=6, effective_units=3, opened_at=5,
        gpu_busy=True,  # who waits for the GPU is not idle
        last_gpu_activity=7, kernels_busy=0, last_kernel_activity=8, hub_last_activity=9, notice=told,
    )  # fmt: skip
    more = session.model_copy(
        update={"gpus": ("GPU-0", "GPU-1"), "share_units": 100, "waiting": False, "kernels_busy": 2}
    )
    observation = Observation.of(more)
    assert (observation.share, observation.gpu_busy) == (Share(units=100, count=2), False)
    assert (observation.kernels_busy, observation.hub_last_activity) == (2, None)
    assert Observation.of(more.model_copy(update={"gpu_busy": True})).gpu_busy
    assert Observation.of(more.model_copy(update={"gpus": ()})).share.count == 1


@pytest.mark.parametrize(
    ("first", "worked", "actions"),
    [
        ("1m", None, [("notice", 40), ("downgraded", 300), ("notice", 340), ("released", 360)]),
        ("1m", 0.0, [("notice", 40), ("downgraded", 60), ("notice", 100), ("released", 120)]),
        # times that an admin tries: 5 times as long
        ("8s", None, [("notice", 4), ("downgraded", 40), ("notice", 44), ("released", 48)]),
        # the time of the shipped templates is long enough
        ("5m", None, [("notice", 280), ("downgraded", 300), ("notice", 580), ("released", 600)]),
    ],
)
def test_a_session_that_never_worked_has_a_longer_first_notice(
    first: str, worked: float | None, actions: list[tuple[str, int]]
) -> None:
    times = Idle(downgrade_after=first, downgrade_to=0.10, warn_before="20s", stop_after="30m")
    times = times.model_copy(update={"release_after": 2 * present(times.downgrade_after)})
    session, seen = observed(last_gpu_activity=worked), list[tuple[str, int]]()
    for now in range(11 * 60):
        decision = decide(times, session, float(now))
        if decision.tier is not session.tier:
            seen.append((str(decision.tier), now))
            units = decision.units
            session = replace(session, tier=decision.tier, tier_since=float(now), effective_units=units, notice=None)
        elif session.notice is None and decision.notice is not None:
            seen.append(("notice", now))
            session = replace(session, notice=told(decision))
    assert seen == actions


def test_the_stop_of_a_session_that_never_worked_is_not_put_off() -> None:
    """Downgrade and release alone come later."""
    idle = Idle(release_after="1m", stop_after="2m", warn_before="10s")
    coming = present(decide(idle, observed(), now=0).upcoming)
    assert (coming.tier, coming.at) == (STOPPED, 2 * MINUTE)


def test_a_session_worked_if_the_agent_knows_its_work_or_has_restored_its_share() -> None:
    assert not observed().has_worked
    assert not observed(tier=RELEASED, tier_since=60.0).has_worked
    assert observed(last_gpu_activity=1.0).has_worked
    assert observed(gpu_seconds=0.5).has_worked
    assert observed(tier_since=60.0).has_worked, "a restarted agent has forgotten the work that restored it"
