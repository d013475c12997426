"""Watches: one line of JSON for each change, until the client's timeout."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import Callable

from aiohttp import web

from .errors import ApiError, bad_request, invalid
from .kinds import Kind
from .selectors import Matches
from .store import Event, Store, Stored
from .targets import whole_number

_LAST_BOOKMARK = 2.0
"""Seconds before a watch's end."""


class Watching:
    """Answers watch requests from the store."""

    def __init__(self, store: Store, bookmark_interval: float) -> None:
        self._store = store
        self.bookmark_interval = bookmark_interval

    async def answer(self, request: web.Request, kind: Kind, namespace: str, matches: Matches) -> web.StreamResponse:
        """Send changes until the timeout that the client asks for, or until the watch is cut."""
        query = request.query
        if query.get("sendInitialEvents"):
            causes = [
                (
                    "sendInitialEvents",
                    "Forbidden: sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled",
                )
            ]
            raise invalid("ListOptions", "", causes, "meta.k8s.io")
        asked = query.get("resourceVersion") or "0"
        if not asked.isdigit():
            raise bad_request(f"invalid resource version {asked!r}")
        timeout = whole_number(query, "timeoutSeconds") or random.uniform(1800, 3600)
        end = time.monotonic() + timeout

        def here(stored: Stored) -> bool:
            return not namespace or stored.key[0] == namespace

        # no await between here and the queue: nothing may happen in between
        lines: list[bytes] = []
        queue = self._store.watch(kind)
        version = int(asked)
        try:
            if version == 0:
                version = self._store.version
                state = self._store.items(kind, namespace)
                lines += [_line("ADDED", stored) for stored in state if matches(stored.item)]
            lines += [
                line
                for event in self._store.since(kind, version)
                if here(event.after) and (line := _said(event, matches))
            ]
        except ApiError as error:
            self._store.unwatch(kind, queue)
            if error.code != 410:
                raise
            # the watch starts, and its first event says that it cannot go on
            lines = [json.dumps({"type": "ERROR", "object": error.status()}).encode() + b"\n"]
            return await self._send_and_end(request, lines)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        try:
            await response.prepare(request)
            if lines:
                await response.write(b"".join(lines))
            await self._follow(response, kind, queue, here, matches, end, query.get("allowWatchBookmarks") == "true")
            with contextlib.suppress(ConnectionError):
                await response.write_eof()
        except ConnectionError:
            pass  # the client has gone
        finally:
            self._store.unwatch(kind, queue)
        return response

    async def _follow(
        self,
        response: web.StreamResponse,
        kind: Kind,
        queue: asyncio.Queue[Event | None],
        here: Callable[[Stored], bool],
        matches: Matches,
        end: float,
        bookmarks: bool,
    ) -> None:
        bookmark_at = self._next_bookmark(end) if bookmarks else float("inf")
        while True:
            wait = min(end, bookmark_at) - time.monotonic()
            event = None
            # not wait_for: up to Python 3.11 it may swallow a cancellation
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(wait, 0)):
                    event = await queue.get()
                    if event is None:
                        return  # cut
            lines = []
            while event is not None:
                if here(event.after) and (line := _said(event, matches)):
                    lines.append(line)
                if queue.empty():
                    break
                event = queue.get_nowait()
                if event is None:
                    return
            if time.monotonic() >= bookmark_at:
                lines.append(_bookmark(kind, self._store.version))
                bookmark_at = self._next_bookmark(end)
            if lines:
                await response.write(b"".join(lines))
            if time.monotonic() >= end:
                return

    def _next_bookmark(self, end: float) -> float:
        """After the interval, and once more shortly before the end."""
        now = time.monotonic()
        last = end - _LAST_BOOKMARK
        return min(now + self.bookmark_interval, last) if last > now else now + self.bookmark_interval

    async def _send_and_end(self, request: web.Request, lines: list[bytes]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        await response.write(b"".join(lines))
        await response.write_eof()
        return response


def _said(event: Event, matches: Matches) -> bytes | None:
    """A change as one who only sees what matches is told of it."""
    before = event.before is not None and matches(event.before.item)
    after = not event.deleted and matches(event.after.item)
    if after:
        return _line("MODIFIED" if before else "ADDED", event.after)
    return _line("DELETED", event.after) if before else None


def _line(what: str, stored: Stored) -> bytes:
    return b'{"type":"%s","object":%s}\n' % (what.encode(), stored.raw)


def _bookmark(kind: Kind, version: int) -> bytes:
    item = {"kind": kind.kind, "apiVersion": kind.api_version, "metadata": {"resourceVersion": str(version)}}
    return json.dumps({"type": "BOOKMARK", "object": item}).encode() + b"\n"
