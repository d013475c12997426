"""Which tier an idle session should be in. Pure policy: time is an argument.

`decide` is for sessions with a GPU share, `overdue` for servers without one and for users.
"""

from gpushare_spawner.idle.dry_run import DryRun
from gpushare_spawner.idle.keep import KeepRefusal, KeepRule, WhyNoKeep, exempts, holds, in_force, keep_refused, recent
from gpushare_spawner.idle.observation import Observation
from gpushare_spawner.idle.overdue import Overdue, overdue
from gpushare_spawner.idle.policy import Decision, IdleAction, decide
from gpushare_spawner.idle.reclaim import Claim
from gpushare_spawner.idle.schedule import NoAction
from gpushare_spawner.idle.short_work import ShortWork, UseRule
from gpushare_spawner.idle.use import RecentUse

__all__ = [
    "Claim",
    "Decision",
    "DryRun",
    "IdleAction",
    "KeepRefusal",
    "KeepRule",
    "NoAction",
    "Observation",
    "Overdue",
    "RecentUse",
    "ShortWork",
    "UseRule",
    "WhyNoKeep",
    "decide",
    "exempts",
    "holds",
    "in_force",
    "keep_refused",
    "overdue",
    "recent",
]
