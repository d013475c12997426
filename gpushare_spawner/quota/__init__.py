"""Who may use how much of the GPUs, and in which order. Pure rules over `model.quota`: time is an argument.

`Accounts` finds the account that a server is charged to, `QuotaUsage` keeps what each account uses, `FairShare` what it
used over quota recently, and `ordered` sorts the spawns that wait.
"""

from gpushare_spawner.quota.account import Account, AccountKind, Accounts
from gpushare_spawner.quota.admission import Admission, Limit, Refused, admit
from gpushare_spawner.quota.fair_share import FairShare
from gpushare_spawner.quota.order import Asking, ordered
from gpushare_spawner.quota.usage import Charge, QuotaUsage

__all__ = [
    "Account",
    "AccountKind",
    "Accounts",
    "Admission",
    "Asking",
    "Charge",
    "FairShare",
    "Limit",
    "QuotaUsage",
    "Refused",
    "admit",
    "ordered",
]
