"""Logs each action of the service as one line with its figures, and enters it in the history."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict

from gpushare_spawner.model.report import SessionReport
from gpushare_spawner.service.history.events import Action, BegunRestart
from gpushare_spawner.service.history.groups import group_of_session
from gpushare_spawner.service.hub.client import HubServer

log = logging.getLogger("gpushare.service.actions")

RESTART = "restart"
"""What the history calls a restart."""
CULLER = "culler"
"""Who acts, in the log and in the history, where no person does."""


class ActionLog:
    """``record`` enters an action in the history; ``clock``: seconds since the epoch."""

    def __init__(self, record: Callable[[Action], None], clock: Callable[[], float]) -> None:
        self._record = record
        self._clock = clock

    def session(
        self,
        session: SessionReport,
        node: str,
        action: str,
        actor: str = CULLER,
        *,
        units: int | None = None,
        cause: str = "",
        reason: str = "",
        dry_run: bool = False,
    ) -> float:
        """Log what was done to a session, and return when that was, in seconds since the epoch.

        ``units``: what it holds afterwards, on each of its GPUs; None: as before.
        """
        at = self._clock()
        self._log(
            Action(
                at=at,
                action=action,
                actor=actor,
                user=session.user,
                server=session.server,
                template=session.template,
                group=group_of_session(session, {}),
                node=node,
                units=units if units is not None else session.effective_units,
                cause=cause,
                reason=reason,
                dry_run=dry_run,
            )
        )
        return at

    def server(
        self, server: HubServer, action: str, actor: str = CULLER, *, reason: str = "", dry_run: bool = False
    ) -> None:
        """Log what was done to a server without a share."""
        self._log(
            Action(
                at=self._clock(),
                action=action,
                actor=actor,
                user=server.user,
                server=server.name,
                template=server.profile or "",
                reason=reason,
                dry_run=dry_run,
            )
        )

    def restart(self, begun: BegunRestart, reason: str) -> None:
        """Log the restart of a server that had a share."""
        self._log(
            Action(
                at=self._clock(),
                action=RESTART,
                actor=begun.actor,
                user=begun.user,
                server=begun.server,
                template=begun.old_template,
                group=begun.group,
                node=begun.node,
                reason=reason,
            )
        )

    def node(self, node: str, action: str, actor: str, *, reason: str) -> None:
        """Log what was done to a node or to one of its GPUs."""
        self._log(Action(at=self._clock(), action=action, actor=actor, node=node, reason=reason))

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
