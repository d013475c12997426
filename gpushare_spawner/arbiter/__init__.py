"""Which sessions may run on a GPU now. A pure state machine: time comes in as an argument, decisions go out. See
docs/explanation/arbiter.md.
explains it."""

from gpushare_spawner.arbiter.decisions import ClientId, Decision, Grant, Pace, PageOut, Refuse, Revoke, RevokeReason
from gpushare_spawner.arbiter.gpu_arbiter import GpuArbiter
from gpushare_spawner.arbiter.recent_use import WINDOW, RecentUse, Use
from gpushare_spawner.arbiter.session import SessionView
from gpushare_spawner.arbiter.settings import ArbiterSettings

__all__ = [
    "WINDOW",
    "ArbiterSettings",
    "ClientId",
    "Decision",
    "GpuArbiter",
    "Grant",
    "Pace",
    "PageOut",
    "RecentUse",
    "Refuse",
    "Revoke",
    "RevokeReason",
    "SessionView",
    "Use",
]
