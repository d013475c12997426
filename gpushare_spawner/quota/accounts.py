"""Accounts that servers are charged to, their current use, and the sessions in quota.

An account belongs to a user, a group or a team, or is a user's default account. Use is updated incrementally. Recent
use over quota is in order.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from gpushare_spawner.model.quota import Group, Quota, Quotas

_NO_QUOTA = Quota()


class AccountKind(StrEnum):
    """The kind of an account's owner."""

    USER = "user"
    GROUP = "group"
    """The account of a group or a team."""
    DEFAULT = "default"
    """The account of a user who has no other account."""


@dataclass(frozen=True)
class Account:
    """An account and its quota."""

    key: str
    """Unique key, for example ``group:optics``. A session keeps its account's key while it runs."""
    quota: Quota
    department: str = ""
    """The department of a team; empty: none."""
    known: bool = True
    """Whether the quota file has the account. A group can be removed from the file while its sessions run."""

    @property
    def kind(self) -> AccountKind:
        """Kind of the account's owner."""
        return AccountKind(self.key.partition(":")[0])

    @property
    def name(self) -> str:
        """The user's or group's name."""
        return self.key.partition(":")[2]


class QuotaAccounts:
    """The accounts of a quota file."""

    def __init__(self, quotas: Quotas) -> None:
        self.quotas = quotas
        self._departments = {name: group for name, group in quotas.groups.items() if group.teams}
        self._groups: dict[str, Account] = {}
        for name, group in quotas.groups.items():
            if group.teams:
                for team, quota in group.teams.items():
                    self._groups[team] = Account(_key(AccountKind.GROUP, team), quota, name)
            else:
                self._groups[name] = Account(_key(AccountKind.GROUP, name), group)

    def of_user(self, user: str, groups: Collection[str]) -> tuple[Account, ...]:
        """Return the accounts that a user can choose from. The first is the default.

        The user's own account comes first, then the groups in file order. The default account is only for users without
        another account.
        """
        own = self.quotas.users.get(user)
        accounts = [Account(_key(AccountKind.USER, user), own)] if own is not None else []
        accounts += [account for name, account in self._groups.items() if name in groups]
        return tuple(accounts) or (self._default(user),)

    def find(self, key: str, user: str) -> Account:
        """Return the account that a session of this user is charged to. ``key``: the session's key, or empty.

        A session older than the quotas is charged to its user's default account. An account that is no longer in the
        file gets an empty quota.
        """
        kind, _, name = key.partition(":")
        if kind == AccountKind.GROUP:
            return self._groups.get(name) or Account(key, _NO_QUOTA, known=False)
        if kind == AccountKind.USER:
            own = self.quotas.users.get(name)
            return Account(key, own) if own is not None else Account(key, _NO_QUOTA, known=False)
        return self._default(name or user)

    def named(self) -> Iterator[Account]:
        """Yield the accounts in the file: those of groups and teams, then those of users."""
        yield from self._groups.values()
        yield from (Account(_key(AccountKind.USER, user), quota) for user, quota in self.quotas.users.items())

    def department(self, account: Account) -> Group | None:
        """Return the department of a team's account; None for other accounts."""
        return self._departments.get(account.department) if account.department else None

    def _default(self, user: str) -> Account:
        return Account(_key(AccountKind.DEFAULT, user), self.quotas.default)


def _key(kind: AccountKind, name: str) -> str:
    return f"{kind}:{name}"


@dataclass(frozen=True)
class Charge:
    """Use of an account by one session."""

    session: str
    user: str
    account: Account
    units: int
    """Units that the session is entitled to, on all its GPUs together."""
    opened_at: float
    """Seconds since the epoch. The oldest sessions are in quota first."""

    @property
    def age(self) -> tuple[float, str]:
        """Sort key: the oldest session first; the session id breaks ties."""
        return (self.opened_at, self.session)


@dataclass
class Left:
    """Remainder of the guarantees of an account, or of a department and its teams."""

    accounts: dict[str, int] = field(default_factory=dict)
    """Units by account key. An account without an entry has its whole guarantee left."""
    shared: int = 0
    """Units by which a department's guarantee exceeds its teams' guarantees."""
    whole: int | None = None
    """Units of a department's guarantee; None if there is no department."""

    def of(self, account: Account) -> int:
        """Return the maximum units of another session in quota."""
        most = max(self._own(account), self.shared)
        return most if self.whole is None else min(most, self.whole)

    def take(self, account: Account, units: int, *, shared: bool = True) -> bool:
        """Deduct the units of a session if they are in quota. Return whether they are.

        The account's own guarantee is used first, then, with ``shared``, the part of the department's guarantee that
        exceeds its teams' guarantees.
        """
        if self.whole is not None and units > self.whole:
            return False
        if units <= (own := self._own(account)):
            self.accounts[account.key] = own - units
        elif shared and units <= self.shared:
            self.shared -= units
        else:
            return False
        if self.whole is not None:
            self.whole -= units
        return True

    def copy(self) -> Left:
        """Return a copy for simulated deductions."""
        return Left(dict(self.accounts), self.shared, self.whole)

    def _own(self, account: Account) -> int:
        return self.accounts.get(account.key, account.quota.guaranteed_units)


@dataclass
class _Pool:
    """Sessions that compete for the same guarantee: those of an account, or of all teams of a department."""

    charges: dict[str, Charge] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)
    """Units by account key."""
    counted: tuple[Left, frozenset[str]] | None = None
    """The remainder and the sessions in quota; None: not computed since the last change."""


class QuotaUsage:
    """Charges of all sessions. The cost of a change is proportional to the sessions of its account and department."""

    def __init__(self, accounts: QuotaAccounts) -> None:
        self.accounts = accounts
        self._charges: dict[str, Charge] = {}
        self._pools: dict[str, _Pool] = {}

    def __len__(self) -> int:
        return len(self._charges)

    def put(self, charge: Charge) -> None:
        """Add or replace a session's charge."""
        before = self._charges.get(charge.session)
        if before == charge:
            return
        self.drop(charge.session)
        self._charges[charge.session] = charge
        pool = self._pools.setdefault(pool_of(charge.account), _Pool())
        pool.charges[charge.session] = charge
        pool.used[charge.account.key] = pool.used.get(charge.account.key, 0) + charge.units
        pool.counted = None

    def drop(self, session: str) -> None:
        """Remove a session's charge, if it has one."""
        charge = self._charges.pop(session, None)
        if charge is None:
            return
        key = pool_of(charge.account)
        pool = self._pools[key]
        del pool.charges[session]
        pool.used[charge.account.key] -= charge.units
        pool.counted = None
        if not pool.charges:
            del self._pools[key]

    def used(self, account: Account) -> int:
        """Return the units that the sessions of an account are entitled to."""
        pool = self._pools.get(pool_of(account))
        return pool.used.get(account.key, 0) if pool is not None else 0

    def all_accounts(self) -> list[Account]:
        """Return the accounts in the quota file and all others that have charges, without duplicates."""
        charged = (charge.account for charge in self._charges.values())
        return list({account.key: account for account in (*self.accounts.named(), *charged)}.values())

    def used_by_department(self, account: Account) -> int:
        """Return the units used by all teams of the account's department, or by the account if it has no department."""
        pool = self._pools.get(pool_of(account))
        return sum(pool.used.values()) if pool is not None else 0

    def sessions(self, account: Account) -> Iterator[Charge]:
        """Yield the charges of an account."""
        pool = self._pools.get(pool_of(account))
        if pool is not None:
            yield from (charge for charge in pool.charges.values() if charge.account.key == account.key)

    def left(self, account: Account) -> Left:
        """Return the remainder of the account's guarantees. The caller must not change it."""
        return self._counted(account)[0]

    def in_quota(self, session: str) -> bool:
        """Return whether a session is in quota. Raises KeyError for an unknown session."""
        return session in self._counted(self._charges[session].account)[1]

    def over_quota_sessions(self) -> Iterator[Charge]:
        """Yield the charges of sessions over quota."""
        for pool in self._pools.values():
            in_quota = self._counted(next(iter(pool.charges.values())).account)[1]
            if len(in_quota) < len(pool.charges):
                yield from (charge for session, charge in pool.charges.items() if session not in in_quota)

    def over_quota(self) -> dict[str, int]:
        """Return the units over quota by account key. Accounts without any are omitted."""
        over: dict[str, int] = {}
        for charge in self.over_quota_sessions():
            over[charge.account.key] = over.get(charge.account.key, 0) + charge.units
        return over

    def _counted(self, account: Account) -> tuple[Left, frozenset[str]]:
        """Decide which sessions are in quota: oldest first, each only if it fits entirely into the remaining guarantee.

        The teams' own guarantees are used first, then the rest of the department's guarantee.
        """
        pool = self._pools.get(pool_of(account))
        if pool is not None and pool.counted is not None:
            return pool.counted
        left = Left()
        department = self.accounts.department(account)
        if department is not None:
            left.whole = department.guaranteed_units
            left.shared = max(0, left.whole - department.teams_units)
        if pool is None:
            return left, frozenset()
        oldest_first = sorted(pool.charges.values(), key=lambda charge: charge.age)
        own = [charge for charge in oldest_first if left.take(charge.account, charge.units, shared=False)]
        in_quota = {charge.session for charge in own}
        for charge in oldest_first:
            if charge.session not in in_quota and left.take(charge.account, charge.units):
                in_quota.add(charge.session)
        pool.counted = (left, frozenset(in_quota))
        return pool.counted


def pool_of(account: Account) -> str:
    """Return the key of the accounts that share a guarantee: the department's teams, or the account alone."""
    return f"department:{account.department}" if account.department else account.key
