"""A spawn that is cancelled, in a real hub: what its pages and its progress say, and what the next spawn finds."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import pytest
from tornado.httpclient import AsyncHTTPClient, HTTPRequest

from gpushare_spawner.model.controls import NOTE_OPTION, SpawnNote
from gpushare_spawner.service.actions import restart
from gpushare_spawner.service.actions.context import ActionContext, Actor
from gpushare_spawner.service.hub.client import Hub
from gpushare_spawner.spawner.attempt import SpawnPhase
from tests.spawner.fake_agent import FakeAgent
from tests.spawner.running_hub import TOKEN, Browser, RunningHub, until

ROOT = Actor("root", is_admin=True)


class Waiting:
    """A spawn of ada that waits for a GPU, its page's event stream, and the service's actions on it."""

    def __init__(self, hub: RunningHub) -> None:
        self.hub = hub
        self.client = Hub(f"{hub.url}/api", TOKEN)
        self.actions = ActionContext((), self.client, dict)
        self.events: list[dict[str, Any]] = []
        self.browser = Browser(hub)

    def follow(self) -> asyncio.Future[Any]:
        """Read the progress as the page does, until the hub ends the stream."""

        def take(part: bytes) -> None:
            lines = [line.removeprefix("data: ") for line in part.decode().splitlines() if line.startswith("data: ")]
            self.events += [json.loads(line) for line in lines]

        return asyncio.ensure_future(
            AsyncHTTPClient(force_instance=True).fetch(
                HTTPRequest(
                    f"{self.hub.url}/api/users/ada/server/progress",
                    headers={"Authorization": f"token {TOKEN}"},
                    streaming_callback=take,
                    request_timeout=30,
                )
            )
        )

    async def page(self, path: str = "/hub/spawn-pending/ada") -> tuple[int, str]:
        response = await self.browser.open(path)
        return response.code, response.body.decode()


@pytest.fixture
async def waiting(make_hub: Any, agent: FakeAgent) -> Any:
    hub: RunningHub = await make_hub(
        lambda config: config.JupyterHub.update({"tornado_settings": {"slow_spawn_timeout": 0}})
    )
    for gpu in (0, 1):
        agent.occupy(f"there-{gpu}", 100, gpu)
    await hub.start_server("ada", {"profile": "half-gpu"})
    await until(lambda: len(hub.reservations.queue) == 1)
    found = Waiting(hub)
    await found.browser.log_in("ada")
    yield found
    found.client.close()


async def test_no_page_calls_the_server_of_a_cancelled_spawn_ready(waiting: Waiting) -> None:
    hub, followed = waiting.hub, waiting.follow()
    await until(lambda: waiting.events)
    spawner = hub.spawner("ada")
    stop = asyncio.ensure_future(hub.stop_server("ada"))
    await until(lambda: spawner._attempt.phase is SpawnPhase.ENDED)
    # the second in which the hub has cancelled its task, and has not stopped the server yet
    while not stop.done():
        assert not spawner.ready
        response = await waiting.browser.open("/hub/user/ada/lab")
        assert "/user/ada" not in response.headers.get("Location", "").removeprefix("/hub"), "leads to no server"
        assert b"Redirect loop" not in response.body
        await asyncio.sleep(0.1)
    await followed
    assert not any(event.get("ready") for event in waiting.events)
    assert waiting.events[-1] == {"progress": 100, "failed": True, "message": "Spawn cancelled"}
    assert not len(hub.reservations.queue)


async def test_the_page_of_a_spawn_that_was_cancelled_by_the_hub_says_so(waiting: Waiting, agent: FakeAgent) -> None:
    hub = waiting.hub
    assert (await hub.stop_server("ada")).code in (202, 204)
    await until(lambda: not hub.spawner("ada").active)
    status, said = await waiting.page()
    assert status == 409
    assert "The spawn was cancelled before the server had started" in said
    # and the next spawn starts
    agent.sessions.clear()
    assert (await hub.start_server("ada", {"profile": "half-gpu"})).code in (201, 202)
    assert (await hub.started("ada"))._attempt.template_name == "half-gpu"
    await hub.stop_server("ada")
    await until(lambda: "" not in hub.user("ada").spawners)


async def test_the_page_of_a_spawn_that_an_admin_cancelled_says_who_did(waiting: Waiting, agent: FakeAgent) -> None:
    hub, followed = waiting.hub, waiting.follow()
    await until(lambda: waiting.events)
    outcome = await restart.cancel(waiting.actions, "ada", "", ROOT, "The\x1b exam <begins>.")
    assert outcome.changed
    await followed
    assert waiting.events[-1]["message"] == "Spawn cancelled"
    status, said = await waiting.page()
    assert (status, "root cancelled the spawn: The  exam &lt;begins&gt;." in said) == (409, True)
    assert not agent.asked("open")
    # the options that were chosen stay the ones that a spawn without options takes
    assert hub.spawner("ada").orm_spawner.user_options == {"profile": "half-gpu"}
    agent.sessions.clear()
    assert (await hub.start_server("ada")).code in (201, 202)
    assert (await hub.started("ada"))._attempt.template_name == "half-gpu"


async def test_the_page_of_a_spawn_that_an_admin_requeued_goes_on_and_says_who_did(waiting: Waiting) -> None:
    hub, followed = waiting.hub, waiting.follow()
    await until(lambda: waiting.events)
    assert (await restart.requeue(waiting.actions, "ada", "", ROOT, "An exam begins.")).changed
    await followed
    assert not any(event.get("ready") for event in waiting.events)
    await until(lambda: len(hub.reservations.queue) == 1)
    status, said = await waiting.page()
    assert (status, 'id="gpushare-heading"' in said or "starting up" in said) == (200, True)
    waiting.events.clear()
    again = waiting.follow()
    await until(lambda: any("First in queue" in event["message"] for event in waiting.events))
    told = [event["message"] for event in waiting.events]
    assert "root put the spawn at the end of the queue: An exam begins." in told
    assert NOTE_OPTION not in hub.spawner("ada").user_options
    assert hub.spawner("ada").orm_spawner.user_options == {"profile": "half-gpu"}
    await hub.stop_server("ada")
    await again


async def test_a_server_that_is_cancelled_while_it_starts_says_so_too(make_hub: Any, agent: FakeAgent) -> None:
    hub: RunningHub = await make_hub(
        lambda config: (
            config.JupyterHub.update({"tornado_settings": {"slow_spawn_timeout": 0}})
            # a program that never listens
            or config.Spawner.update({"cmd": [sys.executable, "-c", "import time; time.sleep(60)"]})
        )
    )
    await hub.start_server("ada", {"profile": "half-gpu"})
    await until(lambda: hub.spawner("ada")._attempt.phase is SpawnPhase.STARTED)
    spawner = hub.spawner("ada")
    stop = asyncio.ensure_future(hub.stop_server("ada"))
    await until(lambda: spawner._attempt.cancelled, 2)
    assert not spawner.ready
    await stop
    await until(lambda: not agent.sessions)
    browser = Browser(hub)
    await browser.log_in("ada")
    response = await browser.open("/hub/spawn-pending/ada")
    assert b"The spawn was cancelled before the server had started" in response.body


async def test_a_note_that_is_none_is_refused_as_any_unknown_option(hub: RunningHub) -> None:
    for wrong in ("text", {"text": ""}, {"text": "x", "more": 1}, {"text": 1}):
        answer = await hub.start_server("ada", {"profile": "cpu-only", NOTE_OPTION: wrong})
        assert answer.code == 400, wrong
        assert NOTE_OPTION in json.loads(answer.body)["message"]
    note = SpawnNote(text="<b>x</b>", cancelled=True)
    answer = await hub.start_server("ada", note.within({"profile": "cpu-only"}))
    assert (answer.code, json.loads(answer.body)["message"]) == (409, "<b>x</b>")
    browser = Browser(hub)
    await browser.log_in("ada")
    page = (await browser.open("/hub/spawn-pending/ada")).body
    assert b"&lt;b&gt;x" in page
    assert b"<b>x" not in page
