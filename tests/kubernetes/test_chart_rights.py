"""The chart's Roles: agent, spawner and service do all of their work with no more than them, and use every right."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from gpushare_spawner.model.control import TierRequest
from gpushare_spawner.model.frames import Kind
from gpushare_spawner.model.tier import Tier
from gpushare_spawner.service.kubernetes.cluster import Cluster as ServiceView
from gpushare_spawner.service.kubernetes.node import NodeAgent as SeenNode
from tests.agent.conftest import short_folder  # noqa: F401
from tests.agent.peers import FIRST, GIB

from .agent_account import agent_token
from .charts import one, render
from .node_agent import NodeAgent
from .sharing_hub import SharingHub, kube_access
from .standin.client import path
from .standin.cluster import HUB_RULES, Cluster
from .standin.programs import Listeners

Right = tuple[str, str]
"""Verb and resource."""


def rights(rules: Iterable[dict[str, Any]]) -> set[Right]:
    return {(verb, resource) for rule in rules for verb in rule["verbs"] for resource in rule["resources"]}


@pytest.fixture
def asked(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> dict[str, set[Right]]:
    """What each service account has asked of the API server."""
    seen: dict[str, set[Right]] = defaultdict(set)
    draw = cluster.faults.draw

    def watching(ask: Any) -> Any:
        if ask.namespace == cluster.namespace and ask.user.startswith("system:serviceaccount:"):
            seen[ask.user.rpartition(":")[2]].add((ask.verb, ask.resource))
        return draw(ask)

    monkeypatch.setattr(cluster.faults, "draw", watching)
    return seen


@pytest.fixture
def roles() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The rules of the agents, and those that the chart adds for the hub."""
    items = render({})
    return one(items, "Role", "gpushare")["rules"], one(items, "Role", "gpushare-hub")["rules"]


@pytest.fixture
async def agent(cluster: Cluster, roles: Any, short_folder: Path) -> AsyncIterator[NodeAgent]:  # noqa: F811
    kubelet = await cluster.make_node(programs=Listeners())
    token = await agent_token(cluster, kubelet.name, roles[0])
    agent = NodeAgent(cluster, kubelet, token, short_folder)
    await agent.start()
    await agent.ready()
    yield agent
    await agent.stop()


async def test_each_has_what_it_needs_and_needs_what_it_has(
    cluster: Cluster,
    asked: dict[str, set[Right]],
    roles: Any,
    agent: NodeAgent,
    templates: Path,
    tmp_path: Path,
) -> None:
    async with kube_access(cluster, [*HUB_RULES, *roles[1]]), SharingHub(tmp_path, templates, cluster) as hub:
        response = await hub.start_server("ada", {"profile": "quarter-gpu"})
        assert response.code == 201, response.body
        await agent.session("ada", 20)
        peer = await agent.peer("ada")
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": 7200},
        }
        answer = await cluster.admin.create(path("serviceaccounts", cluster.namespace, "hub", "token"), request)
        async with cluster.api_client(answer["status"]["token"]) as client:
            service = ServiceView(client, cluster.namespace)
            await service.start(10)
            try:
                node = await _seen(agent, service, lambda session: session.confirmed and not session.gpu_busy)
                await node.tier(TierRequest(id="ada", tier=Tier.RELEASED, effective_units=0, reason="idle"))
                await agent.until(lambda: _tier(agent) is Tier.RELEASED)
                peer.send(Kind.REQUEST, GIB, 0, gpu=FIRST.uuid)
                await _seen(agent, service, lambda session: session.tier is Tier.ACTIVE)
            finally:
                await service.close()
        assert (await hub.stop_server("ada")).code in (202, 204)
        await agent.until(lambda: agent.node.report().session("ada") is None, 20)
    assert asked["agent"] == rights(roles[0])
    of_the_chart = rights(roles[1])
    assert of_the_chart <= asked["hub"] <= of_the_chart | rights(HUB_RULES)


def _tier(agent: NodeAgent) -> Tier | None:
    session = agent.node.report().session("ada")
    return session.tier if session is not None else None


async def _seen(agent: NodeAgent, service: ServiceView, right: Callable[[Any], bool]) -> SeenNode:
    """The node as the service sees it, once ada's session is so."""
    end = time.monotonic() + 20
    while True:
        for node in service:
            session = (await node.report()).session("ada") if node.node == agent.kubelet.name else None
            if session is not None and right(session):
                return node
        assert time.monotonic() < end, "it did not come"
        await asyncio.sleep(0.05)
