"""What holds for every template, every session and every instant."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpushare_spawner.idle.policy import decide
from gpushare_spawner.idle.use import Observation
from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.share import Share, Tier
from gpushare_spawner.model.template import Idle
from tests.idle.sessions import told
from tests.present import present

instants = st.integers(0, 20_000).map(float)


@st.composite
def templates(draw: st.DrawFn) -> Idle:
    waits = sorted(draw(st.sets(st.integers(1, 5000), min_size=3, max_size=3)))
    downgrade, release, stop = (wait if draw(st.booleans()) else None for wait in waits)
    return Idle(
        downgrade_after=downgrade,
        downgrade_to=None if downgrade is None else draw(st.integers(1, 20)) / 100,
        release_after=release,
        stop_after=stop,
        warn_before=draw(st.sampled_from([0, 1, 60, 300, 3000])),
    )


notices = st.none() | st.builds(
    Notice,
    tier=st.sampled_from([Tier.DOWNGRADED, Tier.RELEASED, Tier.STOPPED]),
    at=instants,
    reason=st.just("x"),
    effective_units=st.sampled_from([0, 5, 10]),
)


@st.composite
def sessions(draw: st.DrawFn) -> Observation:
    tier = draw(st.sampled_from([Tier.ACTIVE, Tier.DOWNGRADED, Tier.RELEASED]))
    return Observation(
        share=Share(units=25),
        tier=tier,
        tier_since=draw(instants),
        effective_units={Tier.ACTIVE: 25, Tier.DOWNGRADED: 10}.get(tier, 0),
        opened_at=draw(instants),
        gpu_busy=draw(st.booleans()),
        last_gpu_activity=draw(st.none() | instants),
        kernels_busy=draw(st.integers(0, 2)),
        last_kernel_activity=draw(st.none() | instants),
        hub_last_activity=draw(st.none() | instants),
        notice=draw(notices),
    )


def signs_of_life(session: Observation) -> list[float]:
    marks = [session.opened_at, session.last_gpu_activity or 0.0]
    return marks + ([session.tier_since] if session.tier is Tier.ACTIVE else [])


@given(templates(), sessions(), instants)
def test_no_action_without_a_notice_of_just_that_action_whose_time_has_come(
    idle: Idle, session: Observation, now: float
) -> None:
    decision = decide(idle, session, now)
    if decision.tier is not session.tier:
        assert session.notice is not None
        assert session.notice.tier is decision.tier
        assert session.notice.at <= now
        assert session.notice.effective_units == decision.units


@given(templates(), sessions(), instants)
def test_never_deeper_than_the_idle_time_allows(idle: Idle, session: Observation, now: float) -> None:
    decision = decide(idle, session, now)
    if decision.tier is session.tier:
        return
    marks = signs_of_life(session)
    if decision.tier is Tier.STOPPED:
        assert session.hub_last_activity is not None
        marks += [session.hub_last_activity, session.last_kernel_activity or 0.0]
    assert now - max(marks) >= present(idle.after(decision.tier))


@given(templates(), sessions(), instants)
def test_busy_sessions_are_left_alone(idle: Idle, session: Observation, now: float) -> None:
    assert decide(idle, replace(session, gpu_busy=True), now).tier is session.tier
    assert decide(idle, replace(session, kernels_busy=1), now).tier is not Tier.STOPPED


@given(templates(), sessions(), instants)
def test_one_action_at_most_and_never_up(idle: Idle, session: Observation, now: float) -> None:
    decision = decide(idle, session, now)
    between = [t for t in Tier if session.tier.depth < t.depth < decision.tier.depth and idle.after(t) is not None]
    assert decision.tier.depth >= session.tier.depth
    # a downgrade to the units that it has already is no action
    assert [
        t for t in between if t is not Tier.DOWNGRADED or idle.units(t, session.share) < session.effective_units
    ] == []


@given(templates(), sessions(), instants, st.integers(0, 5000))
def test_who_is_idle_for_longer_is_not_in_a_higher_tier(
    idle: Idle, session: Observation, now: float, more: int
) -> None:
    def aged(value: float | None) -> float | None:
        return None if value is None else value - more

    idler = replace(
        session,
        tier_since=session.tier_since - more,
        opened_at=session.opened_at - more,
        last_gpu_activity=aged(session.last_gpu_activity),
        last_kernel_activity=aged(session.last_kernel_activity),
        hub_last_activity=aged(session.hub_last_activity),
    )
    assert decide(idle, idler, now).tier.depth >= decide(idle, session, now).tier.depth


@given(templates(), sessions(), instants)
def test_a_new_notice_is_at_least_the_notice_period_ahead(idle: Idle, session: Observation, now: float) -> None:
    action = decide(idle, session, now).notice
    if action is None or (session.notice is not None and action.at == session.notice.at):
        return
    waits = [w for w in (idle.downgrade_after, idle.release_after, idle.stop_after) if w is not None]
    shortest = min(b - a for a, b in zip([0.0, *waits], waits, strict=False))
    assert action.at - now >= min(idle.warn_before, shortest / 2)


@settings(deadline=None)
@given(templates(), st.lists(st.tuples(st.integers(1, 400), st.booleans(), st.booleans()), max_size=60))
@example(
    Idle(downgrade_after=1, downgrade_to=0.01, warn_before=1), [(1, False, True), (1, True, False), (1, False, True)]
)
def test_a_session_over_time_is_always_told_before_and_settles(
    idle: Idle, events: list[tuple[int, bool, bool]]
) -> None:
    """A random life: time passes, bursts happen, the service misses passes. The agent keeps tier and notice."""
    session = Observation(Share(units=25), Tier.ACTIVE, 0.0, 25, 0.0, hub_last_activity=0.0)
    now, last_work, told_at = 0.0, 0.0, None
    for pause, works, service_passes in events:
        now += pause
        if works:
            last_work = now
            session = replace(session, last_gpu_activity=now, tier=Tier.ACTIVE, effective_units=25, tier_since=now)
        if not service_passes:
            continue
        decision = decide(idle, session, now)
        if decision.tier is not session.tier:
            assert not works
            assert told_at is not None
            # told after the last work, not before it; work within a second of earlier work does not move a notice
            assert told_at >= last_work - 1.0
            assert told_at < now or idle.warn_before == 0
            if decision.tier is Tier.STOPPED:
                break
            session = replace(session, tier=decision.tier, effective_units=decision.units, tier_since=now)
        notice = told(decision)
        if notice != session.notice:
            told_at = now if notice is not None else None
        session = replace(session, notice=notice)


@given(templates(), sessions(), instants)
def test_a_decision_may_be_made_twice(idle: Idle, session: Observation, now: float) -> None:
    """Killed between decision and action: the next pass comes to the same, with the notice sent or not."""
    first = decide(idle, session, now)
    assert decide(idle, session, now) == first
    if first.tier is session.tier:
        again = decide(idle, replace(session, notice=told(first)), now)
        assert again.notice == first.notice
