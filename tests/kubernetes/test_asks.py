"""What a notebook server asks on a cluster: through the agent's report to the service, and back through the pod."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpushare_spawner.agent.kubernetes.settings import PublishSettings
from gpushare_spawner.model.frames import AskKind, Kind, Role
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.actions.context import ActionContext
from gpushare_spawner.service.culler.asks import AskResponder
from gpushare_spawner.service.history.store import Action
from gpushare_spawner.service.hub.client import Hub
from gpushare_spawner.service.kubernetes.cluster import Cluster
from gpushare_spawner.wording import actions as words
from tests.agent.conftest import short_folder  # noqa: F401
from tests.agent.peers import Peer
from tests.kubernetes.agent_account import agent_token
from tests.kubernetes.node_agent import NodeAgent
from tests.kubernetes.service_namespace import HUB_RULES
from tests.kubernetes.standin.cluster import Cluster as StandInCluster
from tests.present import present
from tests.service.conftest import hub, hub_server, templates  # noqa: F401


@pytest.fixture
async def agent(cluster: StandInCluster, short_folder: Path) -> AsyncIterator[NodeAgent]:  # noqa: F811
    """With the shipped times between two reports."""
    kubelet = await cluster.make_node()
    agent = NodeAgent(cluster, kubelet, await agent_token(cluster, kubelet.name), short_folder)
    agent.cluster_settings = replace(agent.cluster_settings, publish=PublishSettings())
    await agent.start()
    await agent.ready()
    yield agent
    await agent.stop()


async def answered(peer: Peer, number: int, kind: AskKind, value: int = 0) -> tuple[bool, str]:
    peer.send(Kind.ASK, number, kind, value)
    answer = await peer.answer(timeout=30)
    assert answer.number == number
    return answer.done, answer.text


async def test_an_ask_is_carried_out_and_answered_within_five_seconds(
    agent: NodeAgent,
    cluster: StandInCluster,
    hub: Hub,  # noqa: F811
    templates: dict[str, Template],  # noqa: F811
) -> None:
    """Measured: 0.8 to 1.3 s, most of it the agent's pauses between reports."""
    await agent.running("ada")
    peer = Peer(agent.node.sessions["ada"].socket.path)  # type: ignore[union-attr]
    agent.peers.append(peer)
    await peer.connect(Role.NOTEBOOK)
    recorded: list[Action] = []
    token = await cluster.service_account("hub", HUB_RULES)
    async with cluster.api_client(token) as client:
        nodes = Cluster(client, cluster.namespace)
        await nodes.start(60)
        asks = asyncio.create_task(
            AskResponder(nodes, ActionContext(nodes, hub, lambda: templates, record=recorded.append)).run()
        )
        try:
            for number, (kind, value, said) in enumerate(
                [
                    (AskKind.KEEP, 3600, "The GPU share is kept for 1 h."),
                    (AskKind.END_KEEP, 0, words.KEEP_ENDED),
                    (AskKind.END_KEEP, 0, words.NO_KEEP),
                ],
                start=1,
            ):
                began = time.monotonic()
                assert await answered(peer, number, kind, value) == (True, said)
                assert time.monotonic() - began < 5
                kept = (await agent.annotations("ada")).controls.keep
                assert (kept is not None) == (kind is AskKind.KEEP)
                assert present(agent.node.report().session("ada")).keep == kept
        finally:
            asks.cancel()
            await asyncio.gather(asks, return_exceptions=True)
            await nodes.close()
    assert [action.action for action in recorded] == ["keep", "keep-ended"]
