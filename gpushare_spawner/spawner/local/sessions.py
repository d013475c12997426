"""The sessions that this hub process has opened with its machine's agent, from the reservation to the close.

Does not choose GPUs: see `reservations`. What an earlier hub or agent left is handled in `recovery`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from gpushare_spawner.clients.agent import AgentClient
from gpushare_spawner.model.protocol.control import AgentUnreachable, ControlRefused, OpenRequest
from gpushare_spawner.placement import Allocation, Requested
from gpushare_spawner.spawner.spawn_refused import SpawnRefused
from gpushare_spawner.wording.spawn import failures as words

CONFIRM_WITHIN = 900.0
"""Seconds that the agent keeps a session whose process nobody confirmed: longer than a start may take."""
LONGEST_PAUSE = 5.0
"""Seconds between two tries to close a session while the agent does not answer, at most."""

InBackground = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
"""Runs a coroutine to its end, whoever asked for it."""


class AgentSessions:
    """Opens, confirms and closes sessions. ``changed`` is called when a session has been closed."""

    def __init__(
        self, client: AgentClient, log: logging.Logger, in_background: InBackground, changed: Callable[[], None]
    ) -> None:
        self._client = client
        self._log = log
        self._in_background = in_background
        self._changed = changed
        self.in_flight: dict[str, Allocation] = {}
        """Shares of sessions that are not confirmed yet, by the session's id."""
        self._running: dict[str, OpenRequest] = {}
        """Sessions whose process was started here, until they are released."""
        self._closing: dict[str, asyncio.Task[None]] = {}

    async def open(self, request: OpenRequest, uncounted: Requested) -> tuple[Allocation, dict[str, str]]:
        """Open a session; return what it holds, and the environment that its notebook server must be started with.

        ``uncounted``: what it takes of the machine's CPU and memory, until the agent reports it.
        Its share counts as in flight from now on. Raises ControlRefused; then nothing is open. After any other error
        the session is closed in the background: it may have been opened.
        """
        allocation = self.in_flight[request.id] = Allocation(
            session=request.id,
            gpus=request.gpus,
            share_units=request.share_units,
            borrowed_units=request.borrowed_units,
            effective_units=request.share_units,
            opened_at=time.time(),
            uncounted=uncounted,
            user=request.user,
            quota=request.quota,
            layer=request.layer,
        )
        try:
            opened = await self._client.open(request)
        except ControlRefused:
            self.in_flight.pop(request.id, None)
            raise
        except BaseException:
            # closing what is not open is no error
            self.release(request.id)
            raise
        return allocation, opened.environment

    def is_closing(self, session: str) -> bool:
        """Return whether the session is being closed: opened now, it might be closed by that."""
        return session in self._closing

    @property
    def all_closed(self) -> bool:
        """Whether no session is being closed."""
        return not self._closing

    # -- the process runs --

    async def confirm(self, request: OpenRequest, pid: int) -> None:
        """Tell the agent the pid of the session's process. An unavailable agent is told when it is back.

        Raises ControlRefused where the agent does not accept it.
        """
        self._running[request.id] = request
        try:
            await self._confirm(request, pid)
        except AgentUnreachable as error:
            self._log.warning("GPU session %s is not confirmed yet: %s", request.id, error)
            self._in_background(self._confirm_later(request, pid))

    async def confirm_started(self, request: OpenRequest, pid: int) -> None:
        """As `confirm`. Raises SpawnRefused, also for a ``pid`` below 1: then the server has ended already."""
        if pid < 1:
            raise SpawnRefused(words.SERVER_ENDED, reason="exited", status=500)
        try:
            await self.confirm(request, pid)
        except ControlRefused as error:
            raise SpawnRefused(words.agent_refused_process(error.message), reason="agent-refused", status=502) from None

    async def _confirm(self, request: OpenRequest, pid: int) -> None:
        try:
            await self._client.confirm(request.id, pid)
        except ControlRefused as error:
            if error.code != "unknown-session" or self._running.get(request.id) is not request:
                raise
            # the agent lost it, in a restart without its state: the place was ours, ask for it again
            await self._client.open(request)
            self._log.warning("The agent had lost GPU session %s; it was opened again", request.id)
            await self._client.confirm(request.id, pid)
        finally:
            if request.id not in self._running and request.id not in self.in_flight:
                # it was stopped meanwhile, and not started again: what was opened above must not stay
                self.release(request.id)
        self.in_flight.pop(request.id, None)

    async def _confirm_later(self, request: OpenRequest, pid: int) -> None:
        delay = 1.0
        while self._running.get(request.id) is request:
            await asyncio.sleep(delay)
            delay = min(delay * 2, 30.0)
            if self._running.get(request.id) is not request:
                return
            try:
                await self._confirm(request, pid)
            except AgentUnreachable:
                continue
            except ControlRefused as error:
                self._log.warning("GPU session %s is not confirmed: %s. Its notebook runs on.", request.id, error)
            return

    # -- the end of a session --

    def release(self, session: str) -> None:
        """Close a session in the background; a new start of the same server waits until that is done."""
        self._running.pop(session, None)
        if session not in self._closing:
            self._closing[session] = self._in_background(self._close(session))

    async def close(self, session: str, timeout: float = 5.0) -> None:
        """Close a session, and wait for it at most ``timeout`` seconds; the rest happens in the background."""
        self.release(session)
        await asyncio.wait({self._closing[session]}, timeout=timeout)

    async def _close(self, session: str) -> None:
        """Try until the agent has heard it, or until it must have found out by itself."""
        until, pause = time.monotonic() + CONFIRM_WITHIN, 0.25
        try:
            while time.monotonic() < until:
                try:
                    await self._client.close(session)
                    return
                except (AgentUnreachable, ControlRefused) as error:
                    self._log.warning("GPU session %s is not closed yet: %s", session, error)
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, LONGEST_PAUSE)
        finally:
            self.in_flight.pop(session, None)
            self._closing.pop(session, None)
            self._changed()
