"""The units that accounts are entitled to while they compete, and the exchange of units between running sessions.

order.py orders the waiting spawns, and reclaim.py frees units for them. Here, sessions that run beside each other
exchange units until each account has what it is entitled to.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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


Added = tuple[Account, int, int]
"""The account of a session or spawn, and the units on all its GPUs that it has and could use."""


@dataclass
class Entitlements:
    """The units that accounts have and want, by account key."""

    has: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    _demand: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    _accounts: dict[str, Account] = field(default_factory=dict)

    def add(self, account: Account, has: int, demand: int) -> Added:
        """Add a session or a waiting spawn, with units on all its GPUs; return it for `remove`.

        ``has``: units that it gets while all others work.
        """
        self._accounts[account.key] = account
        self.has[account.key] += has
        self._demand[account.key] += demand
        return account, has, demand

    def remove(self, added: Added) -> None:
        """Remove a session."""
        account, has, demand = added
        self.add(account, -has, -demand)
        if not self.has[account.key] and not self._demand[account.key]:
            for of_accounts in (self.has, self._demand, self._accounts):
                del of_accounts[account.key]

    def copy(self) -> Entitlements:
        """Return a copy to which waiting spawns can be added."""
        return Entitlements(self.has.copy(), self._demand.copy(), self._accounts.copy())

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
    """A session, and the units on each of its GPUs that it gets while all others work."""

    session: str
    account: str
    """The account's key."""
    gpus: Sequence[str]
    """UUIDs of its GPUs."""
    units: int
    most: int
    """Units that it can use: its share, or what an idle action leaves."""
    least: int
    """Units that it keeps."""
    rank: tuple[object, ...]
    """Sort key: the first session to give comes first."""
    last_units: int = 0
    """Units of its share on the last GPU if these are fewer; 0: as many."""
    in_quota: bool = False
    """Whether it gives only to other sessions in quota, and only if none over quota can."""

    def on(self, gpu: str) -> int:
        """Return its units on one of its GPUs."""
        return units_on(gpu, self.gpus, self.units, self.last_units)

    @property
    def getting(self) -> Sequence[str]:
        """The GPUs on which it can get `room`: all but the last once it has its share there."""
        return self.gpus[:-1] if 0 < self.last_units <= self.units else self.gpus

    @property
    def room(self) -> int:
        """Units that it can get on each GPU of `getting`."""
        return (min(self.most, self.last_units) if self.units < self.last_units else self.most) - self.units

    @property
    def giving(self) -> Sequence[str]:
        """The GPUs on which it can give `spare`."""
        return self.gpus[:-1] if 0 < self.last_units < self.units else self.gpus

    @property
    def spare(self) -> int:
        """Units that it can give on each GPU of `giving`."""
        return self.units - (max(self.least, self.last_units) if self.units > self.last_units else self.least)


def exchanged(sessions: Iterable[Exchanging], excess: Mapping[str, float], free: Mapping[str, int]) -> dict[str, int]:
    """Return the sessions with other units than now, and these units.

    The account that lacks most gets units from the account that has the most beyond its entitlement. If the two have no
    GPU in common, accounts between them pass units on. ``excess``: see `Entitlements.excess`. ``free``: units of each
    GPU that no spawn needs; they are given first.
    """
    in_order = sorted(sessions, key=lambda session: session.rank)
    before = {session.session: session.units for session in in_order}
    trade = _Trade(in_order, excess, free)
    trade.give_free_units()
    stuck: set[str] = set()
    for _ in range(MOST_EXCHANGES):
        lacking = sorted((units, account) for account, units in trade.balance.items() if units <= -LEAST_EXCHANGED)
        paths = ((account, trade.path(account)) for _, account in lacking if account not in stuck)
        account, path = next((candidate for candidate in paths if candidate[1]), ("", []))
        if path and not trade.make(path):
            stuck.add(account)
        elif path or not trade.in_quota:
            trade.in_quota = not path
            stuck.clear()
        else:
            break
    return {session.session: session.units for session in in_order if session.units != before[session.session]}


_Exchange = tuple[Exchanging, Sequence[Exchanging]]
"""A session that gets units, and those that give it units of its GPUs."""


class _Trade:
    """The sessions by account and by GPU, the accounts' excess, and the free units, after the exchanges so far."""

    def __init__(self, sessions: Sequence[Exchanging], excess: Mapping[str, float], free: Mapping[str, int]) -> None:
        self.balance = defaultdict(float, excess)
        self.in_quota = False
        """Whether sessions in quota exchange, as no others can."""
        self._free = dict(free)
        self._named = {session.session: session for session in sessions}
        self._by_account: defaultdict[str, list[Exchanging]] = defaultdict(list)
        self._by_gpu: defaultdict[str, list[Exchanging]] = defaultdict(list)
        for session in sessions:
            self._by_account[session.account].append(session)
        # of equal priority, sessions that lose no units of other GPUs come first
        for session in sorted(sessions, key=lambda session: (session.rank[:1], len(session.gpus))):
            for gpu in session.gpus:
                self._by_gpu[gpu].append(session)

    def give_free_units(self) -> None:
        """Give the free units to the sessions that can use them, those of accounts that lack most first."""
        for session in sorted(self._named.values(), key=lambda session: self.balance[session.account]):
            while (more := min(session.room, *(self._free.get(gpu, 0) for gpu in session.getting))) > 0:
                self._change(session, more)

    def _change(self, session: Exchanging, more: int) -> None:
        gpus = session.getting if more > 0 else session.giving
        session.units += more
        self.balance[session.account] += more * len(gpus)
        for gpu in gpus:
            if gpu in self._free:
                self._free[gpu] -= more

    def make(self, path: Iterable[_Exchange]) -> bool:
        """Exchange as many units as possible along a path. Return whether there were any."""
        times = Counter[str]()
        for taker, givers in path:
            times[taker.session] += 1
            times.subtract({giver.session for giver in givers})
        moves = [(self._named[name], number) for name, number in times.items() if number]
        used, gained = Counter[str](), Counter[str]()
        limits: list[float] = []
        for session, number in moves:
            gpus, most = (session.getting, session.room) if number > 0 else (session.giving, session.spare)
            used.update(dict.fromkeys(gpus, number))
            gained[session.account] += number * len(gpus)
            limits.append(most / abs(number))
        limits += [self._free.get(gpu, 0) / number for gpu, number in used.items() if number > 0]
        limits += [max(0.0, -self.balance[account] / number) for account, number in gained.items() if number]
        units = int(min(limits))
        for session, number in moves:
            self._change(session, units * number)
        if units and any(number < 0 for number in used.values()):
            self.give_free_units()
        return units > 0

    def path(self, account: str) -> list[_Exchange]:
        """Return the shortest chain of exchanges from an account to one with excess units; empty: there is none.

        Among the shortest chains, the account with the most units beyond its entitlement gives.
        """
        reached_by: dict[str, _Exchange | None] = {account: None}
        level = [account]
        while level:
            following: dict[str, None] = {}
            for current in level:
                for giver, exchange in self._exchanges(current, reached_by):
                    reached_by[giver] = exchange
                    following[giver] = None
            source = max(following, key=lambda key: self.balance[key], default="")
            if following and self.balance[source] >= LEAST_EXCHANGED:
                path: deque[_Exchange] = deque()
                while (last := reached_by[source]) is not None:
                    path.appendleft(last)
                    source = last[0].account
                return list(path)
            level = list(following)
        return []

    def _exchanges(self, account: str, reached: Collection[str]) -> Iterator[tuple[str, _Exchange]]:
        """Yield the sessions of an account that can get units, with those that can give them, by a new account.

        For a session on several GPUs, one of an account with excess units gives where the new account has no session.
        """
        for taker in self._by_account[account]:
            if taker.most - taker.units < LEAST_EXCHANGED or taker.in_quota < self.in_quota:
                continue
            if len(taker.gpus) == 1:
                for giver in self._by_gpu[taker.gpus[0]]:
                    if giver.account not in reached and self._can_give(giver, taker.gpus[0]):
                        yield giver.account, (taker, (giver,))
            elif taker.room >= LEAST_EXCHANGED:
                able = [self._givers(gpu, taker) for gpu in taker.getting if self._free.get(gpu, 0) < LEAST_EXCHANGED]
                rich = [max(here, key=lambda key: self.balance[key], default="") for here in able]
                for key in dict.fromkeys(name for here in able for name in here if name not in reached):
                    pays = [key if key in here else most for here, most in zip(able, rich, strict=True)]
                    if all(payer == key or self.balance[payer] >= LEAST_EXCHANGED for payer in pays):
                        yield key, (taker, [here[payer] for here, payer in zip(able, pays, strict=True)])

    def _givers(self, gpu: str, taker: Exchanging) -> dict[str, Exchanging]:
        """Return the session of each account that gives units of a GPU: if possible one that loses no others."""
        by_account: dict[str, Exchanging] = {}
        others = {giver.session: len(set(giver.gpus).difference(taker.gpus)) for giver in self._by_gpu[gpu]}
        for session in sorted(self._by_gpu[gpu], key=lambda giver: (giver.rank[:1], others[giver.session])):
            if session.account != taker.account and self._can_give(session, gpu):
                by_account.setdefault(session.account, session)
        return by_account

    def _can_give(self, session: Exchanging, gpu: str) -> bool:
        """Return whether a session can give units of one of its GPUs."""
        if session.in_quota > self.in_quota or session.units - session.least < LEAST_EXCHANGED:
            return False
        return not session.last_units or (session.spare >= LEAST_EXCHANGED and gpu in session.giving)
