"""A server that an admin or the idle culler stopped, in a real hub: its pages say so until the next start."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from gpushare_spawner.model.control import AgentUnreachable
from gpushare_spawner.model.controls import NOTE_OPTION, STATE_KEY, SpawnNote
from gpushare_spawner.model.report import SessionReport
from gpushare_spawner.service.actions import restart
from gpushare_spawner.service.actions.context import ActionContext, Actor
from gpushare_spawner.service.culler.actions import HubActions
from gpushare_spawner.service.culler.decisions import CullerSettings
from gpushare_spawner.service.hub.client import Hub
from gpushare_spawner.spawner.hub import HUB_PAGES
from tests.present import present
from tests.spawner.fake_agent import FakeAgent
from tests.spawner.running_hub import TOKEN, Browser, RunningHub

ROOT = Actor("root", is_admin=True)
AT = 1_800_000_000.0
STOPPED = "2027-01-15 08:00 UTC: root stopped the server: The exam &lt;begins&gt;."


def with_our_pages(config: Any) -> None:
    config.JupyterHub.template_paths = [HUB_PAGES]


class Unreachable:
    """An agent that does not answer."""

    async def report(self) -> Any:
        raise AgentUnreachable("no agent")


@dataclass(frozen=True)
class Seen:
    """The session of a user, as a report had it."""

    session: SessionReport
    node: str = "here"
    agent: Any = field(default_factory=Unreachable)


def seen(user: str, server: str = "") -> Seen:
    return Seen(
        SessionReport(
            id=user, user=user, server=server, template="half-gpu", gpus=("GPU-0",), share_units=50,
            effective_units=50, guaranteed_units=50, tier_since=AT, opened_at=AT,
        )
    )  # fmt: skip


@asynccontextmanager
async def service(hub: RunningHub) -> AsyncIterator[Hub]:
    client = Hub(f"{hub.url}/api", TOKEN)
    try:
        yield client
    finally:
        client.close()


async def stop_as_root(hub: RunningHub, user: str, why: str, server: str = "") -> None:
    """What the service does when an admin stops a server; until the hub's pages can say so."""
    async with service(hub) as client:
        actions = ActionContext((), client, dict, clock=lambda: AT)
        assert (await restart.stop(actions, seen(user, server), ROOT, why)).changed
        await asyncio.gather(*actions.notes._under_way)


async def pages(browser: Browser, server: str = "") -> dict[str, str]:
    """The page of a server that does not run, the one that a spawn leads to, and the form."""
    named = f"/{server}" if server else ""
    found = {}
    for page, status in (("user", 424), ("spawn-pending", 200), ("spawn", 200)):
        response = await browser.open(f"/hub/{page}/ada{named}{'/lab' if page == 'user' else ''}")
        assert response.code == status, (page, response.body.decode())
        found[page] = response.body.decode()
    assert all("Spawn failed" not in page and "has failed" not in page for page in found.values())
    return found


async def test_the_hubs_pages_say_who_stopped_a_server_until_it_is_started_again(
    make_hub: Any, agent: FakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    hub: RunningHub = await make_hub(with_our_pages)
    browser = Browser(hub)
    await browser.log_in("ada")
    await hub.start_server("ada", {"profile": "half-gpu"})
    await hub.started("ada")
    await stop_as_root(hub, "ada", "The exam <begins>.")
    assert all(STOPPED in page for page in (await pages(browser)).values())
    assert "gpushareTimes" in (await pages(browser))["user"], "times are the reader's"
    assert "no server is started; the hub's pages now show why the server was stopped" in caplog.text
    assert present(hub.app).tornado_settings.get("failure_count", 0) == 0
    assert not agent.sessions

    # a hub that starts anew knows it
    await hub.end()
    hub = await make_hub(with_our_pages)
    browser = Browser(hub)
    await browser.log_in("ada")
    assert all(STOPPED in page for page in (await pages(browser)).values())
    assert not hub.spawner("ada").active

    # the options that were chosen stay the ones that a spawn without options takes, and the start ends the note
    assert hub.spawner("ada").orm_spawner.user_options == {"profile": "half-gpu"}
    assert (await hub.start_server("ada")).code in (201, 202)
    spawner = await hub.started("ada")
    assert spawner._attempt.template_name == "half-gpu"
    assert STATE_KEY not in spawner.get_state()
    await hub.stop_server("ada")
    assert all("root stopped" not in page for page in (await pages(browser)).values())


async def test_a_spawn_that_is_refused_leaves_the_note(make_hub: Any) -> None:
    hub: RunningHub = await make_hub(with_our_pages)
    browser = Browser(hub)
    await browser.log_in("ada")
    await hub.start_server("ada", {"profile": "cpu-only"})
    await hub.started("ada")
    await stop_as_root(hub, "ada", "The exam <begins>.")
    assert (await hub.start_server("ada", {"profile": "nonsense"})).code == 400
    form = await browser.open("/hub/spawn/ada")
    assert STOPPED in form.body.decode()


async def test_the_note_of_a_named_server_is_not_on_the_pages_of_others(make_hub: Any) -> None:
    hub: RunningHub = await make_hub(with_our_pages)
    browser = Browser(hub)
    await browser.log_in("ada")
    await hub.start_server("ada", {"profile": "cpu-only"}, "thesis")
    await hub.started("ada", "thesis")
    await stop_as_root(hub, "ada", "The exam <begins>.", "thesis")
    assert all(STOPPED in page for page in (await pages(browser, "thesis")).values())
    assert all("root stopped" not in page for page in (await pages(browser)).values())


async def test_options_that_nobody_chose_are_not_chosen_by_the_note(make_hub: Any) -> None:
    hub: RunningHub = await make_hub(with_our_pages)
    await hub.start_server("ada")
    await hub.started("ada")
    await stop_as_root(hub, "ada", "")
    assert hub.spawner("ada").orm_spawner.user_options == {}


async def test_the_hubs_pages_say_that_the_culler_stopped_a_server_without_a_share(make_hub: Any) -> None:
    hub: RunningHub = await make_hub(with_our_pages)
    browser = Browser(hub)
    await browser.log_in("ada")
    await hub.start_server("ada", {"profile": "cpu-only"})
    await hub.started("ada")
    async with service(hub) as client:
        settings = CullerSettings(timeout=3600)
        later = time.time() + 7200
        context = ActionContext((), client, dict, clock=lambda: later)
        culler = HubActions(context, settings)
        assert await culler.stop_unshared(present(await client.server("ada", "")))
        await asyncio.gather(*context.notes._under_way)
    said = "The server was stopped: no activity for 2 h. Files stay. Variables in kernels are lost."
    assert all(said in page for page in (await pages(browser)).values())


async def test_a_user_who_starts_the_server_at_once_is_not_held_up(make_hub: Any) -> None:
    """The note comes when the server runs again: it changes nothing."""
    hub: RunningHub = await make_hub(with_our_pages)
    await hub.start_server("ada", {"profile": "cpu-only"})
    await hub.started("ada")
    note = SpawnNote(text="root stopped the server.", stopped=True)
    assert (await hub.start_server("ada", note.within({"profile": "cpu-only"}))).code == 400
    spawner = await hub.started("ada")
    assert STATE_KEY not in spawner.get_state()
    assert NOTE_OPTION not in spawner.user_options
