"""The roster, figure by figure: bursts and leases, what was seen of memory, and views."""

from __future__ import annotations

import pytest

from gpushare_spawner.arbiter.gpu_arbiter import GpuArbiter
from gpushare_spawner.arbiter.roster import Roster
from gpushare_spawner.arbiter.session import ArbiterSettings, ArbitratedSession, Client, RevokeReason

SETTINGS = ArbiterSettings(
    pause=1.0,
    short_burst=5.0,
    proven_after=2.0,
    memory_poll_interval=0.125,
    crowded=0.75,
    tolerance=0.1,
    doubt_for=60.0,
)


class Board(Roster):
    """A GPU of 100 bytes at instant 0.0. The session of a client has the client's first letter."""

    def __init__(self, settings: ArbiterSettings = SETTINGS, **managed: int) -> None:
        super().__init__(100, settings)
        self.now = 0.0
        for client, amount in managed.items():
            self.come(client, amount)

    def __getitem__(self, client: str) -> Client:
        return self.client(client)

    def come(self, client: str, managed: int) -> None:
        self.sessions.setdefault(client[0], ArbitratedSession(client[0], 1))
        self.connect(client, client[0])
        self.set_memory(self[client], managed, 0)

    def work(self, *clients: str) -> Board:
        """They get leases, and their bursts begin."""
        for client in clients:
            self.work_again(self[client])
            self.granted(self[client], len(self.leaseholders) + 1)
        return self

    def at(self, now: float) -> Board:
        self.now = now
        return self

    def bursts(self, session: str) -> list[float]:
        return list(self.sessions[session].bursts._spans)


# -- bursts ------------------------------------------------------------------------------------------------------


def test_a_burst_is_as_long_as_what_was_reported_since_it_began() -> None:
    board = Board(a=1).work("a")
    for now, busy in ((4.0, 3.0), (10.0, 4.5)):
        board.at(now).report_busy(board["a"], busy)
        board.quiet(board["a"], now)
        board.at(now + 1.0).work_again(board["a"])
    assert board.bursts("a") == [3.0, 1.5]
    assert board.sessions["a"].gpu_seconds == 4.5


def test_a_burst_in_pieces_because_others_were_owed_time_is_one_burst() -> None:
    board = Board(a=1).work("a")
    for busy in (2.0, 1.5):
        board.at(board.now + 3.0).report_busy(board["a"], busy)
        board["a"].parked, board["a"].revoked = True, RevokeReason.TIME_SLICE
        board.released(board["a"])
        assert board.bursts("a") == []
        board.wait(board["a"])
        board.granted(board["a"], 7)
    board.at(board.now + 3.0).report_busy(board["a"], 0.75)
    board.quiet(board["a"], board.now)
    assert board.bursts("a") == [2.0 + 1.5 + 0.75]
    board.work_again(board["a"])
    board.at(board.now + 3.0).report_busy(board["a"], 1.75)
    board.quiet(board["a"], board.now)
    assert board.bursts("a") == [4.25, 1.0]


@pytest.mark.parametrize(("busy", "learned"), [(5.0, []), (5.1, [5.1])])
def test_a_burst_that_was_cut_short_tells_only_that_it_is_long_if_it_is(busy: float, learned: list[float]) -> None:
    board = Board(a=1).work("a").at(9.0)
    board["a"].revoked = RevokeReason.TIME_SLICE
    board.report_busy(board["a"], busy)
    board.released(board["a"])
    assert board.bursts("a") == learned
    assert board["a"].worked_until == 9.0
    board.work("a").at(10.0)
    board.report_busy(board["a"], 0.5)
    board.quiet(board["a"], 10.0)
    assert board.bursts("a") == [*learned, 0.5], "another time slice, another burst"


def test_a_burst_that_was_cut_short_counts_from_its_own_beginning_within_the_lease() -> None:
    board = Board(a=1).work("a").at(3.0)
    board.report_busy(board["a"], 3.0)
    board.quiet(board["a"], 3.0)
    board.at(4.0).work_again(board["a"])
    assert board.at(6.0).snapshot("a").gpu_seconds == 3.0 + 2.0
    board["a"].revoked = RevokeReason.TIME_SLICE
    board.at(10.0).report_busy(board["a"], 9.0)
    board.released(board["a"])
    assert board.bursts("a") == [3.0, 6.0]


def test_one_that_gives_its_lease_back_at_work_has_ended_its_burst_and_one_that_is_quiet_had_before() -> None:
    board = Board(a=1, b=1).work("a", "b").at(4.0)
    board.report_busy(board["a"], 4.0)
    board.report_busy(board["b"], 3.0)
    board.quiet(board["b"], 3.0)
    board.at(5.0)
    for name in "ab":
        board.released(board[name])
    assert (board.bursts("a"), board.bursts("b")) == ([4.0], [3.0])
    assert (board["a"].last_used, board["b"].last_used) == (5.0, 3.0)
    assert (board["a"].worked_until, board["b"].worked_until) == (5.0, 3.0)
    assert [board.sessions[name].last_activity for name in "ab"] == [5.0, 3.0]
    assert [board.sessions[name].quiet_from for name in "ab"] == [5.0, 3.0]


def test_one_that_leaves_at_work_has_worked_until_then() -> None:
    board = Board(a1=1, a2=1).work("a1").at(4.0)
    board.forget(board["a1"])
    session = board.sessions["a"]
    assert (session.last_activity, session.quiet_from) == (4.0, 4.0)
    board.at(7.0).work("a2")
    assert (session.paused, session.pause, session.quiet_from) == (True, 3.0, None)


def test_a_session_is_not_quiet_while_another_of_its_clients_waits_or_works() -> None:
    board = Board(a1=1, a2=1, a3=1).work("a1", "a2").at(4.0)
    board.quiet(board["a1"], 4.0)
    assert board.sessions["a"].quiet_from is None
    board.wait(board["a3"])
    board.quiet(board["a2"], 4.0)
    assert board.sessions["a"].quiet_from is None
    board["a3"].waiting = False
    board.work_again(board["a1"])
    board.at(6.0).quiet(board["a1"], 5.0)
    assert board.sessions["a"].quiet_from == 5.0
    assert board.sessions["a"].last_activity == 5.0
    board.quiet(board["a2"], 2.0)
    assert board.sessions["a"].last_activity == 5.0, "an older end changes nothing"


# -- leases ------------------------------------------------------------------------------------------------------


def test_a_new_lease_counts_its_work_anew_and_knows_nothing_of_the_last() -> None:
    board = Board(a=1).work("a").at(4.0)
    board.report_busy(board["a"], 4.0)
    client = board["a"]
    client.revoked, client.overdue, client.again = RevokeReason.TIME_SLICE, True, True
    client.forced_in = client.displaced = client.early = True
    board.released(client)
    assert (client.lease, client.revoked, client.overdue, client.again) == (0, None, False, False)  # type: ignore[comparison-overlap]
    board.at(5.0).granted(client, 2)
    board.at(6.0).report_busy(client, 0.25)
    assert board.sessions["a"].gpu_seconds == 4.25
    assert (client.forced_in, client.displaced, client.early, client.quiet_since) == (False, False, False, None)


def test_the_end_of_a_lease_that_is_not_there_changes_nothing() -> None:
    board = Board(a=1).at(4.0)
    board.end_of_lease(board["a"])
    assert (board["a"].last_used, board.sessions["a"].last_activity) == (-1.0, None)


def test_a_wait_lasts_from_the_request_to_the_lease() -> None:
    board = Board(a=1, b=1).at(2.0)
    board.wait(board["a"])
    assert (board["a"].waiting_since, board["a"].order) == (2.0, 1)
    board.wait(board["b"])
    assert board["b"].order == 2
    board.at(5.0).granted(board["a"], 1)
    expected = Board(c=1).sessions["c"].waits
    expected.add(3.0)
    assert board.sessions["a"].waits.counts == expected.counts
    assert board["a"].waiting is False
    board.at(9.0).granted(board["a"], 2)
    assert board.sessions["a"].waits.counts == expected.counts, "it did not wait"


# -- memory ------------------------------------------------------------------------------------------------------


def test_a_new_client_has_a_context_and_one_that_leaves_frees_all_that_it_had() -> None:
    board = Board(ArbiterSettings(context_bytes=10))
    board.come("a", 0)
    assert board["a"].unconfirmed == 10
    board.set_memory(board["a"], 50, 20)
    board.device_memory(board["a"], 80)
    board.work("a")
    assert (board.vram_budget().for_managed, board.residency.free(100)) == (70, 50)
    board.forget(board["a"])
    assert (board.vram_budget().for_managed, board.residency.free(100)) == (100, 100)
    assert board.leaseholders == []


def test_a_context_counts_where_nothing_else_was_told_yet() -> None:
    board = Board(ArbiterSettings(context_bytes=10))
    board.sessions["a"] = ArbitratedSession("a", 1)
    board.connect("a", "a")
    assert board["a"].unconfirmed == 10


@pytest.mark.parametrize(("managed", "held", "grew"), [(51, True, True), (50, True, False), (51, False, False)])
def test_only_a_holder_that_allocates_more_asks_for_room(managed: int, held: bool, grew: bool) -> None:
    board = Board(a=50, b=50)
    assert board.holder_grew is False
    board.work("a" if held else "b").at(3.0)
    board.set_memory(board["a"], managed, 0)
    assert board.holder_grew is grew
    assert board["a"].grown_at == (3.0 if managed > 50 else 0.0)


def test_what_was_paged_out_counts_with_what_was_seen_and_the_most_that_was_seen_stays() -> None:
    board = Board(a=80).work("a")
    board.residency.order_out(board["a"], 30, 1.0)
    board.residency.paged_out(board["a"], 30, 1.0, 2.0)
    board.at(3.0).working_set(board["a"], 20)
    assert (board["a"].touched, board["a"].shown, board["a"].working_set) == (50, 20, 50)
    board.working_set(board["a"], 10)
    assert (board["a"].touched, board["a"].shown) == (50, 10)
    fresh = Board(b=5).work("b")
    fresh.working_set(fresh["b"], 0)
    assert (fresh["b"].touched, fresh["b"].working_set) == (0, 0)


@pytest.mark.parametrize(("now", "proven"), [(6.9, None), (7.0, 30)])
def test_what_was_seen_is_proven_after_two_seconds_of_work_since_it_came_and_allocated(
    now: float, proven: int | None
) -> None:
    board = Board(a=80).at(4.0).work("a").at(5.0)
    board.set_memory(board["a"], 90, 0)
    board.at(now).working_set(board["a"], 30)
    assert board["a"].proven == proven


def test_a_client_that_is_quiet_proves_what_was_seen_by_a_burst_that_ended_after_it_allocated() -> None:
    board = Board(a=80).at(1.0).work("a").at(1.5)
    board.quiet(board["a"], 1.5)
    board.working_set(board["a"], 30)
    assert board["a"].proven == 30
    board.at(2.0).set_memory(board["a"], 90, 0)
    board.working_set(board["a"], 40)
    assert board["a"].proven == 30, "it has not worked since"


def test_a_holder_of_which_more_is_seen_asks_for_room_and_has_it_there() -> None:
    board = Board(a=80).work("a")
    board.working_set(board["a"], 30)
    board.holder_grew = False
    board.working_set(board["a"], 30)
    assert board.holder_grew is False
    board.residency.order_out(board["a"], 20, 1.0)
    board.residency.paged_out(board["a"], 20, 1.0, 1.0)
    before = board.residency.of(board["a"])
    board.working_set(board["a"], 45)
    assert board["a"].working_set == 65
    assert board.holder_grew is True
    assert board.residency.of(board["a"]) == min(65, before + 35)


def crowd(shown: int, proven: int | None = None) -> Board:
    """a1 (of a1, a2) and b work; b is proven with all its 40 bytes, and `shown` of a1's 60 bytes are seen."""
    board = Board(a1=60, a2=60, b=40)
    board.work("a1", "b")
    board["b"].touched = board["b"].proven = board["b"].shown = 40
    board["a1"].touched = board["a1"].proven = proven
    board["a2"].touched = board["a2"].working_set = 10
    board.holder_grew = False
    board.at(1.0).working_set(board["a1"], shown)
    return board


@pytest.mark.parametrize(("shown", "crowded"), [(34, False), (35, True)])
def test_clients_that_fill_three_quarters_of_the_memory_together_are_a_crowd_and_unproven_ones_are_doubted(
    shown: int, crowded: bool
) -> None:
    board = crowd(shown)
    assert board.crowded_at == (1.0 if crowded else float("-inf"))
    assert [board[name].doubted for name in ("a1", "a2", "b")] == [crowded, crowded, False]
    assert [board[name].working_set for name in ("a1", "a2")] == ([60, 60] if crowded else [shown, 10])
    assert board.sessions["a"].doubted_at == (1.0 if crowded else float("-inf"))
    assert board.sessions["b"].doubted_at == float("-inf")
    assert board.holder_grew is crowded


@pytest.mark.parametrize(("shown", "doubted"), [(36, False), (40, False), (41, True), (60, False)])
def test_one_that_exceeds_what_was_proven_by_a_tenth_of_the_memory_is_doubted_unless_it_uses_all(
    shown: int, doubted: bool
) -> None:
    board = crowd(shown, proven=30)
    assert board["a1"].doubted is doubted
    assert board.holder_grew is doubted


def test_one_alone_is_no_crowd() -> None:
    board = Board(a=90, b=90).work("a")
    board["b"].shown = 90
    board.at(1.0).working_set(board["a"], 90)
    assert board.crowded_at == float("-inf")


def test_one_that_is_doubted_already_is_not_doubted_again() -> None:
    board = crowd(50)
    board.holder_grew = False
    board.at(3.0).working_set(board["a1"], 50)
    assert board.sessions["a"].doubted_at == 1.0
    assert board.crowded_at == 3.0
    assert board.holder_grew is False


@pytest.mark.parametrize(("now", "doubted"), [(60.9, True), (61.0, False)])
def test_new_clients_of_a_session_are_doubted_for_a_minute_after_one_of_its_clients_was(
    now: float, doubted: bool
) -> None:
    board = crowd(50).at(now)
    board.come("a3", 10)
    board.come("b2", 10)
    assert (board["a3"].doubted, board["b2"].doubted) == (doubted, False)


def test_one_that_works_alone_for_two_seconds_after_a_crowd_is_proven_and_no_longer_doubted() -> None:
    board = crowd(50).at(2.0)
    board.released(board["b"])
    board.at(2.9).working_set(board["a1"], 50)
    assert board["a1"].doubted is True
    board.at(3.0).working_set(board["a1"], 50)
    assert (board["a1"].doubted, board["a1"].proven, board["a1"].working_set) == (False, 50, 50)
    assert board["a2"].doubted is True


def test_clients_that_fit_only_by_what_was_seen_are_looked_at_often_until_all_are_proven() -> None:
    board = Board(a=60, b=60).work("a", "b").at(1.0)
    assert board.memory_poll_interval == 0.125
    for name in "ab":
        board[name].proven, board[name].proven_at = 10, 1.0
    assert board.memory_poll_interval == 5 * 0.125
    board["b"].doubted = True
    assert board.memory_poll_interval == 0.125
    board["b"].doubted = False
    board.at(2.0).set_memory(board["b"], 70, 0)
    assert board.memory_poll_interval == 0.125, "it allocated after it was proven"


# -- views -------------------------------------------------------------------------------------------------------


def test_a_session_without_clients_does_nothing() -> None:
    board = Board(a=60)
    board.forget(board["a"])
    view = board.snapshot("a")
    assert (view.waiting, view.running, view.held, view.memory_bytes, view.resident_bytes) == (False,) * 3 + (0, 0)
    assert (view.gpu_seconds, view.last_activity, view.paged_out_bytes) == (0.0, None, 0)


def test_a_view_adds_up_the_clients_and_counts_the_longest_burst_that_is_not_reported_yet() -> None:
    board = Board(a1=30, a2=20, a3=10, b=5)
    board.at(2.0).work("a1").at(3.0).work("a2")
    board.set_memory(board["a2"], 20, 7)
    board.wait(board["a3"])
    board.at(8.0)
    view = board.snapshot("a")
    assert (view.waiting, view.running, view.held) == (True, True, True)
    assert (view.memory_bytes, view.resident_bytes) == (67, 57)
    assert (view.gpu_seconds, view.last_activity) == (6.0, 8.0)
    board.report_busy(board["a1"], 4.0)
    for name in ("a1", "a2"):
        board.quiet(board[name], 7.0)
    view = board.snapshot("a")
    assert (view.running, view.held, view.gpu_seconds, view.last_activity) == (False, True, 4.0, 7.0)
    other = board.snapshot("b")
    assert (other.waiting, other.running, other.held) == (False, False, False)


def test_a_view_shows_what_was_paged_out_and_no_more_plain_memory_on_the_gpu_than_it_has() -> None:
    board = Board(a=30).work("a")
    board.residency.order_out(board["a"], 10, 1.0)
    board.residency.paged_out(board["a"], 10, 1.0, 2.0)
    board["a"].stated_plain = 500
    view = board.snapshot("a")
    assert (view.paged_out_bytes, view.memory_bytes, view.resident_bytes) == (10, 530, 120)


def test_views_name_each_session_once_in_the_order_of_requests_or_leases() -> None:
    gpu, board = GpuArbiter(100, SETTINGS), Board(a1=1, a2=1, b=1, c=1)
    gpu._roster = board
    for name in ("c", "a2", "b", "a1"):
        board.wait(board[name])
    assert gpu.waiting() == ("c", "a", "b")
    for lease, name in enumerate(("b", "a1", "c", "a2"), 1):
        board.granted(board[name], lease)
    assert gpu.holders() == ("b", "a", "c")
    assert gpu.waiting() == ()
