"""Positions and estimates of queued spawns, as the hub's progress events say them.

The queue is in the hub's process (`spawner.queue`). Each spawn's user sees its events on the hub's page of the spawn,
and the service follows the same events. Without them positions are those of `service.waiting_spawns`, and there is no
estimate.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import ValidationError

from gpushare_spawner.model.protocol.queue_progress import QueueProgress
from gpushare_spawner.service.hub.client import MOST_STREAMS, Hub, HubFailed, HubServer
from gpushare_spawner.wording.errors import reason

log = logging.getLogger("gpushare.service.hub")

LONGEST = 3600.0
"""Seconds that one request lasts; then the next one follows. Ours: a hub that vanished holds no request longer."""
SILENT = 30.0
"""Seconds. JupyterHub sends an empty line every 8 s (`SpawnProgressAPIHandler.keepalive_interval`): after more than
three of them nothing is known."""
ASKED_AGAIN = 10.0
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
        found: list[object] = []
        for line in lines:
            if line.startswith(b"data:"):
                try:
                    found.append(json.loads(line[len(b"data:") :]))
                except ValueError:
                    log.debug("An event of the hub cannot be read: %r", line[:80])
        return found


@dataclass
class _Followed:
    """One spawn whose events are followed."""

    lines: EventLines = field(default_factory=EventLines)
    told: QueueProgress | None = None
    heard_at: float = 0.0
    """Seconds on a monotonic clock."""
    known: asyncio.Event = field(default_factory=asyncio.Event)
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
            self.told = _told(events[-1])
        if self.told is not None:
            self.known.set()


def _told(event: object) -> QueueProgress | None:
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

    async def told(self, waiting: Sequence[HubServer]) -> Mapping[Server, QueueProgress]:
        """Return what is known of these spawns, of at most `MOST_STREAMS` of them; an unknown one is left out."""
        servers = [(one.user, one.name) for one in waiting[:MOST_STREAMS]]
        self._forget(set(servers))
        new = [server for server in servers if server not in self._followed]
        for server in new[: MOST_STREAMS - len(self._followed)]:
            followed = self._followed[server] = _Followed()
            followed.task = asyncio.create_task(self._follow(server, followed))
        if new:
            await self._first_events([self._followed[server] for server in new if server in self._followed])
        return {
            server: one.told
            for server in servers
            if (one := self._followed.get(server)) and one.told is not None and one.silent_for <= SILENT
        }

    async def _first_events(self, spawns: Sequence[_Followed]) -> None:
        waiters = [asyncio.ensure_future(one.known.wait()) for one in spawns]
        if waiters:
            await asyncio.wait(waiters, timeout=self._patience)
        for waiter in waiters:
            waiter.cancel()

    def close(self) -> None:
        """Follow nothing any longer."""
        for one in self._followed.values():
            if one.task is not None:
                one.task.cancel()

    def _forget(self, waiting: set[Server]) -> None:
        """Forget spawns whose events have ended: at once if they do not wait any more, else to ask for them again."""
        for server, one in list(self._followed.items()):
            ended = one.task is None or one.task.done()
            if ended and (server not in waiting or one.silent_for >= ASKED_AGAIN):
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
            followed.told, followed.heard_at = None, time.monotonic()
            followed.known.set()
