"""Stale, doubled and missing messages, crashes at any point: nobody else suffers for long."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from gpushare_spawner.arbiter.gpu_arbiter import UNPACED_AFTER, GpuArbiter
from gpushare_spawner.arbiter.session import ArbiterSettings, LeaseGrant, Revoke
from tests.arbiter.virtual_gpu import GIB, Job, VirtualGpu, alternating, forever


def contended() -> tuple[GpuArbiter, int]:
    """a holds, b waits, both big."""
    arbiter = GpuArbiter(16 * GIB, ArbiterSettings(hand_off_credit=0.0))
    for name in "ab":
        arbiter.add_session(name, 50, 0.0)
        arbiter.connect(name, name, 0.0)
    (grant,) = arbiter.request("a", 12 * GIB, 0, 0.0)
    assert isinstance(grant, LeaseGrant)
    assert arbiter.request("b", 12 * GIB, 0, 0.0) == []
    return arbiter, grant.lease


def test_a_holder_that_crashes_frees_its_lease() -> None:
    arbiter, _ = contended()
    (grant,) = arbiter.disconnect("a", 1.0)
    assert isinstance(grant, LeaseGrant)
    assert (grant.client, grant.prefetch) == ("b", 0)


def test_a_holder_that_crashes_after_its_revocation_frees_its_lease() -> None:
    arbiter, lease = contended()
    (revoke,) = arbiter.idle("a", lease, 0.5, 0.001, 1.0)
    assert isinstance(revoke, Revoke)
    (grant,) = arbiter.disconnect("a", 1.1)
    assert grant.client == "b"


def test_one_that_waits_and_crashes_is_forgotten() -> None:
    arbiter, lease = contended()
    assert arbiter.disconnect("b", 1.0) == []
    assert arbiter.waiting() == ()
    # nothing is left but to let the holder queue what it likes again
    assert arbiter.next_wakeup() == pytest.approx(1.0 + UNPACED_AFTER)
    assert arbiter.tick(2.0) == []
    assert [pace.seconds for pace in arbiter.paces()] == [0.0]
    assert arbiter.next_wakeup() is None
    assert arbiter.idle("a", lease, 0.5, 0.001, 2.0) == []


def test_a_session_that_ends_takes_its_clients_along() -> None:
    arbiter, _ = contended()
    (grant,) = arbiter.remove_session("a", 1.0)
    assert grant.client == "b"
    with pytest.raises(KeyError):
        arbiter.session_snapshot("a")
    with pytest.raises(KeyError):
        arbiter.request("a", 0, 0, 2.0)


def test_a_revoked_client_that_does_not_answer_holds_nobody_up_for_ever() -> None:
    arbiter, lease = contended()
    arbiter.idle("a", lease, 0.5, 0.001, 1.0)
    assert arbiter.next_wakeup() == pytest.approx(5.0)
    assert arbiter.tick(4.9) == []
    (grant,) = arbiter.tick(5.0)
    assert isinstance(grant, LeaseGrant)
    assert grant.client == "b"
    assert arbiter.holders() == ("a", "b")
    assert arbiter.next_wakeup() is None


def test_a_late_answer_is_taken_as_it_comes() -> None:
    arbiter, lease = contended()
    arbiter.idle("a", lease, 0.5, 0.001, 1.0)
    arbiter.tick(11.0)
    assert arbiter.release("a", lease, 0.5, 20.0) == []
    assert arbiter.holders() == ("b",)
    assert arbiter.request("a", 12 * GIB, 0, 21.0) == []
    assert arbiter.waiting() == ("a",)


def test_messages_about_old_leases_change_nothing() -> None:
    arbiter, lease = contended()
    for stale in (0, lease + 1, 10**9):
        assert arbiter.release("a", stale, 1.0, 1.0) == []
        assert arbiter.idle("a", stale, 1.0, 0.1, 1.0) == []
        assert arbiter.busy("a", stale, 1.0) == []
    assert arbiter.holders() == ("a",)
    arbiter.idle("a", lease, 0.5, 0.001, 1.0)
    assert len(arbiter.release("a", lease, 0.5, 1.1)) == 1
    assert arbiter.release("a", lease, 0.5, 1.2) == []
    assert arbiter.idle("a", lease, 0.5, 0.1, 1.3) == []
    assert arbiter.holders() == ("b",)


def test_a_doubled_request_does_not_jump_the_queue_nor_lose_its_place() -> None:
    arbiter, _ = contended()
    assert arbiter.request("b", 12 * GIB, 0, 0.5) == []
    assert arbiter.waiting() == ("b",)


def test_a_holder_that_asks_is_told_its_lease_again() -> None:
    arbiter, lease = contended()
    (pace,) = arbiter.paces()
    assert pace.seconds > 0
    assert arbiter.request("a", 12 * GIB, 0, 0.5) == [LeaseGrant("a", lease, 0.0, 0, pace.seconds)]
    assert arbiter.paces() == []


def test_a_request_that_crosses_a_revocation_waits_from_the_release_on() -> None:
    arbiter, lease = contended()
    arbiter.idle("a", lease, 0.5, 0.001, 1.0)
    assert arbiter.request("a", 12 * GIB, 0, 1.0) == []
    (grant,) = arbiter.release("a", lease, 0.5, 1.001)
    assert grant.client == "b"
    assert arbiter.waiting() == ("a",)


def test_unknown_sessions_are_errors() -> None:
    arbiter = GpuArbiter(16 * GIB)
    arbiter.add_session("a", 50, 0.0)
    arbiter.connect(1, "a", 0.0)
    with pytest.raises(KeyError):
        arbiter.connect(2, "nobody", 0.0)
    with pytest.raises(KeyError):
        arbiter.set_weight("nobody", 1, 0.0)
    calls: tuple[Callable[[], object], ...] = (
        lambda: arbiter.memory(9, 0, 0, 0.0),
        lambda: arbiter.idle(9, 1, 0.0, 0.0, 0.0),
        lambda: arbiter.busy(9, 1, 0.0),
        lambda: arbiter.release(9, 1, 0.0, 0.0),
        lambda: arbiter.paged_in(9, 0, 0.0, 0.0),
        lambda: arbiter.paged_out(9, 0, 0.0, 0.0),
        lambda: arbiter.disconnect(9, 0.0),
    )
    for call in calls:
        with pytest.raises(KeyError):
            call()
    with pytest.raises(ValueError, match="already"):
        arbiter.add_session("a", 50, 0.0)
    with pytest.raises(ValueError, match="already"):
        arbiter.connect(1, "a", 0.0)
    with pytest.raises(ValueError, match="weight"):
        arbiter.add_session("b", -1, 0.0)
    with pytest.raises(ValueError, match="memory"):
        arbiter.memory(1, -1, 0, 0.0)
    with pytest.raises(ValueError, match="memory"):
        GpuArbiter(0)


def test_a_clock_that_jumps_back_does_no_harm() -> None:
    arbiter, lease = contended()
    arbiter.tick(100.0)
    arbiter.idle("a", lease, 0.5, 0.001, 50.0)
    assert arbiter.holders() == ("a",)
    (grant,) = arbiter.release("a", lease, 0.5, 10.0)
    assert grant.client == "b"


def test_crashes_and_starts_in_a_running_system() -> None:
    device = VirtualGpu(GpuArbiter(16 * GIB))
    for name in "abc":
        device.session(name, 30)
    for index in range(40):
        name = f"j{index}"
        phases = forever() if index % 3 else alternating(1.0, 2.0)

        def start(name: str = name, session: str = "abc"[index % 3], phases: object = phases) -> None:
            device.start(Job(name, session, 10 * GIB, phases))  # type: ignore[arg-type]

        device.at(index * 7.0, start)
        if index < 38:
            device.at(index * 7.0 + 40.0, partial(device.crash, name))
    device.run(2000.0)
    left = list(device.jobs.values())
    assert [job.name for job in left] == ["j38", "j39"]
    assert all(job.gpu_seconds > 100 for job in left)
    assert device.idle_while_wanted < 1.0


def test_a_client_that_reports_no_busy_time_does_not_get_more_than_its_share() -> None:
    device = VirtualGpu(GpuArbiter(16 * GIB))
    for name in "ab":
        device.session(name, 50)
    liar = device.start(Job("a", "a", 12 * GIB, forever()))
    honest = device.start(Job("b", "b", 12 * GIB, forever()))
    device.watchers.append(lambda seen: setattr(liar, "busy", 0.0))
    device.run(20000.0)
    assert honest.gpu_seconds == pytest.approx(liar.gpu_seconds, rel=0.04)


def test_a_neighbour_that_grows_while_room_is_made_does_not_stop_the_clock() -> None:
    arbiter = GpuArbiter(16 * GIB, ArbiterSettings(hand_off_credit=0.0))
    leases = {}
    for name, gib, weight in (("a", 6, 50), ("r", 4, 100), ("w", 12, 50)):
        arbiter.add_session(name, weight, 0.0)
        arbiter.connect(name, name, 0.0)
        for grant in arbiter.request(name, gib * GIB, 0, 0.0):
            assert isinstance(grant, LeaseGrant)
            leases[name] = grant.lease
    (revoke,) = arbiter.tick(5000.0)
    assert revoke.client == "a"
    arbiter.memory("r", 8 * GIB, 0, 5000.001)
    arbiter.release("a", leases["a"], 1.0, 5000.002)
    assert arbiter.waiting() == ("w",)
    wakeup = arbiter.next_wakeup()
    assert wakeup is not None
    (revoke,) = arbiter.tick(wakeup)
    assert revoke.client == "r"
