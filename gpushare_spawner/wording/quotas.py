"""Sentences about quotas."""

from __future__ import annotations

from collections.abc import Mapping

from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.quota import Account, AccountKind, Admission, Limit, Refused
from gpushare_spawner.wording.amounts import gpu_share, plural

LABEL = "Quota"
"""The label of the choice between several quotas on the form."""
OVER_QUOTA_WAITS = "Your spawn is over quota: spawns in quota come first."


def exceeded_departments(quotas: Quotas) -> Mapping[str, str]:
    """Return what to say of each department whose teams are guaranteed more than the department."""
    said = {}
    for name, group in quotas.groups.items():
        limits = {"guarantee": group.guaranteed_units, "maximum": group.maximum_units}
        for field, limit in limits.items():
            if limit is not None and group.teams_units > limit:
                said[name] = (
                    f"the teams are guaranteed {gpu_share(group.teams_units)} together, more than the department's "
                    f"{field} of {gpu_share(limit)}: lower the teams' guarantees, or raise the department's {field}"
                )
    return said


def exceeds_cluster(quotas: Quotas, capacity: int) -> str | None:
    """Return what to say where guarantees add up to more than the GPUs have; None where they do not.

    ``capacity``: units of 1 % of all GPUs. The default quota is left out: its number of users is not known.
    """
    guaranteed = quotas.guaranteed_units
    if guaranteed <= capacity:
        return None
    return (
        f"the guarantees add up to {gpu_share(guaranteed)}, and there are {gpu_share(capacity)}: lower some guarantees"
    )


def name_of(account: Account) -> str:
    """Return how an account is named in a sentence: "the quota of group optics"."""
    match account.kind:
        case AccountKind.GROUP:
            return f"the quota of group {account.name}"
        case AccountKind.USER:
            return f"the quota of user {account.name}"
        case _:
            return f"the default quota of user {account.name}"


def exceeded(account: Account, refused: Refused, units: int) -> str:
    """Return that a limit of a quota refuses a server. ``units``: of 1 %, what the server needs on all its GPUs."""
    most, used, needs = refused.most, refused.used, gpu_share(units)
    match refused.limit:
        case Limit.MAXIMUM | Limit.DEPARTMENT:
            whose = name_of(account) if refused.limit is Limit.MAXIMUM else f"department {account.department}"
            return (
                f"This needs {needs}, and {whose} is limited to {gpu_share(most)}, of which {gpu_share(used)} "
                f"{'is' if used <= UNITS_PER_GPU else 'are'} in use. Choose a smaller share, or try again when a "
                "server of this quota has stopped."
            )
        case Limit.SERVERS:
            return (
                f"No more than {plural(most, 'server')} with a GPU can use {name_of(account)}, and {used} "
                f"{'is' if used == 1 else 'are'} running. Try again when one of them has stopped."
            )
        case Limit.USER_SERVERS:
            return (
                f"You have {plural(used, 'server')} with a GPU in {name_of(account)}, which allows {most} for each "
                "user. Stop one first, or choose a template without a GPU."
            )


def on_card(admission: Admission) -> str:
    """Return what a quota means for a spawn now, as a phrase for a card."""
    refused = admission.refused
    if refused is not None:
        limits = {
            Limit.MAXIMUM: f"{gpu_share(refused.used)} of at most {gpu_share(refused.most)} in use",
            Limit.DEPARTMENT: f"department: {gpu_share(refused.used)} of at most {gpu_share(refused.most)} in use",
            Limit.SERVERS: f"{refused.used} of at most {plural(refused.most, 'server')} in use",
            Limit.USER_SERVERS: f"you have {refused.used} of at most {plural(refused.most, 'server')}",
        }
        return f"you cannot start now: {limits[refused.limit]}"
    if admission.in_quota:
        return f"in quota, {gpu_share(admission.left)} left"
    return "over quota: spawns in quota come first"


def choice(account: Account, admission: Admission | None) -> str:
    """Return an account as a choice on the form. ``admission``: what a spawn would be there now; None: unknown."""
    name = account.name if account.kind is AccountKind.GROUP else "your own"
    return f"{name}: {on_card(admission)}" if admission is not None else name
