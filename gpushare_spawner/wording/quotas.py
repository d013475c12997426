"""Sentences about quotas."""

from __future__ import annotations

from collections.abc import Mapping

from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.wording.amounts import gpu_share


def exceeded_departments(quotas: Quotas) -> Mapping[str, str]:
    """Return what to say of each department whose teams are guaranteed more than the department."""
    said = {}
    for name, group in quotas.groups.items():
        limits = {"guarantee": group.guaranteed_units, "maximum": group.maximum_units}
        for field, limit in limits.items():
            if limit is not None and group.teams_units > limit:
                said[name] = (
                    f"the teams are guaranteed {gpu_share(group.teams_units)} together, more than the department's "
                    f"{field} of {gpu_share(limit)}; not all teams can have what they are guaranteed"
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
        f"the guarantees add up to {gpu_share(guaranteed)}; there are {gpu_share(capacity)}: "
        "not all quotas can have what they are guaranteed"
    )
