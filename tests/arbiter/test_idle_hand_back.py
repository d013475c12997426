"""A quiet holder gives way when somebody waits, and only then."""

from __future__ import annotations

import pytest

from gpushare_spawner.arbiter.gpu_arbiter import GpuArbiter
from gpushare_spawner.arbiter.session import ArbiterSettings, LeaseGrant, RecentSpans, Revoke, RevokeReason
from tests.arbiter.virtual_gpu import GIB, Job, VirtualGpu, alternating, forever


def two_big_ones(**settings: object) -> tuple[GpuArbiter, int]:
    """a holds a lease, b will not fit beside it; without credit only the rule in question ends a time slice."""
    settings = {"hand_off_credit": 0.0, "interactive_overhead_bound": 0.025} | settings
    arbiter = GpuArbiter(16 * GIB, ArbiterSettings(**settings))  # type: ignore[arg-type]
    for name in "ab":
        arbiter.add_session(name, 50, 0.0)
        arbiter.connect(name, name, 0.0)
    (grant,) = arbiter.request("a", 12 * GIB, 0, 0.0)
    assert isinstance(grant, LeaseGrant)
    return arbiter, grant.lease


def test_nobody_waits_nobody_is_disturbed() -> None:
    arbiter, lease = two_big_ones()
    assert arbiter.idle("a", lease, 1.0, 0.002, 1.0) == []
    assert arbiter.next_wakeup() is None
    assert arbiter.tick(1000.0) == []


def test_quiet_before_the_other_asks() -> None:
    arbiter, lease = two_big_ones()
    arbiter.idle("a", lease, 1.0, 0.002, 1.0)
    (revoke,) = arbiter.request("b", 12 * GIB, 0, 1.5)
    assert isinstance(revoke, Revoke)
    assert (revoke.client, revoke.lease, revoke.reason) == ("a", lease, RevokeReason.IDLE)
    assert revoke.page_out == 8 * GIB


def test_quiet_while_the_other_waits() -> None:
    arbiter, lease = two_big_ones()
    assert arbiter.request("b", 12 * GIB, 0, 0.01) == []
    (revoke,) = arbiter.idle("a", lease, 1.0, 0.002, 1.0)
    assert isinstance(revoke, Revoke)
    assert revoke.reason is RevokeReason.IDLE
    (grant,) = arbiter.release("a", lease, 1.0, 1.001)
    assert isinstance(grant, LeaseGrant)
    assert (grant.client, grant.prefetch) == ("b", 0)


def test_a_quiet_neighbour_stays_where_it_is_not_in_the_way() -> None:
    arbiter, lease = two_big_ones()
    arbiter.add_session("c", 50, 0.0)
    arbiter.connect("c", "c", 0.0)
    (grant,) = arbiter.request("c", 2 * GIB, 0, 0.0)
    assert isinstance(grant, LeaseGrant)
    arbiter.request("b", 12 * GIB, 0, 0.01)
    assert arbiter.idle("c", grant.lease, 1.0, 0.002, 1.0) == []
    (revoke,) = arbiter.idle("a", lease, 1.0, 0.002, 1.1)
    assert revoke.client == "a"


def learn_gaps(arbiter: GpuArbiter, lease: int, gap: float, times: int = 7) -> float:
    now = 1.0
    for _ in range(times):
        arbiter.idle("a", lease, now, 0.0, now)
        now += gap
        arbiter.busy("a", lease, now)
        now += 0.5
    return now


def test_a_short_thinker_is_waited_for_until_this_pause_is_clearly_longer() -> None:
    arbiter, lease = two_big_ones(bandwidth_guess=8 * GIB)
    now = learn_gaps(arbiter, lease, 0.05)
    arbiter.request("b", 12 * GIB, 0, now)
    assert arbiter.idle("a", lease, now, 0.0, now) == []
    assert arbiter.next_wakeup() == pytest.approx(now + 0.2)
    assert arbiter.tick(now + 0.19) == []
    (revoke,) = arbiter.tick(now + 0.201)
    assert (revoke.client, revoke.reason) == ("a", RevokeReason.IDLE)  # type: ignore[union-attr]


def test_nobody_is_waited_for_longer_than_the_hand_off_costs() -> None:
    arbiter, lease = two_big_ones(bandwidth_guess=8 * GIB)
    now = learn_gaps(arbiter, lease, 1.0)
    arbiter.request("b", 12 * GIB, 0, now)
    # 8 GiB have to leave and to come back at 8 GiB/s: 2 s.
    hand_off = 2.001
    assert arbiter.idle("a", lease, now, 0.0, now) == []
    assert arbiter.next_wakeup() == pytest.approx(now + hand_off)
    assert arbiter.tick(now + 1.9) == []
    assert len(arbiter.tick(now + hand_off)) == 1


def test_a_short_thinker_that_comes_back_goes_on() -> None:
    arbiter, lease = two_big_ones(bandwidth_guess=8 * GIB)
    now = learn_gaps(arbiter, lease, 0.05)
    arbiter.request("b", 12 * GIB, 0, now)
    assert arbiter.idle("a", lease, now, 0.0, now) == []
    assert arbiter.busy("a", lease, now + 0.05) == []
    assert arbiter.tick(now + 3.0) == []


def test_waiting_for_a_short_thinker_ends_with_its_time_slice() -> None:
    arbiter, lease = two_big_ones(bandwidth_guess=1 * GIB)
    now = learn_gaps(arbiter, lease, 0.05)
    arbiter.request("b", 12 * GIB, 0, now)
    over = arbiter.next_wakeup()
    assert over is not None
    assert arbiter.idle("a", lease, now, 0.0, over - 0.1) == []
    (revoke,) = arbiter.tick(over)
    assert isinstance(revoke, Revoke)
    assert revoke.client == "a"


def test_a_long_thinker_is_not_waited_for() -> None:
    arbiter, lease = two_big_ones(bandwidth_guess=8 * GIB)
    now = learn_gaps(arbiter, lease, 5.0)
    assert arbiter.request("b", 12 * GIB, 0, now) == []
    (revoke,) = arbiter.idle("a", lease, now, 0.0, now)
    assert isinstance(revoke, Revoke)
    assert revoke.reason is RevokeReason.IDLE


@pytest.mark.parametrize("exclusive", [False, True])
def test_without_paging_it_gives_way_at_once(exclusive: bool) -> None:
    arbiter = GpuArbiter(16 * GIB, ArbiterSettings(hand_off_credit=0.0, exclusive=exclusive))
    for name in "ab":
        arbiter.add_session(name, 50, 0.0)
        arbiter.connect(name, name, 0.0)
    (grant,) = arbiter.request("a", GIB, 0, 0.0)
    assert isinstance(grant, LeaseGrant)
    now = learn_gaps(arbiter, grant.lease, 0.01, times=3)
    arbiter.idle("a", grant.lease, now, 0.002, now)
    now += 0.01
    answer = arbiter.request("b", GIB, 0, now)
    if not exclusive:
        assert [type(decision) for decision in answer] == [LeaseGrant]
        return
    (revoke,) = answer
    assert isinstance(revoke, Revoke)
    assert (revoke.client, revoke.page_out) == ("a", 0)


def test_from_the_last_kernel_to_the_next_takes_milliseconds() -> None:
    device = VirtualGpu(GpuArbiter(16 * GIB, ArbiterSettings(exclusive=True)))
    for name in "ab":
        device.session(name, 50)
        device.start(Job(name, name, GIB, alternating(0.02, 0.05)))
    device.run(100.0)
    # without the first ones, when pages come in
    waits = [wait for job in device.jobs.values() for wait in job.waits[2:]]
    assert len(waits) > 100
    # At most the other's burst, the time to notice its end and to drain the device.
    assert max(waits) < 0.05 + 0.01


def spans(*seconds: float) -> RecentSpans:
    recent = RecentSpans()
    for span in seconds:
        recent.learn(span)
    return recent


def test_typical_is_the_median_of_the_last_seven() -> None:
    assert spans().typical is None
    assert spans(0.01, 300.0, 0.02, 0.03, -1.0).typical == 0.02
    assert spans(*[9.0] * 10, *[1.0] * 4).typical == 1.0


@pytest.mark.parametrize("typical", [0.01, 0.3, 1.0, 1.9])
def test_patience_loses_little_whatever_comes(typical: float) -> None:
    hand_off = 2.0
    waited = spans(typical).patience(hand_off)
    for gap in (0.0, typical, 2 * typical, 0.5, 1.99, 2.0, 2.01, 100.0):
        lost = gap if gap <= waited else waited + hand_off
        assert lost <= 2 * hand_off
        if gap <= 4 * typical or gap >= hand_off:
            # like its gaps so far, or really over: at most twice what the better of staying and leaving would have lost
            assert lost <= 2 * min(gap, hand_off)


def test_patience_is_for_short_pauses_only() -> None:
    assert spans().patience(2.0) == 0.0
    assert spans(3.0, 4.0).patience(2.0) == 0.0
    assert spans(0.05, 0.05, 0.05).patience(2.0) == pytest.approx(0.2)
    # pauses between cells among those within them
    assert spans(300.0, 0.05, 300.0, 0.05, 300.0).patience(2.0) == pytest.approx(0.2)
    # the short ones are too rare, or too long, to be waited for
    assert spans(300.0, 300.0, 300.0, 300.0, 0.4).patience(2.0) == 0.0


def test_a_job_with_long_cpu_phases_leaves_the_gpu_to_the_other() -> None:
    device = VirtualGpu(GpuArbiter(16 * GIB))
    device.session("phased", 50)
    phased = device.start(Job("phased", "phased", 12 * GIB, alternating(10.0, 10.0)))
    device.session("steady", 50)
    steady = device.start(Job("steady", "steady", 12 * GIB, forever()))
    device.run(5000.0)
    assert device.used_seconds > 0.95 * 5000
    assert steady.gpu_seconds + phased.gpu_seconds == pytest.approx(device.used_seconds)
    assert phased.gpu_seconds > 0.05 * 5000
