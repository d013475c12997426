"""The objects, their versions and their history: what etcd and the watch cache are to an API server."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .errors import expired
from .kinds import Kind

Key = tuple[str, str]
"""(namespace or "", name)"""


class Stored:
    """One version of an object. Never changed: a write makes another one."""

    __slots__ = ("_raw", "item")

    def __init__(self, item: dict[str, Any]) -> None:
        self.item = item
        self._raw: bytes | None = None

    @property
    def raw(self) -> bytes:
        """Its JSON, made once however many lists and watches send it."""
        if self._raw is None:
            self._raw = json.dumps(self.item, separators=(",", ":")).encode()
        return self._raw

    @property
    def key(self) -> Key:
        metadata = self.item["metadata"]
        return metadata.get("namespace", ""), metadata["name"]

    def copy(self) -> dict[str, Any]:
        """For changing."""
        data: dict[str, Any] = json.loads(self.raw)
        return data


@dataclass(frozen=True)
class Event:
    """A change: before and after; `after` of a deletion is the last state with the deletion's version."""

    version: int
    before: Stored | None
    after: Stored
    deleted: bool


class Store:
    """All objects. Every write gets the next version, one sequence for all kinds."""

    def __init__(self, history: int = 20_000) -> None:
        self.version = 1
        self._history_limit = history
        self._items: dict[Kind, dict[Key, Stored]] = {}
        self._history: dict[Kind, deque[Event]] = {}
        self._forgotten: dict[Kind, int] = {}
        self._watches: dict[Kind, set[asyncio.Queue[Event | None]]] = {}
        self._listeners: list[Callable[[Kind, Event], None]] = []
        self._owned: dict[str, set[tuple[Kind, Key]]] = {}

    def items(self, kind: Kind, namespace: str = "") -> Iterator[Stored]:
        """In the order of their names; of all namespaces when none is given."""
        found = self._items.get(kind, {})
        for key in sorted(found):
            if not namespace or key[0] == namespace:
                yield found[key]

    def get(self, kind: Kind, key: Key) -> Stored | None:
        return self._items.get(kind, {}).get(key)

    def put(self, kind: Kind, item: dict[str, Any]) -> Stored:
        """Write an object, which gets the next version."""
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        stored = Stored(item)
        before = self._items.setdefault(kind, {}).get(stored.key)
        self._items[kind][stored.key] = stored
        for owner in item["metadata"].get("ownerReferences") or []:
            self._owned.setdefault(owner["uid"], set()).add((kind, stored.key))
        self._happened(kind, Event(self.version, before, stored, deleted=False))
        return stored

    def remove(self, kind: Kind, key: Key) -> Stored:
        before = self._items[kind].pop(key)
        self.version += 1
        last = before.copy()
        last["metadata"]["resourceVersion"] = str(self.version)
        stored = Stored(last)
        self._happened(kind, Event(self.version, before, stored, deleted=True))
        return stored

    def owned_by(self, uid: str) -> set[tuple[Kind, Key]]:
        """What names an owner that has just gone. Asked once."""
        return self._owned.pop(uid, set())

    def on_change(self, listener: Callable[[Kind, Event], None]) -> None:
        """Call `listener` in the same turn of the event loop as every write."""
        self._listeners.append(listener)

    def since(self, kind: Kind, version: int) -> list[Event]:
        """What has happened after a version. Raises ApiError 410 when that is no longer known."""
        oldest = self._forgotten.get(kind, 0)
        if version < oldest:
            raise expired(version, oldest)
        history = self._history.get(kind, deque())
        recent = []
        for event in reversed(history):
            if event.version <= version:
                break
            recent.append(event)
        return recent[::-1]

    def as_of(self, kind: Kind, version: int) -> list[Stored]:
        """The objects as they were at a version that is still known, in the order of their names."""
        state = dict(self._items.get(kind, {}))
        for event in reversed(self.since(kind, version)):
            if event.before is None:
                state.pop(event.after.key, None)
            else:
                state[event.before.key] = event.before
        return [state[key] for key in sorted(state)]

    def forget_history(self) -> None:
        """Watches can no longer start at an earlier version: they get 410."""
        for kind in list(self._history):
            self._history[kind].clear()
        self._forgotten = dict.fromkeys(set(self._items) | set(self._history), self.version)

    def watch(self, kind: Kind) -> asyncio.Queue[Event | None]:
        """A queue of the changes from now on; None ends the watch."""
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        self._watches.setdefault(kind, set()).add(queue)
        return queue

    def unwatch(self, kind: Kind, queue: asyncio.Queue[Event | None]) -> None:
        self._watches.get(kind, set()).discard(queue)

    def cut_watches(self) -> int:
        """End every watch; how many there were."""
        queues = [queue for queues in self._watches.values() for queue in queues]
        for queue in queues:
            queue.put_nowait(None)
        return len(queues)

    def _happened(self, kind: Kind, event: Event) -> None:
        history = self._history.setdefault(kind, deque())
        history.append(event)
        if len(history) > self._history_limit:
            self._forgotten[kind] = history.popleft().version
        for queue in self._watches.get(kind, ()):
            queue.put_nowait(event)
        for listener in self._listeners:
            listener(kind, event)
