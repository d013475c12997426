"""Which tier an idle session should be in. Pure policy: time is an argument.

`decide` is for sessions with a GPU share, `overdue` for servers without one and for users. `effective_idle`
says what applies to a session of a template under the admin's policy.
"""

from gpushare_spawner.idle.dry_run import DryRun
from gpushare_spawner.idle.effective import effective_idle, group_of
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
from gpushare_spawner.idle.observation import Observation
from gpushare_spawner.idle.overdue import Overdue, overdue
from gpushare_spawner.idle.policy import Decision, IdleAction, decide
from gpushare_spawner.idle.reclaim import Claim
from gpushare_spawner.idle.schedule import NoAction, QuietUntil, first_work_delay, never_quiet
from gpushare_spawner.idle.short_work import ShortWork, UseCount
from gpushare_spawner.idle.use import RecentUse

__all__ = [
    "Claim",
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
