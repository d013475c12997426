"""The arbiter message by message, part two: what each message charges, tells and changes, figure by figure."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gpushare_spawner.arbiter.gpu_arbiter import GpuArbiter
from gpushare_spawner.arbiter.session import ArbiterSettings, Decision, LeaseGrant, Pace, PageOut, Revoke, RevokeReason
from tests.present import present

GIB = 2**30


def arbiter(settings: ArbiterSettings | None = None, managed: int = GIB, **weights: int) -> GpuArbiter:
    """A GPU of 16 GiB; each session has a client of its name, and all ask at 0.0."""
    made = GpuArbiter(16 * GIB, settings or ArbiterSettings())
    for session, weight in weights.items():
        made.add_session(session, weight, 0.0)
        made.connect(session, session, 0.0)
    for session in weights:
        made.request(session, managed, 0, 0.0)
    return made


def lease(gpu: GpuArbiter, client: str) -> int:
    return gpu._roster.client(client).lease


def delivered(gpu: GpuArbiter, session: str) -> tuple[float, float]:
    """GPU seconds that the session was entitled to and received."""
    told = gpu.session_snapshot(session).delivered
    return told.entitled_seconds, told.delivered_seconds


def kinds(decisions: list[Decision]) -> list[tuple[type, object]]:
    return [(type(decision), decision.client) for decision in decisions]


# -- time --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        lambda gpu: gpu.add_session("new", 1, 4.0),
        lambda gpu: gpu.set_weight("b", 10, 4.0),
        lambda gpu: gpu.set_weight("b", 0, 4.0),
        lambda gpu: gpu.remove_session("c", 4.0),
        lambda gpu: gpu.connect("new", "c", 4.0),
        lambda gpu: gpu.disconnect("c", 4.0),
        lambda gpu: gpu.process_ended("c", "c", 4.0),
        lambda gpu: gpu.process_ended("c", "unknown", 4.0),
        lambda gpu: gpu.memory("b", GIB, 0, 4.0),
        lambda gpu: gpu.device_memory("b", GIB, 0, 4.0),
        lambda gpu: gpu.working_set("b", GIB, 4.0),
        lambda gpu: gpu.request("c", GIB, 0, 4.0),
        lambda gpu: gpu.idle("b", lease(gpu, "b"), 4.0, 0.0, 4.0),
        lambda gpu: gpu.busy("b", lease(gpu, "b"), 4.0),
        lambda gpu: gpu.release("b", lease(gpu, "b"), 4.0, 4.0),
        lambda gpu: gpu.paged_in("b", 0, 0.0, 4.0),
        lambda gpu: gpu.paged_out("b", 0, 0.0, 4.0),
        lambda gpu: gpu.delivered(4.0, 4.0, {}, 4.0),
        lambda gpu: gpu.tick(4.0),
    ],
)
def test_every_message_charges_the_time_before_it_by_what_was_so_before_it(
    message: Callable[[GpuArbiter], list[Decision]],
) -> None:
    gpu = arbiter(a=30, b=70)
    gpu.add_session("c", 50, 0.0)
    gpu.connect("c", "c", 0.0)
    message(gpu)
    assert delivered(gpu, "a") == pytest.approx((1.2, 2.0))
    assert delivered(gpu, "b") == pytest.approx((2.8, 2.0)) or "b" not in gpu._roster.sessions


def test_an_instant_that_is_past_already_changes_nothing() -> None:
    gpu = arbiter(a=50, b=50)
    gpu.tick(4.0)
    gpu.tick(3.0)
    assert gpu._roster.now == 4.0
    assert delivered(gpu, "a") == pytest.approx((2.0, 2.0))


# -- sessions ----------------------------------------------------------------------------------------------------


def test_a_removed_session_competes_no_more_and_nothing_is_kept_of_it() -> None:
    gpu = arbiter(a=50, b=50, c=100)
    gpu.tick(0.06)
    gpu.remove_session("c", 0.06)
    assert gpu.holders() == ("a", "b")
    before = delivered(gpu, "a")[0]
    gpu.tick(4.06)
    assert delivered(gpu, "a")[0] - before == pytest.approx(2.0)
    with pytest.raises(KeyError):
        gpu.session_snapshot("c")
    with pytest.raises(KeyError):
        gpu.request("c", 0, 0, 5.0)
    assert "c" not in gpu._nested._places
    gpu.add_session("c", 1, 6.0)
    assert delivered(gpu, "c") == (0.0, 0.0)


def test_what_a_removed_session_measured_no_longer_counts() -> None:
    settings = ArbiterSettings(hand_off_credit=0.0, interactive_overhead_bound=0.025)
    gpu = arbiter(settings, 12 * GIB, a=50, b=50)
    gpu.add_session("liar", 1, 0.0)
    before = present(gpu.next_wakeup())
    gpu._cost.bandwidth_in.learn("liar", GIB, 100.0)
    gpu.tick(0.001)
    assert present(gpu.next_wakeup()) > 1.5 * before
    gpu.remove_session("liar", 0.002)
    assert gpu.next_wakeup() == pytest.approx(before)


def test_a_new_weight_divides_the_time_from_now_on() -> None:
    gpu = arbiter(a=50, b=50)
    gpu.set_weight("a", 150, 4.0)
    gpu.tick(8.0)
    assert delivered(gpu, "a")[0] == pytest.approx(2.0 + 3.0)


def test_a_session_of_weight_0_has_a_weight_of_1_and_its_quiet_clients_without_a_lease_are_not_revoked() -> None:
    gpu = arbiter(a=50, b=50)
    gpu.connect("b2", "b", 0.0)
    assert kinds(gpu.set_weight("b", 0, 1.0)) == [(Revoke, "b")]
    assert kinds(gpu.set_weight("b", 0, 2.0)) == [], "it was told already"


def test_a_session_cannot_come_with_a_weight_below_0() -> None:
    with pytest.raises(ValueError, match="at least 0"):
        GpuArbiter(16 * GIB).add_session("a", -1, 0.0)


# -- requests and leases -----------------------------------------------------------------------------------------


def test_leases_are_numbered_from_1_and_never_used_twice() -> None:
    gpu = arbiter(a=50, b=50)
    assert (lease(gpu, "a"), lease(gpu, "b")) == (1, 2)
    gpu.release("a", 1, 0.5, 1.0)
    (grant,) = gpu.request("a", GIB, 0, 2.0)
    assert isinstance(grant, LeaseGrant)
    assert grant.lease == 3


def test_a_holder_that_asks_again_is_told_its_lease_and_works_from_then_on() -> None:
    gpu = arbiter(a=50, b=50)
    gpu.idle("a", 1, 1.0, 0.0, 1.0)
    assert gpu.session_snapshot("a").running is False
    assert gpu.request("a", GIB, 0, 2.0) == [LeaseGrant("a", 1, 0.0, 0, 0.1)]
    assert gpu.session_snapshot("a").running is True
    assert gpu.session_snapshot("a").delivered.waits == gpu.session_snapshot("b").delivered.waits


def test_a_client_that_waits_and_asks_again_has_waited_since_it_first_asked() -> None:
    gpu = arbiter(ArbiterSettings(exclusive=True, hand_off_credit=0.0), a=50, b=50)
    gpu.request("b", GIB, 0, 0.05)
    assert gpu._roster.client("b").waiting_since == 0.0
    assert gpu.waiting() == ("b",)


def test_one_that_asks_between_its_revocation_and_its_release_waits_after_the_release() -> None:
    for asks in (True, False):
        gpu = arbiter(ArbiterSettings(hand_off_credit=0.0), 12 * GIB, a=50, b=50)
        end = present(gpu.next_wakeup())
        gpu.tick(end)
        if asks:
            assert gpu.request("a", 12 * GIB, 0, end) == []
        gpu.release("a", 1, end, end + 0.1)
        assert gpu.waiting() == (("a",) if asks else ())
        assert gpu.holders() == ("b",)


def test_busy_ends_a_quiet_time_and_a_second_idle_does_not_move_its_beginning() -> None:
    gpu = arbiter(a=50, b=50)
    gpu.idle("a", 1, 1.0, 0.0, 1.0)
    gpu.idle("a", 1, 1.0, 0.0, 3.0)
    assert gpu.session_snapshot("a").last_activity == 1.0
    gpu.busy("a", 1, 4.0)
    assert gpu.session_snapshot("a").running is True
    gpu.busy("b", 2, 4.0)
    assert gpu._roster.client("b").burst_since == 0.0, "it never was quiet"


def test_holders_come_by_their_leases_and_waiters_as_they_asked() -> None:
    gpu = GpuArbiter(16 * GIB, ArbiterSettings(exclusive=True))
    for session in "abcd":
        gpu.add_session(session, 50, 0.0)
        gpu.connect(session, session, 0.0)
    for session in "dcab":
        gpu.request(session, GIB, 0, 0.0)
    assert (gpu.holders(), gpu.waiting()) == (("d",), ("c", "a", "b"))


def test_a_request_after_a_pause_tells_how_long_the_pause_was() -> None:
    gpu = arbiter(a=50)
    gpu.release("a", 1, 1.0, 1.0)
    gpu.request("a", GIB, 0, 5.0)
    session = gpu._roster.sessions["a"]
    assert (session.paused, session.pause, session.attained) == (True, 4.0, 0.0)
    gpu.tick(7.0)
    assert session.attained == 2.0


def test_a_quiet_time_counts_from_the_beginning_of_the_last_burst_at_most() -> None:
    gpu = arbiter(a=50)
    gpu.idle("a", 1, 1.0, 0.0, 1.0)
    gpu.busy("a", 1, 2.0)
    gpu.idle("a", 1, 3.0, 99.0, 4.0)
    assert gpu.session_snapshot("a").last_activity == 2.0


def test_what_a_client_was_busy_counts_when_it_gives_its_lease_back() -> None:
    gpu = arbiter(a=50)
    gpu.release("a", 1, 2.5, 4.0)
    assert gpu.session_snapshot("a").gpu_seconds == 2.5


# -- credit ------------------------------------------------------------------------------------------------------


def test_a_hand_off_that_ends_a_time_slice_and_the_way_back_spend_credit_of_batch_work() -> None:
    settings = ArbiterSettings(interactive_overhead_bound=0.025)
    gpu = arbiter(settings, 12 * GIB, a=50, b=50)
    for name in "ab":
        gpu._roster.sessions[name].paused = False
    credit = gpu._schedule.batch_credit
    gpu.tick(0.001)
    end = present(gpu.next_wakeup())
    gpu.tick(end)
    gpu.request("a", 12 * GIB, 0, end)
    assert credit.seconds == 10.0
    gpu.release("a", 1, end, end)
    way = 0.001 + 12 * GIB / 8e9
    assert credit.seconds == pytest.approx(10.0 - way)
    refilled = present(gpu.next_wakeup())
    gpu.tick(refilled)
    assert credit.seconds == pytest.approx(min(10.0, 10.0 - way + 0.025 * (refilled - end)))
    before = credit.seconds
    gpu.release("b", lease(gpu, "b"), 1.0, refilled)
    assert gpu.holders() == ("a",)
    assert credit.seconds == pytest.approx(before - (0.001 + 8 * GIB / 8e9)), "a was made to give way"


def test_the_place_of_one_that_is_quiet_costs_no_credit() -> None:
    gpu = arbiter(ArbiterSettings(interactive_overhead_bound=0.025), 12 * GIB, a=50, b=50)
    (order,) = gpu.idle("a", 1, 1.0, 0.0, 1.0)
    assert order == Revoke("a", 1, 8 * GIB, RevokeReason.IDLE)
    gpu.release("a", 1, 1.0, 1.0)
    assert gpu.holders() == ("b",)
    assert gpu._schedule.batch_credit.seconds == gpu._schedule.interactive_credit.seconds == 10.0


def test_clients_of_one_session_that_take_turns_spend_no_credit() -> None:
    gpu = arbiter(ArbiterSettings(interactive_overhead_bound=0.025), 12 * GIB, a=50)
    gpu.connect("a2", "a", 0.0)
    gpu.request("a2", 12 * GIB, 0, 0.0)
    end = present(gpu.next_wakeup())
    (order,) = gpu.tick(end)
    assert isinstance(order, Revoke)
    gpu.release("a", 1, end, end)
    assert gpu.holders() == ("a",)
    assert lease(gpu, "a2") == 2
    assert gpu._schedule.batch_credit.seconds == gpu._schedule.interactive_credit.seconds == 10.0


def test_one_that_came_early_and_the_one_that_made_way_spend_interactive_credit() -> None:
    gpu = GpuArbiter(16 * GIB)
    for session in "ab":
        gpu.add_session(session, 50, 0.0)
        gpu.connect(session, session, 0.0)
    gpu.request("a", 12 * GIB, 0, 0.0)
    (order,) = gpu.request("b", 12 * GIB, 0, 9.0)
    assert order == Revoke("a", 1, 8 * GIB, RevokeReason.GUARANTEE)
    gpu.request("a", 12 * GIB, 0, 9.0)
    gpu.release("a", 1, 9.0, 9.0)
    spent = 0.001 + 12 * GIB / 8e9
    assert gpu._schedule.interactive_credit.seconds == pytest.approx(10.0 - spent)
    gpu.release("b", 2, 0.5, 9.5)
    assert gpu.holders() == ("a",)
    back = 0.001 + 8 * GIB / 8e9
    assert gpu._schedule.interactive_credit.seconds == pytest.approx(10.0 - spent + 0.2 * 0.5 - back)
    assert gpu._schedule.batch_credit.seconds == 10.0


# -- what the driver tells ---------------------------------------------------------------------------------------


def test_a_sample_of_the_driver_corrects_what_was_delivered() -> None:
    gpu = arbiter(a=50, b=50)
    gpu.tick(2.0)
    gpu.delivered(0.0, 2.0, {"a": 1.5, "b": 0.5}, 2.0)
    assert delivered(gpu, "a") == pytest.approx((1.0, 1.5))


def test_a_sample_reaches_up_to_now_whatever_it_says() -> None:
    gpu = arbiter(a=50, b=50)
    assert gpu.paces() == [Pace("a", 1, 0.02)]
    gpu.delivered(0.0, 1e6, {"a": 1.0, "b": 1.0}, 2.0)
    assert gpu.paces() == [], "2 s of 2: the GPU is saturated, as it was taken to be"
    gpu.tick(3.0)
    gpu.delivered(2.0, 1e6, {"a": 0.1, "b": 0.1}, 3.0)
    assert gpu.paces() == [Pace("a", 1, 0.1), Pace("b", 2, 0.1)]


def test_holders_are_told_once_how_much_they_may_queue_while_others_compete_and_after() -> None:
    gpu = GpuArbiter(16 * GIB)
    gpu.add_session("a", 50, 0.0)
    gpu.connect("a", "a", 0.0)
    (grant,) = gpu.request("a", GIB, 0, 0.0)
    assert isinstance(grant, LeaseGrant)
    assert grant.pace == 0.0
    gpu.tick(10.0)
    assert (gpu.paces(), gpu.next_wakeup()) == ([], None)
    gpu.add_session("b", 50, 10.0)
    gpu.connect("b", "b", 10.0)
    assert gpu.paces() == [Pace("a", 1, 0.1)], "b may have work at any moment"
    assert gpu.paces() == []
    (grant,) = gpu.request("b", GIB, 0, 11.0)
    assert isinstance(grant, LeaseGrant)
    assert grant.pace == 0.02
    assert gpu.paces() == [Pace("a", 1, 0.02)]
    gpu.release("b", 2, 0.5, 12.0)
    assert gpu.next_wakeup() == 13.0
    gpu.tick(12.9)
    assert gpu.paces() == []
    gpu.tick(13.0)
    assert gpu.paces() == [Pace("a", 1, 0.1)]
    assert gpu.next_wakeup() is None
    gpu.disconnect("b", 15.0)
    assert (gpu.paces(), gpu.next_wakeup()) == ([], 16.0)
    gpu.tick(16.0)
    assert gpu.paces() == [Pace("a", 1, 0.0)]
    assert gpu.next_wakeup() is None


def test_one_whose_lease_was_revoked_is_told_no_pace() -> None:
    gpu = arbiter(a=50, b=50)
    assert gpu.paces() == [Pace("a", 1, 0.02)]
    gpu.delivered(0.0, 1.0, {"a": 0.1, "b": 0.1}, 1.0)
    gpu.set_weight("a", 0, 1.0)
    assert gpu.paces() == [Pace("b", 2, 0.1)]


def test_what_was_delivered_is_never_shown_below_0() -> None:
    gpu = arbiter(a=50, b=50)
    gpu.tick(2.0)
    gpu.delivered(0.0, 2.0, {"a": -3.0, "b": 2.0}, 2.0)
    assert delivered(gpu, "a")[1] == 0.0


# -- parts of the GPU --------------------------------------------------------------------------------------------


def test_the_light_one_is_held_back_when_it_has_had_its_part_and_comes_back_in_the_next_period() -> None:
    gpu = arbiter(a=80, b=20)
    at = present(gpu.next_wakeup())
    assert at == pytest.approx(0.2 * 0.2 * 2)
    (order,) = gpu.tick(at)
    assert order == Revoke("b", 2, 0, RevokeReason.TIME_SLICE)
    gpu.request("b", GIB, 0, at)
    assert gpu.release("b", 2, at, at + 0.001) == []
    assert gpu.waiting() == ("b",)
    assert gpu.next_wakeup() == pytest.approx(0.2)
    (grant,) = gpu.tick(0.2)
    assert isinstance(grant, LeaseGrant)
    assert (grant.client, grant.time_slice, grant.prefetch) == ("b", 0.0, 0)


def test_one_that_was_held_back_and_does_not_ask_again_loses_its_place_after_50_ms() -> None:
    gpu = arbiter(a=80, b=20)
    at = present(gpu.next_wakeup())
    gpu.tick(at)
    gpu.release("b", 2, at, at + 0.001)
    assert gpu._roster.client("b").parked
    assert gpu.next_wakeup() == pytest.approx(at + 0.051)
    gpu.tick(at + 0.0505)
    assert gpu._roster.client("b").parked
    gpu.tick(at + 0.051)
    assert not gpu._roster.client("b").parked


def test_while_the_heavy_one_pauses_for_less_than_the_others_overrun_they_stay_held_back() -> None:
    gpu = arbiter(a=80, b=20)
    at = present(gpu.next_wakeup())
    gpu.tick(at)
    gpu.release("b", 2, at, at + 0.04)  # it received 20 ms beyond the order to stop, and half of it is the average
    gpu.request("b", GIB, 0, at + 0.04)
    assert gpu.idle("a", 1, at, 0.0, at + 0.05) == []
    assert gpu.next_wakeup() == pytest.approx(at + 0.05 + 0.010 / 4)
    assert kinds(gpu.tick(at + 0.05 + 0.010 / 4)) == [(LeaseGrant, "b")]


# -- memory ------------------------------------------------------------------------------------------------------


def test_of_those_without_a_lease_the_one_that_has_not_worked_for_longest_makes_room_first() -> None:
    gpu = arbiter(managed=5 * GIB, a=50, b=50, c=50)
    for number, (name, instant) in enumerate((("b", 1.0), ("c", 2.0), ("a", 3.0)), 1):
        gpu.release(name, lease(gpu, name), 0.1 * number, instant)
    gpu.add_session("d", 50, 4.0)
    gpu.connect("d", "d", 4.0)
    decisions = gpu.request("d", 8 * GIB, 0, 4.0)
    assert decisions[:-1] == [PageOut("b", 5 * GIB), PageOut("c", 2 * GIB)]
    assert kinds(decisions[-1:]) == [(LeaseGrant, "d")]


def test_who_has_no_lease_makes_room_before_one_that_makes_way() -> None:
    gpu = arbiter(ArbiterSettings(hand_off_credit=0.0), managed=8 * GIB, a=50, b=50)
    gpu.release("b", lease(gpu, "b"), 1.0, 1.0)
    gpu.add_session("c", 50, 1.0)
    gpu.connect("c", "c", 1.0)
    assert gpu.request("c", 10 * GIB, 0, 1.0) == []
    decisions = gpu.tick(present(gpu.next_wakeup()))
    assert decisions[1:] == [PageOut("b", 8 * GIB)]
    assert isinstance(decisions[0], Revoke)
    assert decisions[0] == Revoke("a", 1, 2 * GIB, decisions[0].reason)


def test_a_client_is_given_twice_the_time_of_its_hand_off_to_fetch_its_pages_before_others_are_held_back_for_it() -> (
    None
):
    gpu = arbiter(managed=8 * GIB, a=50)
    gpu.release("a", 1, 1.0, 1.0)
    gpu.add_session("b", 50, 1.0)
    gpu.connect("b", "b", 1.0)
    gpu.request("b", 16 * GIB, 0, 1.0)
    gpu.paged_out("a", 8 * GIB, 1.0, 3.0)
    gpu.release("b", lease(gpu, "b"), 1.0, 3.0)
    (out, grant) = gpu.request("a", 8 * GIB, 0, 4.0)
    assert out == PageOut("b", 8 * GIB)
    assert isinstance(grant, LeaseGrant)
    assert grant.prefetch == 8 * GIB
    client = gpu._roster.client("a")
    out_speed = gpu._cost.bandwidth_out.value
    assert client.paging_until == pytest.approx(4.0 + 2 * (0.001 + 8 * GIB / 8e9 + 8 * GIB / out_speed))
    gpu.paged_in("a", 8 * GIB, 1.0, 5.0)
    assert client.paging_until == 5.0
    assert gpu._cost.bandwidth_in.value == pytest.approx(8 * GIB / 1.0)


def test_what_clients_and_the_driver_say_of_memory_counts_from_then_on() -> None:
    gpu = arbiter(a=50)
    gpu.memory("a", 3 * GIB, 2 * GIB, 1.0)
    assert gpu.session_snapshot("a").memory_bytes == 5 * GIB
    client = gpu._roster.client("a")
    assert client.footprint == 5 * GIB
    gpu.device_memory("a", 2 * GIB, 0, 1.0)
    assert (client.footprint, gpu._roster.vram_budget().for_managed) == (3 * GIB, 14 * GIB)
    gpu.working_set("a", GIB, 1.0)
    assert client.footprint == GIB


def test_what_was_paged_out_tells_how_fast_memory_moves() -> None:
    gpu = arbiter(managed=10 * GIB, a=50)
    gpu.release("a", 1, 1.0, 1.0)
    gpu.add_session("b", 50, 1.0)
    gpu.connect("b", "b", 1.0)
    assert kinds(gpu.request("b", 10 * GIB, 0, 1.0)) == [(PageOut, "a"), (LeaseGrant, "b")]
    gpu.paged_out("a", 4 * GIB, 0.25, 2.0)
    assert gpu._cost.bandwidth_out.value == pytest.approx(4 * GIB / 0.25)
    assert gpu._cost.bandwidth_in.value == 8e9


@pytest.mark.parametrize(("grown_to", "orders"), [(10, []), (11, [PageOut("c", GIB + 256 * 2**20)])])
def test_a_holder_that_grows_beyond_the_memory_makes_others_page_out_a_step_more_than_it_lacks(
    grown_to: int, orders: list[Decision]
) -> None:
    gpu = arbiter(managed=6 * GIB, a=50, c=50)
    gpu.release("c", 2, 1.0, 1.0)
    assert gpu.memory("a", grown_to * GIB, 0, 2.0) == orders
    assert gpu.tick(3.0) == []
