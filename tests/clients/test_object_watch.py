"""A watch of objects of which some cannot be read, without an API server."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest

from gpushare_spawner.clients.api import ClusterApi, ListAnswer
from gpushare_spawner.clients.object_watch import Object, Watched
from tests.spawner.running_hub import until


class Api:
    """Lists and watches queues."""

    def __init__(self, *items: Object) -> None:
        self.items = list(items)
        self.events: asyncio.Queue[Object] = asyncio.Queue()
        self.lists = 0

    async def list(self, path: str, **query: str) -> ListAnswer:
        self.lists += 1
        return ListAnswer(json.dumps({"items": self.items, "metadata": {"resourceVersion": "9"}}))

    async def watch(self, path: str, version: str, opened: Callable[[], None], **query: str) -> AsyncIterator[Object]:
        opened()
        while True:
            yield await self.events.get()

    def changes(self, kind: str, item: Object) -> None:
        self.events.put_nowait({"type": kind, "object": item})


def queue(name: str, quota: Any, version: str = "1") -> Object:
    return {"metadata": {"name": name, "resourceVersion": version}, "quota": quota}


def kept(item: Object) -> Object:
    return {"metadata": item["metadata"], "quota": float(item["quota"])}


async def test_an_object_that_cannot_be_read_does_not_hide_the_others(caplog: pytest.LogCaptureFixture) -> None:
    api = Api(queue("good", 1), queue("bad", "many"))
    watched = Watched(
        cast(ClusterApi, api), "/queues", "the queues of the cluster", kept, log=logging.getLogger("test")
    )
    watched.start()
    try:
        assert await watched.loaded(5.0)
        assert watched.current
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
        f"{name} of the queues of the cluster cannot be read, so its earlier state still counts"
        for name in ("bad", "good", "worse")
    ]
