"""What a client has allocated is not what it uses: memory that was never touched keeps nobody waiting and stays."""

from __future__ import annotations

import pytest

from gpushare_spawner.arbiter import ArbiterSettings, Decision, GpuArbiter, Grant, PageOut
from tests.arbiter.virtual_gpu import GIB, Job, VirtualGpu, forever

MIB = 2**20


def two(reserved: int, settings: ArbiterSettings = ArbiterSettings()) -> VirtualGpu:  # noqa: B008 (frozen)
    device = VirtualGpu(GpuArbiter(16 * GIB, settings))
    for name in "ab":
        device.session(name, 50)
        device.start(Job(name, name, reserved, forever()))
    return device


def look_every(device: VirtualGpu, seconds: float, touched: dict[str, int]) -> None:
    """What the agent does: tell the arbiter what the driver shows of each process that has run."""

    def look() -> None:
        for name, amount in touched.items():
            job = device.jobs[name]
            if job.gpu_seconds:
                resident = max(0, amount - device.arbiter._residency.away(device.arbiter._roster.client(name)))
                device._apply(device.arbiter.working_set(name, resident, device.now))
        device.after(seconds, look)

    device.after(seconds, look)


def test_two_jobs_that_reserve_three_quarters_and_touch_little_run_together() -> None:
    device = two(12 * GIB)
    look_every(device, 2.0, {"a": 64 * MIB, "b": 64 * MIB})
    device.run(600.0)
    a, b = device.jobs["a"], device.jobs["b"]
    assert a.open
    assert b.open
    assert a.gpu_seconds == pytest.approx(b.gpu_seconds, rel=0.05)
    assert a.paged_in + b.paged_in <= 64 * MIB  # what little left on the first hand-off came back


def test_jobs_that_touch_all_that_they_reserved_take_turns() -> None:
    device = two(12 * GIB)
    look_every(device, 2.0, {"a": 12 * GIB, "b": 12 * GIB})
    together = []
    device.watchers.append(lambda seen: together.append(all(job.open for job in seen.jobs.values())))
    device.run(1000.0)
    assert not any(together)


class Looked:
    """One client that holds the GPU, and what is thought of it."""

    def __init__(self) -> None:
        self.arbiter = GpuArbiter(16 * GIB)
        for name in "ab":
            self.arbiter.add_session(name, 50, 0.0)
            self.arbiter.connect(name, name, 0.0)
        (grant,) = self.arbiter.request("a", 12 * GIB, 0, 0.0)
        assert isinstance(grant, Grant)
        self.lease = grant.lease

    def look(self, resident: int, now: float) -> list[Decision]:
        return self.arbiter.working_set("a", resident, now)

    @property
    def working_set(self) -> int:
        return self.arbiter._roster.client("a").working_set


def test_a_client_that_has_just_begun_is_taken_to_use_all_that_it_allocated() -> None:
    looked = Looked()
    looked.look(64 * MIB, 0.5)
    assert looked.working_set == 12 * GIB
    looked.look(64 * MIB, 1.5)
    assert looked.working_set == 64 * MIB


def test_one_that_has_finished_a_burst_is_known_at_once() -> None:
    looked = Looked()
    looked.arbiter.idle("a", looked.lease, 0.1, 0.001, 0.2)
    looked.look(64 * MIB, 0.3)
    assert looked.working_set == 64 * MIB


def test_what_is_allocated_later_counts_in_full_until_the_next_look_at_its_work() -> None:
    looked = Looked()
    looked.look(64 * MIB, 2.0)
    looked.arbiter.memory("a", 14 * GIB, 0, 3.0)
    assert looked.working_set == 2 * GIB + 64 * MIB
    looked.look(64 * MIB, 3.5)
    assert looked.working_set == 2 * GIB + 64 * MIB
    looked.look(GIB, 4.5)
    assert looked.working_set == GIB


def test_the_largest_figure_counts() -> None:
    looked = Looked()
    looked.look(3 * GIB, 2.0)
    looked.look(GIB, 4.0)
    assert looked.working_set == 3 * GIB


def test_freed_memory_is_no_working_set() -> None:
    looked = Looked()
    looked.look(3 * GIB, 2.0)
    looked.arbiter.memory("a", GIB, 0, 3.0)
    assert looked.working_set == GIB


def test_what_was_paged_out_belongs_to_the_working_set() -> None:
    looked = Looked()
    arbiter = looked.arbiter
    looked.look(12 * GIB, 2.0)
    arbiter.request("b", 10 * GIB, 0, 3.0)
    arbiter.idle("a", looked.lease, 2.0, 0.001, 3.1)
    arbiter.tick(30.0)
    assert arbiter._residency.of(arbiter._roster.client("a")) == 6 * GIB
    arbiter.release("a", looked.lease, 2.0, 30.2)
    arbiter.paged_out("a", 6 * GIB, 0.5, 30.8)
    looked.look(6 * GIB, 31.0)
    assert looked.working_set == 12 * GIB


def test_no_more_is_paged_out_than_was_seen_on_the_gpu() -> None:
    looked = Looked()
    arbiter = looked.arbiter
    looked.look(GIB, 2.0)
    arbiter.release("a", looked.lease, 2.0, 2.5)
    decisions = arbiter.request("b", 16 * GIB, 0, 3.0)
    assert [d for d in decisions if isinstance(d, PageOut)] == [PageOut("a", GIB)]


def test_a_holder_seen_to_use_more_makes_the_quiet_page_out() -> None:
    looked = Looked()
    arbiter = looked.arbiter
    arbiter.idle("a", looked.lease, 0.1, 0.0, 0.2)
    looked.look(GIB, 0.3)
    arbiter.busy("a", looked.lease, 0.4)
    (grant,) = arbiter.request("b", 12 * GIB, 0, 0.5)
    assert isinstance(grant, Grant)
    arbiter.release("b", grant.lease, 0.1, 0.6)
    decisions = looked.look(8 * GIB, 5.0)
    assert [type(d) for d in decisions] == [PageOut]
    assert decisions[0].client == "b"


@pytest.mark.parametrize("look", ["working_set", "device_memory"])
def test_amounts_below_zero_are_refused(look: str) -> None:
    arbiter = Looked().arbiter
    with pytest.raises(ValueError, match="at least 0"):
        getattr(arbiter, look)("a", -1, 1.0)
    with pytest.raises(KeyError):
        getattr(arbiter, look)("nobody", 1, 1.0)
