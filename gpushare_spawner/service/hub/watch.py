"""Pending spawns from the hub, with positions and estimates of queued spawns from the hub's progress events.

The list is requested only while a page shows it or sessions are over quota. Only one request runs at a time, and it
continues in the background when its caller stops waiting, so a slow hub delays no caller.

The queue is in the hub's process (`spawner.queue`). Each spawn's user sees its events on the hub's page for the spawn,
and the service follows the same events. Without them, positions come from `service.waiting`, without estimates.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from gpushare_spawner.log_once import LogOnce
from gpushare_spawner.model.control import QueueProgress
from gpushare_spawner.service.hub.client import MOST_STREAMS, Hub, HubFailed, HubServer
from gpushare_spawner.wording.amounts import reason

log = logging.getLogger("gpushare.service.hub")

LONGEST = 3600.0
"""Seconds until a request ends and the next one follows. Our choice: it limits how long a request can hang after the
hub has disappeared."""
SILENT = 30.0
"""Seconds without data after which the position is unknown. JupyterHub sends an empty line every 8 s
(`SpawnProgressAPIHandler.keepalive_interval`), so more than three lines are missing."""
RETRY_PAUSE = 10.0
"""Seconds until a waiting spawn is followed again after its events have ended."""
PATIENCE = 0.5
"""Maximum seconds that a page waits for the first events of new spawns. Our choice: the hub answers immediately or is
busy."""
MOST_BYTES = 64 * 1024
"""Maximum bytes of one event. Our choice: an event contains only a few sentences."""

Server = tuple[str, str]
"""User and server name."""


class EventLines:
    """Parser of events in a byte stream with chunks of any size. It buffers at most `MOST_BYTES` of an event."""

    def __init__(self) -> None:
        self._begun = b""

    def take(self, part: bytes) -> list[object]:
        """Return the events that the chunk completes, as JSON values. Other lines are ignored."""
        *lines, self._begun = (self._begun + part).split(b"\n")
        if len(self._begun) > MOST_BYTES:
            self._begun = b""
        events: list[object] = []
        for line in lines:
            if line.startswith(b"data:"):
                try:
                    events.append(json.loads(line[len(b"data:") :]))
                except ValueError:
                    log.debug("An event of the hub cannot be read: %r", line[:80])
        return events


@dataclass
class _Followed:
    """The stream of events of one spawn."""

    lines: EventLines = field(default_factory=EventLines)
    progress: QueueProgress | None = None
    heard_at: float = 0.0
    """Time of the last data, in seconds on a monotonic clock."""
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    """Event that is set when the first position arrives or the stream ends. Before that, the hub sends "Server
    requested"."""
    task: asyncio.Task[None] | None = None

    @property
    def silent_for(self) -> float:
        """Seconds since the last chunk from the hub, or since the end of the stream."""
        return time.monotonic() - self.heard_at

    def take(self, part: bytes) -> None:
        """Process a chunk of the stream.

        Only the last event counts, because the hub first replays all of the spawn's events.
        """
        self.heard_at = time.monotonic()
        events = self.lines.take(part)
        if events:
            self.progress = _progress(events[-1])
        if self.progress is not None:
            self.decided.set()


def _progress(event: object) -> QueueProgress | None:
    """Return an event's progress in the queue; None if the spawn does not wait or uses another spawner."""
    if not isinstance(event, dict) or "queue_position" not in event:
        return None
    try:
        return QueueProgress.model_validate(event)
    except ValidationError as error:
        log.debug("The hub's progress event of a queued spawn cannot be parsed: %s", error)
        return None


class QueueOfHub:
    """The progress of waiting spawns. Each requested spawn is followed until it has ended."""

    def __init__(self, hub: Hub, patience: float = PATIENCE) -> None:
        """Create it. ``patience``: maximum seconds that a page waits for first events; the next page has later ones."""
        self._hub = hub
        self._patience = patience
        self._followed: dict[Server, _Followed] = {}

    async def progress(self, waiting: Sequence[HubServer]) -> Mapping[Server, QueueProgress]:
        """Return the progress of at most `MOST_STREAMS` of these spawns, except where it is unknown."""
        servers = [(server.user, server.name) for server in waiting[:MOST_STREAMS]]
        self._forget(set(servers))
        new = [server for server in servers if server not in self._followed]
        for server in new[: MOST_STREAMS - len(self._followed)]:
            followed = self._followed[server] = _Followed()
            followed.task = asyncio.create_task(self._follow(server, followed))
        if new:
            await self._first_events([self._followed[server] for server in new if server in self._followed])
        return {
            server: stream.progress
            for server in servers
            if (stream := self._followed.get(server)) and stream.progress is not None and stream.silent_for <= SILENT
        }

    async def _first_events(self, spawns: Sequence[_Followed]) -> None:
        waiters = [asyncio.ensure_future(spawn.decided.wait()) for spawn in spawns]
        if waiters:
            await asyncio.wait(waiters, timeout=self._patience)
        for waiter in waiters:
            waiter.cancel()

    def close(self) -> None:
        """Stop following spawns."""
        for followed in self._followed.values():
            if followed.task is not None:
                followed.task.cancel()

    def _forget(self, waiting: set[Server]) -> None:
        """Discard ended streams: immediately if the spawn no longer waits, else after `RETRY_PAUSE` to reconnect."""
        for server, followed in list(self._followed.items()):
            ended = followed.task is None or followed.task.done()
            if ended and (server not in waiting or followed.silent_for >= RETRY_PAUSE):
                del self._followed[server]

    async def _follow(self, server: Server, followed: _Followed) -> None:
        try:
            await self._hub.progress(*server, followed.take, LONGEST)
        except HubFailed as error:
            log.debug("The progress of %s's spawn is unknown: %s", server[0], error)
        except Exception as error:
            # The page then shows the queue without progress.
            log.warning("The progress of %s's spawn is unknown: %s", server[0], reason(error))
        finally:
            followed.progress, followed.heard_at = None, time.monotonic()
            followed.decided.set()


class BackgroundRequest:
    """A repeated request, ``ask``, of which at most one runs at a time."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._ask = ask
        self._asking: asyncio.Task[None] | None = None

    async def refresh(self, due: bool, patience: float) -> None:
        """Start a request if it is ``due`` and none runs. Wait up to ``patience`` seconds for the running request.

        Raises the request's exception. An answer that arrived after its caller had stopped waiting is processed first,
        because it can be hours old.
        """
        self._take_answer()
        if self._asking is None and due:
            self._asking = asyncio.create_task(self._ask())
        if self._asking is not None:
            await asyncio.wait({self._asking}, timeout=patience)
            self._take_answer()

    def close(self) -> None:
        """Cancel a running request."""
        if self._asking is not None:
            self._asking.cancel()

    def _take_answer(self) -> None:
        if self._asking is not None and self._asking.done():
            answered, self._asking = self._asking, None
            answered.result()


SHARE_OF_TIME = 20.0
"""The pause between requests, as a multiple of the last request's duration. Listing thousands of servers keeps the hub
busy, and open dashboards must not overload it."""
RECENT = 30.0
"""Seconds. Our choice: half of the shortest usual notice period, so that no session makes way for an ended spawn."""
LONGEST_PAUSE = 60.0
"""Maximum pause between requests, in seconds. Our choice: a very slow hub gets at most one request a minute, and no
page shows a queue that is older than two such pauses."""


class PendingSpawns:
    """The list of pending spawns, at most ``max_age`` seconds old, or older if the hub answers slowly."""

    def __init__(self, hub: Hub, max_age: float = 4.0, patience: float = 1.0) -> None:
        """Create it. ``patience``: maximum seconds that a page waits for an answer; the next page has a later one."""
        self._hub = hub
        self._max_age = max_age
        self._patience = patience
        self._spawns: tuple[HubServer, ...] | None = None
        self._read_at = self._next_at = -math.inf
        self._request = BackgroundRequest(self._ask)
        self._trouble = LogOnce(
            log,
            "The dashboard shows no queue until the hub lists its servers again",
            "The hub lists its servers again",
            each_reason=True,
        )

    async def now(self) -> tuple[HubServer, ...] | None:
        """Return the starting servers, longest wait first; None if they are unknown."""
        await self._request.refresh(time.monotonic() >= self._next_at, self._patience)
        return self.cached(2 * LONGEST_PAUSE)

    async def recent(self) -> tuple[HubServer, ...] | None:
        """Return the starting servers if the list is recent enough for an idle action, otherwise None."""
        await self.now()
        return self.cached(RECENT)

    def cached(self, max_age: float) -> tuple[HubServer, ...] | None:
        """Return the last answer if it is at most ``max_age`` seconds old."""
        return self._spawns if time.monotonic() - self._read_at <= max_age else None

    def close(self) -> None:
        """Cancel a running request."""
        self._request.close()

    async def _ask(self) -> None:
        began = time.monotonic()
        try:
            servers = await self._hub.pending_spawns()
        except HubFailed as error:
            self._trouble.about(error)
            self._spawns = None
            took = 0.0  # pauses between attempts took most of the time
        else:
            # A spawn has no start time until the hub has run its hooks. Such a spawn is the newest.
            self._spawns = tuple(
                sorted(servers, key=lambda server: math.inf if server.started is None else server.started)
            )
            self._trouble.resolved()
            took = time.monotonic() - began
        self._read_at = time.monotonic()
        self._next_at = self._read_at + min(LONGEST_PAUSE, max(self._max_age, SHARE_OF_TIME * took))
