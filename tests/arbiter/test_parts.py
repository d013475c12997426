"""Each session gets its part of the GPU by weight, where the memory fits, whatever its kernels and its queue."""

from __future__ import annotations

import pytest

from gpushare_spawner.arbiter.gpu_arbiter import PACE, PACE_ALONE, UNPACED_AFTER, GpuArbiter
from gpushare_spawner.arbiter.session import ArbiterSettings, Decision, LeaseGrant, Revoke
from tests.arbiter.virtual_gpu import GIB, Job, VirtualGpu, alternating, forever, slow
from tests.present import present


def gpu(**settings: object) -> VirtualGpu:
    return VirtualGpu(GpuArbiter(16 * GIB, ArbiterSettings(**settings)))  # type: ignore[arg-type]


def run(device: VirtualGpu, name: str, weight: int, kernel: float = 0.0, ahead: int = 1, gib: float = 0.5) -> Job:
    device.session(name, weight)
    return device.start(Job(name, name, int(gib * GIB), forever(), kernel=kernel, ahead=ahead))


def parts(device: VirtualGpu) -> dict[str, float]:
    """Share of the elapsed time that each session had."""
    sums: dict[str, float] = {}
    for job in [*device.gone, *device.jobs.values()]:
        sums[job.session] = sums.get(job.session, 0.0) + job.gpu_seconds / device.now
    return sums


WEIGHTS = [
    slow({"a": 30, "b": 70}),
    slow({"a": 50, "b": 10, "c": 10}),
    {"a": 75, "b": 5, "c": 5, "d": 5, "e": 5, "f": 5},
    {"a": 10, "b": 90},
]


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(("kernel", "ahead"), [(0.001, 4), (0.02, 4), (0.02, 400)])
@pytest.mark.parametrize("nvml", [False, True])
def test_sessions_that_fit_together_get_their_parts(
    weights: dict[str, int], kernel: float, ahead: int, nvml: bool
) -> None:
    device = gpu()
    for name, weight in weights.items():
        run(device, name, weight, kernel, ahead)
    if nvml:
        device.tell_utilisation()
    device.run(20.0)
    total = sum(weights.values())
    assert parts(device) == pytest.approx({name: weight / total for name, weight in weights.items()}, abs=0.02)
    assert device.used_seconds > 0.99 * device.now


@pytest.mark.parametrize("weights", WEIGHTS)
def test_kernels_of_three_seconds_are_paid_back(weights: dict[str, int]) -> None:
    device = gpu()
    for name, weight in weights.items():
        run(device, name, weight, 3.0)
    device.run(120.0)
    total = sum(weights.values())
    assert parts(device) == pytest.approx({name: weight / total for name, weight in weights.items()}, abs=0.04)


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize(("gib", "seconds"), [(0.5, 120.0), (9.0, 2000.0)])
def test_long_kernels_win_nothing_from_short_ones(exclusive: bool, gib: float, seconds: float) -> None:
    device = gpu(exclusive=exclusive)
    run(device, "long", 50, 3.0, gib=gib)
    run(device, "short", 50, 0.02, gib=gib)
    device.run(seconds)
    assert parts(device)["long"] == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("exclusive", [False, True])
def test_a_deep_queue_wins_nothing_from_a_shallow_one(exclusive: bool) -> None:
    device = gpu(exclusive=exclusive)
    run(device, "deep", 50, 0.02, ahead=400)
    run(device, "shallow", 50, 0.02, ahead=4)
    device.run(60.0)
    assert parts(device)["deep"] == pytest.approx(0.5, abs=0.03)


def test_a_paced_client_drains_soon() -> None:
    device = gpu()
    run(device, "deep", 10, 0.02, ahead=400)
    run(device, "other", 90, 0.02, ahead=4)
    device.run(10.0)
    assert device.jobs["deep"].pace == device.jobs["other"].pace == PACE
    assert max(device.jobs["other"].waits, default=0.0) < 0.3
    device.crash("other")
    device.run(12.0)
    assert device.jobs["deep"].pace == 0.0


def test_a_neighbour_that_connects_and_leaves_all_the_time_changes_the_pace_of_others_once() -> None:
    arbiter = GpuArbiter(16 * GIB)
    arbiter.add_session("worker", 50, 0.0)
    arbiter.add_session("restless", 50, 0.0)
    arbiter.connect("job", "worker", 0.0)
    arbiter.request("job", GIB, 0, 0.0)
    changes = []
    for number in range(100):
        now = 0.01 * number
        arbiter.connect(number, "restless", now)
        changes += arbiter.paces()
        arbiter.disconnect(number, now + 0.005)
        changes += arbiter.paces()
    assert [change.seconds for change in changes] == [PACE_ALONE]
    due = present(arbiter.next_wakeup())
    assert due == pytest.approx(0.995 + UNPACED_AFTER)
    arbiter.tick(due)
    assert [change.seconds for change in arbiter.paces()] == [0.0]


def test_one_that_holds_a_lease_and_computes_nothing_keeps_nobody_from_the_gpu() -> None:
    """It neither answers REVOKE nor says that it is idle; the driver's samples tell that it does not compute."""
    arbiter = GpuArbiter(16 * GIB)
    leases: dict[str, int] = {}

    def carry_out(decisions: list[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, LeaseGrant):
                leases[str(decision.client)] = decision.lease
            elif isinstance(decision, Revoke) and decision.client == "worker":
                carry_out(arbiter.release("worker", leases.pop("worker"), 0.0, now))
                carry_out(arbiter.request("worker", 0, 0, now))

    now, step, sampled, busy, late = 0.0, 0.002, 0.0, 0.0, 0.0
    for name, weight in (("worker", 10), ("idler", 90)):
        arbiter.add_session(name, weight, now)
        carry_out(arbiter.connect(name, name, now))
        carry_out(arbiter.request(name, 0, 0, now))
    while now < 6.0:
        now += step
        busy += step if "worker" in leases else 0.0
        late += step if "worker" in leases and now > 2.0 else 0.0
        carry_out(arbiter.tick(now))
        if now - sampled >= 0.2:
            carry_out(arbiter.delivered(sampled, now, {"worker": busy, "idler": 0.0}, now))
            sampled, busy = now, 0.0
    assert late > 0.95 * 4.0


@pytest.mark.parametrize("exclusive", [False, True])
def test_ignoring_revocations_and_coming_back_wins_nothing(exclusive: bool) -> None:
    """It computes on without a lease until it has one again, as a library does that was told to fail open."""
    device = gpu(exclusive=exclusive)
    run(device, "honest", 50, 0.02, ahead=4)
    device.session("rude", 50)
    computed = 0.0
    now = 0.0
    for number in range(60):
        name = f"rude{number}"
        device.start(Job(name, "rude", GIB // 2, forever(), obeys=False))
        device.run(now := now + 1.0)
        job = device.jobs.pop(name)
        device.gone.append(job)
        job.alive = False
        computed += job.gpu_seconds
        device._apply(device.arbiter.disconnect(name, device.now, alive=True))
    assert computed < 0.55 * 60.0


def test_lies_about_being_quiet_win_nothing() -> None:
    """IDLE and BUSY every 20 ms from a client whose kernels run on."""
    for nvml in (False, True):
        device = gpu()
        liar = run(device, "liar", 50, 0.001, 4)
        honest = run(device, "honest", 50, 0.001, 4)
        if nvml:
            device.tell_utilisation()

        def lie(device: VirtualGpu = device, liar: Job = liar, idle: bool = True) -> None:
            if liar.lease and liar.revoked is None:
                if idle:
                    device._apply(device.arbiter.idle("liar", liar.lease, liar.busy, 0.02, device.now))
                else:
                    device._apply(device.arbiter.busy("liar", liar.lease, device.now))
            device.after(0.02, lambda: lie(device, liar, not idle))

        lie()
        device.run(30.0)
        assert liar.gpu_seconds < 0.53 * 30.0, nvml
        assert honest.gpu_seconds > 0.47 * 30.0, nvml


def test_a_load_that_leaves_the_gpu_idle_is_not_held_back() -> None:
    """Both together want 80 %: the driver says so, and nobody's lease is revoked although weights differ."""
    device = gpu()
    for name, weight in (("a", 10), ("b", 90)):
        device.session(name, weight)
        device.start(Job(name, name, GIB, alternating(0.0015, 0.001)))
    device.tell_utilisation()
    device.run(5.0)
    switches = len(device.switches)
    device.run(15.0)
    assert len(device.switches) - switches < 10


def test_a_session_that_cannot_use_its_part_leaves_the_rest_to_others() -> None:
    device = gpu()
    device.session("light", 90)
    light = device.start(Job("light", "light", GIB, alternating(0.009, 0.001)))
    heavy = run(device, "heavy", 10)
    device.tell_utilisation()
    device.run(20.0)
    assert heavy.gpu_seconds > 0.8 * 20.0
    assert light.gpu_seconds > 0.05 * 20.0


@pytest.mark.parametrize("nvml", [False, True])
def test_a_borrower_yields_to_the_owner_that_returns(nvml: bool) -> None:
    device = gpu()
    device.session("owner", 0)
    device.session("borrower", 1)
    borrower = device.start(Job("borrower", "borrower", GIB, forever(), kernel=0.02, ahead=4))
    if nvml:
        device.tell_utilisation()
    device.run(10.0)
    assert borrower.gpu_seconds == pytest.approx(10.0, rel=0.01)
    device.set_weight("owner", 50)
    owner = device.start(Job("owner", "owner", GIB, forever(), kernel=0.02, ahead=4))
    device.run(30.0)
    assert owner.gpu_seconds > 0.95 * 20.0
    assert borrower.gpu_seconds - 10.0 < 0.05 * 20.0


def test_several_processes_share_their_sessions_part() -> None:
    device = gpu()
    device.session("many", 50)
    for number in range(3):
        device.start(Job(f"many{number}", "many", GIB, forever(), kernel=0.02, ahead=4))
    run(device, "one", 50, 0.02, 4)
    device.tell_utilisation()
    device.run(20.0)
    assert parts(device) == pytest.approx({"many": 0.5, "one": 0.5}, abs=0.02)


def test_the_account_shows_what_was_entitled_and_what_was_received() -> None:
    device = gpu()
    alone = run(device, "a", 75)
    device.run(10.0)
    run(device, "b", 25)
    device.run(30.0)
    view = device.arbiter.session_snapshot("a").delivered
    assert view.entitled_seconds == pytest.approx(15.0, abs=0.3)
    assert view.delivered_seconds == pytest.approx(alone.gpu_seconds - 10.0, abs=0.3)
