"""Sessions that move as a whole, beside managed ones, in any order of events: memory is promised once, and each session
that waits is served."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpushare_spawner.arbiter.gpu_arbiter import GpuArbiter
from gpushare_spawner.arbiter.session import ArbiterSettings, Decision, LeaseGrant, PageOut, Revoke
from tests.arbiter.bounds import longest_wait

CAPACITY = 1000
SIZES = st.sampled_from([0, 1, 200, 400, 500, 600, 999, 1000])


@dataclass(eq=False)
class Peer:
    session: str
    size: int
    waiting: bool = False
    lease: int = 0
    revoked: bool = False
    quiet: bool = False
    """It has a lease and no work."""
    told: bool = True
    """It has said what it has; a process that comes while its session is suspended waits before its first call."""
    shown: int | None = None
    """What the driver shows for it."""


class Mixed(RuleBasedStateMachine):
    """Managed and whole sessions in any order. Suspensions and resumptions end sometime, or fail."""

    @initialize(exclusive=st.booleans(), context=st.sampled_from([0, 30]))
    def begin(self, exclusive: bool, context: int) -> None:
        self.arbiter = GpuArbiter(
            CAPACITY,
            settings := ArbiterSettings(
                bandwidth_guess=1e4,
                measured_from=1,
                exclusive=exclusive,
                context_bytes=context,
                max_debt=5.0,
                period=5.0,
                shortest_hold=0.5,
            ),
        )
        self.settings = settings
        self.now, self.names, self.context = 0.0, 0, context
        self.sessions: dict[str, str] = {}
        """"managed", or where a whole session is: "on", "leaving", "away", "coming"."""
        self.peers: dict[str, Peer] = {}
        self.owed: list[str] = []
        """Sessions that are being suspended or resumed."""
        self.weights: dict[str, int] = {}
        self.pinned: set[str] = set()
        """Sessions that cannot be suspended."""

    def total(self, session: str) -> int:
        return sum(
            min(CAPACITY, p.size + self.context)
            for p in self.peers.values()
            if p.session == session and p.size and p.told
        )

    def beside(self, session: str) -> int:
        """What a session takes of the GPU beside others: what the driver shows, where it does not work.

        Where the driver shows nothing, what it says counts, unless it is pinned: then a false claim would keep others
        out for good, and the agent asks the driver before it resumes another.
        """
        peers = [p for p in self.peers.values() if p.session == session and p.size and p.told]
        if any(p.lease for p in peers):
            return self.total(session)
        unseen = 0 if session in self.pinned and self.sessions[session] == "on" else CAPACITY
        return sum(min(CAPACITY, p.size + self.context, unseen if p.shown is None else p.shown) for p in peers)

    def obey(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            peer = self.peers[str(decision.client)]
            whole = self.sessions[peer.session] != "managed"
            if isinstance(decision, LeaseGrant) and decision.lease != peer.lease:
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

    def granted(self, session: str, grant: LeaseGrant) -> None:
        assert grant.prefetch == 0
        assert self.sessions[session] != "leaving"
        if self.sessions[session] != "away":
            return
        others = sum(
            self.beside(name)
            for name, where in self.sessions.items()
            if where not in ("managed", "away") and name != session
        )
        managed = sum(
            min(p.size, CAPACITY)
            for p in self.peers.values()
            if p.lease and not p.revoked and self.sessions[p.session] == "managed"
        )
        assert others + self.total(session) <= CAPACITY or not others, "the memory was promised twice"
        assert not managed or managed + others + self.total(session) <= CAPACITY, "it does not fit beside pages"
        self.sessions[session] = "coming"
        self.owed.append(session)

    @rule(whole=st.booleans(), weight=st.sampled_from([1, 25, 100]))
    def join(self, whole: bool, weight: int) -> None:
        name = f"s{self.names}"
        self.names += 1
        self.sessions[name] = "on" if whole else "managed"
        self.weights[name] = weight
        self.obey(self.arbiter.add_session(name, weight, self.now, suspends=whole))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), size=SIZES)
    def connect(self, data: st.DataObject, size: int) -> None:
        session = data.draw(st.sampled_from(sorted(self.sessions)))
        name = f"c{self.names}"
        self.names += 1
        self.peers[name] = Peer(session, size, told=self.sessions[session] in ("on", "managed"))
        self.obey(self.arbiter.connect(name, session, self.now))
        if self.peers[name].told:
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
            peer.waiting = peer.told = True
            self.obey(self.arbiter.request(name, *self.amounts(name), self.now))

    @precondition(lambda self: any(peer.lease for peer in self.peers.values()))
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        self.release(data.draw(st.sampled_from(sorted(name for name, peer in self.peers.items() if peer.lease))))

    def release(self, name: str) -> None:
        peer = self.peers[name]
        if self.sessions[peer.session] == "coming":
            return  # it hears of its lease when it is back
        lease, peer.lease, peer.revoked, peer.quiet = peer.lease, 0, False, False
        self.obey(self.arbiter.release(name, lease, 0.0, self.now))

    @precondition(lambda self: any(peer.lease for peer in self.peers.values()))
    @rule(data=st.data(), quiet=st.booleans())
    def work_or_rest(self, data: st.DataObject, quiet: bool) -> None:
        name = data.draw(st.sampled_from(sorted(name for name, peer in self.peers.items() if peer.lease)))
        peer = self.peers[name]
        if self.sessions[peer.session] == "coming":
            return
        peer.quiet = quiet
        if quiet:
            self.obey(self.arbiter.idle(name, peer.lease, 0.1, 0.003, self.now))
        else:
            self.obey(self.arbiter.busy(name, peer.lease, self.now))

    @precondition(lambda self: self.peers)
    @rule(data=st.data(), size=SIZES)
    def claim(self, data: st.DataObject, size: int) -> None:
        """It allocates, or says so."""
        name = data.draw(st.sampled_from(sorted(self.peers)))
        if self.sessions[self.peers[name].session] not in ("on", "managed"):
            return
        self.peers[name].size, self.peers[name].told = size, True
        self.tell_memory(name)

    @precondition(lambda self: self.peers)
    @rule(data=st.data(), shown=st.one_of(st.none(), st.just(-1), SIZES))
    def the_driver_shows(self, data: st.DataObject, shown: int | None) -> None:
        """-1: what it says itself."""
        name = data.draw(st.sampled_from(sorted(self.peers)))
        peer = self.peers[name]
        if self.sessions[peer.session] != "on":
            return
        if shown is not None:
            # no less than it says where it works: such a claim counts while it does
            shown = peer.size + self.context if shown < 0 else min(shown, peer.size + self.context)
        peer.shown = None if shown is None else min(CAPACITY, shown)
        self.obey(self.arbiter.device_memory(name, peer.shown, 0, self.now))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), weight=st.sampled_from([0, 1, 25, 100]))
    def reweigh(self, data: st.DataObject, weight: int) -> None:
        """The share changes; 0: it is released."""
        session = data.draw(st.sampled_from(sorted(self.sessions)))
        self.weights[session] = weight
        self.obey(self.arbiter.set_weight(session, weight, self.now))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        """The session is over, wherever it is."""
        session = data.draw(st.sampled_from(sorted(self.sessions)))
        del self.sessions[session]
        self.pinned.discard(session)
        self.owed = [one for one in self.owed if one != session]
        self.peers = {name: peer for name, peer in self.peers.items() if peer.session != session}
        self.obey(self.arbiter.remove_session(session, self.now))

    @precondition(lambda self: any(where != "managed" for where in self.sessions.values()))
    @rule(data=st.data(), able=st.booleans())
    def become_suspendable_or_not(self, data: st.DataObject, able: bool) -> None:
        session = data.draw(st.sampled_from(sorted(n for n, where in self.sessions.items() if where != "managed")))
        (self.pinned.discard if able else self.pinned.add)(session)
        self.obey(self.arbiter.set_suspendable(session, able, self.now))

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
                    peer.lease, peer.waiting, peer.revoked, peer.quiet = 0, True, False, False
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
            view = self.arbiter.session_snapshot(name)
            there = where in ("on", "coming")
            assert view.resident_bytes == (view.memory_bytes if there else 0) or view.memory_bytes > CAPACITY

    def teardown(self) -> None:
        """From here on each session can be suspended, each process works without end and obeys within a millisecond,
        and each move takes 0.1 s: each process is served within the stated bound, unless it can never fit."""
        for session in sorted(self.pinned):
            self.obey(self.arbiter.set_suspendable(session, True, self.now))
        for name, peer in self.peers.items():
            if not peer.lease:
                self.ask_again(name)
            elif peer.quiet and self.sessions[peer.session] != "coming":
                peer.quiet = False
                self.obey(self.arbiter.busy(name, peer.lease, self.now))
        starving = {
            name
            for name, peer in self.peers.items()
            if not peer.lease and (self.total(peer.session) <= CAPACITY or self.sessions[peer.session] == "managed")
        }
        began, weights = self.now, {peer.session: max(1, self.weights[peer.session]) for peer in self.peers.values()}
        most = max((sum(p.session == session for p in self.peers.values()) for session in weights), default=0)
        deadline = float("inf")
        while starving:
            # what moves cost is learned on the way, and time slices with it
            costs = {session: self.cost(session) for session in weights}
            deadline = began + 2.0 + most * longest_wait(weights, costs, self.settings)
            while self.owed:
                self.now += 0.1
                self.carried_out("done")
            revoked = sorted(name for name, peer in self.peers.items() if peer.revoked and peer.lease)
            for name in revoked:
                self.now += 0.001
                self.release(name)
                if name in self.peers and not self.peers[name].lease:
                    self.ask_again(name)
            starving -= {name for name, peer in self.peers.items() if peer.lease}
            if not self.owed and not revoked and starving:
                due = self.arbiter.next_wakeup()
                assert due is not None, f"{starving} wait for ever: {self.sessions}, {self.peers}"
                self.now = max(self.now, due)
                self.obey(self.arbiter.tick(self.now))
            assert not starving or self.now <= deadline, f"{starving} wait too long: {self.now - began} s"

    def ask_again(self, name: str) -> None:
        self.peers[name].waiting = self.peers[name].told = True
        self.obey(self.arbiter.request(name, *self.amounts(name), self.now))

    def cost(self, session: str) -> float:
        """Seconds of the session's moves, there and back, at most."""
        cost = self.arbiter._cost
        if self.sessions[session] != "managed":
            return max(0.2, cost.suspend_and_resume(session, self.total(session)))
        processes = sum(peer.session == session for peer in self.peers.values())
        return processes * self.settings.switch_seconds + cost.sequential(self.total(session))


Mixed.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestMixed = Mixed.TestCase
