"""What sessions would be whose idle actions are not carried out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpushare_spawner.idle.policy import decide
from gpushare_spawner.idle.use import DryRun, Observation
from gpushare_spawner.model.share import Tier
from tests.idle.sessions import HOUR, IDLE, MINUTE, observed, told

SESSION = "ann"


def step(dry_run: DryRun, seen: Observation, now: float) -> Tier | None:
    """One round of a dry run; returns the tier of an action that came."""
    supposed = dry_run.observe(SESSION, seen)
    decision = decide(IDLE, supposed, now)
    if decision.tier is not supposed.tier:
        dry_run.act(SESSION, supposed, decision.tier, decision.units, now)
        return decision.tier
    if decision.notice is not None and decision.notice.at != (supposed.notice.at if supposed.notice else None):
        dry_run.notify(SESSION, supposed, told(decision), now)
    return None


def test_actions_come_when_they_would_have_come() -> None:
    dry_run = DryRun()
    came = [(minute, tier) for minute in range(9 * 60) if (tier := step(dry_run, observed(), minute * MINUTE))]
    assert came == [(15, Tier.DOWNGRADED), (45, Tier.RELEASED), (480, Tier.STOPPED)]


def test_a_session_that_works_begins_again() -> None:
    dry_run = DryRun()
    for minute in range(50):
        step(dry_run, observed(), minute * MINUTE)
    working = observed(gpu_busy=True)
    assert dry_run.observe(SESSION, working) == working
    later = observed(last_gpu_activity=50 * MINUTE, hub_last_activity=50 * MINUTE)
    assert dry_run.observe(SESSION, later) == later
    came = [(minute, tier) for minute in range(51, 120) if (tier := step(dry_run, later, minute * MINUTE))]
    assert came == [(65, Tier.DOWNGRADED), (95, Tier.RELEASED)]


def test_work_between_two_rounds_is_noticed() -> None:
    dry_run = DryRun()
    dry_run.act(SESSION, observed(), Tier.RELEASED, 0, HOUR)
    worked = observed(last_gpu_activity=HOUR + 1)
    assert dry_run.observe(SESSION, worked) == worked


def test_a_session_that_was_opened_again_is_another_one() -> None:
    dry_run = DryRun()
    dry_run.act(SESSION, observed(), Tier.RELEASED, 0, HOUR)
    again = observed(opened_at=10.0, tier_since=10.0)
    assert dry_run.observe(SESSION, again) == again


def test_sessions_that_ended_are_forgotten() -> None:
    dry_run = DryRun()
    dry_run.act(SESSION, observed(), Tier.RELEASED, 0, HOUR)
    dry_run.retain([])
    assert dry_run.observe(SESSION, observed()) == observed()


@given(st.lists(st.floats(1, 3 * HOUR), max_size=12))
def test_a_dry_run_does_what_a_real_run_does(pauses: list[float]) -> None:
    """The same rounds, once with a session that really changes its tier, and once with one that does not."""
    dry_run, real = DryRun(), observed()
    now, dry_actions, real_actions = 0.0, [], []
    for pause in pauses:
        now += pause
        if (tier := step(dry_run, observed(), now)) is not None:
            dry_actions.append((now, tier))
        if real.tier is Tier.STOPPED:
            continue
        decision = decide(IDLE, real, now)
        if decision.tier is not real.tier:
            real_actions.append((now, decision.tier))
            if decision.tier is Tier.STOPPED:
                break
            real = observed(tier=decision.tier, tier_since=now)
        elif decision.notice is not None:
            real = observed(tier=real.tier, tier_since=real.tier_since, notice=told(decision))
    assert dry_actions == real_actions
