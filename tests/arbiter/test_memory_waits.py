"""Clients that are short of memory, in virtual time: each wait for memory ends, whatever the other sessions do."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpushare_spawner.arbiter.gpu_arbiter import GpuArbiter
from gpushare_spawner.arbiter.roster import LONGEST_MEMORY_WAIT, MEMORY_TIMEOUT
from gpushare_spawner.arbiter.session import ArbiterSettings, Decision, LeaseGrant, Refuse, Revoke

DOCS = Path(__file__).parents[2] / "docs"
VRAM = 512
"""MiB, as all amounts of this file. The arbiter does not mind the unit."""
SETTINGS = ArbiterSettings(bandwidth_guess=1e4, measured_from=1, period=20.0, shortest_hold=2.0, min_time_slice=5.0)
"""The usual bounds of waits. Sessions that run together are held back for seconds at a time, not for milliseconds: that
has nothing to do with memory, and is most of what the arbiter computes."""
HANGS = 2000.0
"""Seconds: longer than all bounds."""


@dataclass(eq=False)
class Process:
    session: str
    has: int = 0
    """On the GPU, or in the copy on the host."""
    lacks: int = 0
    """A call waits for so much."""
    since: float = 0.0
    tries: int = 0
    possible: bool = True
    """It could have had the memory all the time while the call waited, beside what is pinned for long."""
    lease: int = 0
    waiting: bool = False


@dataclass(eq=False)
class Kind:
    """How a session behaves."""

    suspendable: bool = True
    answers: bool = True
    """It answers REVOKE."""
    move: float = 0.1
    """Seconds that a suspension or a resumption takes."""
    returns: bool = True
    """Its resumptions succeed."""
    refusals: int = 0
    """So many suspensions in a row fail since it is busy."""


KINDS = {
    "good": Kind(),
    "pinned": Kind(suspendable=False),
    "deaf": Kind(answers=False),
    "slow": Kind(move=30.0),
    "stuck": Kind(move=HANGS),
    "gone": Kind(returns=False),
    "busy": Kind(refusals=3),
    "always busy": Kind(refusals=10**6),
}
PAUSES = (2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
"""Seconds for which the agent leaves a busy session alone after each failure."""
MOMENT = 10.0
"""Longer pauses are not waited for."""


class Gpu:
    """One GPU with the arbiter, the agent's part of suspensions, and the driver's accounts, in virtual time."""

    def __init__(self) -> None:
        self.arbiter = GpuArbiter(VRAM, SETTINGS)
        self.now = 0.0
        self.kinds: dict[str, Kind] = {}
        self.away: set[str] = set()
        self.coming: set[str] = set()
        self.processes: dict[str, Process] = {}
        self.held_back: dict[str, list[Decision]] = {}
        self.outcomes: list[tuple[str, str, float]] = []
        """Process, "memory" or "error", and seconds that the call waited."""
        self.suspended: list[str] = []
        self.pinned: dict[str, bool] = {}
        """Sessions that cannot be suspended, and whether only for a moment."""
        self.refusals: dict[str, int] = {}
        """Failures in a row, by session."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    # -- what sessions do --------------------------------------------------------------------------------------------

    def session(self, name: str, kind: str = "good", weight: int = 25) -> None:
        self.kinds[name] = KINDS[kind]
        self._apply(self.arbiter.add_session(name, weight, self.now, suspends=True))
        if not KINDS[kind].suspendable:
            self.pin(name)

    def pin(self, session: str, seconds: float | None = None) -> None:
        """The session cannot be suspended: for so many seconds, since it is busy, or until `unpin`."""
        brief = self.pinned[session] = seconds is not None and seconds <= MOMENT
        self._apply(self.arbiter.set_suspendable(session, False, self.now, for_a_moment=brief))
        if seconds is not None:
            self.after(seconds, lambda: self.unpin(session))

    def unpin(self, session: str) -> None:
        self.pinned.pop(session, None)
        self._apply(self.arbiter.set_suspendable(session, True, self.now))

    def process(self, name: str, session: str) -> None:
        self.processes[name] = Process(session)
        self._apply(self.arbiter.connect(name, session, self.now))

    def allocate(self, name: str, amount: int) -> None:
        """A call of the process; it waits where the driver has too little memory. Nothing where one waits already."""
        process = self.processes[name]
        if process.lacks or process.session in self.away:
            return
        process.since, process.tries, process.lacks, process.possible = self.now, 0, amount, True
        self._call(name)

    def work(self, name: str) -> None:
        process = self.processes[name]
        if not process.lease and not process.waiting:
            self._request(name)

    def rest(self, name: str) -> None:
        """The process has been quiet for a second and returns its lease."""
        process = self.processes[name]
        if process.lease and process.session not in self.away:
            lease, process.lease = process.lease, 0
            self._apply(self.arbiter.release(name, lease, 0.0, self.now))

    def end(self, name: str) -> None:
        """The process exits, or is killed."""
        session = self.processes.pop(name).session
        if not any(one.session == session for one in self.processes.values()):
            self.away.discard(session)
            self.coming.discard(session)
            self.held_back.pop(session, None)
        self._apply(self.arbiter.disconnect(name, self.now))

    # -- the driver --------------------------------------------------------------------------------------------------

    def size(self, session: str) -> int:
        return sum(one.has for one in self.processes.values() if one.session == session)

    @property
    def free(self) -> int:
        return VRAM - sum(self.size(name) for name in self.kinds if name not in self.away or name in self.coming)

    def _call(self, name: str) -> None:
        process = self.processes[name]
        if process.lacks <= self.free:
            process.has += process.lacks
            self._over(name, "memory")
        elif process.tries == 2:
            self._over(name, "error")
        else:
            process.tries += 1
            self.rest(name)
            self._request(name)

    def _over(self, name: str, outcome: str) -> None:
        process = self.processes[name]
        waited = self.now - process.since
        self.outcomes.append((name, outcome, waited))
        self.check()
        if outcome == "error" and process.possible:
            assert waited >= MEMORY_TIMEOUT - 0.01, f"{name} could have had its memory"
        process.lacks = 0
        self._state(name)

    def _state(self, name: str) -> None:
        process = self.processes[name]
        self._apply(self.arbiter.memory(name, 0, process.has + process.lacks, self.now, process.lacks))
        if process.session not in self.away and name in self.processes:
            self._apply(self.arbiter.device_memory(name, process.has, 0, self.now))

    def _request(self, name: str) -> None:
        process = self.processes[name]
        process.waiting = True
        self._apply(self.arbiter.request(name, 0, process.has + process.lacks, self.now, process.lacks))

    # -- the agent ---------------------------------------------------------------------------------------------------

    def _apply(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            name = str(decision.client)
            process = self.processes.get(name)
            if process is None:
                continue
            if isinstance(decision, Refuse):
                if process.lacks:
                    self.after(0.0, lambda name=name: self._refused(name))  # type: ignore[misc]
            elif process.session in self.away:
                if process.session not in self.held_back:
                    self.coming.add(process.session)
                    self.after(self.kinds[process.session].move, lambda s=process.session: self._came(s))  # type: ignore[misc]
                self.held_back.setdefault(process.session, []).append(decision)
            elif isinstance(decision, LeaseGrant):
                process.lease, process.waiting = decision.lease, False
                if process.lacks:
                    self.after(0.0, lambda name=name: self._granted(name))  # type: ignore[misc]
            elif isinstance(decision, Revoke) and self.kinds[process.session].answers:
                self.after(0.001, lambda name=name: self._gives_back(name))  # type: ignore[misc]
        for session in self.arbiter.suspensions():
            self.suspended.append(session)
            self.after(self.kinds[session].move, lambda s=session: self._left(s))  # type: ignore[misc]

    def _refused(self, name: str) -> None:
        if name in self.processes and self.processes[name].lacks:
            self._over(name, "error")

    def _granted(self, name: str) -> None:
        process = self.processes.get(name)
        if process is not None and process.lacks and process.lease:
            self._call(name)

    def _gives_back(self, name: str) -> None:
        process = self.processes.get(name)
        if process is not None and process.lease:
            self.rest(name)
            self.work(name)

    def _left(self, session: str) -> None:
        failures = self.refusals.get(session, 0)
        if failures < self.kinds[session].refusals:
            self.refusals[session] = failures + 1
            self.pin(session, PAUSES[min(failures, len(PAUSES) - 1)])
            self._apply(self.arbiter.not_suspended(session, self.now))
            return
        self.refusals[session] = 0
        if self.processes and self.size(session):
            self.away.add(session)
        self._apply(self.arbiter.suspended(session, self.size(session), self.kinds[session].move, self.now))

    def _came(self, session: str) -> None:
        if session not in self.coming:
            return
        self.coming.discard(session)
        held_back = self.held_back.pop(session, [])
        if not self.kinds[session].returns or self.free < self.size(session):
            for process in self.processes.values():
                process.waiting = process.waiting or (process.session == session and bool(held_back))
            self._apply(self.arbiter.not_resumed(session, 1.0, self.now))
            return
        self.away.discard(session)
        self._apply([*held_back, *self.arbiter.resumed(session, self.size(session), 0.1, self.now)])

    # -- time --------------------------------------------------------------------------------------------------------

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), what))

    def run(self, seconds: float) -> None:
        """Time goes by; calls that wait longer than the bound fail the test."""
        until = self.now + seconds
        while True:
            wakeup = self.arbiter.next_wakeup()
            due = self._events[0][0] if self._events else float("inf")
            self.now = max(self.now, min(due, until if wakeup is None else min(wakeup, until)))
            self.check()
            if due <= self.now:
                heapq.heappop(self._events)[2]()
            elif self.now >= until:
                return
            self._apply(self.arbiter.tick(self.now))

    def check(self) -> None:
        for name, process in self.processes.items():
            if process.lacks:
                waited = self.now - process.since
                assert waited <= LONGEST_MEMORY_WAIT + 0.01, (name, waited, process, self.away, self.processes)
                needed = sum(one.has + one.lacks for one in self.processes.values() if one.session == process.session)
                pinned = [one for one, brief in self.pinned.items() if not brief and one != process.session]
                process.possible = process.possible and needed + sum(map(self.size, pinned)) <= VRAM

    def filled(self, name: str, amount: int, kind: str = "good") -> None:
        """A session of one process that has so much memory."""
        self.session(name, kind)
        self.process(name, name)
        if amount:
            self.allocate(name, amount)
        assert self.processes[name].has == amount


def test_the_documents_state_the_bounds_that_the_arbiter_keeps() -> None:
    for page in ("reference/protocol.md", "explanation/arbiter.md"):
        text = (DOCS / page).read_text()
        assert f"{MEMORY_TIMEOUT:.0f} s after" in text
        assert f"{LONGEST_MEMORY_WAIT:.0f} s" in text


def test_memory_that_cannot_be_had_beside_a_pinned_session_is_refused_at_once() -> None:
    gpu = Gpu()
    gpu.filled("pinned", 300, "pinned")
    gpu.filled("idle", 100)
    gpu.filled("short", 30)
    gpu.work("pinned")
    gpu.allocate("short", 300)
    gpu.run(1.0)
    assert gpu.outcomes[-1][:2] == ("short", "error")
    assert gpu.outcomes[-1][2] < 0.1
    assert gpu.suspended == [], "no session leaves for memory that cannot be had"


def test_allocation_waits_for_a_session_that_is_busy_for_a_moment_and_then_has_its_memory() -> None:
    gpu = Gpu()
    gpu.filled("busy", 300, "busy")
    gpu.filled("short", 30)
    gpu.allocate("short", 300)
    gpu.run(20.0)
    assert gpu.outcomes[-1][:2] == ("short", "memory")
    assert gpu.outcomes[-1][2] == pytest.approx(sum(PAUSES[:3]) + 4 * 0.1, abs=0.1)


def test_other_sessions_work_while_one_waits_for_memory_of_a_busy_session() -> None:
    gpu = Gpu()
    gpu.filled("busy", 300, "busy")
    gpu.filled("third", 100)
    gpu.filled("short", 30)
    gpu.process("short too", "short")
    gpu.allocate("short", 300)
    gpu.run(1.0)
    for name in ("busy", "third", "short too"):
        gpu.work(name)
        assert gpu.processes[name].lease
    assert gpu.processes["short"].lacks
    gpu.run(60.0)
    assert gpu.outcomes[-1][:2] == ("short", "memory")


def test_session_that_stays_busy_counts_as_one_that_cannot_leave() -> None:
    gpu = Gpu()
    gpu.filled("busy", 300, "always busy")
    gpu.filled("short", 30)
    for longest in (sum(PAUSES[:3]) + 1.0, 0.1):
        gpu.allocate("short", 300)
        gpu.run(longest)
        assert gpu.outcomes[-1][:2] == ("short", "error")
        assert gpu.outcomes[-1][2] <= longest


def test_session_that_cannot_be_suspended_has_the_memory_of_an_idle_one_that_can() -> None:
    gpu = Gpu()
    gpu.filled("pinned", 200, "pinned")
    gpu.filled("idle", 200)
    gpu.allocate("pinned", 200)
    gpu.run(1.0)
    assert gpu.outcomes[-1][:2] == ("pinned", "memory")
    assert gpu.suspended == ["idle"]


def test_session_that_is_short_of_memory_is_not_suspended_for_one_that_has_its_memory() -> None:
    gpu = Gpu()
    gpu.filled("pinned", 200, "pinned")
    gpu.filled("busy", 200)
    gpu.work("busy")
    gpu.filled("short", 100)
    gpu.allocate("short", 200)
    gpu.work("pinned")
    gpu.run(0.05)
    assert gpu.processes["short"].lacks
    assert "short" not in gpu.suspended
    gpu.run(60.0)
    assert gpu.outcomes[-1][:2] == ("short", "memory")
    assert gpu.suspended[0] == "busy"


def test_two_sessions_that_are_short_of_memory_both_get_it_one_after_the_other() -> None:
    gpu = Gpu()
    gpu.filled("a", 200)
    gpu.filled("b", 200)
    gpu.allocate("a", 200)
    gpu.allocate("b", 200)
    gpu.run(60.0)
    assert sorted(outcome[:2] for outcome in gpu.outcomes[2:]) == [("a", "memory"), ("b", "memory")]


def test_wait_of_a_suspended_session_ends_where_it_fits_no_more() -> None:
    gpu = Gpu()
    gpu.filled("away", 200)
    gpu.filled("large", 300)
    gpu.allocate("large", 200)
    gpu.run(1.0)
    assert gpu.away == {"away"}
    gpu.processes["away"].lacks, gpu.processes["away"].since = 50, gpu.now  # it came to its call before it left
    gpu._request("away")
    gpu.pin("large")
    gpu.run(1.0)
    assert gpu.outcomes[-1][:2] == ("away", "error")
    assert gpu.away == {"away"}


@pytest.mark.parametrize("kind", ["deaf", "stuck"])
def test_wait_ends_within_a_minute_after_its_turn_where_others_do_not_leave(kind: str) -> None:
    gpu = Gpu()
    gpu.filled("other", 400, kind)
    gpu.work("other")
    gpu.filled("short", 30)
    gpu.allocate("short", 300)
    if kind == "stuck":
        gpu.rest("other")
    gpu.run(200.0)
    assert gpu.outcomes[-1][:2] == ("short", "error")
    assert gpu.outcomes[-1][2] <= 2 * MEMORY_TIMEOUT


EVENTS = st.tuples(
    st.sampled_from(
        ["allocate", "allocate", "allocate", "work", "work", "rest", "end", "pin", "unpin", "pin for a moment"]
    ),
    st.integers(0, 4),
    st.sampled_from([30, 100, 200, 300, 400, 600]),
    st.sampled_from([0.0, 0.01, 1.0, 20.0]),
)
"""What happens, in which session, how much it is about, and the time that goes by then."""


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(sorted(KINDS)), min_size=2, max_size=5), st.lists(EVENTS, min_size=5, max_size=30))
def test_no_wait_for_memory_lasts_longer_than_its_bound(
    kinds: list[str], events: list[tuple[str, int, int, float]]
) -> None:
    """Whatever mix of sessions allocates, works, rests, is killed, can be suspended or not, moves slowly or never."""
    gpu = Gpu()
    for number, kind in enumerate(kinds):
        gpu.session(f"s{number}", kind)
        gpu.process(f"s{number}", f"s{number}")
    for what, number, amount, seconds in events:
        name = f"s{number % len(kinds)}"
        if what in ("pin", "unpin"):
            getattr(gpu, what)(name)
        elif what == "pin for a moment":
            gpu.pin(name, 5.0)
        elif name not in gpu.processes:
            gpu.process(name, name)  # its kernel restarts
        elif what == "allocate":
            gpu.allocate(name, amount)
        else:
            getattr(gpu, what)(name)
        gpu.run(seconds)
    gpu.run(1.5 * LONGEST_MEMORY_WAIT)
    assert not any(process.lacks for process in gpu.processes.values())
