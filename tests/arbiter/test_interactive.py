"""Those whose users wait are served first, at a stated cost and without more GPU time than their part."""

from __future__ import annotations

import random
from collections.abc import Hashable, Iterator

import pytest

from gpushare_spawner.arbiter.gpu_arbiter import GpuArbiter
from gpushare_spawner.arbiter.session import ArbiterSettings, ArbitratedSession, Client, Decision, Revoke
from gpushare_spawner.arbiter.time_slices import bound, group_with, is_interactive, newcomers, part_of_gpu
from tests.arbiter.virtual_gpu import GIB, Job, VirtualGpu, alternating, forever, slow


def lying_about_pauses(device: VirtualGpu, liar: str) -> None:
    """The liar's processes say at the end of each burst that they have been quiet for as long as they like."""
    told = device.arbiter.idle

    def idle(client: Hashable, lease: int, busy: float, quiet: float, now: float) -> list[Decision]:
        return told(client, lease, busy, 1e9 if str(client).startswith(liar) else quiet, now)

    device.arbiter.idle = idle  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("weights", [slow((50, 50)), (20, 80), slow((80, 20))])
@pytest.mark.parametrize(("burst", "pause"), [(0.5, 1.01), (4.9, 1.01), (4.9, 0.005)])
def test_one_that_pretends_to_be_short_gains_no_gpu_time(weights: tuple[int, int], burst: float, pause: float) -> None:
    device = VirtualGpu(GpuArbiter(16 * GIB))
    lying_about_pauses(device, "eve")
    for name, weight in zip(("eve", "bob"), weights, strict=True):
        device.session(name, weight)
    eve = device.start(Job("eve", "eve", 12 * GIB, alternating(pause, burst)))
    bob = device.start(Job("bob", "bob", 12 * GIB, forever()))
    device.run(1500.0)
    assert eve.gpu_seconds < (weights[0] / 100 + 0.03) * 1500
    # hand-offs cost no more than a fifth of the time, and a time slice may have just begun
    assert eve.gpu_seconds + bob.gpu_seconds > 0.78 * 1500


def test_batch_work_alone_costs_the_small_bound() -> None:
    device = VirtualGpu(GpuArbiter(16 * GIB))
    for name in ("a", "b", "c"):
        device.session(name, 30)
        device.start(Job(name, name, 12 * GIB, forever()))
    device.run(500.0)
    used = device.used_seconds
    device.run(2500.0)
    assert device.used_seconds - used > (1 - 0.025) * 2000 - 15


def test_a_user_among_jobs_is_served_within_seconds_and_the_jobs_lose_no_more_than_the_bound() -> None:
    chance = random.Random(1)

    def cells() -> Iterator[tuple[float, float]]:
        while True:
            yield chance.expovariate(1 / 40), chance.expovariate(1 / 2)

    device = VirtualGpu(GpuArbiter(16 * GIB))
    for name in ("a", "b"):
        device.session(name, 33)
        device.start(Job(name, name, 12 * GIB, forever()))
    device.session("user", 33)
    user = device.start(Job("user", "user", 8 * GIB, cells()))
    device.run(4000.0)
    waits = sorted(user.waits)
    assert len(waits) > 50
    assert waits[len(waits) // 2] < 2.0
    assert waits[int(0.9 * len(waits))] < 12.0  # a time slice of the jobs has just begun, and lasts about 10 s
    assert device.used_seconds > 0.80 * 4000


def test_a_user_who_returns_when_the_time_slice_is_over_takes_the_gpu_from_a_holder_that_would_be_next_again() -> None:
    arbiter = GpuArbiter(16 * GIB)
    for name, weight in (("job", 90), ("user", 10)):
        arbiter.add_session(name, weight, 0.0)
        arbiter.connect(name, name, 0.0)
    arbiter.request("job", 12 * GIB, 0, 0.0)
    # no client waited, so the job's time slice has been over for long
    decisions = arbiter.request("user", 12 * GIB, 0, 1000.0)
    assert [(type(decision), decision.client) for decision in decisions] == [(Revoke, "job")]


def test_one_that_has_worked_for_long_makes_way_before_one_that_has_just_come() -> None:
    arbiter = GpuArbiter(16 * GIB)
    for name in "abc":
        arbiter.add_session(name, 30, 0.0)
        arbiter.connect(name, name, 0.0)
    arbiter.request("a", 8 * GIB, 0, 0.0)
    arbiter.request("b", 8 * GIB, 0, 5.0)
    decisions = arbiter.request("c", 8 * GIB, 0, 9.0)
    assert [(type(d), d.client) for d in decisions] == [(Revoke, "a")]


def sessions(*attained: float) -> list[Client]:
    return [
        Client(number, ArbitratedSession(str(number), 25, attained=seconds)) for number, seconds in enumerate(attained)
    ]


def test_the_bound_follows_those_who_wait() -> None:
    settings = ArbiterSettings()
    assert bound([], settings) == 0.025
    assert bound(sessions(100.0, 6.0), settings) == 0.025
    assert bound(sessions(100.0, 5.0), settings) == 0.20


def test_long_bursts_are_interactive_after_a_pause_of_ten_seconds_only() -> None:
    settings = ArbiterSettings()
    session = ArbitratedSession("a", 25, pause=9.0)
    for _ in range(3):
        session.bursts.learn(20.0)
    assert not is_interactive(session, settings)
    session.pause = 10.0
    assert is_interactive(session, settings)
    session.attained = 5.1
    assert not is_interactive(session, settings)


def test_the_least_attained_comes_first() -> None:
    settings = ArbiterSettings()
    waiting = sessions(3.0, 1.0, 9.0, 2.0)
    waiting[3].session.paused = False
    assert [client.id for client in newcomers(waiting, settings)] == [1, 0]


def test_those_that_attained_least_stay_beside_a_newcomer() -> None:
    arbiter = GpuArbiter(16 * GIB)
    holders, (newcomer,) = sessions(50.0, 3.0, 20.0), sessions(0.0)
    for client in [*holders, newcomer]:
        client.working_set = 5 * GIB
    assert group_with(newcomer, holders, arbiter._roster.vram_budget()) == [newcomer, holders[1], holders[2]]


def test_a_hand_off_beside_others_that_work_stops_only_a_part_of_the_gpu() -> None:
    moving, *others = sessions(0.0, 1.0, 2.0, 3.0)
    assert part_of_gpu([moving], []) == 1.0
    assert part_of_gpu([moving], others) == 1.0  # they do not work
    for client in others:
        client.lease = 1
    assert part_of_gpu([moving], others) == 0.25
    assert part_of_gpu([], others) == 1.0
