"""The state of one spawn of a process: its session with this machine's agent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpushare_spawner.model.protocol.control import OpenRequest
from gpushare_spawner.spawner.attempt import SpawnAttempt
from gpushare_spawner.spawner.local.reservations import OpenedShare
from gpushare_spawner.spawner.options.overrides import Overrides

CHECK_EVERY = 20.0
"""Seconds between two looks whether the agent still has a running server's session."""


class ProcessAttempt(SpawnAttempt[OpenedShare]):
    """One spawn of a process. ``release`` closes the session of an id in the background."""

    def __init__(self, overrides: Overrides, release: Callable[[str], None]) -> None:
        super().__init__(overrides)
        self.session: OpenRequest | None = None
        """The session that the agent was asked for; the server's, from its reservation to its end."""
        self._release = release
        self._checked_at: float | None = None

    def reserved(self, reservation: OpenedShare) -> None:
        """Note the share that was found."""
        self.reservation, self.session = reservation, reservation.opened_with

    def give_back(self) -> None:
        session, self.session, self.reservation = self.session, None, None
        if session is not None:
            self._release(session.id)

    def check_due(self, now: float) -> bool:
        """Return whether the agent is to be asked for the session; ``now``: seconds on a monotonic clock."""
        if self._checked_at is not None and now - self._checked_at < CHECK_EVERY:
            return False
        self._checked_at = now
        return True

    def state(self) -> dict[str, Any]:
        ours = super().state()
        if ours:
            ours["session"] = self.session.model_dump(mode="json") if self.session is not None else None
        return ours

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` said. Raises ValueError (pydantic's) for a session that is none.

        The agent's report is the truth, see `GPUShareMixin.poll`.
        """
        super().restore(state)
        if state.get("session") is not None:
            self.session = OpenRequest.model_validate(state["session"])
