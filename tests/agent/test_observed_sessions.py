"""What the agent knows of sessions whose GPU another layer shares, by what their processes say."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_spawner.agent.gpus.arbitration import MOST_MEASURED, ObservedSessions
from gpushare_spawner.model.report import NOTHING
from tests.agent.peers import GIB

ADA, BOB = "ada", "bob"
FIRST, SECOND = 1, 2


@pytest.fixture
def observed() -> ObservedSessions:
    """Ada has two processes, Bob has none. All came at 10 s."""
    observed = ObservedSessions(16 * GIB)
    for session in (ADA, BOB):
        observed.add(session, 10.0)
    for process in (FIRST, SECOND):
        observed.join(process, ADA, 10.0)
    return observed


def test_session_without_reports_has_not_worked(observed: ObservedSessions) -> None:
    view = observed.snapshot(ADA, 20.0)
    assert (view.running, view.waiting, view.held) == (False, False, False)
    assert (view.last_activity, view.gpu_seconds, view.memory_bytes) == (None, 0.0, 0)
    assert view.delivered == NOTHING
    assert observed.recent_use(ADA, 20.0).seconds == 0.0


def test_burst_lasts_from_busy_to_idle(observed: ObservedSessions) -> None:
    observed.busy(FIRST, 12.0)
    during = observed.snapshot(ADA, 15.0)
    assert (during.running, during.gpu_seconds, during.last_activity) == (True, 3.0, 12.0)
    assert not observed.snapshot(BOB, 15.0).running
    observed.idle(FIRST, gpu_seconds=4.0, quiet=0.5, now=16.5)
    after = observed.snapshot(ADA, 30.0)
    assert (after.running, after.gpu_seconds, after.last_activity) == (False, 4.0, 16.0)


def test_session_works_while_one_of_its_processes_does(observed: ObservedSessions) -> None:
    observed.busy(FIRST, 12.0)
    observed.busy(SECOND, 13.0)
    observed.idle(FIRST, 2.0, 0.0, 14.0)
    assert observed.snapshot(ADA, 15.0).running
    observed.idle(SECOND, 3.0, 0.0, 16.0)
    view = observed.snapshot(ADA, 17.0)
    assert (view.running, view.gpu_seconds, view.last_activity) == (False, 4.0, 16.0)


def test_process_that_dies_in_a_burst_worked_until_then(observed: ObservedSessions) -> None:
    observed.busy(FIRST, 12.0)
    observed.leave(FIRST, 17.0)
    view = observed.snapshot(ADA, 20.0)
    assert (view.running, view.gpu_seconds, view.last_activity) == (False, 5.0, 17.0)


def test_session_that_goes_takes_its_processes_with_it(observed: ObservedSessions) -> None:
    observed.busy(FIRST, 12.0)
    observed.remove(ADA)
    assert ADA not in observed
    assert not observed.has(FIRST)
    observed.add(ADA, 13.0)
    assert not observed.snapshot(ADA, 14.0).running


def test_second_busy_does_not_begin_the_burst_anew(observed: ObservedSessions) -> None:
    observed.busy(FIRST, 12.0)
    observed.busy(FIRST, 14.0)
    assert observed.snapshot(ADA, 15.0).gpu_seconds == 3.0


def test_claims_are_capped_by_the_time_for_which_a_process_is_there(observed: ObservedSessions) -> None:
    observed.busy(FIRST, 12.0)
    observed.idle(FIRST, gpu_seconds=1e9, quiet=1e9, now=13.0)
    view = observed.snapshot(ADA, 13.0)
    assert view.gpu_seconds == 3.0
    assert view.last_activity == 12.0, "the work did not end before it began"
    assert observed.recent_use(ADA, 13.0).seconds <= 1.0


def test_reported_time_never_shrinks(observed: ObservedSessions) -> None:
    observed.busy(FIRST, 11.0)
    observed.idle(FIRST, 3.0, 0.0, 14.0)
    observed.busy(FIRST, 15.0)
    observed.idle(FIRST, 0.0, 0.0, 16.0)
    assert observed.snapshot(ADA, 17.0).gpu_seconds == 3.0


def test_idle_without_a_burst_counts_only_with_more_gpu_time(observed: ObservedSessions) -> None:
    observed.idle(FIRST, 0.0, 0.0, 12.0)
    assert observed.snapshot(ADA, 12.0).last_activity is None
    # the agent left out a pair of reports
    observed.idle(FIRST, 0.25, 0.5, 13.0)
    view = observed.snapshot(ADA, 13.0)
    assert (view.last_activity, view.gpu_seconds) == (12.5, 0.25)


def test_memory_is_that_of_all_processes_and_never_more_than_the_gpu_has(observed: ObservedSessions) -> None:
    observed.memory(FIRST, GIB)
    observed.memory(SECOND, 2 * GIB)
    view = observed.snapshot(ADA, 11.0)
    assert (view.memory_bytes, view.resident_bytes, view.paged_out_bytes) == (3 * GIB, 3 * GIB, 0)
    observed.memory(FIRST, 2**64)
    assert observed.snapshot(ADA, 11.0).memory_bytes == 16 * GIB
    observed.leave(FIRST, 12.0)
    assert observed.snapshot(ADA, 12.0).memory_bytes == 2 * GIB


def test_use_of_the_last_second_is_of_each_process(observed: ObservedSessions) -> None:
    observed.busy(FIRST, 12.0)
    observed.idle(FIRST, 0.25, 0.0, 12.25)
    observed.busy(SECOND, 12.5)
    use = observed.recent_use(ADA, 13.0)
    assert use.seconds == pytest.approx(0.75)
    assert dict(use.by_client) == pytest.approx({FIRST: 0.25, SECOND: 0.5})


def test_work_of_another_session_takes_nothing_off_a_sessions_use(observed: ObservedSessions) -> None:
    observed.join(3, BOB, 10.0)
    observed.busy(FIRST, 12.0)
    observed.busy(3, 12.0)
    assert observed.recent_use(ADA, 14.0).seconds == observed.recent_use(BOB, 14.0).seconds == 1.0


def test_processes_of_one_session_share_its_use(observed: ObservedSessions) -> None:
    observed.busy(FIRST, 12.0)
    observed.busy(SECOND, 12.0)
    assert dict(observed.recent_use(ADA, 14.0).by_client) == pytest.approx({FIRST: 0.5, SECOND: 0.5})


def test_many_processes_at_work_cost_no_more_than_a_few(observed: ObservedSessions) -> None:
    for process in range(100, 100 + 2 * MOST_MEASURED):
        observed.join(process, BOB, 10.0)
        observed.busy(process, 12.0)
    use = observed.recent_use(BOB, 14.0)
    assert use.seconds == pytest.approx(1.0)
    assert len(use.by_client) == MOST_MEASURED


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["busy", "idle", "memory", "leave", "join"]),
        st.sampled_from([FIRST, SECOND]),
        st.floats(0, 5),
        st.floats(0, 1e10),
        st.floats(0, 1e10),
    ),
    max_size=30,
)


@given(STEPS)
def test_no_report_claims_more_than_the_agent_has_seen(steps: list[tuple[str, int, float, float, float]]) -> None:
    observed, now, here, connected = ObservedSessions(16 * GIB), 100.0, set[int](), 0.0
    observed.add(ADA, now)
    for step, process, pause, claim, quiet in steps:
        connected += pause * len(here)
        now += pause
        if step == "join":
            if process not in here:
                observed.join(process, ADA, now)
                here.add(process)
        elif process not in here:
            continue
        elif step == "leave":
            observed.leave(process, now)
            here.discard(process)
        elif step == "busy":
            observed.busy(process, now)
        elif step == "idle":
            observed.idle(process, claim, quiet, now)
        else:
            observed.memory(process, int(claim))
        view, use = observed.snapshot(ADA, now), observed.recent_use(ADA, now)
        assert 0.0 <= view.gpu_seconds <= connected + 1e-6
        assert view.last_activity is None or 100.0 <= view.last_activity <= now
        assert 0 <= view.memory_bytes <= 16 * GIB
        assert 0.0 <= use.seconds <= 1.0
        assert all(seconds >= 0 for _, seconds in use.by_client)
        assert view.running <= bool(here)


def test_samples_of_the_driver_are_work_of_the_session_and_of_no_process(observed: ObservedSessions) -> None:
    observed.sampled(ADA, since=19.0, until=20.0, gpu_seconds=0.25)
    during, after = observed.snapshot(ADA, 20.5), observed.snapshot(ADA, 23.0)
    assert (during.running, during.gpu_seconds, during.last_activity) == (True, 0.25, 20.0)
    assert (after.running, after.gpu_seconds, after.last_activity) == (False, 0.25, 20.0)
    assert not observed.snapshot(BOB, 20.5).running


def test_a_sample_is_no_more_work_than_its_time_and_takes_nothing_back(observed: ObservedSessions) -> None:
    observed.busy(FIRST, 12.0)
    observed.idle(FIRST, 4.0, 0.0, now=30.0)
    observed.sampled(ADA, since=19.0, until=20.0, gpu_seconds=7.0)
    view = observed.snapshot(ADA, 31.0)
    assert (view.running, view.gpu_seconds, view.last_activity) == (False, 5.0, 30.0)


def test_memory_of_processes_that_are_not_connected_counts_besides(observed: ObservedSessions) -> None:
    observed.memory(FIRST, GIB)
    observed.driver_memory(ADA, 2 * GIB)
    assert observed.snapshot(ADA, 11.0).memory_bytes == 3 * GIB
    observed.driver_memory(ADA, 0)
    assert observed.snapshot(ADA, 12.0).memory_bytes == GIB
    assert observed.snapshot(BOB, 12.0).memory_bytes == 0


def test_processes_that_work_at_the_same_time_have_one_gpu_together(observed: ObservedSessions) -> None:
    for process in range(100, 104):
        observed.join(process, ADA, 10.0)
        observed.busy(process, 10.0)
    assert observed.snapshot(ADA, 20.0).gpu_seconds == 10.0
    for process in range(100, 104):
        observed.leave(process, 21.0)
    assert observed.snapshot(ADA, 30.0).gpu_seconds == 11.0
