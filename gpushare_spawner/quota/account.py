"""The account that a server is charged to: a user's, a group's, a team's, or the default one of a user."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum

from gpushare_spawner.model.quota import Group, Quota, Quotas

_NO_QUOTA = Quota()


class AccountKind(StrEnum):
    """Whose account it is."""

    USER = "user"
    GROUP = "group"
    """Of a group or a team."""
    DEFAULT = "default"
    """Of a user who has no other."""


@dataclass(frozen=True)
class Account:
    """A quota in use."""

    key: str
    """Unique; sessions keep it while they run, like ``group:optics``."""
    quota: Quota
    department: str = ""
    """The department of a team; empty: none."""
    known: bool = True
    """Whether the quota file has it; a group may have been removed from the file since the session was opened."""

    @property
    def kind(self) -> AccountKind:
        """Whose account it is."""
        return AccountKind(self.key.partition(":")[0])

    @property
    def name(self) -> str:
        """The user's or group's name."""
        return self.key.partition(":")[2]


class Accounts:
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
        """Return the accounts that a user can choose from; the first is used where none is chosen.

        First the user's own, then those of groups in the file's order. The default account only where there is none.
        """
        own = self.quotas.users.get(user)
        found = [Account(_key(AccountKind.USER, user), own)] if own is not None else []
        found += [account for name, account in self._groups.items() if name in groups]
        return tuple(found) or (self._default(user),)

    def find(self, key: str, user: str) -> Account:
        """Return the account that a session of this user is charged to. ``key``: what the session kept, or empty.

        A session from before there were quotas is charged to the default account of its user. An account that the file
        has no longer has a quota of nothing.
        """
        kind, _, name = key.partition(":")
        if kind == AccountKind.GROUP:
            return self._groups.get(name) or Account(key, _NO_QUOTA, known=False)
        if kind == AccountKind.USER:
            own = self.quotas.users.get(name)
            return Account(key, own) if own is not None else Account(key, _NO_QUOTA, known=False)
        return self._default(name or user)

    def named(self) -> Iterator[Account]:
        """Yield the accounts that the file names: of groups and teams, and of users."""
        yield from self._groups.values()
        yield from (Account(_key(AccountKind.USER, user), quota) for user, quota in self.quotas.users.items())

    def department(self, account: Account) -> Group | None:
        """Return the department of a team's account; None for other accounts."""
        return self._departments.get(account.department) if account.department else None

    def _default(self, user: str) -> Account:
        return Account(_key(AccountKind.DEFAULT, user), self.quotas.default)


def _key(kind: AccountKind, name: str) -> str:
    return f"{kind}:{name}"
