"""A session that does not answer REVOKE costs the others little time, and owes what it took."""

from __future__ import annotations

import pytest

from gpushare_spawner.arbiter.gpu_arbiter import GpuArbiter
from gpushare_spawner.arbiter.session import ArbiterSettings, ArbitratedSession
from gpushare_spawner.arbiter.time_slices import learn_revoke_timeout, revoke_timeout
from tests.arbiter.virtual_gpu import GIB, Job, VirtualGpu, forever

USUAL, SHORTEST = ArbiterSettings().usual_revoke_timeout, ArbiterSettings().shortest_revoke_timeout
MEMORY = int(8.1 * GIB)
"""Two of these do not fit into 16 GiB together, and little has to move: time slices are short."""


class Ignorant:
    """A session "eve" that keeps each lease for some seconds after REVOKE, beside a session "bob". Both always work."""

    def __init__(self, weight: int, keeps: float, of_bob: int | None = None) -> None:
        self.device = VirtualGpu(GpuArbiter(16 * GIB))
        self.device.session("eve", weight)
        self.device.session("bob", of_bob if of_bob is not None else 100 - weight)
        self.device.tell_utilisation()
        self.eve = self.device.start(Job("eve", "eve", MEMORY, forever(), obeys=False))
        self.bob = self.device.start(Job("bob", "bob", MEMORY, forever()))
        self.keeps = keeps
        self.revoked = 0
        self.device.watchers.append(self._watch)

    def _watch(self, device: VirtualGpu) -> None:
        order = self.eve.revoked
        if order is None or order.lease == self.revoked:
            return
        self.revoked = order.lease
        device.after(self.keeps, lambda: self._gives_back(order.lease))

    def _gives_back(self, lease: int) -> None:
        if self.eve.lease == lease:
            self.device._give_back(self.eve)

    def part(self, seconds: float) -> float:
        """The part of the time that eve had, in units of 1 %: the mean over spans that end up to 10 s before and after,
        because the last overrun is repaid only after it."""
        parts = []
        for offset in range(-10, 11):
            self.device.run(seconds + offset)
            parts.append(100 * self.eve.gpu_seconds / self.device.now)
        return sum(parts) / len(parts)


@pytest.mark.parametrize("keeps", [1.5, 3.9, 4.5, 10.5])
@pytest.mark.parametrize(("weight", "seconds"), [(50, 60.0), (30, 120.0), (10, 120.0)])
def test_a_session_that_ignores_revoke_receives_its_part_all_the_same(
    weight: int, seconds: float, keeps: float
) -> None:
    # the smaller the share, the longer it takes to repay one overrun
    assert Ignorant(weight, keeps).part(seconds) == pytest.approx(weight, abs=3)


def test_an_ignored_revoke_delays_the_others_less_the_next_time() -> None:
    ignorant = Ignorant(50, keeps=15.0)
    ignorant.device.run(90.0)
    first, *later = ignorant.bob.waits
    assert first == pytest.approx(USUAL, abs=0.2)
    assert later
    assert max(later) < 2.0 + SHORTEST  # its time slice, and what it may overrun


def test_a_session_with_kernels_of_three_seconds_is_waited_for_every_time() -> None:
    device = VirtualGpu(GpuArbiter(16 * GIB))
    for name in ("ada", "bob"):
        device.session(name, 50)
    ada = device.start(Job("ada", "ada", MEMORY, forever(), kernel=3.0))
    bob = device.start(Job("bob", "bob", MEMORY, forever()))

    def watch(_: VirtualGpu) -> None:
        assert not (ada.lease and bob.open), f"both at {device.now}"

    device.watchers.append(watch)
    device.run(120.0)
    assert len(ada.waits) > 5
    assert 100 * ada.gpu_seconds / 120 == pytest.approx(50, abs=3)


def test_a_debt_is_repaid_in_full_before_the_long_wait_of_a_client_gives_it_a_turn() -> None:
    ignorant = Ignorant(10, keeps=10.5)
    ignorant.device.run(12.0)
    owed = -ignorant.device.arbiter._accounts.lag("eve")
    assert owed > 5
    asked = ignorant.device.now
    while ignorant.eve.waiting_since is not None:
        ignorant.device.run(ignorant.device.now + 0.5)
    # bob's 90 % of the time until then repay it
    assert ignorant.device.now - asked > 0.9 * owed / 0.1


def test_while_several_sessions_run_the_timeout_is_as_many_times_as_long() -> None:
    ada, settings = ArbitratedSession("ada", 50), ArbiterSettings()
    assert revoke_timeout(ada, 1, settings) == USUAL
    assert revoke_timeout(ada, 2, settings) == 2 * USUAL
    assert revoke_timeout(ada, 0, settings) == USUAL


def test_timeout_is_shortened_by_each_ignored_revoke_and_lengthened_by_answers() -> None:
    ada, settings = ArbitratedSession("ada", 50), ArbiterSettings(shortest_revoke_timeout=0.5)
    learn_revoke_timeout(ada, USUAL, settings)
    assert revoke_timeout(ada, 1, settings) == USUAL
    learn_revoke_timeout(ada, USUAL + 0.1, settings)
    assert revoke_timeout(ada, 1, settings) == USUAL / 4
    learn_revoke_timeout(ada, 60.0, settings)
    assert revoke_timeout(ada, 1, settings) == 0.5
    for expected in (1.0, 2.0, 4.0, 4.0):
        learn_revoke_timeout(ada, 3.0, settings)
        assert revoke_timeout(ada, 1, settings) == expected


def test_nobody_waits_longer_than_the_upper_bound_however_many_sessions_run() -> None:
    # eve and nine others run together; the eleventh needs more than they leave
    device = VirtualGpu(GpuArbiter(16 * GIB))
    names = [f"s{number}" for number in range(9)]
    for name in ("eve", *names, "big"):
        device.session(name, 9)
    device.start(Job("eve", "eve", GIB, forever(), obeys=False))
    for name in names:
        device.start(Job(name, name, GIB, forever(), obeys=False))
    device.run(1.0)
    big = device.start(Job("big", "big", 12 * GIB, forever()))
    device.run(30.0)
    assert big.waits
    revoked = ArbiterSettings().revoke_timeout
    assert revoked <= big.waits[0] <= revoked + 2.0


def test_who_left_or_was_quiet_teaches_nothing_by_it() -> None:
    ignorant = Ignorant(50, keeps=15.0)
    ignorant.device.run(30.0)
    arbiter = ignorant.device.arbiter
    assert arbiter._roster.sessions["eve"].revoke_timeout == SHORTEST
    while not ignorant.eve.lease or ignorant.eve.revoked is not None:
        ignorant.device.run(ignorant.device.now + 0.01)
    now = ignorant.device.now
    # it claims to be quiet, is revoked at once and obeys
    ignorant.device._apply(arbiter.idle("eve", ignorant.eve.lease, 0.0, 10.0, now))
    assert ignorant.eve.revoked is not None
    arbiter.release("eve", ignorant.eve.lease, 0.0, now)
    assert arbiter._roster.sessions["eve"].revoke_timeout == SHORTEST
