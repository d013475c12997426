"""Charging, figure by figure: which sessions count as having work, and for which processes each is charged."""

from __future__ import annotations

import pytest

from gpushare_spawner.arbiter.accounting import Charging
from gpushare_spawner.arbiter.roster import Roster
from gpushare_spawner.arbiter.session import ArbiterSettings, ArbitratedSession, Client

SETTINGS = ArbiterSettings(period=0.2)


class Charged:
    """A roster, its accounts, and a clock for both. All clients hold a lease and work."""

    def __init__(self, **clients: str) -> None:
        """`clients`: the session of each."""
        self.roster = Roster(100, SETTINGS)
        self.roster.now = 0.0
        self.charging = Charging(self.roster, SETTINGS)
        self.accounts = self.charging.accounts
        for lease, (client, session) in enumerate(clients.items(), 1):
            if session not in self.roster.sessions:
                self.roster.sessions[session] = ArbitratedSession(session, 50)
                self.accounts.add(session, 50)
            self.roster.connect(client, session)
            self.roster.granted(self.roster.client(client), lease)
        self.settle()

    def client(self, client: str) -> Client:
        return self.roster.client(client)

    def settle(self, **requests: float) -> None:
        self.charging.update_working(requests)

    def run(self, seconds: float, memory_short: bool = False) -> None:
        self.roster.now += seconds
        self.charging.advance(seconds, {}, memory_short)

    def received(self, *sessions: str) -> list[float]:
        return [self.accounts.received(session) for session in sessions]


def test_each_process_with_a_lease_is_charged_an_even_part_of_the_time() -> None:
    charged = Charged(a1="a", a2="a", b="b")
    charged.run(3.0)
    assert charged.received("a", "b") == pytest.approx([2.0, 1.0])


def test_a_process_without_a_lease_is_charged_nothing_and_its_session_has_no_work() -> None:
    charged = Charged(a="a", b="b")
    charged.roster.end_of_lease(charged.client("b"))
    charged.settle()
    assert charged.accounts.working == {"a"}
    charged.run(3.0)
    assert charged.received("a", "b") == [3.0, 0.0]


def test_a_session_whose_client_waits_has_work() -> None:
    charged = Charged(a="a", b1="b", b2="b")
    for name in ("b1", "b2"):
        charged.roster.end_of_lease(charged.client(name))
    charged.roster.wait(charged.client("b2"))
    charged.settle()
    assert charged.accounts.working == {"a", "b"}


def test_a_client_that_says_it_is_quiet_is_charged_until_the_driver_could_contradict_it() -> None:
    charged = Charged(a="a", b="b")
    charged.roster.quiet(charged.client("a"), 0.0)
    charged.settle()
    charged.run(2.0)
    assert charged.received("a", "b") == pytest.approx([1.0, 1.0])
    assert charged.accounts.working == {"a", "b"}
    charged.accounts.sample(0.0, 2.0, {"a": 1.0, "b": 1.0})
    charged.settle()
    assert charged.accounts.working == {"b"}
    charged.run(2.0)
    assert charged.received("a", "b") == pytest.approx([1.0, 3.0])


@pytest.mark.parametrize(("request_seconds", "lag_kept"), [(0.05, 0.2), (0.7, 0.7)])
def test_a_session_that_gets_work_has_a_request_of_a_time_slice_and_of_a_period_at_least(
    request_seconds: float, lag_kept: float
) -> None:
    charged = Charged(a="a", b="b")
    charged.roster.quiet(charged.client("a"), 0.0)
    charged.accounts.sample(-1.0, 0.0, {"a": 0.0, "b": 1.0})
    charged.run(2.0)  # b has had 2 s, and owes one of them to a
    charged.settle()
    charged.accounts._accounts["a"].absent = 1.0
    charged.roster.work_again(charged.client("a"))
    charged.settle(a=request_seconds)
    # of what a session is owed one request is kept when it gets work after a pause
    assert charged.accounts._accounts["a"].lag == pytest.approx(lag_kept)


def test_a_session_that_the_schedule_names_no_time_slice_for_has_a_request_of_a_period() -> None:
    charged = Charged(a="a", b="b")
    charged.roster.quiet(charged.client("a"), 0.0)
    charged.accounts.sample(-1.0, 0.0, {"a": 0.0, "b": 1.0})
    charged.run(2.0)
    charged.settle()
    charged.accounts._accounts["a"].absent = 1.0
    charged.roster.work_again(charged.client("a"))
    charged.settle()
    assert charged.accounts._accounts["a"].lag == pytest.approx(0.2)


def test_a_process_that_left_alive_is_charged_up_to_the_instant_that_is_named_for_it() -> None:
    charged = Charged(a="a", b="b")
    left = charged.client("a")
    charged.roster.forget(left)
    left.session.left_behind[left.id] = 4.0
    for received in ([1.0, 1.0], [2.0, 2.0], [2.0, 4.0]):
        charged.run(2.0)
        assert charged.received("a", "b") == pytest.approx(received)


@pytest.mark.parametrize(("parked", "saturated"), [("", False), ("b", True)])
def test_time_in_which_one_client_was_held_back_says_nothing_of_what_all_want(parked: str, saturated: bool) -> None:
    charged = Charged(a="a", b="b", c="c")
    if parked:
        charged.client(parked).parked = True
    charged.run(1.0)
    charged.accounts.sample(0.0, 1.0, dict.fromkeys("abc", 0.2))
    assert charged.accounts.saturated is saturated


@pytest.mark.parametrize("memory_short", [True, False])
def test_where_memory_is_short_an_idle_gpu_counts_as_saturated(memory_short: bool) -> None:
    charged = Charged(a="a", b="b")
    charged.run(1.0, memory_short)
    charged.accounts.sample(0.0, 1.0, {"a": 0.1, "b": 0.1})
    assert charged.accounts.saturated is memory_short
