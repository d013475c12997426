"""Everything fits: all sessions run. What does not fit is serialised, in groups that fill the memory."""

from __future__ import annotations

import pytest

from gpushare_spawner.arbiter.gpu_arbiter import GpuArbiter
from gpushare_spawner.arbiter.session import ArbiterSettings, LeaseGrant, Revoke, RevokeReason
from tests.arbiter.virtual_gpu import GIB, Job, VirtualGpu, alternating, forever


def gpu(**settings: object) -> VirtualGpu:
    return VirtualGpu(GpuArbiter(16 * GIB, ArbiterSettings(**settings)))  # type: ignore[arg-type]


def run(gpu: VirtualGpu, name: str, gib: float, weight: int = 50, plain: float = 0.0) -> Job:
    gpu.session(name, weight)
    return gpu.start(Job(name, name, int(gib * GIB), forever(), plain=int(plain * GIB)))


def test_all_that_fit_hold_the_lease_together_without_an_end() -> None:
    arbiter = GpuArbiter(16 * GIB)
    grants = []
    for index, gib in enumerate((2, 5, 9)):
        arbiter.add_session(str(index), 30, 0.0)
        arbiter.connect(index, str(index), 0.0)
        grants += arbiter.request(index, gib * GIB, 0, float(index))
    granted = [(grant.client, grant.time_slice) for grant in grants if isinstance(grant, LeaseGrant)]
    assert (granted, len(grants)) == ([(0, 0), (1, 0), (2, 0)], 3)
    assert arbiter.holders() == ("0", "1", "2")
    assert arbiter.waiting() == ()
    assert arbiter.next_wakeup() is None
    assert arbiter.tick(1e6) == []


def test_confirmed_plain_memory_counts_even_of_those_who_are_quiet() -> None:
    device = gpu()
    device.session("quiet", 50)
    device.start(Job("quiet", "quiet", 0, alternating(1e9, 1.0), plain=5 * GIB))
    device.arbiter.device_memory("quiet", 5 * GIB, 0, 0.0)
    run(device, "a", 6)
    run(device, "b", 6)
    device.run(1.0)
    assert len(device.arbiter.waiting()) == 1


def test_context_memory_counts() -> None:
    device = gpu(context_bytes=GIB)
    run(device, "a", 7.5)
    run(device, "b", 7.5)
    device.run(1.0)
    assert len(device.arbiter.waiting()) == 1


def test_a_working_set_larger_than_the_gpu_runs_alone() -> None:
    device = gpu()
    a, b = run(device, "a", 40), run(device, "b", 1)
    device.run(3000.0)
    assert a.gpu_seconds > 0
    assert b.gpu_seconds > 0
    assert device.used_seconds < 3000.0


@pytest.mark.slow
def test_a_small_neighbour_runs_beside_whichever_big_one_has_its_time_slice() -> None:
    device = gpu()
    a, b, c = run(device, "a", 12), run(device, "b", 12), run(device, "c", 2)
    device.run(600.0)
    assert c.longest_wait < 1.0
    assert a.gpu_seconds == pytest.approx(b.gpu_seconds, rel=0.2)
    assert c.gpu_seconds == pytest.approx(200.0, rel=0.05)


@pytest.mark.slow
def test_groups_fill_the_memory() -> None:
    device = gpu()
    jobs = [run(device, name, 8, weight) for name, weight in (("a", 50), ("b", 25), ("c", 25))]
    most = []
    device.watchers.append(lambda seen: most.append(sum(job.open for job in seen.jobs.values())))
    device.run(1500.0)
    assert max(most) == 2
    assert device.used_seconds > 0.98 * 1500
    shares = [job.gpu_seconds / sum(other.gpu_seconds for other in jobs) for job in jobs]
    assert shares == pytest.approx([0.5, 0.25, 0.25], abs=0.02)


def test_exclusive_serialises_what_would_fit_by_session_not_by_process() -> None:
    device = gpu(exclusive=True)
    device.session("a", 50)
    first = device.start(Job("a1", "a", GIB, forever()))
    second = device.start(Job("a2", "a", GIB, forever()))
    run(device, "b", 1)
    together = []

    def watch(seen: VirtualGpu) -> None:
        holders = {job.session for job in seen.jobs.values() if job.open}
        assert len(holders) <= 1
        together.append(sum(job.open for job in seen.jobs.values()))

    device.watchers.append(watch)
    device.run(200.0)
    assert max(together) == 2
    assert first.gpu_seconds + second.gpu_seconds == pytest.approx(100, rel=0.02)


def test_a_neighbour_joins_at_once_where_it_fits_even_while_another_waits() -> None:
    arbiter = GpuArbiter(16 * GIB, ArbiterSettings(hand_off_credit=0.0))
    for name in "abc":
        arbiter.add_session(name, 30, 0.0)
        arbiter.connect(name, name, 0.0)
    arbiter.request("a", 10 * GIB, 0, 0.0)
    assert arbiter.request("b", 10 * GIB, 0, 1.0) == []
    (grant,) = arbiter.request("c", 2 * GIB, 0, 2.0)
    assert isinstance(grant, LeaseGrant)
    assert grant.client == "c"


def test_holders_that_outgrow_the_memory_together_are_parted_at_once() -> None:
    arbiter = GpuArbiter(16 * GIB)
    for name in "ab":
        arbiter.add_session(name, 30, 0.0)
        arbiter.connect(name, name, 0.0)
        arbiter.request(name, 6 * GIB, 0, 0.0)
    (revoke,) = [d for d in arbiter.memory("a", 12 * GIB, 0, 5.0) if isinstance(d, Revoke)]
    assert revoke.reason is RevokeReason.TIME_SLICE
    assert arbiter.release(revoke.client, revoke.lease, 5.0, 5.001) == []


def test_who_is_quiet_is_parted_first_when_a_holder_grows() -> None:
    arbiter = GpuArbiter(16 * GIB)
    leases = {}
    for name in "ab":
        arbiter.add_session(name, 30, 0.0)
        arbiter.connect(name, name, 0.0)
        (grant,) = arbiter.request(name, 6 * GIB, 0, 0.0)
        assert isinstance(grant, LeaseGrant)
        leases[name] = grant.lease
    assert arbiter.idle("a", leases["a"], 1.0, 0.0, 1.0) == []
    (revoke,) = [d for d in arbiter.memory("b", 12 * GIB, 0, 1.1) if isinstance(d, Revoke)]
    assert (revoke.client, revoke.reason) == ("a", RevokeReason.IDLE)
    assert revoke.page_out > 0
