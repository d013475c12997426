"""After a restart of the hub or the agent: running servers keep their sessions, and forgotten sessions are closed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from gpushare_spawner.clients.agent import AgentClient
from gpushare_spawner.model.protocol.control import AgentUnreachable, ControlRefused, OpenRequest
from gpushare_spawner.model.report import Report
from gpushare_spawner.spawner.local.sessions import CONFIRM_WITHIN, AgentSessions, InBackground


class SessionRecovery:
    """Compares the agent's report with the servers that the hub knows.

    ``report`` returns the agent's report, at most as many seconds old as its argument says; it raises AgentUnreachable.
    """

    def __init__(
        self,
        client: AgentClient,
        sessions: AgentSessions,
        report: Callable[[float], Awaitable[Report]],
        log: logging.Logger,
        in_background: InBackground,
    ) -> None:
        self._client = client
        self._sessions = sessions
        self._report = report
        self._log = log
        self._in_background = in_background
        self._started_at = time.time()
        self._adopting: set[str] = set()

    def adopt_soon(self, request: OpenRequest, pid: Callable[[], Awaitable[int]], runs: Callable[[], bool]) -> None:
        """See to it, in the background, that a running server has its session.

        ``runs`` says whether the server still runs under this session; ``pid`` tells its process.
        """
        if request.id not in self._adopting and not self._sessions.is_closing(request.id):
            self._adopting.add(request.id)
            self._in_background(self._adopt(request, pid, runs))

    async def _adopt(self, request: OpenRequest, pid: Callable[[], Awaitable[int]], runs: Callable[[], bool]) -> None:
        try:
            session = (await self._report(2.0)).session(request.id) or (await self._report(0.0)).session(request.id)
            if session is not None and session.confirmed:
                return
            number = await pid()
            if number < 1 or not runs():
                return
            if session is None:
                await self._client.open(request)
                self._log.warning("The agent had lost GPU session %s; it was opened again", request.id)
            if runs():
                await self._client.confirm(request.id, number)
            else:
                self._sessions.release(request.id)
        except AgentUnreachable as error:
            self._log.warning("GPU session %s cannot be checked: %s", request.id, error)
        except ControlRefused as error:
            self._log.warning("Server %s runs without a GPU share: %s", request.id, error.message)
        except Exception:
            self._log.exception("GPU session %s could not be checked", request.id)
        finally:
            self._adopting.discard(request.id)

    def sweep_soon(self, runs: Callable[[str, str], bool]) -> None:
        """`sweep` in the background, as soon as the agent answers."""
        self._in_background(self._sweep(runs))

    async def _sweep(self, runs: Callable[[str, str], bool]) -> None:
        # what an earlier hub left unconfirmed is dropped by the agent itself after CONFIRM_WITHIN
        until = time.monotonic() + CONFIRM_WITHIN
        delay = 1.0
        while time.monotonic() < until:
            try:
                await self.sweep(runs)
                return
            except AgentUnreachable:
                await asyncio.sleep(delay)
                delay = min(delay * 2, 60.0)
            except Exception:
                self._log.exception("Cannot look for sessions of an earlier hub")
                return

    async def sweep(self, runs: Callable[[str, str], bool]) -> list[str]:
        """Close what an earlier hub process reserved and never confirmed; the ids of the sessions.

        ``runs`` says whether the hub knows a user's server to run or to start. A confirmed session is left alone: its
        process lives, perhaps under another hub, and the agent ends it with the process.
        """
        report = await self._report(0.0)
        swept = []
        for session in report.sessions:
            ours = session.id in self._sessions.in_flight or session.opened_at >= self._started_at
            if ours or runs(session.user, session.server):
                continue
            if session.confirmed:
                self._log.warning("GPU session %s (pid %s) belongs to no server of this hub", session.id, session.pid)
            else:
                self._log.info("Closing GPU session %s, which an earlier hub reserved and did not use", session.id)
                self._sessions.release(session.id)
                swept.append(session.id)
        return swept
