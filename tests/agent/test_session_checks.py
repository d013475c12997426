"""When a session is overdue, and when its record is behind: from records alone, without an agent."""

from __future__ import annotations

from gpushare_spawner.agent.node import overdue, record_is_behind
from gpushare_spawner.agent.processes import ProcessName
from gpushare_spawner.agent.session_records import PodOwner, SessionRecord
from gpushare_spawner.agent.sessions.session import Activity, Session
from gpushare_spawner.model.report import NOTHING
from tests.agent.conftest import request_for
from tests.agent.peers import FIRST


def session(**changes: object) -> Session:
    """Opened at 1000 s, to be confirmed within 60 s."""
    return Session(SessionRecord.opened(request_for(confirm_within=60), 1000.0), (FIRST,), **changes)  # type: ignore[arg-type]


def doing(busy: bool = False, last: float | None = None) -> Activity:
    return Activity(
        busy=busy, waiting=False, last=last, gpu_seconds=0.0, memory_bytes=0, resident_bytes=0, delivered=NOTHING
    )


def test_session_without_owner_is_overdue_after_its_time_to_confirm() -> None:
    assert not overdue(session(), 1060.0)
    assert overdue(session(), 1060.1)


def test_session_with_a_process_or_a_pod_is_never_overdue() -> None:
    with_process, with_pod = session(), session()
    with_process.record.process = ProcessName(pid=7, started=1, boot="b")
    with_pod.record.pod = PodOwner(namespace="hub", name="jupyter-ada", uid="u", devices={FIRST.uuid: ("0",)})
    assert with_process.record.owner == with_process.record.process
    assert with_pod.record.owner == with_pod.record.pod
    assert not overdue(with_process, 9e9)
    assert not overdue(with_pod, 9e9)


def test_record_is_behind_once_a_burst_began_or_ended() -> None:
    one = session()
    assert not record_is_behind(one, doing())
    assert record_is_behind(one, doing(busy=True))
    one.record.gpu_busy = True
    assert not record_is_behind(one, doing(busy=True))
    assert record_is_behind(one, doing(last=1010.0))
