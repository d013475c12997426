"""Sessions whose memory leaves the GPU only as a whole: turns, order, memory that is promised once, weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpushare_spawner.arbiter import ArbiterSettings, Decision, GpuArbiter, Grant, PageOut, Revoke, RevokeReason
from tests.arbiter.virtual_gpu import GIB, Job, VirtualGpu, alternating, forever

VRAM = 16 * GIB


class Gpu:
    """An arbiter with sessions of one client each, and what it has decided."""

    def __init__(self, context_bytes: int = 0) -> None:
        self.arbiter = GpuArbiter(VRAM, ArbiterSettings(context_bytes=context_bytes))
        self.now = 0.0
        self.leases: dict[str, int] = {}
        self.page_outs: dict[str, int] = {}
        self.revoked: dict[str, Revoke] = {}
        self.suspensions: list[str] = []
        self.sizes: dict[str, tuple[int, int]] = {}
        """Managed and plain bytes, as a client says when it asks."""

    def tell(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            name = str(decision.client)
            match decision:
                case Grant(lease=lease):
                    self.leases[name] = lease
                case Revoke():
                    self.revoked[name] = decision
                case PageOut(amount=amount):
                    self.page_outs[name] = amount
        self.suspensions += self.arbiter.suspensions()

    def join(self, name: str, gib: float, whole: bool = True, session: str = "", weight: int = 25) -> None:
        """A client that has so much memory; managed where it is not `whole`. Its session where it has none yet."""
        amount = int(gib * GIB)
        if not session:
            self.tell(self.arbiter.add_session(name, weight, self.now, whole=whole))
        self.tell(self.arbiter.connect(name, session or name, self.now))
        self.sizes[name] = (0, amount) if whole else (amount, 0)

    def ask(self, name: str) -> None:
        self.now += 0.001
        self.tell(self.arbiter.request(name, *self.sizes[name], self.now))

    def give_back(self, name: str) -> None:
        self.now += 0.001
        self.revoked.pop(name, None)
        self.tell(self.arbiter.memory(name, *self.sizes[name], self.now))
        self.tell(self.arbiter.release(name, self.leases.pop(name), 0.0, self.now))

    def use(self, name: str) -> None:
        self.ask(name)
        self.give_back(name)

    def suspended(self, name: str, seconds: float = 1.0) -> None:
        self.now += seconds
        self.suspensions.remove(name)
        self.tell(self.arbiter.suspended(name, self.sizes[name][1], seconds, self.now))

    def suspend(self, name: str) -> None:
        """Another session needs all memory for a moment."""
        self.join("huge", VRAM / GIB)
        self.ask("huge")
        self.suspended(name)
        self.give_back("huge")
        self.tell(self.arbiter.remove_session("huge", self.now))

    def until_revoked(self, name: str) -> None:
        for _ in range(100):
            if name in self.revoked:
                return
            due = self.arbiter.next_wakeup()
            assert due is not None
            self.now = due
            self.tell(self.arbiter.tick(self.now))
        pytest.fail(f"{name} was not revoked")


def test_sessions_that_fit_together_run_together_and_none_is_suspended() -> None:
    gpu = Gpu()
    gpu.join("a", 7)
    gpu.join("b", 8)
    gpu.ask("a")
    gpu.ask("b")
    assert gpu.leases.keys() == {"a", "b"}
    gpu.give_back("a")
    assert gpu.suspensions == []


def test_session_waits_until_the_one_in_its_way_is_suspended() -> None:
    gpu = Gpu()
    gpu.join("a", 10)
    gpu.join("b", 10)
    gpu.ask("a")
    gpu.ask("b")
    gpu.until_revoked("a")
    assert gpu.revoked["a"].page_out == 0
    assert gpu.suspensions == []
    gpu.give_back("a")
    assert (gpu.suspensions, gpu.leases) == (["a"], {})
    gpu.ask("a")  # it goes on as soon as it may
    assert gpu.leases == {}
    gpu.suspended("a")
    assert gpu.leases.keys() == {"b"}
    view = gpu.arbiter.session_view("a")
    assert (view.resident_bytes, view.paged_out_bytes, view.memory_bytes) == (0, 10 * GIB, 10 * GIB)
    gpu.until_revoked("b")
    gpu.give_back("b")
    gpu.suspended("b")
    assert gpu.leases.keys() == {"a"}
    assert gpu.arbiter.session_view("a").resident_bytes == 10 * GIB


def test_released_session_stays_on_the_gpu_until_its_memory_is_needed() -> None:
    gpu = Gpu()
    gpu.join("a", 10)
    gpu.ask("a")
    gpu.tell(gpu.arbiter.set_weight("a", 0, gpu.now))
    assert gpu.revoked["a"].reason is RevokeReason.RELEASED
    gpu.give_back("a")
    assert gpu.suspensions == []
    gpu.join("b", 5)
    gpu.use("b")
    assert gpu.suspensions == []
    gpu.join("c", 2)
    gpu.ask("c")
    assert gpu.suspensions == ["a"]


def test_least_recently_used_session_goes_first_and_none_in_vain() -> None:
    gpu = Gpu()
    for name, gib in (("old", 5), ("middle", 4), ("new", 5)):
        gpu.join(name, gib)
        gpu.use(name)
    gpu.join("small", 4)
    gpu.ask("small")
    assert gpu.suspensions == ["old"]
    gpu.suspended("old")
    gpu.give_back("small")
    gpu.join("large", 10)
    gpu.ask("large")  # of 9 and 4 GiB beside it, `middle` alone does not make the room, `new` and `middle` do
    assert sorted(gpu.suspensions) == ["middle", "new"]


def test_session_that_is_not_enough_by_itself_is_spared_where_the_next_one_is() -> None:
    gpu = Gpu()
    for name, gib in (("old", 2), ("new", 9)):
        gpu.join(name, gib)
        gpu.use(name)
    gpu.join("comer", 12)
    gpu.ask("comer")
    assert gpu.suspensions == ["new"]


def test_memory_of_all_processes_counts_once_and_moves_together() -> None:
    gpu = Gpu()
    gpu.join("a", 6)
    gpu.join("a2", 5, session="a")
    gpu.ask("a")
    gpu.ask("a2")
    assert gpu.leases.keys() == {"a", "a2"}
    gpu.join("b", 4)
    gpu.ask("b")
    assert gpu.leases.keys() == {"a", "a2", "b"}
    gpu.give_back("b")
    gpu.give_back("a")
    gpu.join("c", 6)
    gpu.ask("c")
    assert "c" not in gpu.leases  # one of a's processes still works
    gpu.give_back("a2")
    assert "a" in gpu.suspensions


def test_managed_session_waits_for_a_suspension_and_managed_pages_leave_too() -> None:
    gpu = Gpu()
    gpu.join("whole", 6)
    gpu.use("whole")
    gpu.join("m", 8, whole=False)
    gpu.use("m")
    gpu.join("comer", 11, whole=False)
    gpu.ask("comer")
    assert (gpu.suspensions, "comer" in gpu.leases) == (["whole"], False)
    gpu.suspended("whole")
    assert "comer" in gpu.leases
    assert 0 < sum(gpu.page_outs.values()) <= 8 * GIB


def test_context_memory_moves_with_a_session_that_is_suspended() -> None:
    gpu = Gpu(context_bytes=GIB)
    gpu.join("a", 7)
    gpu.join("b", 7)
    gpu.ask("a")
    gpu.ask("b")
    assert gpu.leases.keys() == {"a", "b"}
    gpu.tell(gpu.arbiter.device_memory("a", 9 * GIB, 0, gpu.now))
    gpu.until_revoked("b" if "a" not in gpu.revoked else "a")


def test_session_that_cannot_be_suspended_keeps_its_memory_and_others_take_what_is_left() -> None:
    gpu = Gpu()
    gpu.join("a", 10)
    gpu.use("a")
    gpu.tell(gpu.arbiter.device_memory("a", 10 * GIB, 0, gpu.now))
    gpu.join("b", 10)
    gpu.ask("b")
    assert gpu.suspensions == ["a"]
    gpu.suspensions.clear()
    gpu.tell(gpu.arbiter.set_suspendable("a", False, gpu.now))
    gpu.tell(gpu.arbiter.not_suspended("a", gpu.now))
    gpu.tell(gpu.arbiter.remove_session("b", gpu.now))
    gpu.join("c", 5, whole=False)
    gpu.ask("c")
    assert "c" in gpu.leases
    assert gpu.suspensions == []
    assert gpu.arbiter.session_view("a").resident_bytes == 10 * GIB
    gpu.tell(gpu.arbiter.set_suspendable("a", True, gpu.now))
    gpu.join("d", 4)
    gpu.ask("d")
    assert gpu.suspensions == ["a"]


def test_suspended_session_that_does_not_fit_beside_fixed_memory_lets_the_others_work() -> None:
    gpu = Gpu()
    gpu.join("a", 10)
    gpu.use("a")
    gpu.suspend("a")
    gpu.join("fixed", 8, whole=False)
    gpu.tell(gpu.arbiter.memory("fixed", 0, 8 * GIB, gpu.now))
    gpu.tell(gpu.arbiter.device_memory("fixed", 8 * GIB, 0, gpu.now))
    gpu.ask("a")
    assert gpu.leases == {}
    gpu.sizes["fixed"] = (0, 8 * GIB)
    gpu.ask("fixed")
    assert gpu.leases.keys() == {"fixed"}
    gpu.tell(gpu.arbiter.disconnect("fixed", gpu.now))
    assert "a" in gpu.leases


def test_resumption_short_of_memory_frees_more_and_is_tried_again() -> None:
    gpu = Gpu()
    gpu.join("a", 8)
    gpu.use("a")
    gpu.suspend("a")
    gpu.join("b", 7)
    gpu.use("b")
    gpu.ask("a")
    assert gpu.leases.keys() == {"a"}
    assert gpu.suspensions == []
    gpu.tell(gpu.arbiter.short_of_memory("a", 2 * GIB, gpu.now))
    assert gpu.suspensions == ["b"]
    gpu.tell(gpu.arbiter.short_of_memory("a", 2 * GIB, gpu.now))
    gpu.suspended("b")
    gpu.leases.clear()
    gpu.tell(gpu.arbiter.not_resumed("a", 0.5, gpu.now))
    assert gpu.leases == {}
    gpu.now += 0.6
    gpu.tell(gpu.arbiter.tick(gpu.now))
    assert gpu.leases.keys() == {"a"}
    gpu.tell(gpu.arbiter.resumed("a", 8 * GIB, 1.0, gpu.now))
    assert gpu.arbiter.session_view("a").held


def test_others_work_while_a_failed_resumption_waits_for_its_next_try() -> None:
    gpu = Gpu()
    gpu.join("a", 8)
    gpu.use("a")
    gpu.suspend("a")
    gpu.ask("a")
    gpu.tell(gpu.arbiter.not_resumed("a", 5.0, gpu.now))
    gpu.leases.clear()
    gpu.join("b", 16)
    gpu.ask("b")
    assert gpu.leases.keys() == {"b"}
    due = gpu.arbiter.next_wakeup()
    assert due is not None
    assert due <= gpu.now + 5.0


def test_managed_pages_leave_where_a_resumption_finds_too_little_memory() -> None:
    gpu = Gpu()
    gpu.join("a", 8)
    gpu.use("a")
    gpu.suspend("a")
    gpu.join("m", 6, whole=False)
    gpu.use("m")
    gpu.ask("a")
    assert gpu.page_outs == {}
    gpu.tell(gpu.arbiter.short_of_memory("a", GIB, gpu.now))
    assert gpu.page_outs == {"m": GIB}
    assert gpu.leases.keys() == {"a"}


def test_session_is_not_granted_between_the_order_and_its_suspension() -> None:
    gpu = Gpu()
    gpu.join("a", 10)
    gpu.use("a")
    gpu.join("b", 10)
    gpu.ask("b")
    gpu.tell(gpu.arbiter.disconnect("b", gpu.now))
    gpu.ask("a")
    assert gpu.leases == {}
    gpu.suspended("a")
    assert gpu.leases.keys() == {"a"}


def test_session_that_was_suspended_before_the_agent_began_comes_back() -> None:
    gpu = Gpu()
    gpu.tell(gpu.arbiter.add_session("a", 25, gpu.now, whole=True, away=True))
    gpu.join("a", 10, session="a")
    assert gpu.arbiter.session_view("a").resident_bytes == 0
    gpu.ask("a")
    assert gpu.leases.keys() == {"a"}


# -- time ------------------------------------------------------------------------------------------------------------


class SuspendingGpu(VirtualGpu):
    """A suspension, and a resumption, takes bytes over bandwidth and a fixed time."""

    fixed = 0.05
    away: set[str]
    moves: int
    whole: set[str]

    def __init__(self, arbiter: GpuArbiter, bandwidth: float = 12e9) -> None:
        super().__init__(arbiter, bandwidth)
        self.away, self.moves, self.whole = set(), 0, set()

    def session(self, name: str, weight: int) -> None:
        self.whole.add(name)
        self._apply(self.arbiter.add_session(name, weight, self.now, whole=True))

    def _size(self, session: str) -> int:
        return sum(job.plain for job in self.jobs.values() if job.session == session)

    def _apply(self, decisions: Iterable[Decision]) -> None:
        super()._apply(decisions)
        for session in self.arbiter.suspensions():
            assert session not in self.away
            assert not any(job.lease for job in self.jobs.values() if job.session == session)
            seconds = self.fixed + self._size(session) / self.bandwidth
            self.after(seconds, lambda session=session, seconds=seconds: self._left(session, seconds))  # type: ignore[misc]

    def _left(self, session: str, seconds: float) -> None:
        self.away.add(session)
        self.moves += 1
        self._apply(self.arbiter.suspended(session, self._size(session), seconds, self.now))

    def _granted(self, job: Job, grant: Grant) -> None:
        if job.session not in self.away:
            super()._granted(job, grant)
            return
        self.away.discard(job.session)
        on_gpu = sum(self._size(name) for name in self.whole - self.away)
        assert on_gpu <= VRAM, "memory was promised twice"
        seconds = self.fixed + self._size(job.session) / self.bandwidth
        begun = self.now

        def come() -> None:
            self._apply(self.arbiter.resumed(job.session, self._size(job.session), self.now - begun, self.now))
            if job.revoked is None:
                super(SuspendingGpu, self)._granted(job, grant)

        job.lease = grant.lease
        self.after(seconds, come)


@pytest.mark.parametrize("weights", [(50, 50), (25, 75), (10, 40)])
def test_sessions_that_take_turns_get_the_gpu_by_weight_and_moves_stay_within_their_bound(
    weights: tuple[int, int],
) -> None:
    gpu = SuspendingGpu(GpuArbiter(VRAM))
    jobs = []
    for name, weight in zip("ab", weights, strict=True):
        gpu.session(name, weight)
        jobs.append(gpu.start(Job(name, name, 0, forever(), plain=12 * GIB)))
    gpu.run(3000)
    first, second = (job.gpu_seconds for job in jobs)
    assert first + second >= 0.95 * 3000
    assert first / (first + second) == pytest.approx(weights[0] / sum(weights), abs=0.03)
    assert gpu.moves > 4


def test_user_who_returns_does_not_wait_for_a_long_time_slice() -> None:
    gpu = SuspendingGpu(GpuArbiter(VRAM))
    gpu.session("job", 50)
    gpu.session("user", 50)
    gpu.start(Job("job", "job", 0, forever(), plain=12 * GIB))
    user = gpu.start(Job("user", "user", 0, alternating(60.0, 0.5), plain=8 * GIB))
    gpu.run(1500)
    assert len(user.waits) > 15
    assert sorted(user.waits)[len(user.waits) * 9 // 10] < 6.0


# -- any order -------------------------------------------------------------------------------------------------------

CAPACITY = 1000
SIZES = st.sampled_from([0, 1, 200, 400, 500, 600, 999, 1000])


@dataclass(eq=False)
class Peer:
    session: str
    size: int
    waiting: bool = False
    lease: int = 0
    revoked: bool = False


class Mixed(RuleBasedStateMachine):
    """Managed and whole sessions in any order. Suspensions and resumptions end sometime, or fail."""

    @initialize(exclusive=st.booleans(), context=st.sampled_from([0, 30]))
    def begin(self, exclusive: bool, context: int) -> None:
        self.arbiter = GpuArbiter(
            CAPACITY, ArbiterSettings(bandwidth_guess=1e4, measured_from=1, exclusive=exclusive, context_bytes=context)
        )
        self.now, self.names, self.context = 0.0, 0, context
        self.sessions: dict[str, str] = {}
        """"managed", or where a whole session is: "on", "leaving", "away", "coming"."""
        self.peers: dict[str, Peer] = {}
        self.owed: list[str] = []
        """Sessions that are being suspended or resumed."""

    def total(self, session: str) -> int:
        return sum(min(CAPACITY, p.size + self.context) for p in self.peers.values() if p.session == session and p.size)

    def obey(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            peer = self.peers[str(decision.client)]
            whole = self.sessions[peer.session] != "managed"
            if isinstance(decision, Grant) and decision.lease != peer.lease:
                assert peer.waiting
                peer.waiting, peer.lease, peer.revoked = False, decision.lease, False
                if whole:
                    self.granted(peer.session, decision)
            elif isinstance(decision, Revoke):
                assert not (whole and decision.page_out)
                peer.revoked = True
            elif isinstance(decision, PageOut):
                assert not whole, "a session that moves as a whole was told to page out"
        for session in self.arbiter.suspensions():
            assert self.sessions[session] == "on", "what is not there cannot leave"
            assert not any(p.lease for p in self.peers.values() if p.session == session), "suspended under a lease"
            self.sessions[session] = "leaving"
            self.owed.append(session)

    def granted(self, session: str, grant: Grant) -> None:
        assert grant.prefetch == 0
        assert self.sessions[session] != "leaving"
        if self.sessions[session] != "away":
            return
        others = sum(
            self.total(name)
            for name, where in self.sessions.items()
            if where not in ("managed", "away") and name != session
        )
        managed = sum(
            min(p.size, CAPACITY) for p in self.peers.values() if p.lease and self.sessions[p.session] == "managed"
        )
        assert others + self.total(session) <= CAPACITY or not others, "the memory was promised twice"
        assert not managed or managed + others + self.total(session) <= CAPACITY or grant.lease
        self.sessions[session] = "coming"
        self.owed.append(session)

    @rule(whole=st.booleans(), weight=st.sampled_from([1, 25, 100]))
    def join(self, whole: bool, weight: int) -> None:
        name = f"s{self.names}"
        self.names += 1
        self.sessions[name] = "on" if whole else "managed"
        self.obey(self.arbiter.add_session(name, weight, self.now, whole=whole))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), size=SIZES)
    def connect(self, data: st.DataObject, size: int) -> None:
        session = data.draw(st.sampled_from(sorted(self.sessions)))
        if self.sessions[session] not in ("on", "managed"):
            return  # a process of a suspended session begins with nothing
        name = f"c{self.names}"
        self.names += 1
        self.peers[name] = Peer(session, size)
        self.obey(self.arbiter.connect(name, session, self.now))
        self.tell_memory(name)

    def amounts(self, name: str) -> tuple[int, int]:
        peer = self.peers[name]
        return (peer.size, 0) if self.sessions[peer.session] == "managed" else (0, peer.size)

    def tell_memory(self, name: str) -> None:
        self.obey(self.arbiter.memory(name, *self.amounts(name), self.now))

    @precondition(lambda self: self.peers)
    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.peers)))
        peer = self.peers[name]
        if not peer.lease:
            peer.waiting = True
            self.obey(self.arbiter.request(name, *self.amounts(name), self.now))

    @precondition(lambda self: any(peer.lease for peer in self.peers.values()))
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        self.release(data.draw(st.sampled_from(sorted(name for name, peer in self.peers.items() if peer.lease))))

    def release(self, name: str) -> None:
        peer = self.peers[name]
        if self.sessions[peer.session] == "coming":
            return  # it hears of its lease when it is back
        lease, peer.lease, peer.revoked = peer.lease, 0, False
        self.obey(self.arbiter.release(name, lease, 0.0, self.now))

    @precondition(lambda self: self.peers)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.peers)))
        session = self.peers.pop(name).session
        if not any(p.session == session for p in self.peers.values()) and self.sessions[session] in ("away", "coming"):
            self.sessions[session] = "on"
            self.owed = [one for one in self.owed if one != session]
        self.obey(self.arbiter.disconnect(name, self.now))

    @precondition(lambda self: self.owed)
    @rule(outcome=st.sampled_from(["done", "done", "failed", "short"]))
    def carried_out(self, outcome: str) -> None:
        session = self.owed.pop(0)
        size = self.total(session)
        if self.sessions[session] == "leaving":
            if outcome == "done":
                self.sessions[session] = "away"
                self.obey(self.arbiter.suspended(session, size, 0.1, self.now))
            else:
                self.sessions[session] = "on"
                self.obey(self.arbiter.not_suspended(session, self.now))
        elif outcome == "done":
            self.sessions[session] = "on"
            self.obey(self.arbiter.resumed(session, size, 0.1, self.now))
        else:
            self.sessions[session] = "away"
            for peer in self.peers.values():
                if peer.session == session and peer.lease:
                    peer.lease, peer.waiting, peer.revoked = 0, True, False
            if outcome == "short":
                self.obey(self.arbiter.short_of_memory(session, 300, self.now))
            self.obey(self.arbiter.not_resumed(session, 1.0, self.now))

    def has_peers(self, session: str) -> bool:
        return any(peer.session == session for peer in self.peers.values())

    @rule(seconds=st.sampled_from([0.001, 0.3, 5.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.obey(self.arbiter.tick(self.now))

    @invariant()
    def a_whole_session_is_there_or_not(self) -> None:
        for name, where in getattr(self, "sessions", {}).items():
            if where == "managed":
                continue
            view = self.arbiter.session_view(name)
            there = where in ("on", "coming")
            assert view.resident_bytes == (view.memory_bytes if there else 0) or view.memory_bytes > CAPACITY

    def teardown(self) -> None:
        """Everybody obeys from now on: each one that waits is served, unless it can never fit."""
        for _ in range(400):
            waiting = [
                name
                for name, peer in self.peers.items()
                if peer.waiting and (self.total(peer.session) <= CAPACITY or self.sessions[peer.session] == "managed")
            ]
            if not waiting:
                return
            while self.owed:
                self.carried_out("done")
            for name in sorted(name for name, peer in self.peers.items() if peer.revoked and peer.lease):
                self.release(name)
            while self.owed:
                self.carried_out("done")
            due = self.arbiter.next_wakeup()
            self.now = max(self.now + 5.0, due if due is not None else 0.0)  # debts are paid back within minutes
            self.obey(self.arbiter.tick(self.now))
        assert not waiting, f"{waiting} wait for ever: {self.sessions}, {self.peers}"


Mixed.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestMixed = Mixed.TestCase
