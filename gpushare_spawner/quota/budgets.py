"""The use of budgets: GPU time within windows, what is left, and when use leaves its window. Pure.

Budgets count hours, not money: service/history/recorder.py applies prices. GPU time comes as amounts by hour, account
and user. A group's budget counts the use of all accounts that it contains. `model.quota.HoursBudget` is a budget in the
file; service/budgets.py feeds the use and applies what is decided here.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gpushare_spawner.model.quota import LEAST_LEFT, BudgetState, HoursBudget
from gpushare_spawner.quota.accounts import Account, QuotaAccounts

HOUR = 3600.0
"""Seconds. Use is counted by the hour, and within an hour it counts as uniform."""
MOST_BINS = 100
"""Approximate maximum number of bins of a window: use in a long window is counted in several hours together. Our
choice: what leaves the window is then known within 1 % of its length."""


@dataclass(frozen=True)
class GpuTimeUse:
    """GPU time of a user's sessions that are charged to an account, in an interval."""

    account: str
    """The account's key, see `Account`."""
    user: str
    start: float
    """Seconds since the epoch."""
    length: float
    """Seconds."""
    held: float = 0.0
    """GPU-seconds in which sessions held units, without those that were lent."""
    delivered: float = 0.0
    """GPU-seconds in which sessions had work on the GPU."""


@dataclass(frozen=True)
class Grant:
    """GPU-hours beyond a budget that an admin has granted for a time."""

    account: str
    """The account's key."""
    user: str
    """The user, of the budgets of each user in the account; empty: the budgets of the account itself."""
    hours: float
    since: float
    """Seconds since the epoch."""
    until: float
    by: str = ""
    reason: str = ""


class WindowUse:
    """GPU time by bins, with the sum of those in the window, so that reading costs the same for any number of bins."""

    def __init__(self, budget: HoursBudget) -> None:
        self._budget = budget
        bins = (budget.window or HOUR) / MOST_BINS
        self._bin = max(1, int(bins // HOUR)) * HOUR
        self._starts: list[float] = []
        self._amounts: list[float] = []
        self._total = 0.0

    def add(self, start: float, length: float, amount: float) -> None:
        """Add an amount in GPU-seconds. Amounts of longer intervals, such as days, are spread over the bins."""
        if amount <= 0:
            return
        first = start // self._bin * self._bin
        count = max(1, round(length / self._bin))
        for number in range(count):
            self._add(first + number * self._bin, amount / count)

    def _add(self, start: float, amount: float) -> None:
        place = bisect_left(self._starts, start)
        if place == len(self._starts) or self._starts[place] != start:
            self._starts.insert(place, start)
            self._amounts.insert(place, 0.0)
        self._amounts[place] += amount
        self._total += amount

    def used(self, now: float) -> float:
        """Return the GPU-seconds in the window that ends now. Bins that have left the window are discarded."""
        begin, end = self._budget.bounds(now)
        if self._budget.term is not None:
            inside = slice(bisect_left(self._starts, begin), bisect_left(self._starts, end))
            return sum(self._amounts[inside])
        gone = bisect_right(self._starts, begin - self._bin)
        if gone:
            del self._starts[:gone], self._amounts[:gone]
            self._total = sum(self._amounts)  # made anew, so that rounding errors do not add up
        if not self._starts:
            return 0.0
        outside = max(0.0, begin - self._starts[0]) / self._bin
        return max(0.0, self._total - outside * self._amounts[0])

    def leaves(self, now: float, amount: float) -> float | None:
        """Return when so many GPU-seconds will have left the window if nothing is added; None: never.

        A term ends, and all its use with it.
        """
        begin, end = self._budget.bounds(now)
        if self._budget.term is not None:
            return end
        left = amount
        for start, here in zip(self._starts, self._amounts, strict=True):
            ahead = here * min(1.0, (start + self._bin - begin) / self._bin)
            if ahead >= left:
                gone = max(start, begin) + self._bin * left / here if here else start
                return gone + (self._budget.window or 0.0)
            left -= ahead
        return None


Owner = tuple[str, str]
"""An account's key and a user, or an empty user for the account itself."""


@dataclass
class _Counted:
    account: Account
    user: str
    """See `BudgetState.user`."""
    budgets: Sequence[tuple[HoursBudget, WindowUse]]


class BudgetUse:
    """The use of all budgets of a quota file."""

    def __init__(self, accounts: QuotaAccounts) -> None:
        self.accounts = accounts
        self._counted: dict[Owner, _Counted] = {}
        self._charged: dict[Owner, list[_Counted]] = {}
        """What sessions of an account and a user use."""

    def earliest(self, now: float) -> float:
        """Return the earliest instant from which use counts in a budget now, in seconds since the epoch."""
        return min((budget.bounds(now)[0] for budget in self._all()), default=now)

    def _all(self) -> Iterator[HoursBudget]:
        quotas = self.accounts.quotas
        for quota in (quotas.default, *quotas.all_quotas):
            yield from (*quota.budget, *quota.per_user.budget)

    def add(self, uses: Iterable[GpuTimeUse]) -> None:
        """Add GPU time to the budgets that count it. Amounts of one hour can come in several parts."""
        for use in uses:
            for counted in self._charged_for(use.account, use.user):
                for budget, window in counted.budgets:
                    amount = use.held if budget.counted == "held" else use.delivered
                    window.add(use.start, use.length, amount)

    def states(self, account: Account, user: str, now: float, grants: Iterable[Grant] = ()) -> list[BudgetState]:
        """Return the budgets that a user's server in an account uses, those of groups around it too."""
        granted = _granted(grants, now)
        return [state for counted in self._of(account, user) for state in _states(counted, now, granted)]

    def all_states(self, now: float, grants: Iterable[Grant] = ()) -> Iterator[BudgetState]:
        """Yield the budgets of all accounts in the file, and those of users that have any use."""
        granted = _granted(grants, now)
        for account in self.accounts.named():
            self._owned(account, "")
        for account_key, user in granted:
            self._owned(self.accounts.find(account_key, user), user)
        for counted in [*self._counted.values()]:
            yield from _states(counted, now, granted)

    def used_up(self, sessions: Iterable[Owner], now: float, grants: Iterable[Grant] = ()) -> dict[Owner, list[Owner]]:
        """Return the accounts and users of sessions with a used-up budget, each with the owners of such budgets."""
        granted, over = _granted(grants, now), dict[Owner, list[Owner]]()
        checked: dict[Owner, bool] = {}
        for key, user in set(sessions):
            for counted in self._charged_for(key, user):
                owner = counted.account.key, counted.user
                if owner not in checked:
                    checked[owner] = _is_used_up(counted, now, granted)
                if checked[owner]:
                    over.setdefault((key, user), []).append(owner)
        return over

    def still_used_up(self, owners: Iterable[Owner], now: float, grants: Iterable[Grant] = ()) -> list[Owner]:
        """Return those of the accounts, and of the users in them, with a used-up budget of their own."""
        granted = _granted(grants, now)
        return [
            owner
            for owner in owners
            if (counted := self._counted.get(owner)) is not None and _is_used_up(counted, now, granted)
        ]

    def _charged_for(self, key: str, user: str) -> list[_Counted]:
        charged = self._charged.get((key, user))
        if charged is None:
            charged = self._charged[key, user] = self._of(self.accounts.find(key, user), user)
        return charged

    def _of(self, account: Account, user: str) -> list[_Counted]:
        # the history forgets users before groups
        owners = [(level, owner) for level in account.path for owner in (("", user) if user else ("",))]
        return [counted for level, owner in owners if (counted := self._owned(level, owner)) is not None]

    def _owned(self, account: Account, user: str) -> _Counted | None:
        budgets = account.quota.per_user.budget if user else account.quota.budget
        if not budgets:
            return None
        key = account.key, user
        if key not in self._counted:
            self._counted[key] = _Counted(account, user, [(budget, WindowUse(budget)) for budget in budgets])
        return self._counted[key]


def _is_used_up(counted: _Counted, now: float, grants: Mapping[Owner, float]) -> bool:
    granted = grants.get((counted.account.key, counted.user), 0.0)
    for budget, window in counted.budgets:
        begin, end = budget.bounds(now)
        left = budget.hours + granted - window.used(now) / HOUR
        if left <= LEAST_LEFT and (budget.term is None or begin <= now < end):
            return True
    return False


def _states(counted: _Counted, now: float, grants: Mapping[Owner, float]) -> Iterator[BudgetState]:
    """Yield the budgets of an account, or of a user in it, without terms that have not begun or are over."""
    granted = grants.get((counted.account.key, counted.user), 0.0)
    for budget, window in counted.budgets:
        begin, end = budget.bounds(now)
        if budget.term is None or begin <= now < end:
            used = window.used(now)
            beyond = max(0.0, used - (budget.hours + granted) * HOUR)
            more_at = window.leaves(now, beyond + LEAST_LEFT * HOUR) if used else None
            yield BudgetState(
                account=counted.account.key,
                user=counted.user,
                hours=budget.hours + granted,
                granted=granted,
                used=used / HOUR,
                counted=budget.counted,
                window=budget.window,
                ends_at=end if budget.term is not None else None,
                more_at=more_at,
            )


def states_shown(
    account: Account, user: str, written: Mapping[Owner, Sequence[BudgetState]], now: float
) -> list[BudgetState]:
    """Return the budgets of a user's server in an account, least left first.

    ``written``: the states that the service wrote, by account and user. A budget without a state is unused.
    """
    shown: list[BudgetState] = []
    for level in account.path:
        for owner, budgets in (("", level.quota.budget), (user, level.quota.per_user.budget)):
            states = written.get((level.key, owner), ())
            if not states:
                unused = _Counted(level, owner, [(budget, WindowUse(budget)) for budget in budgets])
                states = list(_states(unused, now, {}))
            shown.extend(states)
    return sorted(shown, key=lambda state: state.part_left)


def _granted(grants: Iterable[Grant], now: float) -> dict[Owner, float]:
    """Return the GPU-hours that are granted now."""
    hours: dict[Owner, float] = {}
    for grant in grants:
        if grant.since <= now < grant.until:
            owner = grant.account, grant.user
            hours[owner] = hours.get(owner, 0.0) + grant.hours
    return hours
