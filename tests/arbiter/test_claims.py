"""No session takes from another by what its processes say of their memory and their transfers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpushare_spawner.arbiter.gpu_arbiter import GpuArbiter
from gpushare_spawner.arbiter.session import ArbiterSettings, Decision, LeaseGrant
from gpushare_spawner.arbiter.time_slices import TRUST, Bandwidth
from tests.arbiter.virtual_gpu import GIB, Job, VirtualGpu, alternating, forever


class Liar(VirtualGpu):
    """A device on which the clients of the session "eve" say of their transfers whatever they like."""

    def __init__(self, says: Callable[[int, float], tuple[int, float]], vram: int = 16 * GIB) -> None:
        super().__init__(GpuArbiter(vram))
        arbiter = self.arbiter
        told = {"paged_in": arbiter.paged_in, "paged_out": arbiter.paged_out}

        def lying(name: str) -> Callable[..., list[Decision]]:
            def tell(client: str, amount: int, seconds: float, now: float) -> list[Decision]:
                if client.startswith("eve"):
                    amount, seconds = says(amount, seconds)
                return told[name](client, amount, seconds, now)

            return tell

        for name in told:
            setattr(arbiter, name, lying(name))


def honest(amount: int, seconds: float) -> tuple[int, float]:
    return amount, seconds


def race(says: Callable[[int, float], tuple[int, float]], names: tuple[str, ...]) -> tuple[float, int]:
    """Longest wait of the honest after the first time slices, and switches, of jobs of 12 GiB each on 16 GiB."""
    device = Liar(says)
    for name in names:
        device.session(name, 50)
        device.start(Job(name, name, 12 * GIB, forever()))
    device.run(6000.0)
    waits = [wait for name in names if name != "eve" for wait in device.jobs[name].waits[3:]]
    return max(waits), len(device.switches)


SLOW, FAST, HUGE = (lambda a, s: (a, 1.8e10)), (lambda a, s: (a, 1e-9)), (lambda a, s: (2**63, 1.8e10))


@pytest.mark.parametrize("says", [SLOW, FAST, HUGE])
@pytest.mark.parametrize("names", [("eve", "bob"), ("eve", "bob", "cyd"), ("eve", "bob", "cyd", "dan")])
def test_false_times_of_transfers_hardly_change_the_time_slices_of_others(
    says: Callable[[int, float], tuple[int, float]], names: tuple[str, ...]
) -> None:
    wait, switches = race(honest, names)
    lied_wait, lied_switches = race(says, names)
    assert lied_wait < 2 * wait
    assert lied_switches < 2 * switches


def test_a_transfer_that_nobody_ordered_teaches_nothing() -> None:
    arbiter = GpuArbiter(16 * GIB)
    arbiter.add_session("eve", 50, 0.0)
    arbiter.connect("eve", "eve", 0.0)
    arbiter.request("eve", 12 * GIB, 0, 0.0)
    guess = arbiter._cost.sequential(GIB)
    for now in (10.0, 20.0):
        arbiter.paged_in("eve", 2**63, 2.0**64 / 1e9, now)
        arbiter.paged_out("eve", 2**63, 1e-9, now)
    assert arbiter._cost.sequential(GIB) == guess


def test_a_claimed_time_counts_only_up_to_the_time_since_the_order() -> None:
    arbiter = GpuArbiter(16 * GIB)
    for name in "ab":
        arbiter.add_session(name, 50, 0.0)
        arbiter.connect(name, name, 0.0)
    (grant,) = arbiter.request("a", 12 * GIB, 0, 0.0)
    assert isinstance(grant, LeaseGrant)
    arbiter.release("a", grant.lease, 1.0, 1.0)
    arbiter.request("b", 12 * GIB, 0, 2.0)  # a is told to page out 8 GiB
    arbiter.paged_out("a", 8 * GIB, 1e9, 3.0)
    assert arbiter._cost.bandwidth_out.value == pytest.approx(8 * GIB)
    arbiter.paged_out("a", 8 * GIB, 1e9, 1000.0)  # an order has one answer
    assert arbiter._cost.bandwidth_out.value == pytest.approx(8 * GIB)


@pytest.mark.parametrize("truth", [[12e9], [12e9, 12.5e9], [11e9, 12e9, 12.5e9], [11e9, 12e9, 12e9, 13e9, 12e9]])
@pytest.mark.parametrize("lie", [1.0, 1e20])
def test_the_estimate_stays_between_what_the_others_measured_and_the_guess(truth: list[float], lie: float) -> None:
    bandwidth = Bandwidth(ArbiterSettings())
    for number, value in enumerate(truth):
        bandwidth.learn(str(number), GIB, GIB / value)
    for _ in range(50):
        bandwidth.learn("eve", GIB, GIB / lie)
    assert min(8e9, *truth) <= bandwidth.value * 1.000001
    assert bandwidth.value * 0.999999 <= max(8e9, *truth)
    bandwidth.forget("eve")
    assert min(truth) <= bandwidth.value * 1.000001


def test_one_session_alone_is_believed_within_a_factor_of_the_guess() -> None:
    for lie, expected in ((1.0, 8e9 / TRUST), (1e20, 8e9 * TRUST)):
        bandwidth = Bandwidth(ArbiterSettings())
        bandwidth.learn("eve", GIB, GIB / lie)
        assert bandwidth.value == pytest.approx(expected)


def neighbours_wait(clients: int, managed: int) -> float:
    """Longest wait of two neighbours of 12 GiB beside a session that claims so much on so many connections."""
    device = VirtualGpu(GpuArbiter(16 * GIB))
    for name in ("bob", "cyd"):
        device.session(name, 50)
        device.start(Job(name, name, 12 * GIB, forever()))
    device.session("eve", 50)
    for number in range(clients):
        device.start(Job(f"eve{number}", "eve", managed, forever()))
    device.run(2500.0)
    return max(wait for name in ("bob", "cyd") for wait in device.jobs[name].waits)


def test_a_session_stretches_the_time_slices_of_others_by_no_more_than_the_gpus_memory() -> None:
    whole = neighbours_wait(1, 16 * GIB)
    for clients, managed in ((1, 48 * GIB), (1, 2**63), (16, 12 * GIB)):
        assert neighbours_wait(clients, managed) < 1.2 * whole


def test_many_connections_of_one_session_spend_no_credit_of_others() -> None:
    device = VirtualGpu(GpuArbiter(16 * GIB))
    device.session("eve", 50)
    for number in range(8):
        device.start(Job(f"eve{number}", "eve", 12 * GIB, forever()))
    device.run(2000.0)
    for credit in (device.arbiter._schedule.batch_credit, device.arbiter._schedule.interactive_credit):
        assert credit.seconds == ArbiterSettings().hand_off_credit


def together(plain: int, shown: int | None, busy: bool) -> bool:
    """Whether two neighbours of 6 GiB run together beside a session that claims so much plain memory."""
    arbiter = GpuArbiter(16 * GIB)
    for name in ("eve", "bob", "cyd"):
        arbiter.add_session(name, 50, 0.0)
        arbiter.connect(name, name, 0.0)
    if shown is not None:
        arbiter.device_memory("eve", shown, 0, 0.0)
    if busy:
        arbiter.request("eve", 0, plain, 0.0)
    else:
        arbiter.memory("eve", 0, plain, 0.0)
    for name in ("bob", "cyd"):
        arbiter.request(name, 6 * GIB, 0, 1.0)
    return {"bob", "cyd"} <= set(arbiter.holders())


@pytest.mark.parametrize("shown", [None, 0, 3 * GIB])
def test_a_claim_of_plain_memory_that_the_driver_does_not_confirm_serialises_nobody(shown: int | None) -> None:
    assert together(2**63, shown, busy=False)


def test_plain_memory_that_the_driver_confirms_counts() -> None:
    assert not together(8 * GIB, 8 * GIB, busy=False)


def test_confirmed_memory_counts_no_longer_when_the_driver_shows_less() -> None:
    arbiter = GpuArbiter(16 * GIB)
    arbiter.add_session("eve", 50, 0.0)
    arbiter.connect("eve", "eve", 0.0)
    arbiter.memory("eve", 0, 8 * GIB, 0.0)
    for shown, left in ((8 * GIB, 8 * GIB), (GIB, 15 * GIB), (None, 16 * GIB)):
        arbiter.device_memory("eve", shown, 0, 1.0)
        assert arbiter._roster.vram_budget().for_managed == left


@pytest.mark.parametrize("reckoned", [True, False])
def test_memory_that_a_session_holds_and_does_not_claim_displaces_no_more_than_it_takes(reckoned: bool) -> None:
    """eve's processes hold 5 GiB and claim nothing; bob and cyd have 6 GiB each on 16."""
    device = VirtualGpu(GpuArbiter(16 * GIB))
    device.session("eve", 50)
    for number in range(6):
        device.start(Job(f"eve{number}", "eve", 0, alternating(1e9, 1.0)))
        hidden = 5 * GIB // 6
        device.arbiter.device_memory(f"eve{number}", hidden, hidden if reckoned else 0, 0.0)
    together = 0.0
    for name in ("bob", "cyd"):
        device.session(name, 50)
        device.start(Job(name, name, 6 * GIB, forever()))
    for second in range(1, 201):
        device.run(float(second))
        together += {"bob", "cyd"} <= set(device.arbiter.holders())
    # 12 GiB beside 5 do not fit: together, the driver would move pages at each kernel
    assert together == (0 if reckoned else 200)
    if reckoned:
        times = [device.jobs[name].gpu_seconds for name in ("bob", "cyd")]
        assert min(times) > 0.45 * 200, "they take turns, and lose the hand-offs alone"


def test_one_that_claims_unconfirmed_plain_memory_and_works_takes_turns_with_others_who_run_together() -> None:
    device = VirtualGpu(GpuArbiter(16 * GIB))
    for name, managed, plain in (("eve", 0, 2**63), ("bob", 6 * GIB, 0), ("cyd", 6 * GIB, 0)):
        device.session(name, 50)
        device.start(Job(name, name, managed, forever(), plain=plain))
    device.run(600.0)
    assert device.jobs["eve"].gpu_seconds < 0.51 * 600
    for name in ("bob", "cyd"):
        assert device.jobs[name].gpu_seconds > 0.24 * 600


@pytest.mark.parametrize("context", [0, GIB])
def test_connections_without_a_process_on_the_gpu_take_no_memory_from_others(context: int) -> None:
    arbiter = GpuArbiter(16 * GIB, ArbiterSettings(context_bytes=context))
    for name in ("eve", "bob", "cyd"):
        arbiter.add_session(name, 50, 0.0)
        arbiter.connect(name, name, 0.0)
    for number in range(64):
        arbiter.connect(f"eve{number}", "eve", 0.0)
    for name in ("bob", "cyd"):
        arbiter.request(name, 6 * GIB, 0, 1.0)
    assert set(arbiter.holders()) == {"bob", "cyd"}
