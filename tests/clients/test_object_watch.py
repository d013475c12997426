"""A watch of objects of which some cannot be read, without an API server."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gpushare_spawner.clients.object_watch import Object, Watched
from tests.spawner.running_hub import until


class Answer:
    """What the client's list methods return with `_preload_content=False`."""

    status = 200

    def __init__(self, whole: Any = None, lines: asyncio.Queue[bytes] | None = None) -> None:
        self._whole = whole
        self._lines = lines
        self.content = self

    async def read(self) -> bytes:
        return json.dumps(self._whole).encode()

    async def iter_any(self) -> AsyncIterator[bytes]:
        assert self._lines is not None
        while True:
            yield await self._lines.get()

    def close(self) -> None:
        pass


class Api:
    """Lists and watches queues."""

    def __init__(self, *items: Object) -> None:
        self.items = list(items)
        self.events: asyncio.Queue[bytes] = asyncio.Queue()
        self.lists = 0

    async def list_queues(self, watch: bool = False, **arguments: Any) -> Answer:
        if watch:
            return Answer(lines=self.events)
        self.lists += 1
        return Answer({"items": self.items, "metadata": {"resourceVersion": "9"}})

    def changes(self, kind: str, item: Object) -> None:
        self.events.put_nowait(json.dumps({"type": kind, "object": item}).encode() + b"\n")


def queue(name: str, quota: Any, version: str = "1") -> Object:
    return {"metadata": {"name": name, "resourceVersion": version}, "quota": quota}


def kept(item: Object) -> Object:
    return {"metadata": item["metadata"], "quota": float(item["quota"])}


async def test_an_object_that_cannot_be_read_does_not_hide_the_others(caplog: pytest.LogCaptureFixture) -> None:
    api = Api(queue("good", 1), queue("bad", "many"))
    watched = Watched("queues", api.list_queues, "the cluster", "", keep=kept, log=logging.getLogger("test"))
    watched.start()
    try:
        assert await watched.loaded(5.0)
        assert watched.known
        assert (watched.problem, list(watched.objects)) == ("", ["good"])
        # also while it is watched: what was read before stays
        api.changes("MODIFIED", queue("good", "none", "10"))
        api.changes("ADDED", queue("worse", [], "11"))
        api.changes("ADDED", queue("new", 3, "12"))
        await until(lambda: "new" in watched.objects)
        assert {name: item["quota"] for name, item in watched.objects.items()} == {"good": 1.0, "new": 3.0}
        api.changes("MODIFIED", queue("bad", 2, "13"))
        await until(lambda: "bad" in watched.objects)
        api.changes("DELETED", queue("good", "none", "14"))
        await until(lambda: "good" not in watched.objects)
        assert api.lists == 1
    finally:
        await watched.close()
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        f"{name} of the queues of the cluster cannot be read, so it counts as it was before"
        for name in ("bad", "good", "worse")
    ]
