"""The asks of one session: few wait, few reach the service, and each has one answer."""

from __future__ import annotations

import pytest

from gpushare_spawner.agent.sessions.session import ASKS_AT_ONCE, ASKS_PER_SECOND, READS_AT_ONCE, PendingAsks
from gpushare_spawner.model.controls import ASK_SECONDS, MOST_ASKS, AskAnswer
from gpushare_spawner.model.frames import AskKind
from gpushare_spawner.wording.actions import NUMBER_REUSED, TOO_MANY_REQUESTS
from gpushare_spawner.wording.layers import ASK_UNKNOWN
from tests.present import present

HOUR = 3600.0


class Clocks:
    """A clock that can be set, and one that cannot."""

    def __init__(self) -> None:
        self.wall, self.steady = 1_000_000.0, 0.0

    def forward(self, seconds: float) -> None:
        self.wall += seconds
        self.steady += seconds


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def asks(clocks: Clocks) -> PendingAsks:
    return PendingAsks(lambda: clocks.wall, lambda: clocks.steady)


def answer(number: int, done: bool = True) -> AskAnswer:
    return AskAnswer(number=number, done=done, text="Done.", at=1)


def test_an_ask_waits_until_it_is_answered(asks: PendingAsks) -> None:
    assert asks.take(7, AskKind.KEEP, HOUR) is None
    (waiting,) = asks.waiting()
    assert (waiting.number, waiting.kind, waiting.value, waiting.at) == (7, AskKind.KEEP, HOUR, 1_000_000)
    assert asks.answered(answer(7))
    assert asks.waiting() == ()


def test_the_same_ask_again_waits_once_and_then_gets_the_same_answer(asks: PendingAsks, clocks: Clocks) -> None:
    asks.take(7, AskKind.KEEP, HOUR)
    clocks.forward(1)
    assert asks.take(7, AskKind.KEEP, HOUR) is None
    assert [ask.at for ask in asks.waiting()] == [1_000_000]
    asks.answered(answer(7))
    assert asks.take(7, AskKind.KEEP, HOUR) == answer(7)
    assert asks.waiting() == ()
    assert not asks.answered(answer(7, done=False))
    assert asks.take(7, AskKind.KEEP, HOUR) == answer(7)


def test_another_ask_with_the_number_of_one_is_refused(asks: PendingAsks) -> None:
    asks.take(7, AskKind.KEEP, HOUR)
    assert present(asks.take(7, AskKind.KEEP, 2 * HOUR)).text == NUMBER_REUSED
    assert [ask.value for ask in asks.waiting()] == [HOUR]
    asks.answered(answer(7))
    assert present(asks.take(7, AskKind.STOP, 0)).text == NUMBER_REUSED


def test_an_ask_that_nobody_answers_is_dropped_after_a_minute(asks: PendingAsks, clocks: Clocks) -> None:
    asks.take(7, AskKind.RELEASE, 0)
    clocks.wall -= 24 * HOUR  # a clock that is set back does not keep it
    clocks.forward(ASK_SECONDS - 1)
    assert len(asks.waiting()) == 1
    clocks.forward(2)
    assert asks.waiting() == ()


def test_an_answer_to_an_ask_that_is_not_known_is_passed_on_once(asks: PendingAsks) -> None:
    assert asks.answered(answer(9))
    assert not asks.answered(answer(9))
    assert asks.take(9, AskKind.KEEP, HOUR) == answer(9)


def test_what_no_service_knows_is_answered_at_once(asks: PendingAsks) -> None:
    refused = present(asks.take(7, max(AskKind) + 1, 0))
    assert (refused.done, refused.text) == (False, ASK_UNKNOWN)
    assert asks.waiting() == ()


def test_of_ten_thousand_asks_few_wait_and_few_reach_the_service(asks: PendingAsks, clocks: Clocks) -> None:
    refused = [asks.take(number, AskKind.KEEP, HOUR) for number in range(1, 10_001)]
    assert [one is None for one in refused] == [True] * MOST_ASKS + [False] * (10_000 - MOST_ASKS)
    assert {present(one).text for one in refused[MOST_ASKS:]} == {TOO_MANY_REQUESTS}
    # even where each is answered at once
    taken, number = 0, 20_000
    for _ in range(1000):
        for ask in asks.waiting():
            asks.answered(answer(ask.number))
        number += 1
        taken += asks.take(number, AskKind.KEEP, HOUR) is None
    assert taken == ASKS_AT_ONCE - MOST_ASKS
    clocks.forward(1 / ASKS_PER_SECOND + 1)
    assert asks.take(30_000, AskKind.KEEP, HOUR) is None
    assert asks.take(30_001, AskKind.KEEP, HOUR) is not None


def spend(asks: PendingAsks, kind: AskKind, first: int) -> int:
    """Ask until the agent refuses, each answered at once. Returns how many reached the service."""
    number = first
    while asks.take(number, kind, 60) is None:
        asks.answered(answer(number))
        number += 1
        assert number < first + 1000, "without end"
    return number - first


@pytest.mark.parametrize("read", [kind for kind in AskKind if kind.reads])
@pytest.mark.parametrize("act", [kind for kind in AskKind if not kind.reads])
def test_reading_is_no_action(asks: PendingAsks, act: AskKind, read: AskKind) -> None:
    assert spend(asks, act, 1) == ASKS_AT_ONCE
    assert spend(asks, read, 1000) == READS_AT_ONCE, "a user who has acted often can read"
    assert present(asks.take(5000, act, 60)).text == TOO_MANY_REQUESTS


@pytest.mark.parametrize("read", [kind for kind in AskKind if kind.reads])
def test_who_reads_without_end_can_still_act(asks: PendingAsks, read: AskKind) -> None:
    for number in range(1, 1000):
        asks.take(number, read, 0)
    assert len(asks.waiting()) == MOST_ASKS
    assert [asks.take(number, AskKind.KEEP, HOUR) for number in range(2000, 2000 + MOST_ASKS)] == [None] * MOST_ASKS
    assert present(asks.take(3000, read, 0)).text == TOO_MANY_REQUESTS
