"""How often callers may act through the REST API. Times are the test's."""

from __future__ import annotations

import pytest

from gpushare_spawner.service.api import router
from gpushare_spawner.service.api.router import ActionBudgets
from gpushare_spawner.service.hub.caller import Caller

ANN, BOB = Caller("ann"), Caller("bob")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def acts(budgets: ActionBudgets, caller: Caller) -> int:
    """How many actions are allowed now."""
    allowed = 0
    while not budgets.wait(caller.label or caller.name, caller):
        allowed += 1
    return allowed


def test_a_user_acts_thirty_times_at_once_and_then_once_in_two_seconds() -> None:
    clock = Clock()
    budgets = ActionBudgets(clock)
    assert acts(budgets, ANN) == 30
    assert budgets.wait("ann", ANN) == pytest.approx(2, abs=0.01)
    clock.now += 20
    assert acts(budgets, ANN) == 10
    assert acts(budgets, BOB) == 30, "another user"
    clock.now += 3600
    assert acts(budgets, ANN) == 30


@pytest.mark.parametrize(
    "caller",
    [
        Caller("boss", is_admin=True),
        Caller("", label="service robot", by_token=True),
        Caller("op", scopes=frozenset({"custom:gpushare:act"})),
        Caller("op", scopes=frozenset({"custom:gpushare:drain"})),
    ],
)
def test_who_acts_for_many_has_a_larger_budget(caller: Caller) -> None:
    clock = Clock()
    budgets = ActionBudgets(clock)
    assert acts(budgets, caller) == 300
    clock.now += 2
    assert acts(budgets, caller) == 20


def test_the_callers_that_acted_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "MOST", 2)
    budgets = ActionBudgets(Clock())
    assert acts(budgets, ANN) == acts(budgets, BOB) == 30
    assert acts(budgets, ANN) == 0
    assert acts(budgets, Caller("carl")) == 30
    assert acts(budgets, ANN) == 0
    assert acts(budgets, BOB) == 30, "forgotten"
