"""Sessions that move as a whole, beside managed ones, in any order of events: memory is promised once, and each session
that waits is served."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpushare_spawner.arbiter import ArbiterSettings, Decision, GpuArbiter, Grant, PageOut, Revoke

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
