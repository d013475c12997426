"""The publisher of a slice beside others that change it: no write is lost, and none is made without end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import cast

import pytest

from gpushare_spawner.agent.kubernetes.claims import slices
from gpushare_spawner.agent.kubernetes.claims.slices import OfferedGpu, PublishedSlice, resource_slice
from gpushare_spawner.clients.api import ApiFailure, ClusterApi, Json, ListAnswer
from tests.agent.peers import FIRST

OWN, OTHERS = 100, 50


class Contested:
    """An API server with one slice, which another program changes or deletes right after each write.

    The watch tells of that before the write is answered.
    """

    def __init__(self, undo: str, times: int) -> None:
        self.writes: list[str] = []
        self.stored: Json | None = self._made(OTHERS, 1)
        self._undo = undo
        self._left = times
        self._version = 1
        self._events: asyncio.Queue[Json] = asyncio.Queue()

    def _made(self, units: int, version: int) -> Json:
        item = resource_slice("node-a", [OfferedGpu(FIRST, units)], 1, 1, taints=True)
        item["metadata"]["resourceVersion"] = str(version)
        return item

    async def list(self, path: str, **query: str) -> ListAnswer:
        items = [self.stored] if self.stored is not None else []
        return ListAnswer(json.dumps({"items": items, "metadata": {"resourceVersion": str(self._version)}}))

    async def watch(self, path: str, version: str, opened: Callable[[], None], **query: str) -> AsyncIterator[Json]:
        while True:
            yield await self._events.get()

    async def create(self, path: str, item: Json, **query: str) -> Json:
        return item if query else await self._write("create", item)

    async def replace(self, path: str, item: Json) -> Json:
        if self.stored is None:
            raise ApiFailure(404, "it is not there")
        return await self._write("replace", item)

    async def _write(self, how: str, item: Json) -> Json:
        self.writes.append(how)
        self._version += 1
        written = self.stored = {**item, "metadata": {**item["metadata"], "resourceVersion": str(self._version)}}
        if self._left > 0:
            self._left -= 1
            self._version += 1
            theirs = self._made(OTHERS, self._version)
            self.stored = theirs if self._undo == "MODIFIED" else None
            await self._events.put({"type": self._undo, "object": theirs})
            await asyncio.sleep(0.01)
        return written


def published(api: Contested) -> PublishedSlice:
    return PublishedSlice(cast(ClusterApi, api), "node-a", lambda: [OfferedGpu(FIRST, OWN)], 1, taints=True)


@pytest.mark.parametrize("undo", ["MODIFIED", "DELETED"])
async def test_change_that_the_watch_tells_before_the_write_is_answered_is_not_lost(undo: str) -> None:
    api = Contested(undo, times=1)
    publisher = published(api)
    publisher.start()
    try:
        async with asyncio.timeout(5):
            while len(api.writes) < 2:
                await asyncio.sleep(0.01)
        assert api.writes == ["replace", "replace" if undo == "MODIFIED" else "create"]
        assert api.stored is not None
        assert api.stored["spec"]["devices"][0]["capacity"]["units"]["value"] == str(OWN)
    finally:
        await publisher.close()


async def test_two_agents_that_undo_each_other_do_not_write_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "LONGEST_PAUSE", 60.0)
    api = Contested("MODIFIED", times=10_000)
    publisher = published(api)
    publisher.start()
    try:
        await asyncio.sleep(1.0)
        # after 5 writes 0.4 s, then 0.8 s
        assert slices.IN_A_ROW < len(api.writes) <= slices.IN_A_ROW + 3
    finally:
        await publisher.close()
