"""Reads and writes the controls of sessions for the actions: one writer for each user at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass
from weakref import WeakValueDictionary

from gpushare_spawner.idle import in_force
from gpushare_spawner.model.controls import AskAnswer, Controls
from gpushare_spawner.model.protocol.control import ControlRefused, ControlsRequest
from gpushare_spawner.model.report import SessionReport
from gpushare_spawner.service.actions.outcome import Asked, Target, current, refusals
from gpushare_spawner.service.reports import Agent, ask_all


@dataclass(frozen=True)
class OtherSessions:
    """The other sessions of a session's user."""

    controls: Mapping[str, Controls]
    """In force now, by the sessions' ids."""
    nodes: frozenset[str]
    """Whose agents have answered: sessions on other nodes are unknown."""


PAUSES = (0.3, 1.0)
"""Seconds before a write is tried again, where the agent changed the session's pod at the same time."""


class ControlsOfSessions:
    """The controls as they are in force now. Methods raise ActionRefused."""

    def __init__(self, agents: Iterable[Agent], clock: Callable[[], float]) -> None:
        """``agents`` is iterated over anew each time; ``clock``: seconds since the epoch."""
        self._agents = agents
        self.clock = clock
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @contextlib.asynccontextmanager
    async def of_user(self, user: str) -> AsyncIterator[None]:
        """Nothing else changes the controls of this user's sessions meanwhile."""
        lock = self._locks.get(user)
        if lock is None:
            lock = self._locks[user] = asyncio.Lock()
        async with lock:
            yield

    async def read(self, one: Target) -> tuple[SessionReport, Controls]:
        """Return the session as it is now, and its controls."""
        session = await current(one)
        return session, in_force(session.controls, self.clock())

    async def of_others(self, session: SessionReport) -> OtherSessions:
        """Return the controls of the other sessions of a session's user, as far as agents answer."""
        reports = [snapshot.report for snapshot in await ask_all(self._agents) if snapshot.report is not None]
        found = (other for report in reports for other in report.sessions)
        controls = {
            other.id: in_force(other.controls, self.clock())
            for other in found
            if other.user == session.user and other.id != session.id
        }
        return OtherSessions(controls, frozenset(report.node for report in reports))

    async def write(self, one: Target, controls: Controls, answer: AskAnswer | None = None) -> None:
        """Set a session's controls, and answer the ask that they come from."""
        request = ControlsRequest.of(one.session.id, controls, answer)
        with refusals():
            for pause in (*PAUSES, None):
                try:
                    await one.agent.controls(request)
                    break
                except ControlRefused as error:
                    if error.code != "busy" or pause is None:
                        raise
                await asyncio.sleep(pause)
                await one.agent.report()


def answer_to(asked: Asked | None, text: str, at: float) -> AskAnswer | None:
    """Return the answer that what was asked has been done."""
    return None if asked is None else AskAnswer(number=asked.ask.number, done=True, text=text, at=at)
