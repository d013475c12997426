"""Objects of one kind from the API server, kept current by a list and a watch.

An unreadable object is logged once and does not affect the others. A list is parsed object by object, and only a part
of each object is kept: all pods of a large cluster at once, as Python objects, would take ten times the memory of these
parts, and a process rarely gives memory back. The connections: cluster.py and service_account.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import aiohttp
from kubernetes_asyncio.client import ApiException
from kubernetes_asyncio.config import ConfigException

from gpushare_spawner.background import Background
from gpushare_spawner.clients.service_account import watch_lines
from gpushare_spawner.wording.amounts import http_status, reason

MOST_LOGGED = 1000
"""Maximum of logged unreadable objects. Our choice: a hub runs for months and sees many pod names."""


class BadObjects:
    """Unreadable objects, each logged once. They must not affect other objects."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._logged: set[str] = set()

    @contextmanager
    def apart(self, name: str) -> Iterator[None]:
        """Log the first exception of the work for an object, which keeps its earlier state."""
        try:
            yield
        except Exception:
            if name not in self._logged and len(self._logged) < MOST_LOGGED:
                self._logged.add(name)
                self._log.exception("%s cannot be read, so it counts as it was before", name)


_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


class ListAnswer:
    """JSON object with ``metadata`` and ``items``, in any order."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.version = ""
        """resourceVersion of the list, set after the last item."""

    def items(self) -> Iterator[dict[str, Any]]:
        """Yield each item. Raises ValueError for an invalid list, and KeyError without a version."""
        others: dict[str, Any] = {}
        at = self._after(0, "{")
        while self._next(at) != "}":
            name, at = self._value(at)
            at = self._after(at, ":")
            if name != "items" or self._next(at) != "[":
                others[name], at = self._value(at)
            else:
                at = self._after(at, "[")
                while self._next(at) != "]":
                    item, at = self._value(at)
                    yield item
                    at = self._after(at, ",") if self._next(at) == "," else at
                at = self._after(at, "]")
            at = self._after(at, ",") if self._next(at) == "," else at
        self.version = str(others["metadata"]["resourceVersion"])

    def _value(self, at: int) -> tuple[Any, int]:
        return _DECODER.raw_decode(self._text, self._skip(at))

    def _next(self, at: int) -> str:
        at = self._skip(at)
        return self._text[at : at + 1]

    def _after(self, at: int, mark: str) -> int:
        at = self._skip(at)
        if not self._text.startswith(mark, at):
            raise ValueError(f"no list of Kubernetes: {mark} expected at character {at}")
        return at + len(mark)

    def _skip(self, at: int) -> int:
        match = _SPACE.match(self._text, at)
        return match.end() if match is not None else at


Object = dict[str, Any]
"""Object as the API server sends it, or a part of it. Never changed here."""

WATCH_SECONDS = 60
"""Seconds after which the API server ends a watch. The next watch continues from there."""
_BROKEN = (aiohttp.ClientError, TimeoutError, OSError)
"""Errors of the connection, after which the next watch can continue."""
_SILENCE = 15.0
"""Seconds of silence after the end of a watch is due that prove a dead connection."""
_LONGEST_PAUSE = 20.0
_AT_LEAST = 0.5
"""Seconds. After a shorter watch (the API server stops, or a proxy cuts it) the next starts with a delay."""
_CATCHING_UP = 2.0
"""Seconds in which a new watch brings earlier events."""
ITEMS_AT_ONCE = 50
"""Objects of a list that are parsed without a break for the event loop: about 2 ms."""
LOST_AFTER = WATCH_SECONDS + _SILENCE + 2 * _LONGEST_PAUSE
"""Seconds without an answer of the API server after which its last answer is out of date."""


def key(item: Object) -> str:
    """Return an object's namespace and name with a slash, or the name alone without a namespace."""
    namespace = item["metadata"].get("namespace")
    return f"{namespace}/{item['metadata']['name']}" if namespace else str(item["metadata"]["name"])


class Watched(Background):
    """Objects read by one list and a series of watches until `close`, with unlimited retries.

    ``list_method`` is one of the client's ``list_…`` methods, bound to its namespace if it has one. ``where`` names for
    people the place of the objects. ``on_change`` is called after each change from a watch. ``keep`` returns the part
    of an object to keep, with its name, namespace and resourceVersion. If it raises, the object keeps its earlier state
    or is left out: an invalid object must not hide the others.
    """

    def __init__(
        self,
        what: str,
        list_method: Callable[..., Awaitable[Any]],
        where: str,
        selector: str,
        on_change: Callable[[], None] = lambda: None,
        keep: Callable[[Object], Object] = lambda item: item,
        log: logging.Logger | None = None,
        missing_right: str = "",
    ) -> None:
        """Create the watch. ``missing_right``: source of the right to read, as the end of a refusal's sentence."""
        self._missing_right = missing_right
        self.what = what
        """Name of the kind for people: "pods"."""
        self.objects: dict[str, Object] = {}
        """Objects by `key`."""
        self.arrived: dict[str, float] = {}
        """Earliest possible time (`time.monotonic`) of the write of the version in `objects`: mostly its arrival by a
        watch. Missing: it came with a list, so its age is unknown."""
        self.problem = f"the {what} of {where} have not been read yet"
        """Present problem, for people; empty: none."""
        self._list_method = list_method
        self._where = where
        self._selector = selector
        self._on_change = on_change
        self._keep = keep
        self._log = log or logging.getLogger("gpushare.cluster")
        self._bad_objects = BadObjects(self._log)
        self._heard: float | None = None
        self._missed_since: float | None = None
        self._caught_up = 0.0
        self._answered = asyncio.Event()
        """Set after the first list has come or failed."""

    @property
    def known(self) -> bool:
        """Whether `objects` is current, or was a short time ago."""
        return self._heard is not None and time.monotonic() - self._heard < LOST_AFTER

    async def loaded(self, patience: float) -> bool:
        """Wait for the success or failure of the first list. Return whether it came within ``patience`` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._answered.wait()
        return self._heard is not None

    def replace(self, item: Object, version: str) -> bool:
        """Replace an object after a local change, if it still has that resourceVersion. Return whether it had.

        The API server's change of that version is the next, so the watch brings it or a newer version.
        """
        current = self.objects.get(key(item))
        if current is None or _version(current) != version:
            return False
        self.objects[key(item)] = self._keep(item)
        return True

    async def _run(self) -> None:
        version, pause = "", 0.0
        # version 0: the API server's cache, which is cheap to read; the watch brings newer versions
        least = "0"
        while True:
            try:
                version = version or await self._list(least)
                pause, began = 0.0, time.monotonic()
                async with contextlib.aclosing(self._watch(version)) as events:
                    async for event in events:
                        version = self._take(event)
                        least = "0"
                if time.monotonic() - began < _AT_LEAST:
                    await asyncio.sleep(_AT_LEAST)
            except _Expired:
                # the API server has dropped later events: list again, and not from its cache
                version, least = "", ""
                await asyncio.sleep(_AT_LEAST)
            except Exception as error:
                # for any error: the objects here must not become stale
                version = version if isinstance(error, _BROKEN) else ""
                self._fail(error)
                pause = min(_LONGEST_PAUSE, 2 * pause or 0.25)
                await asyncio.sleep(pause * random.uniform(0.5, 1))

    async def _list(self, least: str) -> str:
        """List all objects at that version or later; empty: at the newest. Return the version of the list."""
        at_least = {"resource_version": least} if least else {}
        answer = await self._ask(**at_least, _request_timeout=30)
        parsed = ListAnswer((await answer.read()).decode())
        # the answer keeps the bytes
        del answer
        listed: dict[str, Object | None] = {}
        for number, item in enumerate(parsed.items()):
            listed[key(item)] = self._part(item)
            if number % ITEMS_AT_ONCE == 0:
                await asyncio.sleep(0)
        self._heard, self.problem = time.monotonic(), ""
        before = self.objects
        self.objects = {name: part for name, part in listed.items() if part is not None}
        self.arrived = {
            name: at
            for name, at in self.arrived.items()
            if name in self.objects and _version(self.objects[name]) == _version(before[name])
        }
        self._answered.set()
        self._on_change()
        return parsed.version

    async def _watch(self, version: str) -> AsyncGenerator[Mapping[str, Any], None]:
        answer = await self._ask(
            watch=True,
            resource_version=version,
            allow_watch_bookmarks=True,
            timeout_seconds=WATCH_SECONDS,
            _request_timeout=(10, WATCH_SECONDS + _SILENCE),
        )
        try:
            # the first events can be from before this watch began
            self._missed_since, self._caught_up = self._heard, time.monotonic() + _CATCHING_UP
            self._heard, self.problem = time.monotonic(), ""
            async for line in watch_lines(answer.content):
                self._heard = time.monotonic()
                yield json.loads(line)
            self._heard = time.monotonic()
        finally:
            answer.close()

    async def _ask(self, **arguments: Any) -> aiohttp.ClientResponse:
        answer: aiohttp.ClientResponse = await self._list_method(
            label_selector=self._selector, _preload_content=False, **arguments
        )
        if answer.status == 410:
            answer.close()
            raise _Expired
        if answer.status != 200:
            text = await answer.text()
            answer.close()
            raise ApiException(status=answer.status, reason=_message(text) or answer.reason)
        return answer

    def _take(self, event: Mapping[str, Any]) -> str:
        """Apply an event. Return its version."""
        kind, item = event["type"], event["object"]
        if kind == "ERROR":
            if item.get("code") == 410:
                raise _Expired
            raise ApiException(status=item.get("code"), reason=item.get("message"))
        version = _version(item)
        if kind != "BOOKMARK":
            name = key(item)
            if kind == "DELETED":
                self.objects.pop(name, None)
                self.arrived.pop(name, None)
            else:
                part = self._part(item)
                if part is None:
                    return version
                self.objects[name] = part
                now = time.monotonic()
                catching_up = self._missed_since is not None and now < self._caught_up
                self.arrived[name] = min(now, self._missed_since or now) if catching_up else now
            self._on_change()
        return version

    def _part(self, item: Object) -> Object | None:
        """Return the part of an object to keep; None if it is unreadable and new."""
        name = key(item)
        with self._bad_objects.apart(f"{name} of the {self.what} of {self._where}"):
            return self._keep(item)
        return self.objects.get(name)

    def _fail(self, error: Exception) -> None:
        if isinstance(error, ApiException) and error.status in (401, 403):
            why = f"the API server refuses ({http_status(error.status, error.reason)}){self._missing_right}"
        elif isinstance(error, ApiException):
            why = f"the API server answers {http_status(error.status, error.reason)}"
        elif isinstance(error, _BROKEN):
            why = f"the API server cannot be reached ({reason(error)})"
        elif isinstance(error, ConfigException):
            why = f"no token ({error})"
        else:
            why = f"unexpected answer of the API server ({type(error).__name__}: {error})"
        problem = f"the {self.what} of {self._where} cannot be read: {why}"
        if problem != self.problem:
            self._log.warning("%s", problem)
        self.problem = problem
        self._answered.set()


class _Expired(Exception):
    """Expired resourceVersion: the API server no longer has the events since then."""


def _version(item: Object) -> str:
    version: str = item["metadata"]["resourceVersion"]
    return version


def _message(text: str) -> str:
    """Return the message of a Status object."""
    try:
        return str(json.loads(text).get("message", ""))
    except (ValueError, AttributeError):
        return ""
