"""Objects of one kind from the API server, kept current by a list and a watch.

An unreadable object is logged once and does not affect the others. A list is parsed one object at a time, and only a
part of each object is retained. As Python objects, all pods of a large cluster together would take ten times the memory
of these parts, and a process rarely returns memory. For the requests, see api.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

from gpushare_spawner.background import Background, set_within
from gpushare_spawner.clients.api import SILENCE, WATCH_SECONDS, ApiFailure, ClusterApi

MOST_LOGGED = 1000
"""Maximum number of logged unreadable objects. Our choice: a hub runs for months and reads many pod names."""


class BadObjects:
    """Unreadable objects, each logged once. They must not affect other objects."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._logged: set[str] = set()

    @contextmanager
    def apart(self, name: str) -> Iterator[None]:
        """Log the first exception in the work for an object. The object keeps its earlier state."""
        try:
            yield
        except Exception:
            if name not in self._logged and len(self._logged) < MOST_LOGGED:
                self._logged.add(name)
                self._log.exception("%s cannot be read, so its earlier state still counts", name)


Object = dict[str, Any]
"""Object as the API server sends it, or a part of it. This module never changes it."""
Part = TypeVar("Part")

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 20.0
"""Seconds between attempts while the API server does not answer."""
TRIES_OF_A_WATCH = 5
"""Consecutive failures after which the objects are listed again."""
_AT_LEAST = 0.5
"""Seconds. After a shorter watch (the API server stops, or a proxy ends it) the next watch starts with a delay."""
_CATCHING_UP = 2.0
"""Seconds in which a new watch delivers earlier events."""
ITEMS_AT_ONCE = 50
"""Number of a list's objects that are parsed without yielding to the event loop: about 2 ms."""
LOST_AFTER = WATCH_SECONDS + SILENCE + 2 * LONGEST_PAUSE
"""Seconds without an answer from the API server after which its last answer is out of date."""


def key(item: Object) -> str:
    """Return an object's namespace and name, joined by a slash, or only the name if it has no namespace."""
    namespace = item["metadata"].get("namespace")
    return f"{namespace}/{item['metadata']['name']}" if namespace else str(item["metadata"]["name"])


def whole(item: Object) -> Object:
    """Return the whole object: all of it is retained."""
    return item


class Watched(Background, Generic[Part]):
    """Objects read by a list and a series of watches until `close`, with unlimited retries.

    ``title`` names the objects at ``path`` for people ("the pods of this node"); ``query`` selects them. ``convert``
    returns the part of an object to retain; None: the object is omitted. If ``convert`` raises, the object keeps its
    earlier state or is omitted: an invalid object must not hide the others. ``on_change`` is called after each list and
    each change.
    """

    def __init__(
        self,
        api: ClusterApi,
        path: str,
        title: str,
        convert: Callable[[Object], Part | None],
        query: Mapping[str, str] | None = None,
        on_change: Callable[[], None] = lambda: None,
        log: logging.Logger | None = None,
        missing_right: str = "",
        cached: bool = True,
    ) -> None:
        """Create the watch. ``missing_right``: end of the error text for a refusal, naming what grants the right.

        ``cached``: the first list can come from the API server's cache, which is cheap to read; the watch delivers
        newer versions.
        """
        self._api = api
        self._path = path
        self._query = dict(query or {})
        self._convert = convert
        self._on_change = on_change
        self._log = log or logging.getLogger("gpushare.cluster")
        self._missing_right = missing_right
        self._least = "0" if cached else ""
        self.title = title
        """Name of the objects for people."""
        self.objects: dict[str, Part] = {}
        """Objects by `key`."""
        self.versions: dict[str, str] = {}
        """Their resourceVersions, by `key`."""
        self.arrived: dict[str, float] = {}
        """Earliest possible time (`time.monotonic`) at which the version in `objects` was written: usually the time of
        its watch event. Missing: it came from a list, so its age is unknown."""
        self.problem = f"{self.title} have not been read yet"
        """Current problem, for people; empty: none."""
        self.version = ""
        """The newest version that a list or the watch has delivered, including deletions."""
        self.listing = False
        """Whether a list request is in progress."""
        self.listed_at: float | None = None
        """Start of the last successful list request (`time.monotonic`)."""
        self._failing = False
        self._bad_objects = BadObjects(self._log)
        self._heard: float | None = None
        self._missed_since: float | None = None
        self._caught_up = 0.0
        self._answered = asyncio.Event()
        """Set after the first list has arrived or failed."""

    @property
    def current(self) -> bool:
        """Whether `objects` is current, or was recently."""
        return self._heard is not None and time.monotonic() - self._heard < LOST_AFTER

    async def loaded(self, patience: float) -> bool:
        """Wait for the success or failure of the first list. Return whether it arrived within ``patience`` seconds."""
        await set_within(self._answered, patience)
        return self._heard is not None

    def replace(self, item: Object, version: str) -> bool:
        """Replace an object after a local change if it still has that resourceVersion. Return whether it was replaced.

        The API server's next version follows that one, so the watch delivers it or a newer version.
        """
        if self.versions.get(key(item)) != version:
            return False
        self.enter(item)
        return True

    def enter(self, item: Object) -> None:
        """Store the current version of an object."""
        name, part = key(item), self._part(item)
        if part is None:
            self._drop(name)
        else:
            self.objects[name], self.versions[name] = part, _version(item)

    def _part(self, item: Object) -> Part | None:
        """Return the part of an object to retain: for an unreadable object, the part retained before."""
        name = key(item)
        with self._bad_objects.apart(f"{name} of {self.title}"):
            return self._convert(item)
        return self.objects.get(name)

    def _drop(self, name: str) -> None:
        for by_name in (self.objects, self.versions, self.arrived):
            by_name.pop(name, None)

    async def _run(self) -> None:
        version, least, pause, failures, expired = "", self._least, FIRST_PAUSE, 0, False
        while True:
            try:
                version = version or await self._list(least)
                least, began = self._least, time.monotonic()
                watch = self._api.watch(self._path, version, self._opened, **self._query)
                async with contextlib.aclosing(watch) as events:
                    async for event in events:
                        version = self._take(event)
                        pause, failures, expired = FIRST_PAUSE, 0, False
                self._succeeded()
                pause, failures, expired = FIRST_PAUSE, 0, False
                await asyncio.sleep(max(0.0, began + _AT_LEAST - time.monotonic()))
                continue
            except ApiFailure as failure:
                failures += 1
                if failure.status == 410:
                    # the API server has dropped later events: list again, and not from its cache
                    version, least = "", ""
                    if not expired:
                        # only once in a row: a server that rejects every version as too old must not be flooded
                        expired = True
                        continue
                elif not failure.may_pass or failures >= TRIES_OF_A_WATCH:
                    # a list is expensive for an overloaded server, so until then the watch continues from its version
                    version = ""
                self._fail(f"{failure}{self._missing_right if failure.status in (401, 403) else ''}")
            except Exception as error:
                # on any error: the objects here must not become stale
                version = ""
                self._fail(f"unexpected answer from the API server ({type(error).__name__}: {error})")
            await asyncio.sleep(pause * random.uniform(0.5, 1))
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _list(self, least: str) -> str:
        """List all objects at that version or later; empty: the newest version. Return the list's version."""
        began, self.listing = time.monotonic(), True
        try:
            answer = await self._api.list(self._path, **self._query, **({"resourceVersion": least} if least else {}))
        finally:
            self.listing = False
        parts: dict[str, Part] = {}
        versions: dict[str, str] = {}
        for number, item in enumerate(answer.items()):
            part = self._part(item)
            if part is not None:
                parts[key(item)], versions[key(item)] = part, _version(item)
            if number % ITEMS_AT_ONCE == 0:
                await asyncio.sleep(0)
        # an unchanged object has not been written since it arrived
        self.arrived = {name: at for name, at in self.arrived.items() if versions.get(name) == self.versions[name]}
        self.objects, self.versions, self.version, self.listed_at = parts, versions, answer.version, began
        self._succeeded()
        self._on_change()
        return self.version

    def _opened(self) -> None:
        # the first events may predate this watch
        self._missed_since, self._caught_up = self._heard, time.monotonic() + _CATCHING_UP
        self._succeeded()

    def _take(self, event: Object) -> str:
        """Apply an event. Return its version."""
        item, now = event["object"], time.monotonic()
        self.version, self._heard = _version(item), now
        if event["type"] == "BOOKMARK":
            return self.version
        if event["type"] == "DELETED":
            self._drop(key(item))
        else:
            self.enter(item)
            if key(item) in self.objects:
                catching_up = self._missed_since is not None and now < self._caught_up
                self.arrived[key(item)] = min(now, self._missed_since or now) if catching_up else now
        self._on_change()
        return self.version

    def _succeeded(self) -> None:
        self._heard, self.problem = time.monotonic(), ""
        self._answered.set()
        if self._failing:
            self._log.info("%s can be read again", self.title)
        self._failing = False

    def _fail(self, why: str) -> None:
        problem = f"{self.title} cannot be read: {why}"
        if problem != self.problem:
            self._log.warning("%s", problem)
        self.problem, self._failing = problem, True
        self._answered.set()


def _version(item: Object) -> str:
    version: str = item["metadata"]["resourceVersion"]
    return version
