"""Policy that decides the tier of an idle session. Pure: time is an argument.

`decide` is for sessions with a GPU share, `overdue` for servers without a share and for users. `effective_idle` returns
the idle actions of a session under its template and the admin's policy.
"""

from gpushare_spawner.idle.keep import (
    KeepRefusal,
    KeepRule,
    KeepsLeft,
    WhyNoKeep,
    exempts,
    holds,
    in_force,
    keep_refused,
    keeps_left,
    recent,
)
from gpushare_spawner.idle.policy import (
    Decision,
    IdleAction,
    NoAction,
    Overdue,
    QuietUntil,
    UnitsNeeded,
    decide,
    effective_idle,
    first_work_delay,
    group_of,
    never_quiet,
    overdue,
)
from gpushare_spawner.idle.use import DryRun, Observation, RecentUse, ShortWork, UseCount

__all__ = [
    "Decision",
    "DryRun",
    "IdleAction",
    "KeepRefusal",
    "KeepRule",
    "KeepsLeft",
    "NoAction",
    "Observation",
    "Overdue",
    "QuietUntil",
    "RecentUse",
    "ShortWork",
    "UnitsNeeded",
    "UseCount",
    "WhyNoKeep",
    "decide",
    "effective_idle",
    "exempts",
    "first_work_delay",
    "group_of",
    "holds",
    "in_force",
    "keep_refused",
    "keeps_left",
    "never_quiet",
    "overdue",
    "recent",
]
