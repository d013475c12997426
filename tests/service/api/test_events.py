"""Server-sent events: what a page is told, and when."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from gpushare_spawner.service.api import snapshots as module
from gpushare_spawner.service.api.snapshots import PARTS, Events, ServiceSnapshots, TooManyStreams
from gpushare_spawner.service.hub.client import HubServer
from tests.service.api.clients import ANN, As, Client
from tests.service.api.conftest import Machine
from tests.service.dashboards import NOW, afternoon, session

SOON = 0.01


def events(machine: Machine, heartbeat: float = 5.0) -> Events:
    return Events(ServiceSnapshots(machine.sources(), max_age=0), every=SOON, heartbeat=heartbeat)


async def next_of(stream: AsyncGenerator[str]) -> Any:
    async with asyncio.timeout(2):
        text = await anext(stream)
    name, number, data = text.strip().split("\n")
    said = json.loads(data.removeprefix("data: "))
    assert name == "event: changed"
    assert number == f"id: {said['version']}"
    return said


async def test_the_first_event_names_everything_and_later_ones_what_has_changed(machine: Machine) -> None:
    stream = events(machine).stream("ann")
    first = await next_of(stream)
    assert tuple(first["parts"]) == PARTS
    machine.pending = (HubServer("gus", "", ready=False, pending="spawn", started=NOW, profile="half"),)
    second = await next_of(stream)
    assert second["parts"] == ["queue"]
    assert second["version"] > first["version"] > NOW
    machine.agent.now = afternoon(session("zoe", gpus=("GPU-1",)))
    assert (await next_of(stream))["parts"] == ["sessions", "nodes", "quotas"]
    machine.quotas = None
    assert (await next_of(stream))["parts"] == ["sessions", "quotas"]


async def test_a_new_report_that_says_the_same_is_no_change(machine: Machine) -> None:
    snapshots = ServiceSnapshots(machine.sources(), max_age=0)
    first = await snapshots.current()
    report = afternoon()
    hotter = tuple(gpu.model_copy(update={"temperature_celsius": 70.0, "power_watts": 300.0}) for gpu in report.gpus)
    machine.agent.now = report.model_copy(update={"published_at": NOW + 30, "gpus": hotter})
    later = await snapshots.current()
    assert later.version == first.version
    assert later.reports[0].gpus[0].power_watts == 300


async def test_one_snapshot_serves_all_clients_for_a_second(machine: Machine) -> None:
    snapshots = ServiceSnapshots(machine.sources())
    first = await snapshots.current()
    machine.agent.now = afternoon(session("zoe"))
    assert await snapshots.current() is first
    snapshots.outdated()
    assert len((await snapshots.current()).decisions) == len(first.decisions) + 1


async def test_a_silent_stream_has_comments(machine: Machine) -> None:
    stream = events(machine, heartbeat=SOON).stream("ann")
    await next_of(stream)
    assert (await anext(stream)).startswith(": ")


async def test_nothing_is_asked_when_nobody_listens(machine: Machine) -> None:
    looks = events(machine)
    first, second = looks.stream("ann"), looks.stream("bob")
    await next_of(first)
    await next_of(second)
    task = looks._poller
    await first.aclose()
    assert task is looks._poller is not None
    await second.aclose()
    await asyncio.sleep(0)
    assert looks._poller is None
    assert task.cancelled() or task.done() or task.cancelling()
    assert not looks._streams


async def test_streams_that_begin_together_are_served_by_one_look(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, begun = events(machine), 0
    look = looks._poll

    async def counted() -> None:
        nonlocal begun
        begun += 1
        await look()

    monkeypatch.setattr(looks, "_poll", counted)
    streams = [looks.stream(name) for name in ("ann", "bob", "cat")]
    await asyncio.gather(*map(next_of, streams))
    await asyncio.sleep(0)
    assert begun == 1
    for stream in streams:
        await stream.aclose()


async def test_a_user_cannot_open_streams_without_end(machine: Machine) -> None:
    looks = events(machine)
    streams = [looks.stream("ann") for _ in range(module.MOST_STREAMS_OF_USER)]
    for stream in streams:
        await next_of(stream)
    with pytest.raises(TooManyStreams, match="close some of them"):
        await anext(looks.stream("ann"))
    await next_of(looks.stream("bob"))
    await streams[0].aclose()
    await next_of(looks.stream("ann"))


async def test_a_look_that_fails_ends_no_stream(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "AFTER_FAILURE", SOON)
    looks = events(machine)
    stream = looks.stream("ann")
    await next_of(stream)
    machine.fails = True
    await asyncio.sleep(10 * SOON)
    assert "Cannot check for changes" in caplog.text
    machine.fails = False
    machine.agent.now = afternoon().model_copy(update={"sessions": ()})
    assert "sessions" in (await next_of(stream))["parts"]


async def test_services_have_streams_of_their_own(api: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    async def once(self: Events, of: str) -> AsyncGenerator[str]:
        opened.append(of)
        yield ": one\n\n"

    monkeypatch.setattr(Events, "stream", once)
    for caller in (ANN, As("robot", token=True, service=True), As("gauge", token=True, service=True)):
        assert (await api.raw("GET", "events", caller)).code == 200
    assert opened == ["ann", "service robot", "service gauge"]


async def test_a_browser_gets_the_events_and_its_end_frees_the_stream(
    api: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Events] = []
    stream = Events.stream

    def noting(self: Events, of: str) -> AsyncGenerator[str]:
        opened.append(self)
        return stream(self, of)

    monkeypatch.setattr(Events, "stream", noting)
    host, port = api.url.removeprefix("http://").partition("/")[0].split(":")
    api.login.caller = ANN
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET /{api.url.partition('/')[2].partition('/')[2].partition('/')[2]}events HTTP/1.1\r\n".encode())
    writer.write(f"Host: {host}\r\n\r\n".encode())
    async with asyncio.timeout(5):
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        body = await reader.readuntil(b"\n\n")
        assert "200" in head.splitlines()[0]
        assert "Content-Type: text/event-stream" in head
        assert "X-Accel-Buffering: no" in head
        assert b"event: changed" in body
        assert opened[0]._streams == {"ann": 1}
        writer.close()
        while opened[0]._streams:
            await asyncio.sleep(SOON)
