"""What fails between the options and the running server, and that nothing is left behind then."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tornado.httpclient import HTTPResponse

from gpushare_spawner.spawner.attempt import SpawnProgress
from gpushare_spawner.spawner.queue.queue import Reservation
from tests.spawner.fake_agent import FakeAgent
from tests.spawner.running_hub import RunningHub, until


def said(response: HTTPResponse) -> str:
    return str(json.loads(response.body)["message"])


async def nothing_left(hub: RunningHub, agent: FakeAgent) -> None:
    await until(lambda: not agent.sessions and not hub.reservations.closing)
    assert not len(hub.reservations.queue)
    assert not hub.reservations.in_flight
    assert not hub.reservations._running


async def test_an_agent_that_refuses_a_session_ends_the_spawn_with_the_reason(
    hub: RunningHub, agent: FakeAgent
) -> None:
    agent.refuse["open"] = ["bad-request"]
    response = await hub.start_server("ada", {"profile": "quarter-gpu"})
    assert response.code == 502
    assert "The GPU agent refused the session: the test says bad-request" in said(response)
    await nothing_left(hub, agent)
    assert (await hub.start_server("ada", {"profile": "quarter-gpu"})).code == 201


async def test_agent_from_before_shares_above_one_gpu_is_named_with_the_remedy(
    hub: RunningHub, agent: FakeAgent, templates: Path
) -> None:
    (templates / "more.yaml").write_text("name: more\ndisplay_name: More\ngpu: {fraction: 1.5}\n")
    (templates / "two.yaml").write_text("name: two\ndisplay_name: Two\ngpu: {count: 2}\n")
    agent.unknown_fields = ("last_units",)
    response = await hub.start_server("ada", {"profile": "more"})
    assert response.code == 502
    assert said(response).endswith(
        "The GPU agent of this machine is older than the hub: it does not support a fraction above 1 of GPUs "
        "(gpu.fraction). Ask the admin to update gpushare-spawner where the agent (gpushare-agent) runs and to restart "
        "it, or choose another template."
    )
    await nothing_left(hub, agent)
    assert (await hub.start_server("ada", {"profile": "two"})).code == 201, "it knows whole GPUs"
    await hub.stop_server("ada")
    agent.unknown_fields = ()
    assert (await hub.start_server("ada", {"profile": "more"})).code == 201


async def test_an_error_after_the_reservation_gives_the_share_back(
    hub: RunningHub, agent: FakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(progress: SpawnProgress, reservation: Reservation) -> str:
        raise RuntimeError("no words for this GPU")

    with monkeypatch.context() as patched:
        patched.setattr(SpawnProgress, "add_placement", fails)
        assert (await hub.start_server("ada", {"profile": "quarter-gpu"})).code == 500
        await nothing_left(hub, agent)
    assert (await hub.start_server("ada", {"profile": "quarter-gpu"})).code == 201


async def test_an_agent_that_does_not_accept_the_process_ends_the_spawn(hub: RunningHub, agent: FakeAgent) -> None:
    agent.refuse["confirm"] = ["bad-request"]
    response = await hub.start_server("ada", {"profile": "quarter-gpu"})
    assert response.code == 502
    await nothing_left(hub, agent)
    assert not hub.spawner("ada").active
    assert await hub.spawner("ada").poll() is not None


async def test_an_agent_that_is_away_is_told_the_process_when_it_is_back(hub: RunningHub, agent: FakeAgent) -> None:
    """The server runs; the agent is told when it is back."""

    async def drop(request: Any) -> None:
        if request.op == "confirm":
            raise ConnectionError

    agent.before = drop
    assert (await hub.start_server("ada", {"profile": "quarter-gpu"})).code == 201
    assert not agent.sessions["ada"].confirmed
    agent.before = None
    await until(lambda: agent.sessions["ada"].confirmed)


async def test_a_session_that_the_agent_lost_is_opened_again_and_confirmed(hub: RunningHub, agent: FakeAgent) -> None:
    def lose(request: Any) -> None:
        if request.op == "confirm" and len(agent.asked("confirm")) == 1:
            agent.sessions.clear()

    agent.before = lose
    assert (await hub.start_server("ada", {"profile": "quarter-gpu"})).code == 201
    assert agent.sessions["ada"].confirmed


async def test_a_process_that_dies_at_once_gives_its_share_back(make_hub: Any, agent: FakeAgent) -> None:
    hub: RunningHub = await make_hub(
        lambda config: config.Spawner.update({"cmd": [sys.executable, "-I", "-S", "-c", "exit(3)"], "http_timeout": 2})
    )
    response = await hub.start_server("ada", {"profile": "quarter-gpu"})
    assert response.code == 500
    await nothing_left(hub, agent)


async def test_a_command_that_does_not_exist_gives_the_share_back(make_hub: Any, agent: FakeAgent) -> None:
    hub: RunningHub = await make_hub(lambda config: config.Spawner.update({"cmd": ["/no/such/command"]}))
    assert (await hub.start_server("ada", {"profile": "quarter-gpu"})).code == 500
    await nothing_left(hub, agent)


async def test_a_start_that_times_out_gives_its_share_back(make_hub: Any, agent: FakeAgent) -> None:
    """The agent answers nothing more once the session is open: start_timeout ends the start and frees the share."""
    hub: RunningHub = await make_hub(lambda config: config.Spawner.update({"start_timeout": 1}))

    async def hang(request: Any) -> None:
        if request.op == "confirm":
            await asyncio.sleep(3)

    agent.before = hang
    response = await hub.start_server("ada", {"profile": "quarter-gpu"})
    assert response.code == 500
    agent.before = None
    await nothing_left(hub, agent)
    assert await hub.spawner("ada").poll() is not None


@pytest.mark.parametrize("op", ["report", "open", "confirm"])
async def test_a_spawn_that_is_cancelled_in_any_step_leaves_nothing(make_hub: Any, agent: FakeAgent, op: str) -> None:
    hub: RunningHub = await make_hub(
        lambda config: config.JupyterHub.update({"tornado_settings": {"slow_spawn_timeout": 0}})
    )
    there, go_on = asyncio.Event(), asyncio.Event()

    async def hold(request: Any) -> None:
        # the sweep at the hub's start asks for a report too
        if request.op == op and hub.app is not None and "ada" in [user.name for user in hub.app.users.values()]:
            there.set()
            await go_on.wait()

    agent.before = hold
    assert (await hub.start_server("ada", {"profile": "quarter-gpu"})).code == 202
    await asyncio.wait_for(there.wait(), 10)
    stop = asyncio.ensure_future(hub.stop_server("ada"))
    await asyncio.sleep(0.2)
    go_on.set()
    assert (await stop).code in (202, 204)
    await until(lambda: not hub.spawner("ada").active)
    await nothing_left(hub, agent)
    assert await hub.spawner("ada").poll() is not None


async def test_a_hook_of_the_admin_that_fails_reserves_nothing(make_hub: Any, agent: FakeAgent) -> None:
    def hook(spawner: Any) -> None:
        raise RuntimeError("no home directory")

    hub: RunningHub = await make_hub(lambda config: config.Spawner.update({"pre_spawn_hook": hook}))
    assert (await hub.start_server("ada", {"profile": "quarter-gpu"})).code == 500
    await nothing_left(hub, agent)
    assert not agent.asked("open")


async def test_a_server_that_dies_gives_its_share_back(hub: RunningHub, agent: FakeAgent) -> None:
    await hub.start_server("ada", {"profile": "quarter-gpu"})
    spawner = await hub.started("ada")
    spawner.proc.kill()
    await nothing_left(hub, agent)


async def test_an_agent_that_comes_back_without_its_state_gets_the_sessions_again(
    hub: RunningHub, agent: FakeAgent
) -> None:
    """A running server whose session the agent lost has it again soon, and never notices."""
    await hub.start_server("ada", {"profile": "quarter-gpu"})
    spawner = await hub.started("ada")
    await agent.stop()
    agent.sessions.clear()
    spawner._attempt._checked_at = None
    assert await spawner.poll() is None
    await agent.start()
    spawner._attempt._checked_at = None
    await until(lambda: "ada" not in hub.reservations._adopting)
    hub.reservations._last = None
    assert await spawner.poll() is None
    await until(lambda: "ada" in agent.sessions and agent.sessions["ada"].confirmed)
    assert agent.sessions["ada"].gpus == spawner._attempt.session.gpus


async def test_a_server_that_stops_while_the_agent_is_unavailable_is_closed_later(
    hub: RunningHub, agent: FakeAgent
) -> None:
    await hub.start_server("ada", {"profile": "quarter-gpu"})
    await hub.started("ada")
    await agent.stop()
    stop = asyncio.ensure_future(hub.stop_server("ada"))
    await asyncio.sleep(1.5)
    await agent.start()
    assert (await stop).code in (202, 204)
    await nothing_left(hub, agent)


# -- the settings that a template asks for --


async def test_overrides_of_a_template_hold_for_one_start(hub: RunningHub, templates: Path, agent: FakeAgent) -> None:
    (templates / "own.yaml").write_text(
        "name: own\ndisplay_name: Own\nimage: some/image\n"
        "resources: {cpu: {limit: 2}, memory: {guarantee: 1Gi, limit: 2Gi}}\n"
        "kubespawner_override: {cpu_limit: 3, environment: {MY_OWN: 'a {b}'}, default_url: /own}\n"
    )
    assert (await hub.start_server("ada", {"profile": "own"})).code == 201
    spawner = await hub.started("ada")
    assert (spawner.cpu_limit, spawner.mem_guarantee, spawner.mem_limit) == (3, 2**30, 2**31)
    assert spawner.get_env()["MY_OWN"] == "a {b}"
    await hub.stop_server("ada")
    assert (spawner.cpu_limit, spawner.default_url, spawner.environment) == (None, "", {})


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("{node_selector: {a: b}}", "GPUShareSimpleSpawner has no setting 'node_selector'"),
        ("{start_timeout: soon}", "'start_timeout' cannot be 'soon'"),
    ],
)
async def test_overrides_that_the_spawner_cannot_apply_are_refused_and_logged(
    hub: RunningHub, templates: Path, override: str, says: str
) -> None:
    (templates / "own.yaml").write_text(f"name: own\ndisplay_name: Own\nkubespawner_override: {override}\n")
    response = await hub.start_server("ada", {"profile": "own"})
    assert response.code == 500
    assert says in said(response)
    assert "Tell the admin" in said(response)


async def test_a_bad_template_takes_no_other_down(hub: RunningHub, templates: Path) -> None:
    (templates / "bad.yaml").write_text("name: bad\ndisplay_name: Bad\ngpu: {fraction: 65}\n")
    assert (await hub.start_server("ada", {"profile": "bad"})).code == 400
    assert (await hub.start_server("ada", {"profile": "quarter-gpu"})).code == 201


async def test_refusals_do_not_count_as_failures_of_the_hub(make_hub: Any, agent: FakeAgent) -> None:
    """JupyterHub 5 counts every refused start towards consecutive_failure_limit."""
    hub: RunningHub = await make_hub(lambda config: config.Spawner.update({"consecutive_failure_limit": 3}))
    for _ in range(4):
        assert (await hub.start_server("ada", {"profile": "no-such"})).code == 400
    assert hub.app is not None
    assert hub.app.tornado_application.settings.get("failure_count", 0) <= 0
