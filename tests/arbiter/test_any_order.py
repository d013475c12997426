"""Any order of joins, leaves, crashes, weight changes and stale messages: the invariants hold, and everybody is
served at last."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpushare_spawner.arbiter.gpu_arbiter import GpuArbiter
from gpushare_spawner.arbiter.session import ArbiterSettings, Decision, LeaseGrant, PageOut, Revoke
from tests.arbiter.bounds import longest_wait

VRAM = 1000
SIZES = st.sampled_from([0, 1, 100, 333, 499, 500, 501, 700, 999, 1000, 1001, 3000])
SECONDS = st.sampled_from([0.0, 1e-7, 0.0005, 0.01, 0.3, 1.0, 7.0, 50.0, 1000.0])
WEIGHTS = st.sampled_from([0, 1, 10, 25, 50, 100])

# Sets of clients have no fixed order, so one run in hundreds draws a wait of many thousand decisions: half a minute.
pytestmark = pytest.mark.timeout(400)


@dataclass(eq=False)
class Peer:
    """A client as it sees itself: it obeys, if perhaps late."""

    session: str
    managed: int = 0
    plain: int = 0
    shown: int | None = None
    unstated: int = 0
    """What the driver shows for its process."""
    waiting: bool = False
    waiting_since: float = 0.0
    lease: int = 0
    revoked: Revoke | None = None
    revoked_at: float = 0.0
    idle: bool = False
    old_leases: list[int] = field(default_factory=list)


class AnyOrder(RuleBasedStateMachine):
    @initialize(
        exclusive=st.booleans(),
        credit=st.sampled_from([0.0, 10.0]),
        bandwidth=st.sampled_from([1e2, 1e4, 1e9]),
        context=st.sampled_from([0, 0, 30]),
    )
    def begin(self, exclusive: bool, credit: float, bandwidth: float, context: int) -> None:
        slow = max(1.0, 1e4 / bandwidth)
        self.settings = ArbiterSettings(
            exclusive=exclusive,
            hand_off_credit=credit,
            bandwidth_guess=bandwidth,
            measured_from=1,
            page_out_step=50,
            max_debt=5.0,
            context_bytes=context,
            # Time slices grow with the time that memory takes to move. In proportion to them the periods in which
            # weights are kept stay long enough for a wait of hours to have no more than some thousand decisions.
            period=0.2 * slow,
            shortest_run=0.01 * slow,
            shortest_hold=0.015 * slow,
        )
        self.arbiter = GpuArbiter(VRAM, self.settings)
        self.now = 0.0
        self.names = 0
        self.sessions: dict[str, int] = {}
        self.peers: dict[str, Peer] = {}
        self.leases: set[int] = set()

    # -- orders ------------------------------------------------------------------------------------------------------

    def obey(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            peer = self.peers[str(decision.client)]
            if isinstance(decision, LeaseGrant):
                assert decision.lease > 0
                assert 0 <= decision.prefetch <= peer.managed
                assert decision.time_slice >= 0
                if decision.lease == peer.lease:
                    continue  # told again
                assert peer.waiting, "a lease for somebody who did not ask"
                assert not peer.lease
                assert decision.lease not in self.leases, "a lease was used twice"
                self.leases.add(decision.lease)
                peer.lease, peer.waiting, peer.idle, peer.revoked = decision.lease, False, False, None
            elif isinstance(decision, Revoke):
                assert decision.lease == peer.lease, "revoked what is not held"
                assert peer.revoked is None, "revoked twice"
                assert 0 <= decision.page_out <= peer.managed
                peer.revoked, peer.revoked_at = decision, self.now
            else:
                assert isinstance(decision, PageOut)
                assert not peer.lease, "a holder was told to page out"
                assert 0 < decision.amount <= peer.managed

    # -- what may happen ---------------------------------------------------------------------------------------------

    @rule(weight=WEIGHTS)
    def join(self, weight: int) -> None:
        name = f"s{self.names}"
        self.names += 1
        self.sessions[name] = weight
        self.obey(self.arbiter.add_session(name, weight, self.now))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), managed=SIZES, plain=st.sampled_from([0, 0, 0, 50, 400]))
    def connect(self, data: st.DataObject, managed: int, plain: int) -> None:
        session = data.draw(st.sampled_from(sorted(self.sessions)))
        name = f"c{self.names}"
        self.names += 1
        self.peers[name] = Peer(session, managed, plain)
        self.obey(self.arbiter.connect(name, session, self.now))
        self.obey(self.arbiter.memory(name, managed, plain, self.now))

    def some_peer(self, data: st.DataObject) -> tuple[str, Peer]:
        name = data.draw(st.sampled_from(sorted(self.peers)))
        return name, self.peers[name]

    @precondition(lambda self: self.peers)
    @rule(data=st.data())
    def ask(self, data: st.DataObject) -> None:
        name, peer = self.some_peer(data)
        if not peer.lease and not peer.waiting:
            peer.waiting, peer.waiting_since = True, self.now
        # else: doubled, or crossed with a grant
        self.obey(self.arbiter.request(name, peer.managed, peer.plain, self.now))

    @precondition(lambda self: self.peers)
    @rule(data=st.data(), managed=SIZES)
    def allocate(self, data: st.DataObject, managed: int) -> None:
        name, peer = self.some_peer(data)
        peer.managed = managed
        self.obey(self.arbiter.memory(name, managed, peer.plain, self.now))

    @precondition(lambda self: self.peers)
    @rule(data=st.data(), busy=SECONDS, quiet=SECONDS)
    def become_quiet(self, data: st.DataObject, busy: float, quiet: float) -> None:
        name, peer = self.some_peer(data)
        peer.idle = peer.lease != 0
        self.obey(self.arbiter.idle(name, peer.lease, busy, quiet, self.now))

    @precondition(lambda self: self.peers)
    @rule(data=st.data())
    def work_again(self, data: st.DataObject) -> None:
        name, peer = self.some_peer(data)
        peer.idle = False
        self.obey(self.arbiter.busy(name, peer.lease, self.now))

    def give_back(self, name: str, peer: Peer, busy: float) -> None:
        lease, order = peer.lease, peer.revoked
        peer.old_leases.append(lease)
        peer.lease, peer.revoked = 0, None
        again = order is not None and not peer.idle
        if again:
            # Still has work: the request follows the release on the same connection.
            peer.waiting, peer.waiting_since = True, self.now
        # The arbiter may know of the request already, if the request was sent before the release.
        elif not peer.waiting:
            peer.waiting, peer.waiting_since = True, self.now
            self.obey(self.arbiter.release(name, lease, busy, self.now))
            if not peer.lease:
                self.obey(self.arbiter.request(name, peer.managed, peer.plain, self.now))
            return
        self.obey(self.arbiter.release(name, lease, busy, self.now))
        if not peer.lease:
            self.obey(self.arbiter.request(name, peer.managed, peer.plain, self.now))

    @precondition(lambda self: any(peer.lease for peer in self.peers.values()))
    @rule(data=st.data(), busy=SECONDS, again=st.booleans())
    def release(self, data: st.DataObject, busy: float, again: bool) -> None:
        name = data.draw(st.sampled_from(sorted(name for name, peer in self.peers.items() if peer.lease)))
        peer = self.peers[name]
        if again:
            self.give_back(name, peer, busy)
            return
        lease = peer.lease
        peer.old_leases.append(lease)
        peer.lease, peer.revoked, peer.idle = 0, None, False
        # A request that crossed the revocation makes it wait at once.
        peer.waiting, peer.waiting_since = True, self.now
        self.obey(self.arbiter.release(name, lease, busy, self.now))
        if not peer.lease and name not in self.waiting_clients():
            peer.waiting = False

    def waiting_clients(self) -> set[str]:
        return {str(c.id) for c in self.arbiter._roster.clients if c.waiting}

    @precondition(lambda self: self.peers)
    @rule(data=st.data(), amount=SIZES, seconds=SECONDS, inwards=st.booleans())
    def page(self, data: st.DataObject, amount: int, seconds: float, inwards: bool) -> None:
        name, _ = self.some_peer(data)
        report = self.arbiter.paged_in if inwards else self.arbiter.paged_out
        self.obey(report(name, amount, max(seconds, amount / 1e9), self.now))

    @precondition(lambda self: self.peers)
    @rule(data=st.data(), amount=st.one_of(st.none(), SIZES), part=st.floats(0.0, 1.0))
    def the_driver_shows(self, data: st.DataObject, amount: int | None, part: float) -> None:
        name, peer = self.some_peer(data)
        peer.shown, peer.unstated = amount, round((amount or 0) * part)
        self.obey(self.arbiter.device_memory(name, amount, peer.unstated, self.now))
        if amount is not None:
            self.obey(self.arbiter.working_set(name, amount, self.now))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), length=SECONDS, late=SECONDS, part=st.floats(0.0, 1.0))
    def driver_tells(self, data: st.DataObject, length: float, late: float, part: float) -> None:
        told = data.draw(st.lists(st.sampled_from(sorted(self.sessions)), unique=True, max_size=3))
        until = self.now - late
        busy = {session: length * part / len(told) for session in told}
        self.obey(self.arbiter.delivered(until - length, until, busy, self.now))
        for pace in self.arbiter.paces():
            peer = self.peers[str(pace.client)]
            assert peer.lease == pace.lease
            assert peer.revoked is None

    @precondition(lambda self: self.peers)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        name, _ = self.some_peer(data)
        del self.peers[name]
        self.obey(self.arbiter.disconnect(name, self.now))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.sessions)))
        del self.sessions[session]
        self.peers = {name: peer for name, peer in self.peers.items() if peer.session != session}
        self.obey(self.arbiter.remove_session(session, self.now))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data(), weight=WEIGHTS)
    def reweigh(self, data: st.DataObject, weight: int) -> None:
        session = data.draw(st.sampled_from(sorted(self.sessions)))
        self.sessions[session] = weight
        self.obey(self.arbiter.set_weight(session, weight, self.now))
        if weight == 0:
            assert all(peer.revoked for peer in self.peers.values() if peer.session == session and peer.lease)

    @precondition(lambda self: any(peer.old_leases for peer in self.peers.values()))
    @rule(data=st.data(), what=st.sampled_from(["release", "idle", "busy"]))
    def stale(self, data: st.DataObject, what: str) -> None:
        name = data.draw(st.sampled_from(sorted(name for name, peer in self.peers.items() if peer.old_leases)))
        lease = data.draw(st.sampled_from([*self.peers[name].old_leases, 10**6, 0]))
        before = (self.arbiter.holders(), self.arbiter.waiting())
        if what == "release":
            decisions = self.arbiter.release(name, lease, 1.0, self.now)
        elif what == "idle":
            decisions = self.arbiter.idle(name, lease, 1.0, 0.5, self.now)
        else:
            decisions = self.arbiter.busy(name, lease, self.now)
        self.obey(decisions)
        if not decisions:
            assert (self.arbiter.holders(), self.arbiter.waiting()) == before

    @rule(seconds=SECONDS, backwards=st.booleans())
    def time_goes_by(self, seconds: float, backwards: bool) -> None:
        target = self.now + seconds
        for _ in range(1000):
            wakeup = self.arbiter.next_wakeup()
            if wakeup is None or wakeup > target:
                break
            self.now = max(self.now, wakeup)
            self.obey(self.arbiter.tick(self.now))
        self.now = target
        self.obey(self.arbiter.tick(self.now - 1.0 if backwards else self.now))

    # -- what must hold ----------------------------------------------------------------------------------------------

    def fixed(self, peer: Peer) -> tuple[int, int]:
        """Bytes that cannot leave the GPU: those that the driver confirms, and those that it does not."""
        claimed = min(VRAM, peer.plain + self.settings.context_bytes)
        confirmed = min(claimed, peer.shown or 0)
        return min(confirmed + peer.unstated, VRAM), claimed - confirmed

    def fit(self, peers: list[Peer]) -> bool:
        if len(peers) <= 1:
            return True
        if self.settings.exclusive and len({peer.session for peer in peers}) > 1:
            return False
        left = VRAM - sum(self.fixed(peer)[0] for peer in self.peers.values())
        used = {name: self.arbiter._roster.client(name).working_set for name in self.peers}
        assert all(used[name] <= min(VRAM, peer.managed) for name, peer in self.peers.items())
        together = [used[name] + self.fixed(peer)[1] for name, peer in self.peers.items() if peer in peers]
        return left >= 0 and sum(together) <= left

    @invariant()
    def leases_held_together_fit(self) -> None:
        if not hasattr(self, "arbiter"):
            return
        assert self.fit([peer for peer in self.peers.values() if peer.lease and peer.revoked is None])

    @invariant()
    def nobody_waits_while_there_is_room(self) -> None:
        if not hasattr(self, "arbiter"):
            return
        limit = self.settings.revoke_timeout
        answering = [p for p in self.peers.values() if p.lease and p.revoked and self.now - p.revoked_at < limit - 1e-5]
        holding = [p for p in self.peers.values() if p.lease and p.revoked is None]
        if not answering:
            for name, peer in self.peers.items():
                if self.arbiter._roster.client(name).parked:
                    assert holding, "all are held back"
                else:
                    assert not peer.waiting or not self.fit([*holding, peer]), "work conservation"

    @invariant()
    def somebody_will_decide(self) -> None:
        if not hasattr(self, "arbiter"):
            return
        wakeup = self.arbiter.next_wakeup()
        if self.arbiter.waiting():
            assert wakeup is not None, "somebody waits, and nothing will ever end it"
        if wakeup is not None:
            assert math.isfinite(wakeup)
            assert wakeup > self.arbiter._roster.now

    @invariant()
    def views_agree(self) -> None:
        if not hasattr(self, "arbiter"):
            return
        waiting = {peer.session for peer in self.peers.values() if peer.waiting}
        holding = {peer.session for peer in self.peers.values() if peer.lease}
        assert set(self.arbiter.waiting()) == waiting
        assert set(self.arbiter.holders()) == holding
        for session in self.sessions:
            view = self.arbiter.session_snapshot(session)
            assert (view.waiting, view.held) == (session in waiting, session in holding)
            assert 0 <= view.resident_bytes <= view.memory_bytes
            assert view.gpu_seconds >= 0

    @invariant()
    def lags_add_up_and_are_bounded(self) -> None:
        if not hasattr(self, "arbiter"):
            return
        accounts, competing = self.arbiter._accounts, self.arbiter._accounts.working
        lags = {session: accounts.lag(session) for session in competing}
        assert abs(sum(lags.values())) < 1e-6 * (1 + sum(abs(lag) for lag in lags.values()))

    def teardown(self) -> None:
        """From here on everybody works without end and obeys within a millisecond: all are served within the stated
        bound."""
        if not hasattr(self, "arbiter"):
            return
        for name, peer in self.peers.items():
            if not peer.lease and not peer.waiting:
                peer.waiting = True
                self.obey(self.arbiter.request(name, peer.managed, peer.plain, self.now))
            elif peer.lease and peer.idle:
                peer.idle = False
                self.obey(self.arbiter.busy(name, peer.lease, self.now))
            peer.waiting_since = self.now
        if not self.peers:
            return
        weights = {peer.session: max(1, self.sessions[peer.session]) for peer in self.peers.values()}
        seconds_per_byte = 1 / self.arbiter._cost.bandwidth_in.value + 1 / self.arbiter._cost.bandwidth_out.value
        costs = dict.fromkeys(weights, 0.0)
        for peer in self.peers.values():
            costs[peer.session] += self.settings.switch_seconds + peer.managed * seconds_per_byte
        # Several processes of one session divide its time slice.
        most = max(sum(p.session == session for p in self.peers.values()) for session in weights)
        deadline = self.now + most * longest_wait(weights, costs, self.settings)
        starving = {name for name, peer in self.peers.items() if not peer.lease}
        while starving:
            revoked = [name for name, peer in self.peers.items() if peer.revoked]
            wakeup = self.arbiter.next_wakeup()
            if revoked:
                self.now += 0.001
                for name in revoked:
                    self.give_back(name, self.peers[name], 1e9)
            else:
                assert wakeup is not None
                self.now = max(self.now, wakeup)
                self.obey(self.arbiter.tick(self.now))
            starving -= {name for name, peer in self.peers.items() if peer.lease}
            assert not starving or self.now <= deadline, f"{starving} wait too long: {self.now} past {deadline}"


FEW = settings(
    max_examples=50,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


class ManyOrders(AnyOrder):
    """The same with more examples."""


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = FEW
TestManyOrders = pytest.mark.slow(ManyOrders.TestCase)
TestManyOrders.settings = settings(FEW, max_examples=150)
