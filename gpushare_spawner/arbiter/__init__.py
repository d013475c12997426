"""Which sessions may run on a GPU now. A pure state machine: time comes in as an argument, decisions go out. See
docs/explanation/arbiter.md.
explains it."""

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
