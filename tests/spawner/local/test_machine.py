"""CPU and memory of the hub's machine in placement."""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

import pytest

from gpushare_spawner.clients.agent import AgentClient
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement.node import NodeResources
from gpushare_spawner.sharing.base import Tenant
from gpushare_spawner.spawner.local.process import GPUShareSimpleSpawner
from gpushare_spawner.spawner.local.reservations import AgentReservations, left, this_machine
from gpushare_spawner.spawner.queue.queue import Ticket
from gpushare_spawner.spawner.queue.snapshot import SpawnRequest
from gpushare_spawner.templates.folder import Policy
from tests.spawner.fake_agent import FakeAgent
from tests.spawner.running_hub import RunningHub, until

GIB = 2**30
MACHINE = NodeResources(cpu=4000, memory=16 * GIB)


def template(name: str, cpu: float | None = None, memory: str | None = None) -> Template:
    resources = {"cpu": {"guarantee": cpu}, "memory": {"guarantee": memory}}
    return Template.model_validate(
        {"name": name, "display_name": name, "gpu": {"fraction": 0.1}, "resources": resources}
    )


BIG, SMALL, BARE = template("big", 2.5, "4Gi"), template("small", 0.5, "10Gi"), template("bare")


def reservations(agent: FakeAgent, machine: NodeResources | None = MACHINE) -> AgentReservations:
    client = AgentClient(agent.socket, 1.0)
    log = logging.getLogger("test")
    policy = Policy(templates=(BIG, SMALL, BARE))
    made = AgentReservations(client, log, machine=machine, policy=lambda: policy)
    made.place_every = 0.05
    return made


def test_sessions_take_what_their_templates_guarantee(agent: FakeAgent) -> None:
    agent.occupy("ada", 10, template="big")
    agent.occupy("bea", 10, template="small")
    agent.occupy("cy", 10, template="gone")
    assert left(MACHINE, agent.report(), [BIG, SMALL, BARE]) == NodeResources(cpu=1000, memory=2 * GIB)


def test_machine_of_this_process_has_its_cores_and_memory() -> None:
    total = this_machine()
    assert total.cpu == (os.cpu_count() or 1) * 1000
    assert total.memory is not None
    assert total.memory > 2**28
    assert total.pods is None


async def test_a_spawn_waits_for_cpu_and_reads_what_is_missing(agent: FakeAgent) -> None:
    here = reservations(agent)
    first = await here.reserve(SpawnRequest(Tenant("ada"), BIG), 5.0)
    tickets: list[Ticket] = []
    second = asyncio.ensure_future(here.reserve(SpawnRequest(Tenant("bea"), BIG), 10.0, tickets.append))
    await until(lambda: tickets and "CPU" in tickets[0].hint)
    assert "this needs 2.5 CPU, and at most 1.5 is free" in tickets[0].hint
    # what fits beside it starts
    await here.reserve(SpawnRequest(Tenant("cy"), BARE), 5.0)
    here.give_back(first)
    await second
    assert set(agent.sessions) == {"bea", "cy"}


async def test_spawns_of_one_pass_count_each_others_memory(agent: FakeAgent) -> None:
    here = reservations(agent)
    starts = [
        asyncio.ensure_future(here.reserve(SpawnRequest(Tenant(name), SMALL), 0.5)) for name in ("ada", "bea", "cy")
    ]
    done = await asyncio.gather(*starts, return_exceptions=True)
    assert len([one for one in done if not isinstance(one, Exception)]) == 1
    refusal = next(one for one in done if isinstance(one, Exception))
    assert "10 GiB of memory, and at most 6 GiB is free" in str(refusal)


async def test_nothing_counts_where_the_spawner_enforces_nothing(agent: FakeAgent) -> None:
    here = reservations(agent, machine=None)
    for name in ("ada", "bea", "cy"):
        await here.reserve(SpawnRequest(Tenant(name), BIG), 5.0)
    assert len(agent.sessions) == 3


@pytest.mark.parametrize("enforces", [True, False])
async def test_the_spawner_says_whether_cpu_and_memory_count(
    make_hub: Any, agent: FakeAgent, enforces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GPUShareSimpleSpawner, "enforces_resources", enforces)
    hub: RunningHub = await make_hub()
    await hub.add_user("ada")
    here: AgentReservations = hub.spawner("ada").reservations
    await here.snapshot()
    resources = here.feed.ledger.capacity.nodes["here"].resources
    assert (resources.cpu is not None) is enforces
    assert (resources.memory is not None) is enforces
