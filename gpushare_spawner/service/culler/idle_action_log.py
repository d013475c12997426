"""Idle actions for the log of actions and the history: what was decided, with its rule and figures."""

from __future__ import annotations

from gpushare_spawner.model.tier import Tier
from gpushare_spawner.service.actions.action_log import ActionLog
from gpushare_spawner.service.culler.decisions import SessionDecision
from gpushare_spawner.service.hub.client import HubServer
from gpushare_spawner.wording.idle_decisions import decided


class IdleActionLog:
    """Enters idle actions in the log of actions."""

    def __init__(self, actions: ActionLog) -> None:
        self._actions = actions

    def gpu_action(self, one: SessionDecision) -> None:
        """Log that a session was downgraded or released, as decided; or, in a dry run, that it would have been."""
        self._session(one, one.decision.tier, one.decision.units, decided(one.decision, one.session.share))

    def stopped_session(self, one: SessionDecision, reason: str) -> None:
        """Log that a session's server was stopped."""
        self._session(one, Tier.STOPPED, 0, reason)

    def stopped_server(self, server: HubServer, reason: str, dry_run: bool = False) -> None:
        """Log that a server without a share was stopped."""
        self._actions.server(server, Tier.STOPPED, reason=reason, dry_run=dry_run)

    def _session(self, one: SessionDecision, tier: Tier, units: int, reason: str) -> None:
        upcoming = one.decision.upcoming
        self._actions.session(
            one.session,
            one.node,
            tier,
            units=units,
            cause=upcoming.cause.value if upcoming is not None else "",
            reason=reason,
            dry_run=one.dry_run,
        )
