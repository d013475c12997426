"""Arbiter of the sessions that run on a GPU: a pure state machine with time as an argument and decisions as results.

See docs/explanation/arbiter.md.
"""

from gpushare_spawner.arbiter.gpu_arbiter import GpuArbiter
from gpushare_spawner.arbiter.recent_use import WINDOW, RecentGpuUse, Use
from gpushare_spawner.arbiter.session import (
    ClientId,
    Decision,
    LeaseGrant,
    Pace,
    PageOut,
    Refuse,
    Revoke,
    RevokeReason,
    SessionView,
)
from gpushare_spawner.arbiter.settings import ArbiterSettings

__all__ = [
    "WINDOW",
    "ArbiterSettings",
    "ClientId",
    "Decision",
    "GpuArbiter",
    "LeaseGrant",
    "Pace",
    "PageOut",
    "RecentGpuUse",
    "Refuse",
    "Revoke",
    "RevokeReason",
    "SessionView",
    "Use",
]
