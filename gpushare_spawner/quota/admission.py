"""Whether an account admits a server more: in quota, over quota, or not at all."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from gpushare_spawner.quota.account import Account
from gpushare_spawner.quota.usage import QuotaUsage


class Limit(Enum):
    """The limits of a quota that keep a server from being started."""

    MAXIMUM = "maximum"
    """Units that the account can use."""
    DEPARTMENT = "department"
    """Units that the account's department can use."""
    SERVERS = "servers"
    """Servers of the account."""
    USER_SERVERS = "user-servers"
    """Servers of the user in the account."""


@dataclass(frozen=True)
class Refused:
    """The limit that a server more would exceed."""

    limit: Limit
    most: int
    """The limit: units or servers."""
    used: int
    """What is used of it now."""


@dataclass(frozen=True)
class Admission:
    """What a server more would be."""

    account: Account
    in_quota: bool
    left: int = 0
    """Units of 1 % that a server more can have at most and be in quota."""
    refused: Refused | None = None
    """None: the account admits it."""


def admit(usage: QuotaUsage, account: Account, user: str, units: int) -> Admission:
    """Return whether the account admits a server of this user with so many units, over all its GPUs."""
    left = usage.left(account).of(account)
    return Admission(account, units <= left, left, _refused(usage, account, user, units))


def _refused(usage: QuotaUsage, account: Account, user: str, units: int) -> Refused | None:
    quota = account.quota
    if quota.per_user.servers is not None:
        mine = sum(charge.user == user for charge in usage.sessions(account))
        if mine >= quota.per_user.servers:
            return Refused(Limit.USER_SERVERS, quota.per_user.servers, mine)
    if quota.servers is not None:
        servers = sum(1 for _ in usage.sessions(account))
        if servers >= quota.servers:
            return Refused(Limit.SERVERS, quota.servers, servers)
    return exceeded_units(usage, account, units)


def exceeded_units(usage: QuotaUsage, account: Account, units: int) -> Refused | None:
    """Return the limit of units that so many units more would exceed; None: they exceed none."""
    quota = account.quota
    if quota.maximum_units is not None and usage.used(account) + units > quota.maximum_units:
        return Refused(Limit.MAXIMUM, quota.maximum_units, usage.used(account))
    department = usage.accounts.department(account)
    if department is not None and department.maximum_units is not None:
        used = usage.used_by_department(account)
        if used + units > department.maximum_units:
            return Refused(Limit.DEPARTMENT, department.maximum_units, used)
    return None
