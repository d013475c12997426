"""The roster: what sessions have attained, by how much memory is exceeded, and what a report of a client is worth."""

from __future__ import annotations

import pytest

from gpushare_spawner.arbiter.roster import Roster
from gpushare_spawner.arbiter.session import ArbiterSettings, ArbitratedSession

SETTINGS = ArbiterSettings(pause=1.0)


def roster(vram: int = 100, **clients: tuple[str, int]) -> Roster:
    """Clients with managed memory, all of which wait since 0.0."""
    made = Roster(vram, SETTINGS)
    made.now = 0.0
    for client, (session, managed) in clients.items():
        made.sessions.setdefault(session, ArbitratedSession(session, 1))
        made.connect(client, session)
        made.set_memory(made.client(client), managed, 0)
        made.work_again(made.client(client))
        made.wait(made.client(client))
    return made


def test_a_session_has_to_move_no_more_than_all_exceed_the_memory_by_and_counts_for_others_as_one_gpu_at_most() -> None:
    made = roster(a=("a", 60), b1=("b", 40), b2=("b", 30), c1=("c", 100), c2=("c", 50))
    excess = {session.id: amount for session, amount in made.excess().items()}
    # 60 + 70 + 100 of 100 bytes; beside its own 150 bytes c finds 130
    assert excess == {"a": 130, "b": 130, "c": 180}


def test_nothing_has_to_move_where_all_fit_and_those_that_want_no_memory_do_not_count() -> None:
    made = roster(a=("a", 60), b=("b", 41), c=("c", 100))
    made.client("c").waiting = False
    assert {session.id: amount for session, amount in made.excess().items()} == {"a": 1, "b": 1, "c": 1}
    made.set_memory(made.client("b"), 40, 0)
    assert set(made.excess().values()) == {0}


def test_a_client_was_busy_for_no_longer_than_its_lease_and_never_for_less_than_it_said_before() -> None:
    made = roster(a=("a", 1))
    client = made.client("a")
    made.now = 10.0
    made.granted(client, 1)
    made.now = 13.0
    made.report_busy(client, 2.0)
    assert client.session.gpu_seconds == 2.0
    made.report_busy(client, 1.0)
    assert client.session.gpu_seconds == 2.0
    made.report_busy(client, 99.0)
    assert client.session.gpu_seconds == 3.0


def test_a_view_counts_a_burst_from_when_its_pages_are_in_up_to_the_instant_of_the_view() -> None:
    made = roster(a=("a", 1))
    client = made.client("a")
    made.now = 10.0
    made.granted(client, 1)
    client.paging_until = 18.0
    assert (made.snapshot("a", 15.0).running, made.snapshot("a", 15.0).gpu_seconds) == (True, 0.0)
    client.paging_until = 16.0
    assert (made.snapshot("a", 19.0).gpu_seconds, made.snapshot("a", 19.0).last_activity) == (3.0, 19.0)
    assert made.snapshot("a").last_activity == 10.0, "at the last event"


def test_a_session_attains_time_once_however_many_of_its_clients_work() -> None:
    made = roster(a1=("a", 1), a2=("a", 1), b=("b", 1))
    made.granted(made.client("a1"), 1)
    made.granted(made.client("a2"), 2)
    made.elapse(3.0)
    assert (made.sessions["a"].attained, made.sessions["b"].attained) == (3.0, 0.0)
    made.quiet(made.client("a1"), 0.0)
    made.quiet(made.client("a2"), 0.0)
    made.elapse(3.0)
    assert made.sessions["a"].attained == 3.0


@pytest.mark.parametrize(("pause", "attained"), [(0.9, 4.0), (1.0, 0.0), (7.0, 0.0)])
def test_a_pause_of_a_second_sets_what_a_session_has_attained_back_to_nothing(pause: float, attained: float) -> None:
    made = roster(a=("a", 1))
    client = made.client("a")
    made.granted(client, 1)
    made.now = 4.0
    made.elapse(4.0)
    made.quiet(client, 4.0)
    made.now = 4.0 + pause
    made.work_again(client)
    assert made.sessions["a"].attained == attained
    assert made.sessions["a"].paused is (attained == 0.0)
    assert list(client.gaps._spans) == [pytest.approx(pause)]


def test_a_session_pauses_only_while_none_of_its_clients_works() -> None:
    made = roster(a1=("a", 1), a2=("a", 1))
    first, second = made.client("a1"), made.client("a2")
    for number, client in enumerate((first, second)):
        made.granted(client, number + 1)
    made.quiet(first, 0.0)
    made.elapse(9.0)
    made.now = 9.0
    made.work_again(first)
    assert made.sessions["a"].attained == 9.0, "the second client went on"


def test_a_client_cannot_connect_twice_and_needs_a_session() -> None:
    made = roster(a=("a", 1))
    with pytest.raises(ValueError, match="connected already"):
        made.connect("a", "a")
    with pytest.raises(KeyError):
        made.connect("b", "b")


@pytest.mark.parametrize(("managed", "plain"), [(-1, 0), (0, -1)])
def test_amounts_below_0_are_refused(managed: int, plain: int) -> None:
    made = roster(a=("a", 1))
    with pytest.raises(ValueError, match="at least 0"):
        made.set_memory(made.client("a"), managed, plain)


def test_the_context_counts_beside_the_plain_memory_and_what_the_driver_shows_of_both_cannot_leave() -> None:
    made = Roster(100, ArbiterSettings(context_bytes=10))
    made.sessions["a"] = ArbitratedSession("a", 1)
    made.connect("a", "a")
    client = made.client("a")
    made.set_memory(client, 0, 30)
    assert (client.plain, client.unconfirmed, made.vram_budget().for_managed) == (0, 40, 100)
    made.device_memory(client, 25)
    assert (client.plain, client.unconfirmed, made.vram_budget().for_managed) == (25, 0, 75)  # until it shows more
    made.device_memory(client, 60)
    assert (client.plain, client.unconfirmed, made.vram_budget().for_managed) == (40, 0, 60)
    made.set_memory(client, 0, 500)
    assert (client.plain, client.unconfirmed) == (60, 0)
    made.device_memory(client, None)
    assert (client.plain, client.unconfirmed) == (0, 100), "no more than the GPU has"


def test_a_client_that_was_held_back_has_been_on_the_gpu_since_it_came() -> None:
    made = roster(a=("a", 1))
    client = made.client("a")
    for instant, parked, came_at in ((3.0, False, 3.0), (5.0, True, 3.0), (8.0, False, 8.0)):
        made.now = instant
        client.parked = parked
        made.granted(client, 1)
        assert (client.came_at, client.granted_at, client.parked) == (came_at, instant, False)


@pytest.mark.parametrize(("plain", "looks"), [(10, False), (11, True)])
def test_what_clients_touch_is_looked_at_only_where_all_that_they_may_use_does_not_fit(plain: int, looks: bool) -> None:
    made = roster(a=("a", 40), b=("b", 40))
    for name in "ab":
        made.set_memory(made.client(name), 40, plain)
    assert (made.memory_poll_interval is not None) is looks
    made.client("b").waiting = False
    assert made.memory_poll_interval is None
