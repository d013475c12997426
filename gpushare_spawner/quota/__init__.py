"""Who may use how much of the GPUs, and in which order. Pure rules over `model.quota`: time is an argument.

`Accounts` finds the account that a server is charged to, `QuotaUsage` keeps what each account uses, `FairShare` what it
used over quota recently, `ordered` sorts the spawns that wait, and `reclaimed` chooses the sessions that make way for
them.
"""

from gpushare_spawner.quota.account import Account, AccountKind, Accounts
from gpushare_spawner.quota.admission import Admission, Limit, Refused, admit, exceeded_units
from gpushare_spawner.quota.fair_share import FairShare
from gpushare_spawner.quota.order import Asking, divided, ordered
from gpushare_spawner.quota.reclaim import Gpus, OverQuota, reclaimed
from gpushare_spawner.quota.usage import Charge, QuotaUsage

__all__ = [
    "Account",
    "AccountKind",
    "Accounts",
    "Admission",
    "Asking",
    "Charge",
    "FairShare",
    "Gpus",
    "Limit",
    "OverQuota",
    "QuotaUsage",
    "Refused",
    "admit",
    "divided",
    "exceeded_units",
    "ordered",
    "reclaimed",
]
