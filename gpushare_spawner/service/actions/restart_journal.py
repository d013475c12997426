"""The restarts that are under way, on disk: a service that starts finishes those of one that was killed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gpushare_spawner.service.history.events import BegunRestart


class RestartJournal(Protocol):
    """Where restarts are stored. Methods raise nothing: without a journal a restart is carried out all the same."""

    async def begin_restart(self, restart: BegunRestart) -> None:
        """Store a restart before its server is stopped; one of the same server is replaced."""

    async def end_restart(self, user: str, server: str) -> None:
        """Delete it: the server has been started, or was not stopped."""

    async def begun_restarts(self) -> Sequence[BegunRestart]:
        """Return those that are stored."""


class NoJournal:
    """There is no history: nothing is stored."""

    async def begin_restart(self, restart: BegunRestart) -> None:
        pass

    async def end_restart(self, user: str, server: str) -> None:
        pass

    async def begun_restarts(self) -> Sequence[BegunRestart]:
        return ()
