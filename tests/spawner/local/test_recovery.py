"""The hub is restarted while servers run."""

from __future__ import annotations

import time
from typing import Any

from tests.spawner.fake_agent import FakeAgent
from tests.spawner.running_hub import RunningHub, until


async def test_running_servers_keep_their_sessions(make_hub: Any, agent: FakeAgent) -> None:
    first: RunningHub = await make_hub()
    await first.start_server("ada", {"profile": "whole-gpu"})
    spawner = await first.started("ada")
    pid, process = spawner.pid, spawner.proc
    before = agent.sessions["ada"]
    await first.end(cleanup_servers=False)

    second: RunningHub = await make_hub()
    again = second.spawner("ada")
    assert again.ready
    assert again.pid == pid
    assert again._attempt.session.id == "ada"
    assert again._attempt.session.gpus == before.gpus
    assert agent.sessions["ada"] == before
    # the limit of one server for each user still counts it
    assert (await second.start_server("ada", {"profile": "whole-gpu"}, server="more")).code == 409
    # and it ends as if nothing had been
    process.send_signal(2)
    process.wait()
    await second.stop_server("ada")
    await until(lambda: not agent.sessions)


async def test_a_session_that_the_agent_lost_meanwhile_is_opened_again(make_hub: Any, agent: FakeAgent) -> None:
    first: RunningHub = await make_hub()
    await first.start_server("ada", {"profile": "quarter-gpu"})
    process = (await first.started("ada")).proc
    await first.end(cleanup_servers=False)
    agent.sessions.clear()
    second: RunningHub = await make_hub()
    await until(lambda: "ada" in agent.sessions and agent.sessions["ada"].confirmed)
    assert agent.sessions["ada"].pid == second.spawner("ada").pid
    process.kill()
    process.wait()


async def test_a_server_that_ended_meanwhile_gives_its_share_back(make_hub: Any, agent: FakeAgent) -> None:
    first: RunningHub = await make_hub()
    await first.start_server("ada", {"profile": "quarter-gpu"})
    process = (await first.started("ada")).proc
    await first.end(cleanup_servers=False)
    process.kill()
    process.wait()
    second: RunningHub = await make_hub()
    assert not second.spawner("ada").ready
    await until(lambda: not agent.sessions)


async def test_what_an_earlier_hub_reserved_and_never_used_is_closed(make_hub: Any, agent: FakeAgent) -> None:
    agent.occupy("left", 100, 0, confirmed=False, pid=None, opened_at=time.time() - 60)
    agent.occupy("others", 50, 1, opened_at=time.time() - 60)
    hub: RunningHub = await make_hub()
    await hub.start_server("ada", {"profile": "cpu-only"})
    assert hub.spawner("ada").reservations
    await until(lambda: "left" not in agent.sessions)
    # one whose process lives is left alone: it may belong to another hub
    assert "others" in agent.sessions


async def test_state_that_makes_no_sense_is_no_obstacle(hub: RunningHub) -> None:
    await hub.add_user("ada")
    spawner = hub.spawner("ada")
    states: tuple[dict[str, Any], ...] = (
        {"gpushare": 3},
        {"gpushare": {"session": {"id": "x"}, "template": None}},
        {"gpushare": []},
        {},
    )
    for state in states:
        spawner.load_state(state)
        assert spawner._attempt.session is None
