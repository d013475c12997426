"""Accounts that servers are charged to, their current use, and the servers in quota.

An account belongs to a user or a group, or is a user's default account. A group's account contains those of its teams
and users, at any depth. Use is updated incrementally. Recent use over quota is in order.py, and
GPU hours by user and group are in service/history/queries.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from gpushare_spawner.model.quantity import whole_millicores
from gpushare_spawner.model.quota import NOTHING, Group, Quota, Quotas, Resource, ResourceAmounts
from gpushare_spawner.model.template import Template

_NO_QUOTA = Quota()


class AccountKind(StrEnum):
    """The kind of an account's owner."""

    USER = "user"
    GROUP = "group"
    """The account of a group."""
    DEFAULT = "default"
    """The account of a user without another account."""


@dataclass(frozen=True)
class Account:
    """An account and its quota."""

    key: str
    """Unique key, for example ``group:optics``. A session keeps its account's key while it runs."""
    quota: Quota
    parent: Account | None = None
    """The account of the group that contains it; None: none."""
    configured: bool = True
    """Whether the quota file has the account. A group can be removed from the file while its sessions run."""

    @property
    def kind(self) -> AccountKind:
        """Kind of the account's owner."""
        return AccountKind(self.key.partition(":")[0])

    @property
    def name(self) -> str:
        """The user's or group's name."""
        return self.key.partition(":")[2]

    @cached_property
    def path(self) -> tuple[Account, ...]:
        """The account, the group that contains it, and so on."""
        return (self, *(self.parent.path if self.parent is not None else ()))

    @cached_property
    def guarantees(self) -> Sequence[tuple[int, Sequence[tuple[str, int]]]]:
        """For each guaranteed resource, by number, the accounts of its path with their own guarantees.

        An own guarantee is the part beyond the guarantees of the accounts within.
        """
        levels = [(level.key, level.quota.unshared) for level in self.path]
        by_resource = [
            [(key, own) for key, unshared in levels if (own := unshared[number]) is not None] for number in range(3)
        ]
        return [(number, guaranteed) for number, guaranteed in enumerate(by_resource) if guaranteed]

    @property
    def counts_resources(self) -> bool:
        """Whether it, or a group that contains it, guarantees or limits CPU or memory."""
        return any(number for number, _ in self.guarantees) or any(
            most is not None for level in self.path for most in level.quota.maxima[1:]
        )

    @property
    def department(self) -> str:
        """The names of the groups that contain it, the outermost first; empty: none."""
        return " / ".join(account.name for account in reversed(self.path[1:]))

    def entry(self, depth: int) -> Account | None:
        """Return the account of its path that has ``depth`` groups around it; 0: the outermost one.

        None: fewer groups contain it, so its servers are those of the group itself.
        """
        return self.path[-1 - depth] if depth < len(self.path) else None

    def is_within(self, account: Account) -> bool:
        """Return whether it is this account, or this account contains it."""
        return any(level.key == account.key for level in self.path)

    @property
    def has_servers(self) -> bool:
        """Whether servers can be charged to it: a group with teams only adds theirs up."""
        return not (isinstance(self.quota, Group) and self.quota.teams)


class QuotaAccounts:
    """The accounts of a quota file."""

    def __init__(self, quotas: Quotas) -> None:
        self.quotas = quotas
        self._groups: dict[str, Account] = {}
        self._users = {user: Account(_key(AccountKind.USER, user), quota) for user, quota in quotas.users.items()}
        self._within: dict[str, list[str]] = {}
        self._enter(quotas.groups, None)

    def _enter(self, groups: Mapping[str, Group], parent: Account | None) -> None:
        for name, group in groups.items():
            account = self._groups[name] = Account(_key(AccountKind.GROUP, name), group, parent)
            self._enter(group.teams, account)
            for user, quota in group.users.items():
                self._users[user] = Account(_key(AccountKind.USER, user), quota, account)
        if parent is None:
            for account in self.named():
                for above in account.path[1:]:
                    self._within.setdefault(above.key, []).append(account.key)

    def of_user(self, user: str, groups: Collection[str]) -> tuple[Account, ...]:
        """Return the accounts that a user can choose from. The first is the default.

        The user's own account comes first, then the groups in file order, except a group that contains the user's own.
        The default account is only for users without another account.
        """
        own = self._users.get(user)
        accounts = [own] if own is not None else []
        above = [account.key for account in own.path] if own is not None else []
        for name, account in self._groups.items():
            if name in groups and account.has_servers and account.key not in above:
                accounts.append(account)
        return tuple(accounts) or (self._default(user),)

    def find(self, key: str, user: str) -> Account:
        """Return the account that a session of this user is charged to. ``key``: the session's key, or empty.

        A session older than the quotas is charged to its user's default account. An account that is no longer in the
        file gets an empty quota.
        """
        kind, _, name = key.partition(":")
        if kind in (AccountKind.GROUP, AccountKind.USER):
            accounts = self._groups if kind == AccountKind.GROUP else self._users
            return accounts.get(name) or Account(key, _NO_QUOTA, configured=False)
        return self._default(name or user)

    def named(self) -> Iterator[Account]:
        """Yield the accounts in the file: those of groups at any depth, then those of users."""
        yield from self._groups.values()
        yield from self._users.values()

    def within(self, account: Account) -> Sequence[str]:
        """Return the keys of the accounts that a group contains, at any depth."""
        return self._within.get(account.key, ())

    def _default(self, user: str) -> Account:
        return Account(_key(AccountKind.DEFAULT, user), self.quotas.default)


def _key(kind: AccountKind, name: str) -> str:
    return f"{kind}:{name}"


def needs_of(template: Template, quotas: Quotas) -> ResourceAmounts:
    """Return what a server of a template is charged: its share, and guaranteed CPU and memory if quotas count them."""
    units = template.gpu.share.total_units if template.gpu is not None else 0
    if not quotas.count_resources:
        return ResourceAmounts(units)
    cpu, memory = template.resources.cpu.guarantee, template.resources.memory.guarantee
    return ResourceAmounts(units, whole_millicores(cpu or 0.0), memory or 0)


@dataclass(frozen=True)
class Charge:
    """Use of an account by one server."""

    session: str
    user: str
    account: Account
    needs: ResourceAmounts
    """What the server is entitled to, on all its GPUs together."""
    opened_at: float
    """Seconds since the epoch. The oldest servers are in quota first."""
    reclaimable: bool = True
    """See `Template.reclaimable`."""

    @property
    def age(self) -> tuple[bool, float, str]:
        """Sort key: the servers that cannot be reclaimed, then the oldest first; the session id breaks ties."""
        return (self.reclaimable, self.opened_at, self.session)


@dataclass
class Left:
    """Remainders of the guarantees of accounts that have a group in common."""

    rest: tuple[dict[str, int], dict[str, int], dict[str, int]] = field(default_factory=lambda: ({}, {}, {}))
    """For each resource by account key. An account without an entry has all that it is guaranteed itself."""

    def of(self, account: Account) -> ResourceAmounts:
        """Return the most of each resource that another server in quota can have; 0 without a guarantee."""
        most = [0, 0, 0]
        for number, levels in account.guarantees:
            most[number] = max(self.rest[number].get(key, own) for key, own in levels)
        return ResourceAmounts(*most)

    def lacking(self, account: Account, needs: ResourceAmounts) -> Sequence[Resource]:
        """Return the resources of which a server needs more than is left. Without any guarantee nothing is lacking."""
        left = self.of(account)
        return [tuple(Resource)[number] for number, _ in account.guarantees if needs[number] > left[number]]

    def take(self, account: Account, needs: ResourceAmounts) -> bool:
        """Deduct a server's needs if all are in quota. Return whether they are.

        Each resource is taken from the account's own guarantee, else from what the guarantee of the nearest group
        exceeds those within it.
        """
        taken: list[tuple[dict[str, int], str, int]] = []
        for number, levels in account.guarantees:
            needed, rest = needs[number], self.rest[number]
            for key, own in levels:
                left = rest.get(key, own) - needed
                if left >= 0:
                    taken.append((rest, key, left))
                    break
            else:
                return False
        for rest, key, left in taken:
            rest[key] = left
        return True

    def copy(self) -> Left:
        """Return a copy for simulated deductions."""
        units, cpu, memory = self.rest
        return Left((units.copy(), cpu.copy(), memory.copy()))


@dataclass
class _Pool:
    """Servers that share a guarantee: those of an outermost group, or of an account in no group."""

    charges: dict[str, Charge] = field(default_factory=dict)
    used: dict[str, ResourceAmounts] = field(default_factory=dict)
    """By account key, with what the group contains."""
    servers: Counter[str] = field(default_factory=Counter)
    """The number of servers with a GPU, in the same way."""
    counted: tuple[Left, frozenset[str]] | None = None
    """The remainder and the servers in quota; None: not computed since the last change."""
    beside: Left | None = None
    """The remainder beside the servers that cannot be reclaimed; None: the same."""


class QuotaUsage:
    """Charges of all servers. The cost of a change is proportional to the servers of its outermost group."""

    def __init__(self, accounts: QuotaAccounts) -> None:
        self.accounts = accounts
        self._charges: dict[str, Charge] = {}
        self._pools: dict[str, _Pool] = {}

    def __len__(self) -> int:
        return len(self._charges)

    def put(self, charge: Charge) -> None:
        """Add or replace a server's charge."""
        before = self._charges.get(charge.session)
        if before == charge:
            return
        self.drop(charge.session)
        self._charges[charge.session] = charge
        pool = self._pools.setdefault(pool_of(charge.account), _Pool())
        pool.charges[charge.session] = charge
        self._count(pool, charge, 1)

    def drop(self, session: str) -> None:
        """Remove a server's charge, if it has one."""
        charge = self._charges.pop(session, None)
        if charge is None:
            return
        key = pool_of(charge.account)
        pool = self._pools[key]
        del pool.charges[session]
        self._count(pool, charge, -1)
        if not pool.charges:
            del self._pools[key]

    def _count(self, pool: _Pool, charge: Charge, times: int) -> None:
        for account in charge.account.path:
            pool.servers[account.key] += times if charge.needs.units else 0
            pool.used[account.key] = pool.used.get(account.key, NOTHING).plus(charge.needs, times)
        pool.counted = pool.beside = None

    def used(self, account: Account) -> ResourceAmounts:
        """Return the amounts that an account's servers are entitled to; for a group, with the accounts within."""
        pool = self._pools.get(pool_of(account))
        return pool.used.get(account.key, NOTHING) if pool is not None else NOTHING

    def all_accounts(self) -> list[Account]:
        """Return the accounts in the quota file and all others that have charges, without duplicates."""
        charged = (charge.account for charge in self._charges.values())
        return list({account.key: account for account in (*self.accounts.named(), *charged)}.values())

    def servers(self, account: Account, user: str = "") -> int:
        """Return the number of servers with a GPU of an account, or of one user there; for a group, of all within."""
        pool = self._pools.get(pool_of(account))
        if pool is None or not user:
            return pool.servers[account.key] if pool is not None else 0
        mine = (charge for charge in pool.charges.values() if charge.user == user and charge.needs.units)
        return sum(charge.account.is_within(account) for charge in mine)

    def left(self, account: Account) -> Left:
        """Return the remainder of the account's guarantees. The caller must not change it."""
        return self._counted(account)[0]

    def left_beside(self, account: Account) -> Left:
        """Return the remainder beside the servers that cannot be reclaimed. The caller must not change it."""
        pool = self._pools.get(pool_of(account))
        if pool is None:
            return Left()
        if pool.beside is None:
            pool.beside = Left()
            unreclaimable = (charge for charge in pool.charges.values() if not charge.reclaimable)
            for charge in sorted(unreclaimable, key=lambda charge: charge.age):
                pool.beside.take(charge.account, charge.needs)
        return pool.beside

    def in_quota(self, session: str) -> bool:
        """Return whether a server is in quota. Raises KeyError for an unknown server."""
        return session in self._counted(self._charges[session].account)[1]

    def over_quota_sessions(self) -> Iterator[Charge]:
        """Yield the charges of servers over quota."""
        for pool in self._pools.values():
            in_quota = self._counted(next(iter(pool.charges.values())).account)[1]
            if len(in_quota) < len(pool.charges):
                yield from (charge for session, charge in pool.charges.items() if session not in in_quota)

    def over_quota(self, with_groups: bool = False) -> dict[str, ResourceAmounts]:
        """Return the amounts over quota by account key. Accounts without any are omitted.

        ``with_groups``: whether groups also have the amounts of the accounts that they contain.
        """
        over: dict[str, ResourceAmounts] = {}
        for charge in self.over_quota_sessions():
            for account in charge.account.path if with_groups else (charge.account,):
                over[account.key] = over.get(account.key, NOTHING).plus(charge.needs)
        return over

    def _counted(self, account: Account) -> tuple[Left, frozenset[str]]:
        """Decide which servers are in quota: oldest first, each only if all its needs fit into the rest."""
        pool = self._pools.get(pool_of(account))
        if pool is None:
            return Left(), frozenset()
        if pool.counted is None:
            left = Left()
            oldest_first = sorted(pool.charges.values(), key=lambda charge: charge.age)
            in_quota = [charge.session for charge in oldest_first if left.take(charge.account, charge.needs)]
            pool.counted = (left, frozenset(in_quota))
        return pool.counted


def pool_of(account: Account) -> str:
    """Return the key of the accounts that share a guarantee: that of the outermost group, or of the account alone."""
    return account.path[-1].key
