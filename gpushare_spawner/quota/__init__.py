"""Quotas of users and groups, and the order of waiting spawns. Pure rules over `model.quota`: time is an argument.

`QuotaAccounts` finds the account that a server is charged to, `QuotaUsage` keeps the present use of each account,
`FairShare` its recent use over quota, `ordered` sorts the waiting spawns, and `reclaimed` chooses the sessions that
make way for them.
"""

from gpushare_spawner.quota.accounts import Account, AccountKind, Charge, QuotaAccounts, QuotaUsage
from gpushare_spawner.quota.order import (
    Admission,
    Asking,
    FairShare,
    Limit,
    LimitExceeded,
    admit,
    divided,
    exceeded_units,
    ordered,
)
from gpushare_spawner.quota.reclaim import Gpus, OverQuota, reclaimed

__all__ = [
    "Account",
    "AccountKind",
    "Admission",
    "Asking",
    "Charge",
    "FairShare",
    "Gpus",
    "Limit",
    "LimitExceeded",
    "OverQuota",
    "QuotaAccounts",
    "QuotaUsage",
    "admit",
    "divided",
    "exceeded_units",
    "ordered",
    "reclaimed",
]
