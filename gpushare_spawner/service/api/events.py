"""Server-sent events: which parts of the dashboard have changed. The events have no data of sessions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator

from pydantic import BaseModel, ConfigDict

from gpushare_spawner.descriptors import for_connections
from gpushare_spawner.service.api.snapshots import PARTS, Part, ServiceSnapshots

log = logging.getLogger("gpushare.service.api")

EVERY = 2.0
"""Seconds between two looks for changes while somebody listens."""
HEARTBEAT = 15.0
"""Seconds after which a stream without events carries a comment: proxies end streams that are silent for a minute."""
LONGEST = 3600.0
"""Seconds after which a stream ends and its client logs in again: rights can have been taken away."""
AFTER_FAILURE = 30.0
"""Seconds."""
MOST_STREAMS = 2000
"""Of all users; fewer where half of the descriptors for connections are fewer: other requests need connections too."""
MOST_STREAMS_OF_USER = 20
"""A browser allows 6 for each site over HTTP/1.1; a user has several browsers."""


class Changed(BaseModel):
    """What has changed since the last event."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    version: int
    """Grows with each change, also over restarts of the service."""
    parts: tuple[Part, ...]
    """What to ask for again. The first event of a stream names all parts."""


class TooManyStreams(Exception):
    """No further stream can be opened; the text says why."""


class Events:
    """Looks for changes while there are streams."""

    def __init__(self, snapshots: ServiceSnapshots, every: float = EVERY, heartbeat: float = HEARTBEAT) -> None:
        self._snapshots = snapshots
        self._every = every
        self._heartbeat = heartbeat
        self._version = 0
        self._news = asyncio.Condition()
        self._looking: asyncio.Task[None] | None = None
        self._soon = asyncio.Event()
        self._streams: Counter[str] = Counter()
        self._most_streams = min(MOST_STREAMS, for_connections() // 2)

    def look_now(self) -> None:
        """Look for changes at once, after an action."""
        self._soon.set()

    async def stream(self, of: str) -> AsyncGenerator[str]:
        """Yield the events for one client, ``of`` this user or service. Raises TooManyStreams before the first one."""
        if self._streams.total() >= self._most_streams or self._streams[of] >= MOST_STREAMS_OF_USER:
            raise TooManyStreams("Too many pages listen for changes: close some of them, or try again in a minute.")
        self._streams[of] += 1
        try:
            if not self._looks:
                version = (await self._snapshots.current()).version
                # another stream can have begun meanwhile
                if not self._looks:
                    self._version = version
                    self._looking = asyncio.create_task(self._look())
            seen = self._version
            yield _event(Changed(version=seen, parts=PARTS))
            ends = asyncio.get_running_loop().time() + LONGEST
            while asyncio.get_running_loop().time() < ends:
                if not await self._changed_after(seen):
                    yield ": nothing has changed\n\n"
                    continue
                parts, seen = self._snapshots.changed_since(seen), self._version
                yield _event(Changed(version=seen, parts=parts))
        finally:
            self._streams[of] -= 1
            if not self._streams[of]:
                del self._streams[of]
            if not self._streams and self._looking is not None:
                self._looking.cancel()
                self._looking = None

    @property
    def _looks(self) -> bool:
        return self._looking is not None and not self._looking.done()

    async def _changed_after(self, version: int) -> bool:
        """Wait for a later version, at most until a heartbeat is due."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._heartbeat), self._news:
                await self._news.wait_for(lambda: self._version > version)
                return True
        return False

    async def _look(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._soon.wait(), self._every)
            self._soon.clear()
            try:
                version = (await self._snapshots.current()).version
            except Exception:
                # the next look can succeed; without it all pages would be silent for good
                log.exception("Cannot look for changes")
                await asyncio.sleep(AFTER_FAILURE)
                continue
            if version != self._version:
                async with self._news:
                    self._version = version
                    self._news.notify_all()


def _event(changed: Changed) -> str:
    return f"event: changed\nid: {changed.version}\ndata: {changed.model_dump_json()}\n\n"
