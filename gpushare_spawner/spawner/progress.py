"""What a spawn has to say while it waits and is placed: one teller, any number of listeners."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from typing import Any

from gpushare_spawner.model.protocol.queue_progress import LONGEST_TEXT, QueueProgress
from gpushare_spawner.spawner.queue.queue import Startable, Ticket
from gpushare_spawner.wording.amounts import utc
from gpushare_spawner.wording.spawn import queue as words


@dataclass(frozen=True)
class Paragraph:
    """A part of a message, as plain text and as HTML for the hub's page."""

    plain: str
    html: str


class SpawnProgress:
    """The events of one spawn, in JupyterHub's form for ``progress()``; a listener who comes late gets them all."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._more = asyncio.Event()
        self._ended = False

    def tell(
        self,
        *paragraphs: str | Paragraph,
        progress: int | None = None,
        queue: QueueProgress | None = None,
    ) -> None:
        """Add text, and how far the spawn is (0 to 100). Empty paragraphs are left out.

        ``queue``: the same for programs; None: the spawn does not wait.
        """
        parts = [part if isinstance(part, Paragraph) else Paragraph(part, escape(part)) for part in paragraphs]
        event: dict[str, Any] = {
            "message": " ".join(part.plain for part in parts if part.plain),
            "html_message": "<br>".join(part.html for part in parts if part.html),
        }
        if progress is not None:
            event["progress"] = progress
        if queue is not None:
            event |= queue.model_dump()
        self._events.append(event)
        self._notify()

    def tell_template(self, name: str, title: str) -> None:
        """Add which template is started. ``title``: its display name."""
        marked = f'<span class="gpushare-template" data-template="{escape(name)}">{escape(title)}</span>'
        html = escape(words.template("{title}")).replace("{title}", marked)
        self.tell(Paragraph(words.template(title), html), progress=0)

    @staticmethod
    def _with_time(text: str, at: float) -> Paragraph:
        """Return a text with the instant ``at`` (seconds since the epoch) for ``{time}``."""
        return Paragraph(text.replace("{time}", utc(at)), escape(text).replace("{time}", _time_element(at)))

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
                text = words.waiting(status.ahead, ticket.request.share, status.hint, status.minutes, status.elsewhere)
                self.tell(
                    self._with_time(text, ends_at),
                    words.suitable(status.gpus),
                    _alternatives(status.startable),
                    progress=10,
                    queue=QueueProgress(
                        queue_position=status.ahead + 1,
                        estimated_minutes=status.minutes,
                        waits_for=status.hint[:LONGEST_TEXT],
                        cancelled_at=ends_at,
                    ),
                )


def _alternatives(startable: Sequence[Startable]) -> Paragraph:
    """The templates that would start now; the hub's page of a pending spawn makes links of their names."""
    names = [
        f'<span class="gpushare-startable" data-template="{escape(one.name)}">{escape(one.title)}</span>'
        for one in startable
    ]
    html = f'<span class="gpushare-instead">{words.instead(names)}</span>' if names else ""
    return Paragraph(words.instead([one.title for one in startable]), html)


def _time_element(at: float) -> str:
    """An instant as HTML: the hub's page of a pending spawn writes it in the reader's time zone."""
    instant = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return f'<time class="gpushare-wait-end" datetime="{instant}">{utc(at)}</time>'


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
