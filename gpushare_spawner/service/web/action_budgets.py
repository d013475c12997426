"""How often each caller may act through the REST API."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from gpushare_spawner.rate_limit import Budget
from gpushare_spawner.service.web.caller import Caller

AT_ONCE, PER_SECOND = 30, 0.5
"""Of a user. Ours: more than anybody does by hand. Each action can ask an agent and all agents anew, and is an entry of
the history."""
AT_ONCE_FOR_ALL, PER_SECOND_FOR_ALL = 300, 10.0
"""Of those who may act on the sessions or nodes of all users, and of services: they act for many."""
MOST = 10_000
"""Callers that are kept; the one that has not acted for longest is forgotten first. After a minute without an action a
budget is full, so only 10,000 callers within a minute could gain by this."""
_ALMOST_ONE = 0.999
"""Of an action: sums of floats are not exact."""


class ActionBudgets:
    """The budgets of all callers. ``clock``: seconds; it never goes back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._budgets: OrderedDict[tuple[str, bool], Budget] = OrderedDict()

    def wait(self, who: str, caller: Caller) -> float:
        """Count one action; or return the seconds until the caller may act again: then it is not counted.

        ``who``: the same for all logins and tokens of one user or service.
        """
        for_all = caller.acts_on_all or caller.drains or not caller.name
        budget = self._budgets.pop((who, for_all), None) or self._new(for_all)
        self._budgets[who, for_all] = budget
        if len(self._budgets) > MOST:
            self._budgets.popitem(last=False)
        wait = budget.wait(keep=_ALMOST_ONE)
        if not wait:
            budget.spend()
        return wait

    def _new(self, for_all: bool) -> Budget:
        if for_all:
            return Budget(self._clock, PER_SECOND_FOR_ALL, AT_ONCE_FOR_ALL)
        return Budget(self._clock, PER_SECOND, AT_ONCE)


def who(user: Mapping[str, Any]) -> str:
    """Return a name of a user or service as the hub describes it. No user has the name of a service in this."""
    return f"{user.get('kind')}:{user['name']}"
