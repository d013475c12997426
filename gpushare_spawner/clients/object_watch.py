"""The client of the cluster's API server, in a pod or outside of the cluster.

The objects of one kind, kept current by a list and a watch.

Objects of the API server that cannot be read: each is told once, and the others are read.

Reads the API server's answer to a list object by object.

Of a large cluster's pods only a small part is kept (`object_watch`). All of them at once, as objects of Python, would
take ten times the memory of that part, and what a process has taken once it hardly ever gives back.
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

from gpushare_spawner.clients.service_account import watch_lines
from gpushare_spawner.wording.amounts import http_status, reason

MOST_TOLD = 1000
"""Objects that cannot be read of which the log says so. Ours: a hub runs for months, and names of pods are many."""


class BadObjects:
    """Objects that cannot be read. One of them must not keep the others from being counted."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._told: set[str] = set()

    @contextmanager
    def apart(self, name: str) -> Iterator[None]:
        """Log an exception of the work for one object, the first time; the object is left as it was before."""
        try:
            yield
        except Exception:
            if name not in self._told and len(self._told) < MOST_TOLD:
                self._told.add(name)
                self._log.exception("%s cannot be read, so it counts as it was before", name)


_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


class ListAnswer:
    """A JSON object with ``metadata`` and ``items``, in any order."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.version = ""
        """The resourceVersion of the list, after the last item."""

    def items(self) -> Iterator[dict[str, Any]]:
        """Yield each item. Raises ValueError for what is no such object, and KeyError where its version is missing."""
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
        found = _SPACE.match(self._text, at)
        return found.end() if found is not None else at


Object = dict[str, Any]
"""As the API server sends it, or a part of that. Never changed here."""

WATCH_SECONDS = 60
"""The API server ends a watch after this time; the next one goes on where it ended."""
_BROKEN = (aiohttp.ClientError, TimeoutError, OSError)
"""Errors of the connection; the next watch can continue where this one ended."""
_SILENCE = 15.0
"""A watch that is silent for this long after its end is due has a dead connection."""
_LONGEST_PAUSE = 20.0
_AT_LEAST = 0.5
"""A watch that ends sooner (the API server stops, or a proxy cuts it) is not started again at once."""
_CATCHING_UP = 2.0
"""Seconds in which a new watch brings what happened before it began."""
ITEMS_AT_ONCE = 50
"""Objects of a list that are read without a break for the event loop: about 2 ms."""
LOST_AFTER = WATCH_SECONDS + _SILENCE + 2 * _LONGEST_PAUSE
"""Seconds without an answer of the API server after which its last answer is out of date."""


def key(item: Object) -> str:
    """An object's namespace and name, with a slash between them; of an object in no namespace the name alone."""
    namespace = item["metadata"].get("namespace")
    return f"{namespace}/{item['metadata']['name']}" if namespace else str(item["metadata"]["name"])


class Watched:
    """One list and then one watch after the other, until `close`; it never gives up.

    ``list_method`` is one of the client's ``list_…`` methods, bound to its namespace where it has one. ``where`` says
    for people what is read. ``on_change`` is called after each change that a watch brings. ``keep`` gives the part of
    an object that is kept; its name, namespace and resourceVersion must be in it. An object for which it raises stays
    as it was before, or is left out: one that somebody wrote wrongly must not hide the others.
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
        """``missing_right``: what gives the right to read them, as the end of a sentence about a refusal."""
        self._missing_right = missing_right
        self.what = what
        """For people: "pods"."""
        self.objects: dict[str, Object] = {}
        """By `key`."""
        self.arrived: dict[str, float] = {}
        """The earliest time (`time.monotonic`) at which the version in `objects` can have been written: mostly when a
        watch brought it. Missing: it came with a list, so its age is unknown."""
        self.problem = f"the {what} of {where} have not been read yet"
        """What is wrong now, for people; empty: nothing."""
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
        self._task: asyncio.Task[None] | None = None
        self._answered = asyncio.Event()
        """The first list has come, or has failed."""

    @property
    def known(self) -> bool:
        """Whether `objects` is what the API server has, or had a short time ago."""
        return self._heard is not None and time.monotonic() - self._heard < LOST_AFTER

    def start(self) -> None:
        """Begin to read, in the background."""
        self._task = asyncio.create_task(self._run(), name=f"watch {self.what}")

    async def loaded(self, patience: float) -> bool:
        """Wait for the first list, at most until the first one has failed; whether it came in ``patience`` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._answered.wait()
        return self._heard is not None

    async def close(self) -> None:
        """Read no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def replace(self, item: Object, version: str) -> bool:
        """Take over an object that was changed here, if it is still the one of that resourceVersion. Returns whether.

        The change that the API server made to that version is the next one, so the watch brings it, or newer ones.
        """
        known = self.objects.get(key(item))
        if known is None or _version(known) != version:
            return False
        self.objects[key(item)] = self._keep(item)
        return True

    async def _run(self) -> None:
        version, pause = "", 0.0
        # version 0: whatever the API server has in its cache, which costs it little; the watch brings the rest
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
                # what happened since is forgotten there: read everything again, and not from the cache that led here
                version, least = "", ""
                await asyncio.sleep(_AT_LEAST)
            except Exception as error:
                # whatever it is: what is shown here must not grow old because of it
                version = version if isinstance(error, _BROKEN) else ""
                self._fail(error)
                pause = min(_LONGEST_PAUSE, 2 * pause or 0.25)
                await asyncio.sleep(pause * random.uniform(0.5, 1))

    async def _list(self, least: str) -> str:
        """Everything anew, of that version or later; empty: as it is now. Returns the version that it is of."""
        at_least = {"resource_version": least} if least else {}
        answer = await self._ask(**at_least, _request_timeout=30)
        found = ListAnswer((await answer.read()).decode())
        # it keeps the bytes
        del answer
        listed: dict[str, Object | None] = {}
        for number, item in enumerate(found.items()):
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
        return found.version

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
            said = await answer.text()
            answer.close()
            raise ApiException(status=answer.status, reason=_message(said) or answer.reason)
        return answer

    def _take(self, event: Mapping[str, Any]) -> str:
        """The version after the event."""
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
        """Return the part of an object that is kept; None: it cannot be read, and was not there before."""
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
    """The API server no longer knows what happened since the version that was asked for."""


def _version(item: Object) -> str:
    version: str = item["metadata"]["resourceVersion"]
    return version


def _message(text: str) -> str:
    """What a Status object says."""
    try:
        return str(json.loads(text).get("message", ""))
    except (ValueError, AttributeError):
        return ""
