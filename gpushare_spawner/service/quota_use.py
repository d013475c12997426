"""Which sessions are over quota, by the agents' reports."""

from __future__ import annotations

from collections.abc import Iterable

from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.model.report import Report
from gpushare_spawner.quota import Accounts, Charge, QuotaUsage


def quota_use(quotas: Quotas, reports: Iterable[Report]) -> QuotaUsage:
    """Return what the sessions of all reports use."""
    accounts = Accounts(quotas)
    usage = QuotaUsage(accounts)
    for report in reports:
        for session in report.sessions:
            account = accounts.find(session.quota, session.user)
            units = session.share_units * len(session.gpus)
            usage.put(Charge(session.id, session.user, account, units, session.begun))
    return usage
