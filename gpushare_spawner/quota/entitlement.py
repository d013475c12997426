"""The units that accounts are entitled to while they compete, and the exchange of units between running sessions.

order.py orders the waiting spawns, and reclaim.py frees units for them. Here, sessions that run beside each other
exchange units until each account has what it is entitled to.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpushare_spawner.model.quota import Quota
from gpushare_spawner.model.share import units_on
from gpushare_spawner.quota.accounts import Account

_NO_QUOTA = Quota()
LEAST_EXCHANGED = 4
"""Units. A smaller difference from the entitlement is left: sessions would give and get it back again and again. Our
value: 1 % of four GPUs."""
MOST_EXCHANGES = 200
"""Exchanges of one round. Our value; the next round continues."""
MINIMUM_RUN = 600.0
"""Seconds. A session loses units to other accounts over quota at most once in this time. Our value: a user can finish a
step of the work, and the time in which units follow the weights is still a quarter of an hour."""


@dataclass(frozen=True)
class Entry:
    """One entry of a level of the quotas' tree, in units of 1 %."""

    guarantee: int
    weight: float
    wanted: int
    """Units that its sessions and waiting spawns could use."""


def divide(capacity: float, entries: Sequence[Entry]) -> list[float]:
    """Return the units that each entry is entitled to.

    Guarantees come first, as far as they are wanted. The rest is divided by weight among those that want more; entries
    of weight 0 come last. Guarantees that exceed the capacity are lowered in proportion.
    """
    given = [float(min(entry.wanted, entry.guarantee)) for entry in entries]
    left = capacity - sum(given)
    if left < 0:
        return [units * capacity / sum(given) for units in given]
    for weights in ([entry.weight for entry in entries], [float(not entry.weight) for entry in entries]):
        while left > 1e-9:
            short = [
                number
                for number, entry in enumerate(entries)
                if weights[number] * (entry.wanted - given[number]) > 1e-9
            ]
            if not short:
                break
            part = left / sum(weights[number] for number in short)
            for number in short:
                more = min(part * weights[number], entries[number].wanted - given[number])
                given[number] += more
                left -= more
    return given


@dataclass
class Entitlements:
    """The units that accounts have and want, by account key."""

    has: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    _wanted: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    _known: dict[str, Account] = field(default_factory=dict)

    def add(self, account: Account, has: int, wanted: int) -> None:
        """Add a session or a waiting spawn. ``has``: units that it gets while all others work."""
        self._known[account.key] = account
        self.has[account.key] += has
        self._wanted[account.key] += wanted

    def add_session(self, account: Account, gpus: Sequence[str], last_units: int, has: int, wanted: int) -> None:
        """Add a session on these GPUs, with units per GPU. ``last_units``: see `share.units_on`."""
        if last_units:
            has, wanted = (sum([units_on(gpu, gpus, units, last_units) for gpu in gpus]) for units in (has, wanted))
        else:
            has, wanted = has * len(gpus), wanted * len(gpus)
        self.add(account, has, wanted)

    def excess(self, capacity: int) -> dict[str, float]:
        """Return the units that each account has beyond its entitlement; negative: it lacks them.

        The units of a group are divided among its teams and users; its own servers are an entry of weight 1.
        """
        entitled: dict[str, float] = {}
        self._divide(capacity, list(self._known.values()), 0, entitled)
        return {key: self.has[key] - entitled[key] for key in self._known}

    def _divide(self, capacity: float, accounts: Sequence[Account], depth: int, entitled: dict[str, float]) -> None:
        """Divide units among accounts of one group. ``depth``: the number of groups around them, and the group."""
        within: defaultdict[str, list[Account]] = defaultdict(list)
        for account in accounts:
            entry = account.entry(depth)
            within[entry.key if entry is not None else ""].append(account)
        entries = []
        for here in within.values():
            entry = here[0].entry(depth)
            quota = entry.quota if entry is not None else _NO_QUOTA
            wanted = sum(self._wanted[account.key] for account in here)
            entries.append(Entry(quota.guaranteed_units, quota.weight, wanted))
        for (key, here), units in zip(within.items(), divide(capacity, entries), strict=True):
            if not key or (here[0].key == key and len(here) == 1):
                entitled[here[0].key] = units
            else:
                self._divide(units, here, depth + 1, entitled)


@dataclass
class Exchanging:
    """A session with a share of one GPU, and the units that it gets while all others work."""

    session: str
    account: str
    """The account's key."""
    gpu: str
    units: int
    most: int
    """Units that it can use: its share, or what an idle action leaves."""
    least: int
    """Units that it keeps."""
    rank: tuple[object, ...]
    """Sort key: the first session to give comes first."""


def exchanged(sessions: Iterable[Exchanging], excess: Mapping[str, float], free: Mapping[str, int]) -> dict[str, int]:
    """Return the sessions with other units than now, and these units.

    The account that lacks most gets units from the account that has the most beyond its entitlement. If the two have no
    GPU in common, accounts between them pass units on. ``excess``: see `Entitlements.excess`. ``free``: units of each
    GPU that no spawn needs; they are given first.
    """
    every = sorted(sessions, key=lambda one: one.rank)
    before = {one.session: one.units for one in every}
    balance, left = defaultdict(float, excess), dict(free)
    for one in sorted(every, key=lambda one: balance[one.account]):
        more = max(0, min(one.most - one.units, left.get(one.gpu, 0)))
        one.units += more
        balance[one.account] += more
        left[one.gpu] = left.get(one.gpu, 0) - more
    neighbours = _Neighbours(every)
    for _ in range(MOST_EXCHANGES):
        lacking = sorted((units, account) for account, units in balance.items() if units <= -LEAST_EXCHANGED)
        path = next((path for _, account in lacking if (path := neighbours.path(account, balance))), None)
        if path is None:
            break
        first, last = path[0][0].account, path[-1][1].account
        units = min(-balance[first], balance[last], *(min(to.most - to.units, of.units - of.least) for to, of in path))
        for to, of in path:
            to.units, of.units = to.units + int(units), of.units - int(units)
        balance[first] += int(units)
        balance[last] -= int(units)
    return {one.session: one.units for one in every if one.units != before[one.session]}


class _Neighbours:
    """The sessions by account and by GPU."""

    def __init__(self, sessions: Sequence[Exchanging]) -> None:
        self._of: defaultdict[str, list[Exchanging]] = defaultdict(list)
        self._on: defaultdict[str, list[Exchanging]] = defaultdict(list)
        for one in sessions:
            self._of[one.account].append(one)
            self._on[one.gpu].append(one)

    def path(self, account: str, balance: Mapping[str, float]) -> list[tuple[Exchanging, Exchanging]]:
        """Return the shortest chain of exchanges from an account to one with excess units; empty: there is none.

        Each exchange is a session that gets units, and one that gives them. Among the shortest chains, the account with
        the most units beyond its entitlement gives.
        """
        came: dict[str, tuple[Exchanging, Exchanging] | None] = {account: None}
        level = [account]
        while level:
            following: dict[str, None] = {}
            for current in level:
                for to, of in self._exchanges(current):
                    if of.account not in came:
                        came[of.account] = (to, of)
                        following[of.account] = None
            giver = max(following, key=lambda key: balance[key], default=None)
            if giver is not None and balance[giver] >= LEAST_EXCHANGED:
                path: deque[tuple[Exchanging, Exchanging]] = deque()
                while (exchange := came[giver]) is not None:
                    path.appendleft(exchange)
                    giver = exchange[0].account
                return list(path)
            level = list(following)
        return []

    def _exchanges(self, account: str) -> Iterator[tuple[Exchanging, Exchanging]]:
        """Yield the sessions of an account that can get units, each with one that can give them."""
        for to in self._of[account]:
            if to.most - to.units >= LEAST_EXCHANGED:
                for of in self._on[to.gpu]:
                    if of.account != account and of.units - of.least >= LEAST_EXCHANGED:
                        yield to, of
