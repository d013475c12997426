"""The arbiter message by message, each instant and amount by hand: time slices, revocations, charges."""

from __future__ import annotations

import pytest

from gpushare_spawner.arbiter.gpu_arbiter import GpuArbiter
from gpushare_spawner.arbiter.session import ArbiterSettings, Decision, LeaseGrant, Revoke, RevokeReason
from tests.present import present

GIB = 2**30
S = 0.001 + 2 * 16 * GIB / 8e9
"""Seconds of a hand-off of a whole GPU of 16 GiB at the guessed bandwidth."""
NO_CREDIT = ArbiterSettings(hand_off_credit=0.0, interactive_overhead_bound=0.025)
"""Time slices end on time, and not early for an interactive session."""


def arbiter(settings: ArbiterSettings = NO_CREDIT, managed: int = 16 * GIB, **weights: int) -> GpuArbiter:
    """A GPU of 16 GiB; each session has a client of its name, and all ask at 0.0."""
    made = GpuArbiter(16 * GIB, settings)
    for session, weight in weights.items():
        made.add_session(session, weight, 0.0)
        made.connect(session, session, 0.0)
    for session in weights:
        made.request(session, managed, 0, 0.0)
    return made


def test_a_time_slice_ends_after_its_part_of_the_round_and_not_before() -> None:
    gpu = arbiter(a=30, b=70)
    end = present(gpu.next_wakeup())
    assert end == pytest.approx(0.3 * 2 * S / 0.025)
    assert gpu.tick(end - 0.001) == []
    (order,) = gpu.tick(end)
    assert isinstance(order, Revoke)
    assert (order.client, order.reason, order.page_out) == ("a", RevokeReason.TIME_SLICE, 16 * GIB)
    assert gpu.holders() == ("a",)
    gpu.request("a", 16 * GIB, 0, end)  # it has more work, and waits when it has given its lease back
    (grant,) = gpu.release("a", order.lease, end, end + 0.5)
    assert isinstance(grant, LeaseGrant)
    assert (grant.client, grant.prefetch, grant.pace) == ("b", 0, 0.02)
    assert grant.time_slice == pytest.approx(0.7 * 2 * S / 0.025)
    assert gpu.next_wakeup() == pytest.approx(end + 0.5 + grant.time_slice)


def test_a_revoked_client_has_four_seconds_to_answer() -> None:
    gpu = arbiter(a=50, b=50)
    end = present(gpu.next_wakeup())
    gpu.tick(end)
    assert gpu.next_wakeup() == pytest.approx(end + 4.0)
    assert gpu.tick(end + 3.999) == []
    (grant,) = gpu.tick(end + 4.0)
    assert (type(grant), grant.client) == (LeaseGrant, "b")
    assert gpu.holders() == ("a", "b")


def test_an_interactive_session_comes_once_the_holder_has_had_the_time_of_a_hand_off_and_the_least_beyond() -> None:
    gpu = GpuArbiter(16 * GIB)
    for session in "ab":
        gpu.add_session(session, 50, 0.0)
        gpu.connect(session, session, 0.0)
    gpu.request("a", 16 * GIB, 0, 0.0)
    assert gpu.request("b", 16 * GIB, 0, 1.0) == []
    assert gpu.next_wakeup() == pytest.approx(S + 0.1)
    (order,) = gpu.tick(S + 0.1)
    assert isinstance(order, Revoke)
    assert (order.client, order.reason) == ("a", RevokeReason.GUARANTEE)


def test_a_session_that_comes_early_spends_credit_for_what_it_lacks() -> None:
    gpu = GpuArbiter(16 * GIB, ArbiterSettings(hand_off_credit=S))
    for session in "ab":
        gpu.add_session(session, 50, 0.0)
        gpu.connect(session, session, 0.0)
    gpu.request("a", 16 * GIB, 0, 0.0)
    (order,) = gpu.request("b", 16 * GIB, 0, 100.0)
    assert isinstance(order, Revoke)
    gpu.release("a", order.lease, 100.0, 100.0)
    # b lacked 16 GiB of its pages, and came in place of others: half of a hand-off there and back
    assert gpu._schedule.interactive_credit.seconds == pytest.approx(S - (0.001 + 16 * GIB / 8e9))


def test_a_process_that_left_alive_is_charged_until_it_ends_or_for_ten_seconds() -> None:
    for ends, received in ((3.0, 1.5), (None, 5.5)):
        gpu = arbiter(managed=GIB, a=50, b=50)
        gpu.disconnect("a", 1.0, alive=True)
        if ends is not None:
            gpu.process_ended("a", "a", ends)
        for instant in (11.0, 15.0, 20.0):
            gpu.tick(instant)
        delivered = gpu.session_snapshot("a").delivered
        assert delivered.delivered_seconds == pytest.approx(received), ends


def test_a_client_that_gave_its_lease_back_is_charged_nothing_more() -> None:
    gpu = arbiter(managed=GIB, a=50, b=50)
    lease = next(client.lease for client in gpu._roster.clients if client.id == "a")
    gpu.release("a", lease, 1.0, 1.0)
    gpu.disconnect("a", 2.0, alive=True)
    gpu.tick(9.0)
    assert gpu.session_snapshot("a").delivered.delivered_seconds == pytest.approx(0.5)


def test_the_driver_is_asked_for_samples_while_sessions_compete_and_for_a_second_after() -> None:
    gpu = GpuArbiter(16 * GIB)
    for session in "ab":
        gpu.add_session(session, 50, 0.0)
        gpu.connect(session, session, 0.0)
    gpu.request("a", GIB, 0, 0.0)
    assert gpu.contended is False
    (grant,) = gpu.request("b", GIB, 0, 5.0)
    assert gpu.contended is True
    gpu.release("b", grant.lease, 1.0, 6.0)
    gpu.tick(6.9)
    assert gpu.contended is True
    gpu.tick(7.0)
    assert gpu.contended is False


def quiet_and_computing(quiet: float = 0.5) -> GpuArbiter:
    """Two sessions that run together; one says IDLE at 1.0 and had been quiet for so long."""
    gpu = arbiter(managed=GIB, a=50, b=50)
    gpu.idle("a", 1, 0.5, quiet, 1.0)
    return gpu


def test_a_session_that_computes_although_it_says_it_is_quiet_works_and_competes() -> None:
    gpu = quiet_and_computing()
    gpu.delivered(0.0, 1.1, {"a": 0.0, "b": 1.1}, 1.1)
    for number in range(20):
        now = 1.2 + 0.2 * number
        gpu.delivered(now - 0.3, now - 0.1, {"a": 0.1, "b": 0.1}, now)
        assert gpu.contended is True
        assert gpu.session_snapshot("a").running is True
    assert gpu.session_snapshot("a").delivered.delivered_seconds == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize(
    ("busy", "quiet", "works"), [(0.021, 0.2, True), (0.019, 0.2, False), (0.1, 0.19, False), (0.0, 0.5, False)]
)
def test_a_sample_tells_of_work_from_a_tenth_of_its_time_on_and_not_of_what_was_done_before(
    busy: float, quiet: float, works: bool
) -> None:
    gpu = quiet_and_computing(quiet)
    gpu.delivered(1.0, 1.2, {"a": busy, "b": 0.1}, 1.3)
    assert gpu.session_snapshot("a").running is works


def test_without_samples_a_client_that_stays_quiet_under_its_lease_returns_it_while_its_session_owes_time() -> None:
    """The library returns it after 1 s; one that does not may compute on."""
    gpu = arbiter(managed=GIB, a=30, b=70)
    assert gpu.tick(0.05) == []
    gpu.idle("a", 1, 0.05, 0.0, 0.05)
    instants: list[float] = []
    orders: list[Decision] = []
    while not orders:
        instants.append(present(gpu.next_wakeup()))
        orders = gpu.tick(instants[-1])
    (order,) = orders
    assert isinstance(order, Revoke)
    assert (order.client, order.reason) == ("a", RevokeReason.IDLE)
    assert instants[-1] == pytest.approx(1.55)
    assert len(instants) < 3


@pytest.mark.parametrize(("weights", "others"), [({"a": 70, "b": 30}, True), ({"a": 30, "b": 70}, False)])
def test_without_samples_a_quiet_client_keeps_its_lease_while_its_session_owes_nothing_or_is_alone(
    weights: dict[str, int], others: bool
) -> None:
    gpu = arbiter(NO_CREDIT, GIB, **weights)
    if not others:
        gpu.release("b", 2, 0.0, 0.0)
    gpu.idle("a", 1, 0.0, 0.0, 0.0)
    for _ in range(5):
        if (wakeup := gpu.next_wakeup()) is not None:
            assert not any(isinstance(order, Revoke) and order.client == "a" for order in gpu.tick(wakeup))


def test_a_quiet_client_is_believed_while_another_of_its_session_works() -> None:
    gpu = quiet_and_computing()
    gpu.connect("a2", "a", 1.0)
    gpu.request("a2", GIB, 0, 1.0)
    gpu.delivered(1.0, 1.2, {"a": 0.1, "b": 0.1, "left": 0.2}, 1.3)
    assert gpu._roster.client("a").quiet_since == pytest.approx(0.5)


@pytest.mark.parametrize("lease", [0, 99])
def test_stale_messages_change_nothing(lease: int) -> None:
    gpu = arbiter(managed=GIB, a=50, b=50)
    assert gpu.idle("a", lease, 1.0, 0.5, 1.0) == []
    assert gpu.release("a", lease, 1.0, 2.0) == []
    assert gpu.busy("a", lease, 3.0) == []
    assert gpu.holders() == ("a", "b")
    assert gpu.session_snapshot("a").gpu_seconds == pytest.approx(3.0), "the burst goes on"


def test_a_quiet_time_reported_counts_from_the_beginning_of_the_burst_at_most() -> None:
    gpu = arbiter(managed=GIB, a=50, b=50)
    gpu.idle("a", 1, 1.5, 99.0, 4.0)
    assert gpu.session_snapshot("a").last_activity == 0.0
    gpu.idle("b", 2, 1.5, 0.5, 4.0)
    assert gpu.session_snapshot("b").last_activity == 3.5
    assert gpu.session_snapshot("b").gpu_seconds == 1.5


def test_a_released_sessions_leases_are_revoked_and_it_is_served_again_with_weight_1() -> None:
    gpu = arbiter(managed=GIB, a=50, b=50)
    (order,) = gpu.set_weight("a", 0, 1.0)
    assert isinstance(order, Revoke)
    assert (order.client, order.reason, order.page_out) == ("a", RevokeReason.RELEASED, 0)
    with pytest.raises(ValueError, match="at least 0"):
        gpu.set_weight("a", -1, 2.0)
    assert gpu._accounts.total_weight == 51


def test_names_that_are_taken_and_amounts_below_0_are_refused() -> None:
    gpu = arbiter(managed=GIB, a=50)
    with pytest.raises(ValueError, match="already"):
        gpu.add_session("a", 1, 1.0)
    with pytest.raises(ValueError, match="at least 0"):
        gpu.device_memory("a", -1, 0, 1.0)
    with pytest.raises(ValueError, match="at least 0"):
        gpu.working_set("a", -1, 1.0)
    with pytest.raises(ValueError, match="memory"):
        GpuArbiter(0)
    assert gpu.device_memory("a", 0, 0, 1.0) == gpu.working_set("a", 0, 1.0) == []


def test_where_all_fit_a_lease_has_no_time_slice() -> None:
    gpu = GpuArbiter(16 * GIB)
    for session in "ab":
        gpu.add_session(session, 50, 0.0)
        gpu.connect(session, session, 0.0)
        (grant,) = gpu.request(session, GIB, 0, 0.0)
        assert isinstance(grant, LeaseGrant)
        assert grant.time_slice == 0.0


def test_a_small_neighbour_that_asks_when_the_time_slice_is_over_does_not_keep_the_next_big_one_waiting() -> None:
    gpu = arbiter(managed=10 * GIB, a=50, b=50)
    gpu.add_session("small", 10, 0.0)
    gpu.connect("small", "small", 0.0)
    over = 10 * present(gpu.next_wakeup())  # the timer is late
    decisions = gpu.request("small", 4 * GIB, 0, over)
    assert (Revoke, "a") in [(type(one), one.client) for one in decisions]
