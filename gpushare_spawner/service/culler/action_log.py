"""Logs each idle action as one line with its figures, and enters it in the history."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict

from gpushare_spawner.model.tier import Tier
from gpushare_spawner.service.culler.decisions import SessionDecision
from gpushare_spawner.service.history.events import Action
from gpushare_spawner.service.history.groups import group_of_session
from gpushare_spawner.service.hub.client import HubServer
from gpushare_spawner.wording.idle_decisions import decided

log = logging.getLogger("gpushare.service.actions")

CULLER = "culler"
"""Who acts, in the log and in the history."""


class ActionLog:
    """``record`` enters an action in the history; ``clock``: seconds since the epoch."""

    def __init__(self, record: Callable[[Action], None], clock: Callable[[], float]) -> None:
        self._record = record
        self._clock = clock

    def gpu_action(self, one: SessionDecision) -> None:
        """Log that a session was downgraded or released, as decided; or, in a dry run, that it would have been."""
        self._session_action(one, one.decision.tier, one.decision.units, decided(one.decision, one.session.share))

    def stopped_session(self, one: SessionDecision, reason: str) -> None:
        """Log that a session's server was stopped."""
        self._session_action(one, Tier.STOPPED, 0, reason)

    def stopped_server(self, server: HubServer, reason: str, dry_run: bool = False) -> None:
        """Log that a server without a share was stopped."""
        self._log(
            Action(
                at=self._clock(),
                action=Tier.STOPPED,
                actor=CULLER,
                user=server.user,
                server=server.name,
                template=server.profile or "",
                reason=reason,
                dry_run=dry_run,
            )
        )

    def _session_action(self, one: SessionDecision, tier: Tier, units: int, reason: str) -> None:
        session, upcoming = one.session, one.decision.upcoming
        self._log(
            Action(
                at=self._clock(),
                action=tier,
                actor=CULLER,
                user=session.user,
                server=session.server,
                template=session.template,
                group=group_of_session(session, {}),
                node=one.node,
                units=units,
                cause=upcoming.cause.value if upcoming is not None else "",
                reason=reason,
                dry_run=one.dry_run,
            )
        )

    def _log(self, action: Action) -> None:
        log.info("%s", line(action))
        self._record(action)


def line(action: Action) -> str:
    """Return an action as ``name=value`` pairs (logfmt), without those that are empty; the log has the time."""
    pairs = asdict(action) | {"at": "", "dry_run": "true" if action.dry_run else ""}
    return " ".join(f"{name}={_value(value)}" for name, value in pairs.items() if value != "")


def _value(value: object) -> str:
    text = str(value)
    return text if text and all(letter.isalnum() or letter in "-_.@:/" for letter in text) else json.dumps(text)
