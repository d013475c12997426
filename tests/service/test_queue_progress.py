"""What the hub tells the users of queued spawns, as the service follows it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_spawner.service.hub import watch
from gpushare_spawner.service.hub.client import Hub, HubServer
from gpushare_spawner.service.hub.watch import EventLines, QueueOfHub
from tests.service.fake_hub import FakeHub, Progress

ANN, TWO = HubServer("ann", ""), HubServer("bob", "two words")
FIRST = {"message": "First in queue.", "queue_position": 1, "estimated_minutes": 10, "waits_for": "All is full."}


@pytest.fixture
async def queue(hub: Hub) -> AsyncIterator[QueueOfHub]:
    following = QueueOfHub(hub, patience=5)
    yield following
    following.close()


async def position_of(queue: QueueOfHub, server: HubServer, wanted: int | None) -> None:
    async with asyncio.timeout(5):
        while True:
            told = (await queue.progress([server])).get((server.user, server.name))
            if (told.queue_position if told is not None else None) == wanted:
                return
            await asyncio.sleep(0.01)


async def test_the_first_question_has_the_answer(queue: QueueOfHub, hub_server: FakeHub) -> None:
    hub_server.progress = {
        "/users/ann/server": Progress({**FIRST, "queue_position": 3, "estimated_minutes": None}, FIRST),
        "/users/bob/servers/two words": Progress(
            {"message": "x", "queue_position": 2, "cancelled_at": 9.5, "nodes": ["n1"]}
        ),
    }
    told = await queue.progress([ANN, TWO])
    ann, bob = told["ann", ""], told["bob", "two words"]
    assert (ann.queue_position, ann.estimated_minutes, ann.waits_for) == (1, 10, "All is full.")
    assert (bob.queue_position, bob.estimated_minutes, bob.cancelled_at) == (2, None, 9.5)
    assert (ann.nodes, bob.nodes) == (None, ("n1",))


async def test_a_change_is_followed_on_one_connection(queue: QueueOfHub, hub_server: FakeHub) -> None:
    progress = hub_server.progress["/users/ann/server"] = Progress({**FIRST, "queue_position": 2})
    await position_of(queue, ANN, 2)
    progress.tell(FIRST)
    await position_of(queue, ANN, 1)
    progress.tell({"message": "Placed on GPU 0.", "progress": 30})
    await position_of(queue, ANN, None)
    assert progress.clients == 1


async def test_a_spawn_that_waits_again_is_followed_again(
    queue: QueueOfHub, hub_server: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "RETRY_PAUSE", 0.0)
    progress = hub_server.progress["/users/ann/server"] = Progress(FIRST)
    await position_of(queue, ANN, 1)
    progress.end()
    await position_of(queue, ANN, None)
    hub_server.progress["/users/ann/server"] = Progress({**FIRST, "queue_position": 4})
    await position_of(queue, ANN, 4)


async def test_a_hub_that_says_nothing_delays_the_page_once(hub: Hub, hub_server: FakeHub) -> None:
    hub_server.progress["/users/ann/server"] = progress = Progress()
    queue = QueueOfHub(hub, patience=0.05)
    assert await queue.progress([ANN]) == {}
    async with asyncio.timeout(0.04):
        assert await queue.progress([ANN]) == {}
    progress.tell(FIRST)
    await position_of(queue, ANN, 1)
    queue.close()


async def test_what_was_heard_too_long_ago_is_not_said(
    queue: QueueOfHub, hub_server: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_server.progress["/users/ann/server"] = Progress(FIRST)
    await position_of(queue, ANN, 1)
    monkeypatch.setattr(watch, "SILENT", -1.0)
    assert await queue.progress([ANN]) == {}


@pytest.mark.parametrize("fault", [403, 500, b"data: {nonsense\n\n", b"data: [1]\n\n", None])
async def test_a_hub_that_fails_leaves_the_position_unknown(queue: QueueOfHub, hub_server: FakeHub, fault: Any) -> None:
    hub_server.faults = [fault] if fault is not None else []
    assert await queue.progress([ANN]) == {}


@pytest.mark.parametrize(
    "event", [{"queue_position": 0}, {"queue_position": "x"}, {"queue_position": 1, "cancelled_at": 1e300}]
)
async def test_positions_that_cannot_be_are_not_shown(
    queue: QueueOfHub, hub_server: FakeHub, event: dict[str, Any]
) -> None:
    hub_server.progress["/users/ann/server"] = progress = Progress(event)
    progress.ended = True
    assert await queue.progress([ANN]) == {}


@given(st.lists(st.dictionaries(st.text(), st.text(), max_size=3)), st.lists(st.integers(1, 40), min_size=1))
def test_events_come_whole_from_parts_of_any_size(events: list[dict[str, str]], sizes: list[int]) -> None:
    stream = b"\n\n" + b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in events)
    lines, found, at, turn = EventLines(), [], 0, 0
    while at < len(stream):
        size = sizes[turn % len(sizes)]
        found += lines.take(stream[at : at + size])
        at, turn = at + size, turn + 1
    assert found == events


def test_an_endless_event_takes_no_memory() -> None:
    lines = EventLines()
    for _ in range(64):
        assert lines.take(b"x" * 4096) == []
    assert lines.take(b'\ndata: {"a": 1}\n') == [{"a": 1}]
