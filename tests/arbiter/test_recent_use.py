"""The part of the GPU's time that sessions and clients had of late."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_spawner.arbiter.gpu_arbiter import GpuArbiter
from gpushare_spawner.arbiter.recent_use import RETAINED, WINDOW, BurstRecorder, RecentGpuUse, Use, User
from gpushare_spawner.arbiter.session import ArbiterSettings
from gpushare_spawner.model.report import MOST_BURSTS, Burst

GIB = 2**30
ADA: User = ("ada", 1)
BOB: User = ("bob", 2)


def seconds(use: RecentGpuUse, user: User, now: float) -> float:
    return use.of(user[0], now, now, ()).seconds


def rounded(use: Use) -> Use:
    return Use(round(use.seconds, 6), tuple((client, round(used, 6)) for client, used in use.by_client))


def test_clients_that_work_at_the_same_time_have_equal_parts() -> None:
    use = RecentGpuUse()
    use.advance(0.0, 0.4, [ADA])
    use.advance(0.4, 1.0, [ADA, BOB])
    assert seconds(use, ADA, 1.0) == pytest.approx(0.7)
    assert rounded(use.of("bob", 1.0, 1.0, ())) == Use(0.3, ((2, 0.3),))


def test_time_before_the_window_does_not_count() -> None:
    use = RecentGpuUse()
    for tenth in range(20):
        use.advance(tenth / 10, (tenth + 1) / 10, [ADA] if tenth < 15 else [])
    assert seconds(use, ADA, 2.0) == pytest.approx(0.5)
    assert seconds(use, ADA, 2.0 + WINDOW) == 0.0


def test_work_since_the_last_event_counts() -> None:
    use = RecentGpuUse()
    use.advance(0.0, 0.2, [ADA])
    assert use.of("ada", 0.5, 0.9, [ADA, BOB]).seconds == pytest.approx(0.2 + 0.4 / 2)


def test_burst_counts_with_no_more_than_the_client_reports() -> None:
    use = RecentGpuUse()
    use.advance(0.0, 0.3, [ADA])
    use.advance(0.3, 0.5, [ADA, BOB])
    use.burst_ended(ADA, 0.3, 0.02)
    assert seconds(use, ADA, 0.5) == pytest.approx(0.32)
    assert seconds(use, BOB, 0.5) == pytest.approx(0.1)
    use.burst_ended(ADA, 0.3, 5.0)
    assert seconds(use, ADA, 0.5) == pytest.approx(0.32), "and never with more than was estimated"


def test_sample_replaces_the_estimate_of_the_sessions_that_it_shows() -> None:
    use = RecentGpuUse()
    use.advance(0.0, 1.0, [ADA, BOB, ("eve", 3)])
    use.sample(0.0, 0.5, {"ada": 0.4, "bob": 0.0})
    assert seconds(use, ADA, 1.0) == pytest.approx(0.4 + 0.5 / 3)
    assert seconds(use, BOB, 1.0) == pytest.approx(0.5 / 3)
    assert seconds(use, ("eve", 3), 1.0) == pytest.approx(1 / 3)


def test_sampled_time_of_processes_without_a_connection_is_the_sessions_alone() -> None:
    use = RecentGpuUse()
    use.sample(0.2, 0.6, {"ada": 0.3})
    use.advance(0.6, 0.7, [BOB])
    use.sample(0.1, 0.2, {"bob": 0.05})
    assert rounded(use.of("ada", 0.7, 0.7, ())) == Use(0.3)
    assert seconds(use, BOB, 0.7) == pytest.approx(0.15)


@given(
    st.lists(st.tuples(st.floats(0.0, 0.5), st.sets(st.sampled_from([ADA, BOB, ("eve", 3)]))), max_size=30),
    st.lists(st.tuples(st.floats(0.0, 3.0), st.floats(0.0, 1.0), st.floats(0.0, 1.0)), max_size=5),
)
def test_no_session_has_more_than_the_window_or_less_than_nothing(
    events: list[tuple[float, set[User]]], samples: list[tuple[float, float, float]]
) -> None:
    use = RecentGpuUse()
    now = 0.0
    for span, working in events:
        use.advance(now, now + span, sorted(working, key=str))
        now += span
        for since, length, busy in samples:
            if since + length <= now:
                use.sample(since, since + length, {"ada": busy * length})
        found = {session: use.of(session, now, now, ()).seconds for session in ("ada", "bob", "eve")}
        assert all(0 <= one <= WINDOW for one in found.values()), found
        if not samples:
            assert sum(found.values()) <= WINDOW + 1e-6


def test_what_is_kept_does_not_grow_with_the_number_of_bursts() -> None:
    use = RecentGpuUse()
    for number in range(5000):
        use.advance(number / 500, (number + 1) / 500, [ADA if number % 2 else BOB])
    assert len(use._spans) <= RETAINED * 500 + 1
    assert seconds(use, ADA, 10.0) == pytest.approx(0.5)
    steady = RecentGpuUse()
    for number in range(5000):
        steady.advance(number / 500, (number + 1) / 500, [ADA])
    assert len(steady._spans) <= RETAINED * 10 + 2


def test_arbiter_tells_the_recent_use_of_a_session_while_its_burst_runs_and_after_it() -> None:
    arbiter = GpuArbiter(1 << 30, ArbiterSettings())
    arbiter.add_session("ada", 25, 0.0)
    arbiter.connect(1, "ada", 0.0)
    (grant, *_) = arbiter.request(1, 0, 0, 10.0)
    assert rounded(arbiter.recent_use("ada", 10.4)) == Use(0.4, ((1, 0.4),))
    arbiter.idle(1, getattr(grant, "lease", 0), 0.3, 0.1, 10.5)
    assert arbiter.recent_use("ada", 10.5).seconds == pytest.approx(0.3)
    assert arbiter.recent_use("ada", 12.0) == Use()


def recorded(*events: tuple[str, float]) -> tuple[Burst, ...]:
    """Return the bursts of a session that works alone. Events: "begin" or "end", and the instant."""
    recorder, last = BurstRecorder(), 0.0
    bursts: list[Burst] = []
    for event, now in events:
        recorder.advance(now - last, 1.0, contended=False)
        if event == "begin":
            recorder.begin(now)
        else:
            recorder.end(now, now, GIB)
        bursts += recorder.take(now)
        last = now
    return (*bursts, *recorder.take(last + 10.0))


def test_pause_of_less_than_a_second_is_part_of_a_burst() -> None:
    bursts = recorded(("begin", 10.0), ("end", 12.0), ("begin", 12.5), ("end", 13.0), ("begin", 14.1), ("end", 15.0))
    assert [(burst.began_at, burst.ended_at) for burst in bursts] == [(10.0, 13.0), (14.1, pytest.approx(15.0))]
    assert bursts[0] == Burst(13.0, 3.0, 2.5, 0.5, 0.0, GIB)
    assert bursts[0].waited_seconds == 0.0


def test_training_run_is_recorded_in_pieces() -> None:
    events = [event for start in range(0, 1500, 10) for event in (("begin", float(start)), ("end", start + 9.5))]
    lengths = [burst.seconds for burst in recorded(*events)]
    assert lengths == [pytest.approx(609.5 - 10.0), pytest.approx(599.5), pytest.approx(299.5)]


def test_time_beside_others_and_while_waiting_is_waited() -> None:
    recorder = BurstRecorder()
    recorder.begin(0.0)
    recorder.advance(2.0, 0.0, contended=True)
    recorder.advance(4.0, 0.5, contended=True)
    recorder.advance(1.0, 1.0, contended=False)
    # the device was quiet half a second before the report
    recorder.end(6.5, 7.0, GIB)
    (burst,) = recorder.take(8.0)
    assert (burst.seconds, burst.gpu_seconds, burst.contended_seconds) == (6.5, 2.5, 6.0)
    assert burst.waited_seconds == 4.0


def test_driver_sample_corrects_the_burst_and_shows_what_it_can_use() -> None:
    recorder = BurstRecorder()
    recorder.begin(0.0)
    recorder.advance(10.0, 0.5, contended=True)
    recorder.correct(-1.0, demand=0.5)
    recorder.end(10.0, 10.0, GIB)
    (burst,) = recorder.take(20.0)
    assert (burst.gpu_seconds, burst.gap_seconds, burst.waited_seconds) == (4.0, 4.0, 2.0)


def test_only_the_last_bursts_are_kept() -> None:
    recorder = BurstRecorder()
    for number in range(2 * MOST_BURSTS):
        recorder.begin(10.0 * number)
        recorder.end(10.0 * number + 1.0, 10.0 * number + 1.0, GIB)
    taken = recorder.take(1e6)
    assert len(taken) == MOST_BURSTS
    assert taken[-1].ended_at == 10.0 * (2 * MOST_BURSTS - 1) + 1.0
    assert recorder.take(1e6) == ()
