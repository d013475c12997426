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
    demand: int
    """Units that its sessions and waiting spawns could use."""


def divide(capacity: float, entries: Sequence[Entry]) -> list[float]:
    """Return the units that each entry is entitled to.

    Guarantees come first, up to each demand. The rest is divided by weight among entries with more demand; entries
    of weight 0 come last. Guarantees that exceed the capacity are lowered in proportion.
    """
    given = [float(min(entry.demand, entry.guarantee)) for entry in entries]
    left = capacity - sum(given)
    if left < 0:
        return [units * capacity / sum(given) for units in given]
    for weights in ([entry.weight for entry in entries], [float(not entry.weight) for entry in entries]):
        while left > 1e-9:
            short = [
                number
                for number, entry in enumerate(entries)
                if weights[number] * (entry.demand - given[number]) > 1e-9
            ]
            if not short:
                break
            part = left / sum(weights[number] for number in short)
            for number in short:
                more = min(part * weights[number], entries[number].demand - given[number])
                given[number] += more
                left -= more
    return given


@dataclass
class Entitlements:
    """The units that accounts have and want, by account key."""

    has: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    _demand: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    _accounts: dict[str, Account] = field(default_factory=dict)

    def add(self, account: Account, has: int, demand: int) -> None:
        """Add a session or a waiting spawn. ``has``: units that it gets while all others work."""
        self._accounts[account.key] = account
        self.has[account.key] += has
        self._demand[account.key] += demand

    def add_session(self, account: Account, gpus: Sequence[str], last_units: int, has: int, demand: int) -> None:
        """Add a session on these GPUs, with units per GPU. ``last_units``: see `share.units_on`."""
        if last_units:
            has, demand = (sum([units_on(gpu, gpus, units, last_units) for gpu in gpus]) for units in (has, demand))
        else:
            has, demand = has * len(gpus), demand * len(gpus)
        self.add(account, has, demand)

    def excess(self, capacity: int) -> dict[str, float]:
        """Return the units that each account has beyond its entitlement; negative: it lacks them.

        The units of a group are divided among its teams and users; its own servers are an entry of weight 1.
        """
        entitled: dict[str, float] = {}
        self._divide(capacity, list(self._accounts.values()), 0, entitled)
        return {key: self.has[key] - entitled[key] for key in self._accounts}

    def _divide(self, capacity: float, accounts: Sequence[Account], depth: int, entitled: dict[str, float]) -> None:
        """Divide units among accounts of one group. ``depth``: the number of groups around them, and the group."""
        within: defaultdict[str, list[Account]] = defaultdict(list)
        for account in accounts:
            entry = account.entry(depth)
            within[entry.key if entry is not None else ""].append(account)
        entries = []
        for members in within.values():
            entry = members[0].entry(depth)
            quota = entry.quota if entry is not None else _NO_QUOTA
            demand = sum(self._demand[account.key] for account in members)
            entries.append(Entry(quota.guaranteed_units, quota.weight, demand))
        for (key, members), units in zip(within.items(), divide(capacity, entries), strict=True):
            if not key or (members[0].key == key and len(members) == 1):
                entitled[members[0].key] = units
            else:
                self._divide(units, members, depth + 1, entitled)


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
    in_order = sorted(sessions, key=lambda session: session.rank)
    before = {session.session: session.units for session in in_order}
    balance, left = defaultdict(float, excess), dict(free)
    for session in sorted(in_order, key=lambda session: balance[session.account]):
        more = max(0, min(session.most - session.units, left.get(session.gpu, 0)))
        session.units += more
        balance[session.account] += more
        left[session.gpu] = left.get(session.gpu, 0) - more
    neighbours = _Neighbours(in_order)
    for _ in range(MOST_EXCHANGES):
        lacking = sorted((units, account) for account, units in balance.items() if units <= -LEAST_EXCHANGED)
        path = next((path for _, account in lacking if (path := neighbours.path(account, balance))), None)
        if path is None:
            break
        taking, giving = path[0][0].account, path[-1][1].account
        units = min(
            -balance[taking],
            balance[giving],
            *(min(taker.most - taker.units, giver.units - giver.least) for taker, giver in path),
        )
        for taker, giver in path:
            taker.units, giver.units = taker.units + int(units), giver.units - int(units)
        balance[taking] += int(units)
        balance[giving] -= int(units)
    return {session.session: session.units for session in in_order if session.units != before[session.session]}


class _Neighbours:
    """The sessions by account and by GPU."""

    def __init__(self, sessions: Sequence[Exchanging]) -> None:
        self._by_account: defaultdict[str, list[Exchanging]] = defaultdict(list)
        self._by_gpu: defaultdict[str, list[Exchanging]] = defaultdict(list)
        for session in sessions:
            self._by_account[session.account].append(session)
            self._by_gpu[session.gpu].append(session)

    def path(self, account: str, balance: Mapping[str, float]) -> list[tuple[Exchanging, Exchanging]]:
        """Return the shortest chain of exchanges from an account to one with excess units; empty: there is none.

        Each exchange is a session that gets units, and one that gives them. Among the shortest chains, the account with
        the most units beyond its entitlement gives.
        """
        reached_by: dict[str, tuple[Exchanging, Exchanging] | None] = {account: None}
        level = [account]
        while level:
            following: dict[str, None] = {}
            for current in level:
                for taker, giver in self._exchanges(current):
                    if giver.account not in reached_by:
                        reached_by[giver.account] = (taker, giver)
                        following[giver.account] = None
            source = max(following, key=lambda key: balance[key], default=None)
            if source is not None and balance[source] >= LEAST_EXCHANGED:
                path: deque[tuple[Exchanging, Exchanging]] = deque()
                while (exchange := reached_by[source]) is not None:
                    path.appendleft(exchange)
                    source = exchange[0].account
                return list(path)
            level = list(following)
        return []

    def _exchanges(self, account: str) -> Iterator[tuple[Exchanging, Exchanging]]:
        """Yield the sessions of an account that can get units, each with one that can give them."""
        for taker in self._by_account[account]:
            if taker.most - taker.units >= LEAST_EXCHANGED:
                for giver in self._by_gpu[taker.gpu]:
                    if giver.account != account and giver.units - giver.least >= LEAST_EXCHANGED:
                        yield taker, giver
