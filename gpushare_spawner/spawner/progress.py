"""What a spawn has to say while it waits and is placed: one teller, any number of listeners."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from html import escape
from typing import Any

from gpushare_spawner.model.protocol.queue_progress import LONGEST_TEXT, QueueProgress
from gpushare_spawner.spawner.queue.queue import Ticket
from gpushare_spawner.wording.amounts import universal_clock
from gpushare_spawner.wording.spawn.queue import instead, waiting


class SpawnProgress:
    """The events of one spawn, in JupyterHub's form for ``progress()``; a listener who comes late gets them all."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._events: list[dict[str, Any]] = []
        self._more = asyncio.Event()
        self._ended = False

    def tell(
        self,
        *paragraphs: str,
        progress: int | None = None,
        at: float | None = None,
        queue: QueueProgress | None = None,
    ) -> None:
        """Add plain text, and how far the spawn is (0 to 100). Empty paragraphs are left out.

        ``at``: the instant (seconds since the epoch) that stands for ``{time}`` in the first paragraph.
        ``queue``: the same for programs; None: the spawn does not wait.
        """
        plain, html = list(paragraphs), [escape(paragraph) for paragraph in paragraphs]
        if at is not None:
            plain[0] = plain[0].replace("{time}", universal_clock(at, self._clock()))
            html[0] = html[0].replace("{time}", _time_element(at, self._clock()))
        event: dict[str, Any] = {
            "message": " ".join(filter(None, plain)),
            "html_message": "<br>".join(filter(None, html)),
        }
        if progress is not None:
            event["progress"] = progress
        if queue is not None:
            event |= queue.model_dump()
        self._events.append(event)
        self._notify()

    def end(self) -> None:
        """Nothing more will come; what follows is the spawner's own."""
        self._ended = True
        self._notify()

    def _notify(self) -> None:
        more, self._more = self._more, asyncio.Event()
        more.set()

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """All events, until `end`."""
        told = 0
        while True:
            while told < len(self._events):
                yield dict(self._events[told])
                told += 1
            if self._ended:
                return
            await self._more.wait()

    async def follow(self, ticket: Ticket, ends_at: float) -> None:
        """Tell the position in the queue and what belongs to it, whenever something of it changes.

        ``ends_at``: when the wait ends, in seconds since the epoch. Runs until it is cancelled.
        """
        while True:
            await ticket.changed.wait()
            ticket.changed.clear()
            if ticket.result.done():
                return
            status = ticket.status
            if status is not None:
                self.tell(
                    waiting(status.ahead, ticket.request.share, status.hint, status.minutes, status.elsewhere),
                    instead(status.startable),
                    progress=10,
                    at=ends_at,
                    queue=QueueProgress(
                        queue_position=status.ahead + 1,
                        estimated_minutes=status.minutes,
                        waits_for=status.hint[:LONGEST_TEXT],
                        cancelled_at=ends_at,
                    ),
                )


def _time_element(at: float, now: float) -> str:
    """An instant as HTML: the hub's page of a pending spawn writes it in the reader's time zone."""
    instant = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return f'<time class="gpushare-wait-end" datetime="{instant}">{universal_clock(at, now)}</time>'


async def interleaved(first: AsyncIterator[Any], second: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The events of both as they come, until the first has no more."""
    sources = {"first": first, "second": second}
    coming: dict[str, asyncio.Task[Any]] = {}
    try:
        while "first" in sources:
            for name, source in sources.items():
                if name not in coming:
                    coming[name] = asyncio.ensure_future(anext(source))
            done, _ = await asyncio.wait(coming.values(), return_when=asyncio.FIRST_COMPLETED)
            for name in [name for name, task in coming.items() if task in done]:
                task = coming.pop(name)
                try:
                    event = task.result()
                except StopAsyncIteration:
                    del sources[name]
                else:
                    yield event
    finally:
        for task in coming.values():
            task.cancel()
        await asyncio.gather(*coming.values(), return_exceptions=True)
