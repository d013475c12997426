"""What a client has allocated is not what it uses: memory that was never touched keeps nobody waiting and stays."""

from __future__ import annotations

import pytest

from gpushare_spawner.arbiter.gpu_arbiter import GpuArbiter
from gpushare_spawner.arbiter.session import ArbiterSettings, Client, Decision, LeaseGrant, PageOut, Revoke
from tests.arbiter.virtual_gpu import GIB, Job, VirtualGpu, forever

MIB = 2**20


def two(reserved: int, settings: ArbiterSettings = ArbiterSettings()) -> VirtualGpu:  # noqa: B008 (frozen)
    device = VirtualGpu(GpuArbiter(16 * GIB, settings))
    for name in "ab":
        device.session(name, 50)
        device.start(Job(name, name, reserved, forever()))
    return device


def memory_poll_interval(device: VirtualGpu, seconds: float, touched: dict[str, int]) -> None:
    """What the agent does: tell the arbiter what the driver shows of each process that has run."""

    def look() -> None:
        for name, amount in touched.items():
            job = device.jobs[name]
            if job.gpu_seconds:
                resident = max(
                    0, amount - device.arbiter._residency.in_host_memory(device.arbiter._roster.client(name))
                )
                device._apply(device.arbiter.working_set(name, resident, device.now))
        device.after(seconds, look)

    device.after(seconds, look)


def test_two_jobs_that_reserve_three_quarters_and_touch_little_run_together() -> None:
    device = two(12 * GIB)
    memory_poll_interval(device, 2.0, {"a": 64 * MIB, "b": 64 * MIB})
    device.run(600.0)
    a, b = device.jobs["a"], device.jobs["b"]
    assert a.open
    assert b.open
    assert a.gpu_seconds == pytest.approx(b.gpu_seconds, rel=0.05)
    assert a.paged_in + b.paged_in <= 64 * MIB  # what little left on the first hand-off came back


def test_jobs_that_touch_all_that_they_reserved_take_turns() -> None:
    device = two(12 * GIB)
    memory_poll_interval(device, 2.0, {"a": 12 * GIB, "b": 12 * GIB})
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
        assert isinstance(grant, LeaseGrant)
        self.lease = grant.lease

    def look(self, resident: int, now: float) -> list[Decision]:
        return self.arbiter.working_set("a", resident, now)

    @property
    def working_set(self) -> int:
        return self.arbiter._roster.client("a").working_set


def test_a_client_of_which_nothing_was_seen_is_taken_to_use_all_that_it_allocated() -> None:
    looked = Looked()
    assert looked.working_set == 12 * GIB
    looked.look(64 * MIB, 0.5)
    assert looked.working_set == 64 * MIB


def test_one_that_has_finished_a_burst_is_known_at_once() -> None:
    looked = Looked()
    looked.arbiter.idle("a", looked.lease, 0.1, 0.001, 0.2)
    looked.look(64 * MIB, 0.3)
    assert looked.working_set == 64 * MIB


def test_what_is_allocated_later_counts_when_it_is_seen() -> None:
    looked = Looked()
    looked.look(64 * MIB, 2.0)
    looked.arbiter.memory("a", 14 * GIB, 0, 3.0)
    assert looked.working_set == 64 * MIB
    looked.look(GIB, 3.1)
    assert looked.working_set == GIB


class Together:
    """Two clients that reserve 12 of 16 GiB each, of which little was seen: they run together."""

    def __init__(self, reserved: int = 12 * GIB) -> None:
        self.arbiter = GpuArbiter(16 * GIB)
        self.leases: dict[str, int] = {}
        for name in "ab":
            self.arbiter.add_session(name, 50, 0.0)
            self.arbiter.connect(name, name, 0.0)
            self.arbiter.request(name, reserved, 0, 0.0)
        self.look(0.01, a=0, b=0)
        assert self.held == {"a", "b"}

    def look(self, now: float, **shown: int) -> list[Decision]:
        decisions = [d for name, amount in shown.items() for d in self.arbiter.working_set(name, amount, now)]
        self.leases.update({str(d.client): d.lease for d in decisions if isinstance(d, LeaseGrant)})
        return decisions

    @property
    def held(self) -> set[str]:
        return {str(client.id) for client in self.arbiter._roster.clients if client.held}

    def client(self, name: str) -> Client:
        return self.arbiter._roster.client(name)


def test_clients_that_fill_the_gpu_together_are_parted_and_page_out_no_more_than_was_seen() -> None:
    both = Together()
    assert both.look(0.1, a=5 * GIB, b=5 * GIB) == []
    decisions = both.look(0.2, a=8 * GIB, b=7 * GIB)
    assert len(both.held) == 1
    (revoke,) = (d for d in decisions if isinstance(d, Revoke))
    loser = str(revoke.client)
    shown = {"a": 8 * GIB, "b": 7 * GIB}[loser]
    assert 0 < revoke.page_out <= shown
    assert both.client(loser).working_set == 12 * GIB, "how much it would use is not known"


def test_jobs_that_stay_small_are_not_parted_by_one_that_fills_the_gpu_beside_them() -> None:
    """What was proven is believed in a crowd too."""
    both = Together()
    both.look(1.5, a=64 * MIB, b=13 * GIB)
    assert both.held == {"a", "b"}
    both.look(1.6, a=64 * MIB, b=15 * GIB)
    both.look(1.7, a=66 * MIB, b=15 * GIB)
    assert not both.client("a").doubted
    assert both.client("a").working_set == 66 * MIB


def test_one_that_grows_beyond_what_was_proven_in_a_crowd_is_doubted() -> None:
    both = Together()
    both.look(1.5, a=64 * MIB, b=64 * MIB)
    assert both.client("a").proven == 64 * MIB
    both.look(60.0, a=7 * GIB, b=8 * GIB)
    assert len(both.held) == 1


def test_one_that_is_doubted_and_stays_is_taken_to_fill_the_memory_that_the_other_frees() -> None:
    both = Together()
    both.look(0.2, a=8 * GIB, b=7 * GIB)
    (winner,) = both.held
    loser = ({"a", "b"} - {winner}).pop()
    residency = both.arbiter._residency
    assert residency.of(both.client(winner)) == 12 * GIB
    assert residency.of(both.client(loser)) <= 4 * GIB
    assert residency.free(16 * GIB) >= 0


def test_one_that_was_doubted_is_believed_after_a_second_of_work_for_itself() -> None:
    both = Together()
    both.look(0.2, a=8 * GIB, b=7 * GIB)
    both.look(0.3, a=8 * GIB, b=7 * GIB)
    (first,) = both.held
    second = ({"a", "b"} - {first}).pop()
    lease = both.client(second).lease
    both.arbiter.release(second, lease, 0.3, 0.4)
    both.look(0.9, **{first: 9 * GIB})
    assert both.client(first).working_set == 12 * GIB
    both.look(1.5, **{first: 10 * GIB})
    assert both.client(first).working_set == 10 * GIB


def test_who_filled_the_gpu_and_connects_anew_is_not_trusted_again_at_once() -> None:
    both = Together()
    both.look(0.2, a=8 * GIB, b=7 * GIB)
    (winner,) = both.held
    loser = ({"a", "b"} - {winner}).pop()
    both.arbiter.disconnect(loser, 0.3)
    both.arbiter.connect("new", loser, 0.4)
    both.arbiter.request("new", 12 * GIB, 0, 0.4)
    both.look(0.5, new=0)
    assert both.held == {winner}
    both.arbiter.connect("later", loser, 100.0)
    assert not both.client("later").doubted


def test_processes_of_a_session_do_not_fill_the_gpu_one_after_the_other() -> None:
    """All of a session are doubted with the one that did, those that were connected before too."""
    both = Together(reserved=16 * GIB)
    both.arbiter.connect("b2", "b", 0.05)
    both.arbiter.connect("a2", "a", 0.05)
    both.look(0.2, a=64 * MIB, b=15 * GIB)
    assert both.client("b2").doubted
    both = Together(reserved=16 * GIB)
    both.arbiter.connect("b2", "b", 0.05)
    both.arbiter.connect("a2", "a", 0.05)
    both.look(1.5, a=64 * MIB, b=64 * MIB)
    both.look(1.6, a=64 * MIB, b=15 * GIB)
    assert both.client("b2").doubted
    assert not both.client("a2").doubted, "its session did nothing"


def test_looks_are_pressing_while_clients_run_together_only_by_what_was_seen() -> None:
    both = Together()
    assert both.arbiter.memory_poll_interval == 0.1
    both.look(1.5, a=64 * MIB, b=64 * MIB)
    assert both.arbiter.memory_poll_interval == 0.5, "proven, and they may use more one day"
    both.arbiter.memory("a", 13 * GIB, 0, 1.6)
    assert both.arbiter.memory_poll_interval == 0.1
    assert Together(reserved=7 * GIB).arbiter.memory_poll_interval is None, "they fit, whatever they touch"


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
    assert isinstance(grant, LeaseGrant)
    arbiter.release("b", grant.lease, 0.1, 0.6)
    decisions = looked.look(8 * GIB, 5.0)
    assert [type(d) for d in decisions] == [PageOut]
    assert decisions[0].client == "b"


@pytest.mark.parametrize(
    ("look", "amounts"), [("working_set", (-1,)), ("device_memory", (-1, 0)), ("device_memory", (0, -1))]
)
def test_amounts_below_zero_are_refused(look: str, amounts: tuple[int, ...]) -> None:
    arbiter = Looked().arbiter
    with pytest.raises(ValueError, match="at least 0"):
        getattr(arbiter, look)("a", *amounts, 1.0)
    with pytest.raises(KeyError):
        getattr(arbiter, look)("nobody", *map(abs, amounts), 1.0)
