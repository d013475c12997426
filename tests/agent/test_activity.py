"""When a session last worked, from the clocks of arbiter and machine."""

from __future__ import annotations

from types import SimpleNamespace

from gpushare_spawner.agent.session_records import SessionRecord
from gpushare_spawner.agent.sessions.session import Past, Session, activity
from gpushare_spawner.model.report import NOTHING
from tests.agent.conftest import request_for
from tests.agent.peers import FIRST

EPOCH = 1_700_000_000.0


class Machine:
    """A GPU whose session worked until 5 s after the machine's start, and a process that is paused at each reading."""

    def __init__(self, pause: float = 0.0) -> None:
        self.uptime = 10.0
        self.pause = pause
        self.known = SimpleNamespace(
            running=False, waiting=False, last_activity=5.0, gpu_seconds=1.0, memory_bytes=0, resident_bytes=0,
            delivered=NOTHING, guesses_used=0, guesses_unused=0,
        )  # fmt: skip

    def now(self) -> float:
        self.uptime += self.pause
        return self.uptime - self.pause

    def clock(self) -> float:
        self.uptime += self.pause
        return EPOCH + self.uptime - self.pause

    def snapshot(self, session: str) -> SimpleNamespace:
        return self.known

    def last(self, **past: float) -> float | None:
        session = Session(SessionRecord.opened(request_for(), EPOCH), (FIRST,), past=Past(**past))  # type: ignore[arg-type]
        return activity(session, {FIRST.uuid: self}, self.clock).last  # type: ignore[dict-item]


def test_end_of_the_last_burst_is_an_instant_of_the_wall_clock() -> None:
    assert Machine().last() == EPOCH + 5


def test_pause_between_two_readings_never_makes_work_earlier() -> None:
    found = Machine(pause=0.5).last()
    assert found is not None
    assert EPOCH + 5 <= found <= EPOCH + 5.5


def test_work_of_an_earlier_run_of_the_agent_counts() -> None:
    assert Machine().last(last=EPOCH + 7) == EPOCH + 7


def test_work_of_an_earlier_opening_does_not_count() -> None:
    machine = Machine()
    machine.known.last_activity = -20.0
    assert machine.last() is None
