"""Spawns that wait for free capacity: order, place, time, end."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gpushare_spawner.model.controls import Keep
from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.share import Tier, split_session_id
from gpushare_spawner.model.template import Template
from gpushare_spawner.sharing.base import Tenant
from gpushare_spawner.spawner.hub import SpawnRefused
from gpushare_spawner.spawner.local.reservations import OpenedShare
from gpushare_spawner.spawner.queue.snapshot import SpawnRequest
from gpushare_spawner.templates.folder import Policy
from gpushare_spawner.wording.amounts import utc
from tests.spawner.fake_agent import FakeAgent
from tests.spawner.queue.running_queue import RunningQueue
from tests.spawner.running_hub import TOKEN, RunningHub, until


def spawn_request(name: str, fraction: float = 0.5, **gpu: Any) -> SpawnRequest:
    wanted = {"fraction": fraction, **gpu} if "count" not in gpu else gpu
    template = Template.model_validate({"name": "t", "display_name": "T", "gpu": wanted})
    return SpawnRequest(Tenant(name), template)


@pytest.fixture
async def queue(agent: FakeAgent) -> AsyncIterator[RunningQueue]:
    async with RunningQueue(agent) as made:
        yield made


async def test_spawns_are_placed_in_the_order_in_which_they_came(queue: RunningQueue, agent: FakeAgent) -> None:
    for gpu in (0, 1):
        agent.occupy(f"there-{gpu}", 100, gpu)
    starts = {}
    for place, name in enumerate(("ada", "bob", "cyd")):
        starts[name] = queue.start(spawn_request(name))
        await queue.waits(name, place)
    assert "none is free" in queue.tickets["ada"].hint
    del agent.sessions["there-1"]
    await asyncio.wait({starts["ada"], starts["bob"]})
    assert [session.gpus for session in agent.sessions.values()] == [("GPU-0",), ("GPU-1",), ("GPU-1",)]
    await queue.waits("cyd", 0)
    assert not starts["cyd"].done()
    queue.reservations.release("ada")
    assert (await starts["cyd"]).gpus[0].uuid == "GPU-1"
    assert not agent.violations


async def test_an_empty_queue_asks_the_agent_nothing(queue: RunningQueue, agent: FakeAgent) -> None:
    await queue.start(spawn_request("ada"))
    asked = len(agent.requests)
    await asyncio.sleep(0.3)
    assert len(agent.requests) == asked


async def test_a_spawn_waits_for_the_session_that_is_idle_for_long_before_its_user_has_a_notice(
    agent: FakeAgent,
) -> None:
    idle = {"release_after": "45m", "warn_before": "5m"}
    other = Template.model_validate({"name": "other", "display_name": "O", "gpu": {"count": 1}, "idle": idle})
    now = time.time()
    agent.occupy("works", 100, 0, last_gpu_activity=now, gpu_busy=True)
    agent.occupy("idle", 100, 1, last_gpu_activity=now - 2390)
    policy = Policy((other, spawn_request("ada").template))
    async with RunningQueue(agent, policy=lambda: policy) as queue:
        queue.start(spawn_request("ada"))
        await until(lambda: "ada" in queue.tickets and queue.tickets["ada"].start is not None)
        start = queue.tickets["ada"].start
        assert start is not None
        assert start.hold.gpus == ("GPU-1",)
        assert start.at.likely == pytest.approx(now + 310, abs=1)
        agent.occupy("idle", 100, 1, last_gpu_activity=now - 2390, keep=Keep(until=now + 600, since=now, by="idle"))
        await until(lambda: queue.tickets["ada"].start is None)


async def test_later_spawns_use_what_is_not_kept_for_an_earlier_one(queue: RunningQueue, agent: FakeAgent) -> None:
    agent.occupy("there-0", 50, 0)
    agent.occupy("there-1", 60, 1)
    whole = queue.start(spawn_request("whole", count=1))
    await queue.waits("whole", 0)
    for number in range(4):
        assert (await queue.start(spawn_request(f"small-{number}", 0.1))).gpus[0].uuid == "GPU-1"
    late = queue.start(spawn_request("late", 0.1))
    await queue.waits("late", 1)
    assert queue.tickets["late"].hint == "Earlier spawns are placed first."
    agent.sessions.pop("there-0")
    assert (await whole).gpus[0].uuid == "GPU-0"
    queue.reservations.release("small-0")
    assert (await late).gpus[0].uuid == "GPU-1"


async def test_what_is_kept_for_a_spawn_is_free_as_soon_as_it_leaves(queue: RunningQueue, agent: FakeAgent) -> None:
    agent.occupy("there-0", 50, 0)
    agent.occupy("there-1", 100, 1)
    whole = queue.start(spawn_request("whole", count=1))
    await until(lambda: bool(queue.reservations.feed.ledger.holds))
    quarter = spawn_request("quarter", 0.25).template
    assert (await queue.reservations.availability_now()).availability(quarter).kind == "wait"
    whole.cancel()
    await asyncio.wait([whole])
    assert (await queue.reservations.availability_now()).availability(quarter).kind == "now"


async def test_spawns_for_different_models_do_not_delay_each_other(queue: RunningQueue, agent: FakeAgent) -> None:
    other = agent.gpus[1].model_copy(update={"model": "NVIDIA A100"})
    agent.gpus = (agent.gpus[0], other)
    agent.occupy("there", 100, 0)
    first = queue.start(spawn_request("ada", models=["Simulated*"]))
    await queue.waits("ada", 0)
    assert (await queue.start(spawn_request("bob", models=["*a100"]))).gpus[0].model == "NVIDIA A100"
    agent.occupy("more", 50, 1)
    queue.start(spawn_request("cyd", models=["*a100"]))
    await queue.waits("cyd", 0)
    assert not first.done()


async def test_the_wait_ends_with_a_clear_message(queue: RunningQueue, agent: FakeAgent) -> None:
    for gpu in (0, 1):
        agent.occupy(f"there-{gpu}", 80, gpu)
    with pytest.raises(SpawnRefused) as refused:
        await queue.start(spawn_request("ada"), patience=0.3)
    assert refused.value.status_code == 503
    said = refused.value.jupyterhub_message
    assert "No free capacity for 0.50 GPU after" in said
    assert "at most 0.20 GPU is free" in said
    assert "Nothing stays reserved" in said
    assert refused.value.headers == {"Retry-After": "60"}
    assert queue.nothing_left()
    assert not agent.asked("open")


async def test_a_spawn_that_no_pass_has_come_to_yet_is_not_refused_for_its_time(
    queue: RunningQueue, agent: FakeAgent
) -> None:
    busy = asyncio.Event()
    agent.before = lambda request: busy.wait()
    start = queue.start(spawn_request("ada"), patience=0.3)
    await asyncio.sleep(0.5)
    assert not start.done()
    busy.set()
    assert (await start).gpus


async def test_a_spawn_that_no_pass_ever_comes_to_is_refused_after_twice_its_time(
    queue: RunningQueue, agent: FakeAgent
) -> None:
    agent.before = lambda request: asyncio.Event().wait()
    with pytest.raises(SpawnRefused):
        await asyncio.wait_for(queue.start(spawn_request("ada"), patience=0.2), 2)
    assert queue.nothing_left()


async def test_a_user_name_of_255_characters_of_four_bytes_gets_a_place(queue: RunningQueue, agent: FakeAgent) -> None:
    name, server = "\U00020000" * 255, "\U00020001" * 255
    template = spawn_request("x").template
    assert (await queue.start(SpawnRequest(Tenant(name, server), template))).gpus
    assert split_session_id(agent.asked("open")[0].id) == (name, server)


async def test_a_spawn_that_cannot_be_placed_for_a_bug_holds_up_nobody(
    queue: RunningQueue, agent: FakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    bad = queue.start(SpawnRequest(Tenant("ada\n"), Template.model_validate({"name": "t", "display_name": "T"})))
    good = queue.start(spawn_request("bob"))
    assert (await asyncio.wait_for(good, 5)).gpus
    with pytest.raises(SpawnRefused, match="internal error"):
        await bad
    assert "Placing ada" in caplog.text
    queue.reservations.release("bob")
    await until(queue.nothing_left)


async def test_a_spawn_is_refused_when_the_queue_is_full(agent: FakeAgent) -> None:
    queue = RunningQueue(agent, queue_length=1)
    agent.occupy("there-0", 80, 0)
    agent.occupy("there-1", 80, 1)
    queue.start(spawn_request("ada"))
    await queue.waits("ada", 0)
    with pytest.raises(SpawnRefused, match="The queue is full \\(1 spawn\\)"):
        await queue.start(spawn_request("bob"))
    # one that fits is not turned away because others wait
    assert (await queue.start(spawn_request("cyd", 0.1))).gpus


async def test_a_cancelled_wait_leaves_nothing(queue: RunningQueue, agent: FakeAgent) -> None:
    agent.occupy("there-0", 100, 0)
    agent.occupy("there-1", 100, 1)
    waiting = queue.start(spawn_request("ada"))
    await queue.waits("ada", 0)
    behind = queue.start(spawn_request("bob"))
    await queue.waits("bob", 1)
    waiting.cancel()
    await queue.waits("bob", 0)
    agent.sessions.clear()
    await behind
    assert list(agent.sessions) == ["bob"]


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_a_spawn_that_is_cancelled_while_the_agent_opens_leaves_nothing(
    queue: RunningQueue, agent: FakeAgent, moment: str
) -> None:
    opening, go_on = asyncio.Event(), asyncio.Event()

    async def hold(request: Any) -> None:
        if request.op == "open":
            opening.set()
            await go_on.wait()

    setattr(agent, moment, hold)
    start = queue.start(spawn_request("ada"))
    await opening.wait()
    start.cancel()
    await asyncio.wait({start})
    go_on.set()
    await until(lambda: bool(agent.asked("close")))
    await until(queue.nothing_left)
    assert not agent.sessions
    assert not queue.reservations.in_flight


async def test_the_same_server_again_waits_until_its_old_session_is_closed(
    queue: RunningQueue, agent: FakeAgent
) -> None:
    await queue.start(spawn_request("ada"))
    closing = asyncio.Event()

    async def slow(request: Any) -> None:
        if request.op == "close":
            closing.set()
            await asyncio.sleep(0.2)

    agent.before = slow
    queue.reservations.release("ada")
    await closing.wait()
    await queue.start(spawn_request("ada", 1.0))
    assert [request.op for request in agent.requests if request.op != "report"] == ["open", "close", "open"]
    assert agent.sessions["ada"].share_units == 100


async def test_a_close_that_was_tried_before_does_not_hit_the_new_session(
    queue: RunningQueue, agent: FakeAgent
) -> None:
    """The agent is unavailable when a session is closed; the server is started again before the next try."""
    await queue.start(spawn_request("ada"))
    await agent.stop()
    queue.reservations.release("ada")
    await asyncio.sleep(0.1)
    again = queue.start(spawn_request("ada"))
    await agent.start()
    await again
    await until(lambda: not queue.reservations.closing)
    await asyncio.sleep(0.3)
    assert list(agent.sessions) == ["ada"]


async def test_a_session_from_before_does_not_block_its_own_server(queue: RunningQueue, agent: FakeAgent) -> None:
    agent.occupy("ada", 100, 0)
    agent.occupy("there", 100, 1)
    assert (await queue.start(spawn_request("ada", 1.0))).gpus[0].uuid == "GPU-0"


@pytest.mark.parametrize("code", ["no-capacity", "unknown-gpu", "unhealthy-gpu", "exists"])
async def test_a_place_that_the_agent_refuses_is_looked_for_again(
    queue: RunningQueue, agent: FakeAgent, code: Any
) -> None:
    agent.refuse["open"] = [code]
    assert (await queue.start(spawn_request("ada"))).gpus
    assert len(agent.asked("open")) == 2
    assert agent.sessions["ada"].share_units == 50


async def test_a_session_that_the_agent_refuses_for_good_ends_the_wait(queue: RunningQueue, agent: FakeAgent) -> None:
    agent.refuse["open"] = ["internal"]
    with pytest.raises(SpawnRefused, match="the test says internal"):
        await queue.start(spawn_request("ada"))
    assert queue.nothing_left()
    assert not queue.reservations.in_flight


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (spawn_request("ada", count=3), "no node has more than 2"),
        (spawn_request("ada", models=["*A100*"]), "Available models: Simulated GPU 16 GiB"),
        (spawn_request("ada", memory={"guarantee": "40Gi"}), "No GPU is of a model"),
    ],
)
async def test_what_can_never_fit_does_not_wait(
    queue: RunningQueue, agent: FakeAgent, wanted: SpawnRequest, says: str
) -> None:
    agent.occupy("there", 100, 0)
    with pytest.raises(SpawnRefused) as refused:
        await queue.start(wanted)
    assert refused.value.status_code == 409
    assert says in refused.value.jupyterhub_message


async def test_an_agent_that_restarts_is_waited_for(queue: RunningQueue, agent: FakeAgent) -> None:
    await agent.stop()
    start = queue.start(spawn_request("ada"))
    await until(lambda: "ada" in queue.tickets and "does not answer" in queue.tickets["ada"].hint)
    await agent.start()
    assert (await start).gpus


async def test_a_spawn_is_refused_when_the_agent_stays_unavailable(agent: FakeAgent) -> None:
    queue = RunningQueue(agent)
    queue.reservations.patience = 0.2
    await agent.stop()
    with pytest.raises(SpawnRefused) as refused:
        await queue.start(spawn_request("ada"))
    assert "The GPU agent of this machine does not answer" in refused.value.jupyterhub_message
    assert refused.value.status_code == 503
    assert queue.nothing_left()


async def test_a_share_on_lent_units_is_marked_as_borrowed(queue: RunningQueue, agent: FakeAgent) -> None:
    for gpu in (0, 1):
        agent.occupy(f"idle-{gpu}", 100, gpu, tier="released", effective_units=0, guaranteed_units=0)
    got = await queue.start(spawn_request("ada"))
    assert isinstance(got, OpenedShare)
    assert got.opened_with.borrowed_units == 50


# -- on a hub --


async def events(spawner: Any, count: int) -> list[str]:
    told = []
    async for event in spawner.progress():
        told.append(event["message"])
        assert "<" not in re.sub("<br>|</?(time|span)[^>]*>", "", event.get("html_message", ""))
        if len(told) == count:
            return told
    return told


async def test_a_waiting_spawn_shows_its_position_and_starts_after_the_wait(make_hub: Any, agent: FakeAgent) -> None:
    # room comes long after start_timeout: waiting is not part of it
    hub: RunningHub = await make_hub(
        lambda config: (
            config.Spawner.update({"start_timeout": 1}),
            config.JupyterHub.update({"tornado_settings": {"slow_spawn_timeout": 0}}),
        )
    )
    agent.occupy("there-0", 100, 0)
    agent.occupy("there-1", 100, 1)
    assert (await hub.start_server("ada", {"profile": "half-gpu"})).code == 202
    await until(lambda: len(hub.reservations.queue) == 1)
    assert (await hub.start_server("bob", {"profile": "half-gpu"})).code == 202
    spawner = hub.spawner("bob")
    story = asyncio.ensure_future(events(spawner, 4))
    await until(lambda: any("Position 2 in queue" in event["message"] for event in spawner._attempt.progress._events))
    await asyncio.sleep(1.2)
    assert (await spawner.poll()) is None
    agent.sessions.pop("there-0")
    told = await story
    assert told[0] == "Template: 0.50 GPU."
    assert told[1].startswith("Position 2 in queue. Not enough free capacity")
    assert "Placed on GPU 0 (Simulated GPU 16 GiB)." in told
    await hub.started("ada")
    await hub.started("bob")


async def progress_of(hub: RunningHub, name: str, said: str) -> dict[str, Any]:
    """The first event of the API's progress stream whose message contains ``said``."""
    address = f"{hub.url}/api/users/{name}/server/progress"
    headers = {"Authorization": f"token {TOKEN}"}
    async with aiohttp.ClientSession(headers=headers) as session, session.get(address) as stream, asyncio.timeout(10):
        # the stream goes on while the spawn waits: leaving the block ends it
        async for queue in stream.content:
            if queue.startswith(b"data:"):
                event: dict[str, Any] = json.loads(queue.removeprefix(b"data:"))
                if said in event["message"]:
                    return event
    raise AssertionError(f"the stream ended without {said!r}")


async def test_the_api_tells_a_waiting_spawn_the_estimate_and_what_would_start_now(
    make_hub: Any, agent: FakeAgent
) -> None:
    hub: RunningHub = await make_hub(
        lambda config: config.JupyterHub.update({"tornado_settings": {"slow_spawn_timeout": 0}})
    )
    due = Notice(tier=Tier.RELEASED, at=time.time() + 200, reason="idle")
    agent.occupy("there-0", 70, 0, notice=due)
    agent.occupy("there-1", 100, 1)
    began = time.time()
    await hub.start_server("ada", {"profile": "half-gpu"})
    event = await progress_of(hub, "ada", "Estimated wait")
    instant = re.search('datetime="([^"]+)"', event["html_message"])
    assert instant is not None
    ends = datetime.fromisoformat(instant[1])
    assert ends.timestamp() == pytest.approx(began + 600, abs=15)
    by = utc(ends.timestamp())
    assert event["message"] == (
        "First in queue. Not enough free capacity: this needs 0.50 GPU, and at most 0.30 GPU is free on any GPU. "
        f"Estimated wait: about 4 min. If the server cannot start by {by}, the spawn is cancelled. "
        "Suitable GPUs: 1 of 2 × Simulated GPU 16 GiB. "
        "These templates would start now: CPU only, 0.25 GPU. To start one of them instead, cancel this spawn."
    )
    assert "the spawn is cancelled.<br>Suitable GPUs" in event["html_message"]
    assert 'data-template="quarter-gpu">0.25 GPU<' in event["html_message"]
    assert event["queue_position"] == 1
    agent.occupy("there-0", 90, 0)
    event = await progress_of(hub, "ada", "at most 0.10 GPU is free")
    assert event["message"].endswith(
        "Suitable GPUs: 1 of 2 × Simulated GPU 16 GiB. "
        "CPU only would start now. To start it instead, cancel this spawn."
    )


async def test_templates_that_the_user_may_not_start_are_not_offered_to_a_waiting_spawn(
    make_hub: Any, agent: FakeAgent
) -> None:
    hub: RunningHub = await make_hub(
        lambda config: config.JupyterHub.update({"tornado_settings": {"slow_spawn_timeout": 0}})
    )
    agent.occupy("there-0", 80, 0)
    agent.occupy("there-1", 80, 1)
    await hub.start_server("ada", {"profile": "half-gpu"})
    assert (await progress_of(hub, "ada", "CPU only would start now."))["progress"] == 10
    await hub.start_server("mia", {"profile": "half-gpu"})
    assert "would start now: Course, CPU only." in (await progress_of(hub, "mia", "Position 2"))["message"]


async def test_a_waiting_spawn_is_cancelled_by_the_api(make_hub: Any, agent: FakeAgent) -> None:
    hub: RunningHub = await make_hub(
        lambda config: config.JupyterHub.update({"tornado_settings": {"slow_spawn_timeout": 0}})
    )
    agent.occupy("there-0", 100, 0)
    agent.occupy("there-1", 100, 1)
    await hub.start_server("ada", {"profile": "half-gpu"})
    await until(lambda: len(hub.reservations.queue) == 1)
    assert (await hub.stop_server("ada")).code in (202, 204)
    await until(lambda: not hub.spawner("ada").active)
    assert not len(hub.reservations.queue)
    assert not agent.asked("open")
    # and it can be started again
    agent.sessions.clear()
    assert (await hub.start_server("ada", {"profile": "half-gpu"})).code in (201, 202)
    await hub.started("ada")


async def test_a_hub_that_ends_cancels_the_spawns_that_wait(make_hub: Any, agent: FakeAgent) -> None:
    hub: RunningHub = await make_hub(
        lambda config: config.JupyterHub.update({"tornado_settings": {"slow_spawn_timeout": 0}})
    )
    agent.occupy("there-0", 100, 0)
    agent.occupy("there-1", 100, 1)
    await hub.start_server("ada", {"profile": "half-gpu"})
    reservations = hub.reservations
    await until(lambda: len(reservations.queue) == 1)
    # the hub stops what is active; a signal to pid 0 would end this very process
    await hub.end()
    await until(lambda: not len(reservations.queue))
    assert not agent.asked("open")


async def test_the_api_says_that_no_capacity_was_free_in_time(make_hub: Any, agent: FakeAgent, tmp_path: Path) -> None:
    hub: RunningHub = await make_hub(lambda config: config.GPUShareMixin.update({"queue_timeout": 0.3}))
    agent.occupy("there-0", 100, 0)
    agent.occupy("there-1", 100, 1)
    response = await hub.start_server("ada", {"profile": "half-gpu"})
    assert response.code == 503
    assert response.headers["Retry-After"] == "60"
    assert "No free capacity for 0.50 GPU" in json.loads(response.body)["message"]
    assert not hub.spawner("ada").active
