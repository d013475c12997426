"""The state of one spawn, from the admin's hook to the end of its server, and the progress that the user sees.

Each spawn has a new `SpawnAttempt`, so no state needs a reset. On Kubernetes it is a `PodAttempt`, and each pod that is
started for it has a `PodAdmission`. This module does not choose a place (see ``queue``) and does not start a server
(see the spawners in ``local`` and ``kubernetes``).
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import Enum
from html import escape
from typing import Any, Generic, TypeVar

from gpushare_spawner.background import cancel
from gpushare_spawner.model.control import LONGEST_TEXT, QueueProgress
from gpushare_spawner.model.layers import LAYERS
from gpushare_spawner.model.template import Template
from gpushare_spawner.spawner.options import Choice, Overrides
from gpushare_spawner.spawner.queue.queue import Reservation, Ticket, WaitStatus
from gpushare_spawner.spawner.queue.quotas import ServerWithoutGpu
from gpushare_spawner.wording import spawn_failures as words
from gpushare_spawner.wording import spawn_form as layer_words
from gpushare_spawner.wording.amounts import utc


@dataclass(frozen=True)
class Paragraph:
    """A part of a message, as plain text and as HTML for the hub's page."""

    plain: str
    html: str


class SpawnProgress:
    """The events of one spawn, in JupyterHub's form for ``progress()``. A late listener receives all events."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._more = asyncio.Event()
        self._ended = False

    def add(
        self, *paragraphs: str | Paragraph, progress: int | None = None, queue: QueueProgress | None = None
    ) -> None:
        """Add an event with a text and the progress of the spawn (0 to 100). Empty paragraphs are left out.

        ``queue``: the queue position as data for programs; None if the spawn does not wait. The hub's page shows no
        event without a text.
        """
        parts = [part if isinstance(part, Paragraph) else Paragraph(part, escape(part)) for part in paragraphs]
        event: dict[str, Any] = {}
        if parts:
            event["message"] = " ".join(part.plain for part in parts if part.plain)
            event["html_message"] = "<br>".join(part.html for part in parts if part.html)
        if progress is not None:
            event["progress"] = progress
        if queue is not None:
            for earlier in self._events[-1:]:
                earlier.pop("nodes", None)
            event |= queue.model_dump()
        self._events.append(event)
        self._notify()

    def add_template(self, name: str, title: str) -> None:
        """Add the template of this spawn. ``title``: its display name."""
        marked = f'<span class="gpushare-template" data-template="{escape(name)}">{escape(title)}</span>'
        html = escape(words.template("{title}")).replace("{title}", marked)
        self.add(Paragraph(words.template(title), html), progress=0)

    def end(self) -> None:
        """End the events of placement; later events are the spawner's own."""
        self._ended = True
        self._notify()

    def _notify(self) -> None:
        more, self._more = self._more, asyncio.Event()
        more.set()

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """Yield all events until `end` is called."""
        sent = 0
        while True:
            while sent < len(self._events):
                yield dict(self._events[sent])
                sent += 1
            if self._ended:
                return
            await self._more.wait()

    def add_placement(self, reservation: Reservation) -> str:
        """Add the GPUs of a reservation. Return the place as text for the log."""
        offer, share = reservation.offer, reservation.request.share
        if offer is not None:
            place = LAYERS[offer.layer].title
            self.add(layer_words.placed(place), progress=30)
            return f"by {place}"
        gpus = [(gpu.index, gpu.model) for gpu in reservation.gpus]
        place = words.placed_on(gpus, reservation.placement.node)
        self.add(words.placed(place, share, reservation.placement.borrowed), progress=30)
        return f"on {place}"

    async def follow(self, ticket: Ticket, ends_at: float) -> None:
        """Report the position in the queue and its details after each change.

        ``ends_at``: when the wait ends, in seconds since the epoch. Runs until it is cancelled.
        """
        shown: WaitStatus | None = None
        while True:
            await ticket.changed.wait()
            ticket.changed.clear()
            if ticket.result.done():
                return
            status = ticket.status
            if status is None:
                continue
            for_users = replace(status, nodes=None)
            text = words.waiting(status.ahead, ticket.request.share, status.hint, status.wait, status.elsewhere)
            parts = (_with_time(text, ends_at), words.suitable(status.gpus), _alternatives(status.startable))
            self.add(
                *(parts if for_users != shown else ()),
                progress=10,
                queue=QueueProgress(
                    queue_position=status.ahead + 1,
                    estimated_minutes=max(1, wait.likely) if (wait := status.wait) is not None else None,
                    earliest_minutes=wait.earliest if wait is not None else None,
                    latest_minutes=wait.latest if wait is not None else None,
                    waits_for=status.hint[:LONGEST_TEXT],
                    cancelled_at=ends_at,
                    nodes=status.nodes,
                ),
            )
            shown = for_users


def _alternatives(startable: Sequence[Template]) -> Paragraph:
    """Return the templates that would start now; the hub's spawn-pending page turns their names into links."""
    marked = '<span class="gpushare-startable" data-template="{}">{}</span>'
    names = [marked.format(escape(template.name), escape(template.display_name)) for template in startable]
    html = f'<span class="gpushare-instead">{words.instead(names)}</span>' if names else ""
    return Paragraph(words.instead([template.display_name for template in startable]), html)


def _with_time(text: str, at: float) -> Paragraph:
    """Return a text with ``{time}`` replaced by the instant ``at`` (seconds since the epoch).

    The hub's spawn-pending page shows the instant in the reader's time zone.
    """
    instant = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    shown = f'<time class="gpushare-wait-end" datetime="{instant}">{utc(at)}</time>'
    return Paragraph(text.replace("{time}", utc(at)), escape(text).replace("{time}", shown))


async def interleaved(first: AsyncIterator[Any], second: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """Yield the events of both iterators as they arrive, until the first iterator ends."""
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
        await cancel(*coming.values())


Reserved = TypeVar("Reserved", bound=Reservation)


class SpawnPhase(Enum):
    """The phase of a spawn."""

    NEW = "new"
    """No request yet."""
    PLACING = "placing"
    """The hook runs, options are checked, and the spawn waits for its share. No server exists to poll or stop."""
    READY = "ready"
    """Options are checked and applied, and the share is reserved. The next step is the spawner's ``start``."""
    STARTING = "starting"
    """The spawner's ``start`` runs."""
    STARTED = "started"
    """The server was started, perhaps by an earlier hub process."""
    ENDED = "ended"
    """The spawn failed or was cancelled, or its server has ended. Nothing is reserved."""


class SpawnAttempt(ABC, Generic[Reserved]):
    """One spawn of one server."""

    def __init__(self, overrides: Overrides) -> None:
        self.phase = SpawnPhase.NEW
        self.overrides = overrides
        """The traits that the choice set."""
        self.choice: Choice | None = None
        """None before the choice, and for a server that an earlier hub process started."""
        self.template_name = ""
        """The template's name, which survives a restart of the hub; empty for the admin's own profiles."""
        self.reservation: Reserved | None = None
        self.progress = SpawnProgress()
        """The events until the share is reserved."""
        self.charged: ServerWithoutGpu | None = None
        """The server without a GPU that counts in quotas; None: it has a GPU, or no template."""
        self._uncharge: Callable[[], object] = lambda: None
        self._waiting: asyncio.Task[Any] | None = None
        self.hub_task: asyncio.Future[Any] | None = None
        """The hub's task for this spawn; None: a script started the spawner without a hub."""

    @abstractmethod
    def give_back(self) -> None:
        """Release the share, if any. Idempotent."""

    @property
    def cancelled(self) -> bool:
        """Whether a user or an admin has cancelled the spawn: the hub has cancelled its task, in any phase."""
        return self.hub_task is not None and self.hub_task.cancelled()

    @property
    def chosen(self) -> bool:
        """Whether this spawn's options have been checked and applied, and its start has not finished."""
        return self.phase in (SpawnPhase.READY, SpawnPhase.STARTING)

    @property
    def template(self) -> Template | None:
        """The chosen template; None before the choice, and for an admin's own profile."""
        return self.choice.profile.template if self.choice is not None else None

    @property
    def hides_gpus(self) -> bool:
        """Whether the server must not see a GPU because its template has none."""
        return self.template is not None and self.template.gpu is None

    def record_choice(self, choice: Choice) -> None:
        """Record the choice. Only templates are saved with the server's state."""
        self.choice = choice
        self.template_name = choice.profile.slug if choice.profile.template is not None else ""

    def charge(self, servers: dict[str, ServerWithoutGpu], session: str, server: ServerWithoutGpu) -> None:
        """Add a server without a GPU to the servers that count in quotas, until the attempt or the server ends."""
        self.charged = servers[session] = server
        self._uncharge = lambda: servers.get(session) is server and servers.pop(session)

    def apply(self, choice: Choice) -> None:
        """Record the choice and set its traits. Raises SpawnRefused, see `Overrides.apply`."""
        self.overrides.undo()
        self.record_choice(choice)
        self.overrides.apply_choice(choice)

    def choose(self, choice: Choice) -> None:
        """Apply the choice without `placing`, for a script that starts a spawner without a hub."""
        self.apply(choice)
        self.phase = SpawnPhase.READY

    @contextlib.contextmanager
    def placing(self) -> Iterator[None]:
        """Mark the wait for the share. A failure ends the attempt, see `cancel`."""
        self.phase = SpawnPhase.PLACING
        self._waiting = asyncio.current_task()
        try:
            with self.cancelled_on_failure():
                yield
            self.phase = SpawnPhase.READY
        finally:
            self._waiting = None
            self.progress.end()

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Mark the spawner's ``start``."""
        self.phase = SpawnPhase.STARTING
        try:
            yield
        except BaseException:
            self.phase = SpawnPhase.ENDED
            raise
        self.phase = SpawnPhase.STARTED

    @contextlib.contextmanager
    def cancelled_on_failure(self) -> Iterator[None]:
        """End the attempt if this part of a spawn fails or is cancelled, see `cancel`."""
        try:
            yield
        except BaseException:
            self.phase = SpawnPhase.ENDED
            self.cancel()
            raise

    def call_off(self) -> bool:
        """Stop waiting for a share. Return whether the spawn was waiting."""
        if self._waiting is None:
            return False
        self._waiting.cancel()
        return True

    def cancel(self) -> None:
        """Release the share, restore the traits and clear the choice. Idempotent.

        Does not end a wait for a share; `call_off` ends it, and the attempt ends with the wait.
        """
        self.give_back()
        self._uncharge()
        self.overrides.undo()
        self.choice, self.template_name = None, ""
        if self.phase is not SpawnPhase.PLACING:
            self.phase = SpawnPhase.ENDED
            self.progress.end()

    def state(self) -> dict[str, Any]:
        """Return the state that a restarted hub needs; empty if no template was chosen."""
        charged = {"quota": self.charged.quota, "since": self.charged.opened_at} if self.charged is not None else {}
        return {"template": self.template_name, **charged} if self.template_name else {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the `state` that an earlier hub process saved for a running server."""
        self.template_name = str(state.get("template") or "")
        self.phase = SpawnPhase.STARTED
