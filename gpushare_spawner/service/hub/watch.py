"""The hub's servers that are being started. Asked only while a page shows them, or sessions are over quota.

Positions and estimates of queued spawns, as the hub's progress events say them.

The queue is in the hub's process (`spawner.queue`). Each spawn's user sees its events on the hub's page of the spawn,
and the service follows the same events. Without them positions are those of `service.waiting_spawns`, and there is no
estimate.

One request at a time. It goes on in the background when its caller stops waiting: a slow hub delays no caller.
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

from gpushare_spawner.model.control import QueueProgress
from gpushare_spawner.service.hub.client import MOST_STREAMS, Hub, HubFailed, HubServer
from gpushare_spawner.wording.amounts import reason

log = logging.getLogger("gpushare.service.hub")

LONGEST = 3600.0
"""Seconds that one request lasts; then the next one follows. Ours: a hub that vanished holds no request longer."""
SILENT = 30.0
"""Seconds. JupyterHub sends an empty line every 8 s (`SpawnProgressAPIHandler.keepalive_interval`): after more than
three of them nothing is known."""
RETRY_PAUSE = 10.0
"""Seconds until a spawn is followed again whose events ended while it still waits."""
PATIENCE = 0.5
"""Seconds that a page waits for the first events of new spawns. Ours: the hub answers at once, or is busy."""
MOST_BYTES = 64 * 1024
"""Of one event. Ours: an event has some sentences."""

Server = tuple[str, str]
"""User, and server name."""


class EventLines:
    """The events in a stream of bytes that come in parts of any size. Keeps at most `MOST_BYTES` of an event."""

    def __init__(self) -> None:
        self._begun = b""

    def take(self, part: bytes) -> list[object]:
        """Return the events that the part completes, as JSON's values. What is no event is left out."""
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
    """One spawn whose events are followed."""

    lines: EventLines = field(default_factory=EventLines)
    progress: QueueProgress | None = None
    heard_at: float = 0.0
    """Seconds on a monotonic clock."""
    decided: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the position is known, and at the end. Before it the hub says "Server requested"."""
    task: asyncio.Task[None] | None = None

    @property
    def silent_for(self) -> float:
        """Seconds since the hub sent something, or since the stream ended."""
        return time.monotonic() - self.heard_at

    def take(self, part: bytes) -> None:
        """Take a part of the stream. The last event counts: a hub sends all events of the spawn anew at first."""
        self.heard_at = time.monotonic()
        events = self.lines.take(part)
        if events:
            self.progress = _progress(events[-1])
        if self.progress is not None:
            self.decided.set()


def _progress(event: object) -> QueueProgress | None:
    """Return what an event says of the queue; None: the spawn does not wait, or another spawner starts it."""
    if not isinstance(event, dict) or "queue_position" not in event:
        return None
    try:
        return QueueProgress.model_validate(event)
    except ValidationError as error:
        log.debug("What the hub says of a queued spawn cannot be read: %s", error)
        return None


class QueueOfHub:
    """Follows the spawns that wait, once somebody asks for them, until each of them has ended."""

    def __init__(self, hub: Hub, patience: float = PATIENCE) -> None:
        """``patience``: seconds that a page waits for the first events of a spawn; what comes later is on the next."""
        self._hub = hub
        self._patience = patience
        self._followed: dict[Server, _Followed] = {}

    async def progress(self, waiting: Sequence[HubServer]) -> Mapping[Server, QueueProgress]:
        """Return what is known of these spawns, of at most `MOST_STREAMS` of them; an unknown one is left out."""
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
        """Follow nothing any longer."""
        for followed in self._followed.values():
            if followed.task is not None:
                followed.task.cancel()

    def _forget(self, waiting: set[Server]) -> None:
        """Forget spawns whose events have ended: at once if they do not wait any more, else to ask for them again."""
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
            # the page shows the queue without it
            log.warning("The progress of %s's spawn is unknown: %s", server[0], reason(error))
        finally:
            followed.progress, followed.heard_at = None, time.monotonic()
            followed.decided.set()


class BackgroundRequest:
    """Runs ``ask`` again and again, but never twice at a time."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._ask = ask
        self._asking: asyncio.Task[None] | None = None

    async def refresh(self, due: bool, patience: float) -> None:
        """Start a request if one is ``due`` and none runs; wait ``patience`` seconds for the one that runs.

        Raises what the request raised. An answer that came after its caller had gone is taken first: it
        may be hours old.
        """
        self._take_answer()
        if self._asking is None and due:
            self._asking = asyncio.create_task(self._ask())
        if self._asking is not None:
            await asyncio.wait({self._asking}, timeout=patience)
            self._take_answer()

    def close(self) -> None:
        """Cancel a request that runs."""
        if self._asking is not None:
            self._asking.cancel()

    def _take_answer(self) -> None:
        if self._asking is not None and self._asking.done():
            answered, self._asking = self._asking, None
            answered.result()


SHARE_OF_TIME = 20.0
"""The next request comes after this many times the time that the last one took: a list of thousands of servers keeps
the hub busy, and open dashboards must not."""
RECENT = 30.0
"""Seconds. Ours: half of the shortest notice period that is usual, so that nobody makes way for a spawn that has
ended."""
LONGEST_PAUSE = 60.0
"""Seconds. Ours: after a minute a page may cost a slow hub one more request, and an older queue is shown to nobody."""


class PendingSpawns:
    """The spawns that are pending, at most ``max_age`` seconds old, or older where the hub's answers take long."""

    def __init__(self, hub: Hub, max_age: float = 4.0, patience: float = 1.0) -> None:
        """``patience``: seconds that a page waits for an answer; a later answer is on the next page."""
        self._hub = hub
        self._max_age = max_age
        self._patience = patience
        self._spawns: tuple[HubServer, ...] | None = None
        self._read_at = self._next_at = -math.inf
        self._request = BackgroundRequest(self._ask)
        self._problem = ""

    async def now(self) -> tuple[HubServer, ...] | None:
        """Return the servers that are being started, the longest first; None: the hub has not said."""
        await self._request.refresh(time.monotonic() >= self._next_at, self._patience)
        return self.cached(2 * LONGEST_PAUSE)

    async def recent(self) -> tuple[HubServer, ...] | None:
        """Return the same, but None where it is older than an idle action may be based on."""
        await self.now()
        return self.cached(RECENT)

    def cached(self, max_age: float) -> tuple[HubServer, ...] | None:
        """Return the last answer if it is at most ``max_age`` seconds old."""
        return self._spawns if time.monotonic() - self._read_at <= max_age else None

    def close(self) -> None:
        """Cancel a request that runs."""
        self._request.close()

    async def _ask(self) -> None:
        began = time.monotonic()
        try:
            servers = await self._hub.pending_spawns()
        except HubFailed as error:
            if str(error) != self._problem:
                log.warning("The dashboard shows no queue until the hub lists its servers again. %s", error)
            self._spawns, self._problem = None, str(error)
            took = 0.0  # the time went by in pauses between tries
        else:
            # the hub says when a spawn started only once its hooks have run: such a spawn is the newest
            self._spawns = tuple(
                sorted(servers, key=lambda server: math.inf if server.started is None else server.started)
            )
            self._problem, took = "", time.monotonic() - began
        self._read_at = time.monotonic()
        self._next_at = self._read_at + min(LONGEST_PAUSE, max(self._max_age, SHARE_OF_TIME * took))
