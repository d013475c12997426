"""Observations for the tests: a quarter of a GPU, opened at 0, idle since."""

from __future__ import annotations

from typing import Any

from gpushare_spawner.idle.policy import Decision
from gpushare_spawner.idle.use import Observation
from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.share import Share, Tier, UseRule
from gpushare_spawner.model.template import Idle

MINUTE = 60.0
HOUR = 3600.0

IDLE = Idle(downgrade_after="15m", downgrade_to=0.10, release_after="45m", stop_after="8h", warn_before="5m")


def observed(**changes: Any) -> Observation:
    """An idle, active session; the hub saw it last at 0."""
    tier = changes.get("tier", Tier.ACTIVE)
    units = {Tier.ACTIVE: 25, Tier.DOWNGRADED: 10, Tier.RELEASED: 0}[tier]
    values: dict[str, Any] = {
        "share": Share(units=25),
        "tier": tier,
        "tier_since": 0.0,
        "effective_units": units,
        "opened_at": 0.0,
        "hub_last_activity": 0.0,
    }
    return Observation(**(values | changes))


def told(decision: Decision, use: UseRule | None = None) -> Notice | None:
    """The notice as the agent would report it once it has been told of the decision."""
    action = decision.notice
    if action is None:
        return None
    return Notice(
        tier=action.tier,
        at=action.at,
        reason="idle",
        effective_units=action.units,
        cause=action.cause,
        after_seconds=action.after,
        use=use,
    )
