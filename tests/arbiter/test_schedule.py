"""The schedule, figure by figure: whose time slice it is, when it ends, and who is chosen.

The GPU has 100 bytes and moves 10 of them in a second each way; a hand-off takes a second beside that.
"""

from __future__ import annotations

import pytest

from gpushare_spawner.arbiter.accounting import Accounts
from gpushare_spawner.arbiter.roster import Roster
from gpushare_spawner.arbiter.schedule import Schedule, Selection, TimeSlice
from gpushare_spawner.arbiter.session import ArbiterSettings, ArbitratedSession, Client, RevokeReason
from gpushare_spawner.arbiter.time_slices import HandOffCost

SETTINGS = ArbiterSettings(
    overhead_bound=0.1,
    interactive_overhead_bound=0.5,
    min_time_slice=2.0,
    bandwidth_guess=10.0,
    switch_seconds=1.0,
    hand_off_credit=20.0,
    pause=1.0,
    short_burst=5.0,
)


class Board:
    """A schedule with its roster and its accounts at 0.0. The session of a client has the client's first letter."""

    def __init__(self, weights: dict[str, int] | None = None, **clients: int) -> None:
        """`clients`: bytes of each. Sessions have worked for 100 s without a pause: none is interactive."""
        self.roster = Roster(100, SETTINGS)
        self.roster.now = 0.0
        self.accounts = Accounts(SETTINGS)
        self.cost = HandOffCost(SETTINGS)
        self.schedule = Schedule(self.roster, self.accounts, self.cost, SETTINGS)
        self._leases = 0
        for name, amount in clients.items():
            session = name[0]
            if session not in self.roster.sessions:
                weight = (weights or {}).get(session, 50)
                self.roster.sessions[session] = ArbitratedSession(session, weight, attained=100.0, paused=False)
                self.accounts.add(session, weight)
            self.roster.connect(name, session)
            self.roster.set_memory(self.roster.client(name), amount, 0)

    def client(self, name: str) -> Client:
        return self.roster.client(name)

    def session(self, name: str) -> ArbitratedSession:
        return self.roster.sessions[name]

    def ask(self, *names: str) -> Board:
        for name in names:
            self.roster.wait(self.client(name))
            self.accounts.work(self.client(name).session.id, 1.0)
        return self

    def hold(self, *names: str) -> Board:
        """These have leases from now on, and come one beside the other."""
        for name in names:
            self._leases += 1
            beside_others = bool(self.roster.staying)
            self.roster.granted(self.client(name), self._leases)
            self.accounts.work(self.client(name).session.id, 1.0)
            self.schedule.granted(self.client(name), beside_others)
        return self

    def returned(self, session: str, attained: float = 0.0) -> Board:
        """The session's user has come back after a pause."""
        self.session(session).attained, self.session(session).paused = attained, True
        return self

    def owes(self, session: str, seconds: float) -> Board:
        """To the other session with work, of the same weight."""
        self.accounts.advance(self.roster.now, 2 * seconds, {session: 1}, {"a": 1e9, "b": 1e9, "u": 1e9})
        return self

    def plan(self, now: float | None = None) -> Board:
        if now is not None:
            self.roster.now = now
        self.schedule.plan()
        self.schedule.pass_on_time_slice()
        return self

    def choose(self, now: float | None = None) -> Selection:
        return self.plan(now).schedule.choose()

    def chosen(self, now: float | None = None) -> list[str]:
        return [str(client.id) for client in self.choose(now).group]

    def due(self, now: float | None = None) -> float | None:
        """When the next choice is due, where this one is carried out."""
        self.choose(now)
        return self.schedule.due()

    @property
    def time_slice(self) -> tuple[str, float | None] | None:
        time_slice = self.schedule.time_slice
        return None if time_slice is None else (time_slice.head.id, time_slice.start)


# -- the plan ------------------------------------------------------------------------------------------------------


def test_a_round_is_as_long_as_its_hand_offs_are_worth_and_divided_by_weight() -> None:
    board = Board({"a": 30, "b": 70}, a=60, b=60).hold("a").ask("b").plan()
    # 20 bytes do not fit: each session's hand-off takes 1 + 2 + 2 s, and both are a tenth of the round
    assert board.schedule.lengths.round_seconds == pytest.approx(100.0)
    assert board.schedule.lengths.by_session == pytest.approx({"a": 30.0, "b": 70.0})


def test_all_clients_of_a_session_move_in_its_time_slice_up_to_the_whole_memory() -> None:
    board = Board(a=60, b1=30, b2=40).hold("a").ask("b1", "b2").plan()
    # 30 bytes do not fit: a's hand-off moves 30, b's 30 and 30
    assert board.schedule.lengths.by_session == pytest.approx({"a": 100.0, "b": 100.0})
    board = Board(a=80, b1=80, b2=80).hold("a").ask("b1", "b2").plan()
    # b has 160 bytes: for a 80 + 100 less 100 are too many, for b 80 + 160 less 100; b moves 100 bytes
    assert board.schedule.lengths.round_seconds == pytest.approx((17.0 + 21.0) / 0.1)


def test_a_client_that_wants_no_memory_has_no_time_slice() -> None:
    board = Board(a=60, b=60).hold("a").plan()
    assert board.schedule.lengths.by_session == pytest.approx({"a": 10.0}), "nothing moves: 1 s is a tenth of it"


def test_hand_offs_may_cost_more_while_a_user_who_returned_waits() -> None:
    board = Board(a=60, u=60).hold("a").ask("u").returned("u").plan()
    assert board.schedule.bound == 0.5
    assert board.schedule.lengths.by_session == pytest.approx({"a": 10.0, "u": 10.0})
    board.client("u").parked = True
    assert board.plan().schedule.bound == 0.1, "it has its memory on the GPU"


def test_a_hand_off_for_an_interactive_session_there_or_back_spends_interactive_credit() -> None:
    board = Board(a=60, u=60).hold("a").plan()
    schedule = board.schedule
    assert schedule.credit() is schedule.batch_credit
    assert schedule.credit(early=True) is schedule.interactive_credit
    board.ask("u").returned("u").plan()
    assert schedule.credit() is schedule.interactive_credit


def test_both_credits_refill_each_at_the_rate_of_its_bound() -> None:
    schedule = Board().schedule
    for credit in (schedule.batch_credit, schedule.interactive_credit):
        credit.spend(20.0)
    schedule.refill(4.0)
    assert schedule.batch_credit.seconds == pytest.approx(0.4)
    assert schedule.interactive_credit.seconds == pytest.approx(2.0)


def test_a_hand_off_moves_no_more_than_what_does_not_fit() -> None:
    board = Board(a=60)
    assert board.schedule.hand_off_seconds(board.client("a"), 20) == pytest.approx(5.0)
    assert board.schedule.hand_off_seconds(board.client("a"), 90) == pytest.approx(13.0)


# -- whose time slice it is --------------------------------------------------------------------------------------


def test_the_first_that_comes_begins_a_time_slice_and_who_joins_it_does_not_make_it_longer() -> None:
    board = Board(a=20, b=20).hold("a")
    assert board.time_slice == ("a", 0.0)
    board.roster.now = 3.0
    board.hold("b")
    assert board.time_slice == ("a", 0.0)


def test_the_time_slice_of_one_that_had_to_wait_for_others_begins_when_it_comes() -> None:
    board = Board(a=20, b=20, c=20)
    board.schedule.time_slice = TimeSlice(board.session("b"), None)
    board.hold("a")
    board.roster.now = 3.0
    assert board.time_slice == ("a", 0.0), "it came alone: the time slice is its own"
    board.schedule.time_slice = TimeSlice(board.session("b"), None)
    board.hold("c")
    assert board.time_slice == ("b", None), "c joins a"  # type: ignore[comparison-overlap]
    board.hold("b")
    assert board.time_slice == ("b", 3.0)


def test_a_time_slice_ends_when_nobody_is_left() -> None:
    board = Board(a=20).hold("a").plan()
    board.roster.forget(board.client("a"))
    assert board.plan(1.0).time_slice is None


def test_a_time_slice_whose_head_has_gone_passes_to_the_one_with_the_longest_and_its_beginning_stays() -> None:
    board = Board({"b": 10, "c": 70}, a=20, b=20, c=20).hold("a", "b", "c").plan()
    board.roster.forget(board.client("a"))
    assert board.plan(5.0).time_slice == ("c", 0.0)


def test_who_is_there_without_a_time_slice_begins_one() -> None:
    board = Board(a=20, b=20).hold("a", "b")
    board.schedule.time_slice = None
    assert board.plan(4.0).time_slice == ("a", 4.0)


def test_a_time_slice_waits_for_its_head_as_long_as_the_head_waits() -> None:
    board = Board(a=60, b=60).hold("a").ask("b")
    board.schedule.time_slice = TimeSlice(board.session("b"), None)
    assert board.plan(4.0).time_slice == ("b", None)
    board.client("b").parked = True  # held back for a moment, with its memory on the GPU: the time slice has begun
    assert board.plan(5.0).time_slice == ("a", 5.0)
    board.client("b").parked = board.client("b").waiting = False
    board.schedule.time_slice = TimeSlice(board.session("b"), None)
    assert board.plan(6.0).time_slice == ("a", 6.0), "the head has gone"
    board = Board(a=60, b1=60, b2=60).hold("a").ask("b1")
    board.schedule.time_slice = TimeSlice(board.session("b"), None)
    assert board.plan(4.0).time_slice == ("b", None), "one of its clients waits"


def test_those_who_are_there_have_the_time_slice_where_the_head_cannot_come_and_nobody_makes_way() -> None:
    board = Board(a=60, b=60).hold("a").ask("b").plan(4.0)
    board.schedule.time_slice = TimeSlice(board.session("b"), None)
    board.client("a").revoked = RevokeReason.TIME_SLICE
    board.schedule.due()
    assert board.time_slice == ("b", None), "nobody stays"
    board.client("a").revoked = None
    board.schedule.due()
    assert board.time_slice == ("a", 4.0)  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(("overdue", "time_slice"), [(False, ("c", None)), (True, ("a", 4.0))])
def test_a_time_slice_waits_for_those_that_make_way_until_they_are_overdue(
    overdue: bool, time_slice: tuple[str, float | None]
) -> None:
    board = Board(a=60, b=40, c=40).hold("a", "b").ask("c").plan(4.0)
    board.schedule.time_slice = TimeSlice(board.session("c"), None)
    board.client("b").revoked, board.client("b").overdue = RevokeReason.TIME_SLICE, overdue
    board.schedule.due()
    assert board.time_slice == time_slice


# -- when it ends ------------------------------------------------------------------------------------------------


def test_a_time_slice_ends_after_the_heads_request_and_then_the_others_begins_when_it_comes() -> None:
    board = Board({"a": 30, "b": 70}, a=60, b=60).hold("a").ask("b")
    assert board.due() == pytest.approx(30.0)
    assert board.chosen(29.9) == ["a"]
    assert board.schedule.left_out == [board.client("b")]
    choice = board.choose(30.0)
    assert ([client.id for client in choice.group], choice.reason) == (["b"], RevokeReason.TIME_SLICE)
    assert board.time_slice == ("b", None)
    assert board.schedule.left_out == [board.client("a")]


def test_a_holder_that_is_owed_time_goes_on_with_a_new_time_slice() -> None:
    board = Board(a=60, b=60).hold("a").ask("b").owes("b", 1.0)
    assert board.chosen(50.0) == ["a"]
    assert board.time_slice == ("a", 50.0)


def test_clients_of_one_session_that_do_not_fit_together_divide_its_time_slice() -> None:
    board = Board(a1=60, a2=60, b=60).hold("a1").ask("a2", "b")
    # a has 120 bytes and b 60: a moves 60 and 60, b 60; of the round of 340 s each has half
    assert board.plan().schedule.lengths.by_session == pytest.approx({"a": 170.0, "b": 170.0})
    assert board.due() == pytest.approx(85.0)
    board.client("a2").waiting = False
    board.client("a2").parked = True
    assert board.due() == pytest.approx(170.0), "one that is held back has come, and does not ask"


def test_a_time_slice_is_never_shorter_than_the_least() -> None:
    board = Board({"a": 1, "b": 10_000}, a=60, b=60).hold("a").ask("b").plan()
    assert board.schedule.lengths.by_session["a"] == pytest.approx(5.0 + 2.0)
    board = Board(a1=2, a2=99, a3=99, a4=99, b=99).hold("a1").ask("a2", "a3", "a4", "b").returned("b").plan()
    board.schedule.lengths = type(board.schedule.lengths)(4.0, {"a": 4.0, "b": 4.0})
    assert board.schedule._time_slice_over_at() == pytest.approx(2.0), "a quarter of 4 s"


@pytest.mark.parametrize(("spent", "over"), [(20.0, 50.0), (24.0, 50.0), (26.0, 60.0), (28.0, 80.0), (99.0, 100.0)])
def test_where_more_was_spent_on_hand_offs_than_the_bound_allows_a_time_slice_lasts_until_it_is_earned(
    spent: float, over: float
) -> None:
    board = Board(a=60, b=60).hold("a").ask("b").plan()
    board.schedule.batch_credit.spend(spent)
    # the credit was 20 s, and a tenth of a second is earned in a second; a round of 100 s at most
    assert board.due() == pytest.approx(over)


def test_where_a_user_waits_a_time_slice_lasts_until_the_interactive_credit_is_earned() -> None:
    board = Board(a=60, u=60).hold("a").ask("u").returned("u").plan()
    board.schedule.interactive_credit.spend(20.0 + 6.0)
    board.schedule.batch_credit.spend(99.0)
    assert board.schedule._time_slice_over_at() == pytest.approx(12.0)


def test_without_a_time_slice_nothing_is_over() -> None:
    board = Board(a=60, b=60)
    assert board.schedule._time_slice_over_at() == float("inf")
    board.ask("b").plan()
    board.schedule.time_slice = TimeSlice(board.session("b"), None)
    assert board.schedule._time_slice_over_at() == float("inf")
    assert board.schedule._early_at(board.client("b"), []) == float("inf")


def test_nothing_is_due_where_all_fit() -> None:
    assert Board(a=50, b=50).hold("a", "b").due() is None
    assert Board(a=50).due() is None


def test_a_revoked_clients_deadline_is_due_until_it_is_overdue() -> None:
    board = Board(a=60, b=60).hold("a").plan()
    board.client("a").revoked, board.client("a").revoke_deadline = RevokeReason.TIME_SLICE, 14.0
    assert board.due() == 14.0
    assert board.due(14.0) is None, "what is due now is not due later"
    board.roster.now = 0.0
    board.client("a").overdue = True
    assert board.due() is None


def test_one_that_waits_only_for_those_who_are_leaving_ends_no_time_slice() -> None:
    board = Board(a=60, c=30, b=50).hold("a", "c").ask("b").plan()
    board.client("a").revoked, board.client("a").revoke_deadline = RevokeReason.TIME_SLICE, 200.0
    assert board.plan().time_slice == ("c", 0.0)
    assert board.schedule._time_slice_over_at() < 200.0
    assert board.schedule.due() == 200.0


# -- who is chosen -----------------------------------------------------------------------------------------------


def test_whoever_fits_beside_the_holders_comes_at_once() -> None:
    board = Board(a=60, b=60, c=40).hold("a").ask("b", "c")
    assert board.chosen() == ["a", "c"]
    assert board.time_slice == ("a", 0.0)


def test_within_a_time_slice_clients_of_its_session_come_before_others_whatever_these_are_owed() -> None:
    board = Board(a1=60, a2=40, b=40).hold("a1").ask("b", "a2").owes("a", 1.0)
    assert board.chosen() == ["a1", "a2"]
    board = Board(c=60, a2=40, b=40).hold("c").ask("a2", "b").owes("a", 1.0)
    assert board.chosen() == ["c", "b"], "in the time slice of a third the one that is owed time comes"


def test_of_holders_that_have_grown_too_large_the_head_stays_and_the_others_by_their_right() -> None:
    board = Board(a=30, b=30, c=30).hold("b", "a", "c").owes("a", 1.0)
    for name in "abc":
        board.roster.set_memory(board.client(name), 45, 0)
    assert board.chosen() == ["b", "c"]


def test_among_equals_those_who_wait_come_before_holders_and_the_first_that_was_added_first() -> None:
    board = Board(a=60, b=60, c=60).hold("a").ask("c", "b")
    assert board.due() == pytest.approx(130.0)
    assert board.chosen(130.0) == ["b"]
    assert [client.id for client in board.schedule._in_order] == ["b", "c"]


def test_of_a_sessions_clients_the_one_without_a_lease_for_longest_comes_first_and_then_the_first_that_asked() -> None:
    board = Board(a1=60, a2=60, a3=60)
    board.client("a1").last_granted = 5.0
    assert board.ask("a1", "a3", "a2").chosen(6.0) == ["a3"]
    board = Board(a1=60, a2=60).hold("a1").ask("a2")
    assert board.chosen(1e6) == ["a2"], "the one that waits before the one that holds"


def test_one_that_is_quiet_makes_way_at_once_if_its_pauses_are_not_known_and_stays_where_nobody_needs_the_room() -> (
    None
):
    board = Board(a=60, b=60, c=40).hold("a").plan()
    board.roster.quiet(board.client("a"), 1.0)
    assert board.chosen(1.0) == ["a"]
    board.ask("c")
    assert board.chosen(1.0) == ["c", "a"]
    board.client("c").waiting = False
    board.ask("b")
    assert board.chosen(1.0) == ["b"]


def test_of_two_that_are_quiet_the_one_that_worked_last_stays() -> None:
    for last, first in (("a", "b"), ("b", "a")):
        board = Board(a=40, b=40, c=60).hold("a", "b").ask("c").plan()
        board.roster.quiet(board.client(first), 1.0)
        board.roster.quiet(board.client(last), 2.0)
        assert board.chosen(2.0) == ["c", last]


def test_one_whose_pauses_are_short_keeps_its_place_until_this_one_is_clearly_longer() -> None:
    board = Board(a=60, b=60).hold("a").ask("b").plan()
    for _ in range(3):
        board.client("a").gaps.learn(0.5)
    board.roster.quiet(board.client("a"), 1.0)
    # its hand-off takes 5 s, so that four times its typical pause are worth waiting for
    assert board.due(1.0) == pytest.approx(3.0)
    assert board.chosen(2.9) == ["a"]
    assert board.chosen(3.0) == ["b"]


def test_who_is_left_out_has_work() -> None:
    board = Board(a=60, b=60, c=60, d=60).hold("a").ask("b", "c")
    board.roster.granted(board.client("d"), 9)
    board.roster.quiet(board.client("d"), 0.0)
    board.choose()
    assert [client.id for client in board.schedule.left_out] == ["b", "c"]


# -- a user who returns ------------------------------------------------------------------------------------------


def test_a_user_who_returned_comes_when_the_holder_has_had_the_time_of_a_hand_off_and_the_least_beyond() -> None:
    board = Board(a=60, u=60).hold("a").ask("u").returned("u")
    assert board.due() == pytest.approx(5.0 + 2.0)
    assert board.chosen(6.9) == ["a"]
    choice = board.choose(7.0)
    assert ([client.id for client in choice.group], choice.reason) == (["u"], RevokeReason.GUARANTEE)
    assert board.time_slice == ("u", None)


def test_the_holders_time_counts_from_when_its_memory_came() -> None:
    board = Board(a=60, u=60)
    board.roster.now = 1.0
    board.hold("a").ask("u").returned("u")
    assert board.due() == pytest.approx(8.0)


def test_a_user_who_returned_waits_until_there_is_credit_for_the_way_and_the_way_back() -> None:
    board = Board(a=60, u=60).hold("a").ask("u").returned("u")
    board.schedule.interactive_credit.spend(14.0)
    # 10 s are needed and 6 are there; half a second is earned in a second
    assert board.due() == pytest.approx(8.0)
    board = Board(a=60, u=30, b=30).hold("a", "b").ask("u").returned("u")
    board.session("b").attained = 50.0
    board.schedule.interactive_credit.spend(19.0)
    # a makes way for u, who lacks 20 bytes, and b works on beside it: half of 5 + 5 s
    assert board.due() == pytest.approx(8.0)
    assert board.chosen(7.0) == ["a", "b"]


def test_where_several_make_way_for_a_user_each_has_its_time_and_the_most_expensive_way_back_is_paid() -> None:
    board = Board(a=5, b=3, u=99).hold("a")
    board.roster.now = 1.0
    board.hold("b").ask("u").returned("u")
    board.schedule.time_slice = TimeSlice(board.session("a"), 50.0)
    # 7 bytes do not fit: the hand-offs of a, b and u take 2, 1.6 and 2.4 s
    assert board.due() == pytest.approx(1.0 + 1.6 + 2.0)
    board.schedule.interactive_credit.spend(18.0)
    assert board.due() == pytest.approx(1.0 + (2.4 + 2.0 - 2.0) / 0.5)


def test_a_user_comes_in_place_of_those_that_have_attained_twice_as_much_since_their_pause() -> None:
    board = Board(a=60, u=60).hold("a").ask("u").returned("u", attained=3.0)
    board.session("a").attained = 4.0
    board.schedule.time_slice = TimeSlice(board.session("a"), 9.0)
    assert board.due(9.0) == pytest.approx(9.0 + 2.0)
    board.session("a").attained = 6.0
    assert board.chosen(9.0) == ["u"]


def test_a_user_comes_beside_the_head_where_another_makes_room_and_the_time_slice_stays_the_heads() -> None:
    board = Board(a=40, b=60, u=50).hold("a", "b").ask("u").returned("u")
    board.session("a").attained = 50.0
    # b's hand-off moves 50 bytes in 11 s
    assert board.due() == pytest.approx(13.0)
    assert board.chosen(13.0) == ["u", "a"]
    assert board.time_slice == ("a", 0.0)


def test_others_come_beside_the_user_where_they_fit() -> None:
    board = Board(a=90, c=40, u=60).hold("a").ask("c", "u").returned("u")
    assert board.chosen(20.0) == ["u", "c"]


def test_a_user_does_not_take_the_place_of_a_client_of_the_same_session() -> None:
    board = Board(a1=60, a2=60).hold("a1").ask("a2").returned("a")
    assert board.due() == pytest.approx(board.schedule._time_slice_over_at())


@pytest.mark.parametrize(("debt", "early"), [(5.0, True), (5.1, False)])
def test_a_user_whose_session_owes_more_than_a_short_burst_waits_for_its_time_slice(debt: float, early: bool) -> None:
    board = Board(a=60, u=60).hold("a").ask("u").returned("u").owes("u", debt)
    assert (board.schedule._newcomer([board.client("u")], [board.client("a")]) is not None) is early
    assert (board.due() == pytest.approx(7.0)) is early


def test_a_user_for_whom_those_who_stay_need_not_move_comes_at_once() -> None:
    board = Board(a=60, b=30, u=60).hold("a").ask("b", "u").returned("u")
    board.client("a").came_at = -100.0
    assert board.due() is not None
    assert board.chosen() == ["u", "b"]


# -- the promise to each client ----------------------------------------------------------------------------------


def kept_since(board: Board, client: str) -> float:
    """Since when a client waits that is served before all others; infinite for others."""
    known = board.client(client)
    return board.schedule._kept_waiting(known, board.schedule._promises([known]))


@pytest.mark.parametrize(
    ("weights", "debt", "waited", "kept"),
    [
        ({}, 0.0, 200.0, False),  # request of 50 s, and half of the weight: within 2 * 50 * 2
        ({}, 0.0, 200.1, True),
        ({"a": 30, "b": 70}, 0.0, 200.0, False),  # 70 s, and 100/70 of it
        ({"a": 30, "b": 70}, 0.0, 200.1, True),
        ({}, 10.0, 220.0, False),  # what the session owes is paid back first
        ({}, 10.0, 220.1, True),
        ({}, -10.0, 200.1, True),
    ],
)
def test_a_client_that_waited_twice_its_requests_time_is_served_before_all_others(
    weights: dict[str, int], debt: float, waited: float, kept: bool
) -> None:
    board = Board(weights, a=60, b=60).hold("a").ask("b")
    board.owes("b" if debt >= 0 else "a", abs(debt))
    board.plan(waited)
    since = kept_since(board, "b")
    assert since == (0.0 if kept else float("inf"))


def test_the_promise_counts_from_the_request() -> None:
    board = Board(a=60, b=60).hold("a")
    board.roster.now = 10.0
    board.ask("b")
    assert kept_since(board.plan(210.0), "b") == float("inf")
    assert kept_since(board.plan(210.1), "b") == 10.0


@pytest.mark.parametrize("kept", [False, True])
def test_clients_of_one_session_share_its_promise(kept: bool) -> None:
    board = Board(a=60, b1=60, b2=10, b3=10).hold("a").ask("b1", "b2")
    board.plan()
    request = board.schedule.lengths.by_session["b"]
    board.plan(2 * 2 * request * 2 + (0.1 if kept else 0.0))
    assert (kept_since(board, "b1") == 0.0) is kept


def test_a_client_that_waited_too_long_comes_first_whatever_its_session_has_had() -> None:
    board = Board(a=60, b=60, c=60).hold("a").ask("b", "c").owes("b", 1.0)
    assert board.chosen(150.0) == ["c"]
    board.schedule.time_slice = TimeSlice(board.session("a"), 0.0)
    board.client("c").waiting_since = 9_000.0
    assert board.chosen(9_500.0) == ["b"]


def test_one_that_does_not_wait_is_promised_nothing() -> None:
    board = Board(a=60, b=60).hold("a").ask("b").plan(1e6)
    assert kept_since(board, "a") == float("inf")
    board.client("b").parked = True
    assert kept_since(board, "b") == float("inf")
