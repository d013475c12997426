"""A release right after GPU work, with the service and a real agent: its answer is true, and comes within its bound."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import dataclass

import pytest

from gpushare_spawner.model.frames import Kind
from gpushare_spawner.model.report import SessionReport
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.actions import share
from gpushare_spawner.service.actions.context import ActionContext, ActionOutcome, ActionRefused, Actor, RefusalCode
from gpushare_spawner.service.history.store import Action
from gpushare_spawner.service.hub.client import Hub
from gpushare_spawner.service.kubernetes import cluster as service_node
from gpushare_spawner.service.kubernetes.cluster import Cluster
from gpushare_spawner.wording import actions as words
from tests.agent.conftest import short_folder  # noqa: F401
from tests.agent.peers import FIRST, GIB, Peer
from tests.kubernetes.node_agent import NodeAgent
from tests.kubernetes.service_namespace import HUB_RULES
from tests.kubernetes.standin.cluster import Cluster as StandInCluster
from tests.kubernetes.test_asks import agent  # noqa: F401
from tests.present import present
from tests.service.conftest import hub, hub_server, templates  # noqa: F401

BOUND = service_node.DECIDED_WITHIN + 2.0
"""Seconds."""
ADA = Actor("ada")


@dataclass(frozen=True)
class Target:
    agent: service_node.NodeAgent
    session: SessionReport
    node: str = "node"


async def works(peer: Peer, again_at_once: bool = False) -> None:
    peer.send(Kind.REQUEST, GIB, 0, gpu=FIRST.uuid)
    lease = (await peer.until(Kind.GRANT)).fields[0]
    peer.send(Kind.RELEASE, lease, 1000, int(again_at_once), gpu=FIRST.uuid)


async def answer(action: Awaitable[ActionOutcome]) -> str:
    """Return the text of what was done, or the code of a refusal."""
    try:
        return (await action).text
    except ActionRefused as refused:
        return refused.code


def seen_by_service(nodes: Cluster) -> SessionReport:
    (node,) = [one.node for one in nodes]
    return present(nodes.report(node)[0].session("ada"))


@pytest.mark.parametrize("worked_again", [False, True], ids=["then-idle", "works-again-meanwhile"])
async def test_a_release_right_after_work_ends_as_done_or_refused_and_the_tier_agrees_with_the_answer(
    agent: NodeAgent,  # noqa: F811
    cluster: StandInCluster,
    hub: Hub,  # noqa: F811
    templates: dict[str, Template],  # noqa: F811
    worked_again: bool,
) -> None:
    await agent.running("ada")
    peer = await agent.peer("ada")
    recorded: list[Action] = []
    answers: list[str] = []
    token = await cluster.service_account("hub", HUB_RULES)
    async with cluster.api_client(token) as client:
        nodes = Cluster(client, cluster.namespace)
        await nodes.start(60)
        actions = ActionContext(nodes, hub, lambda: templates, record=recorded.append)
        try:
            for pause in (0.0, 0.0, 0.0, 0.05, 0.3, *(() if worked_again else (None,))):
                await works(peer)
                if pause is not None:
                    await asyncio.sleep(pause)
                else:
                    ended = present(agent.node.report().session("ada")).last_gpu_activity
                    await agent.until(lambda: seen_by_service(nodes).last_gpu_activity == ended, 30)  # noqa: B023
                (seen,) = await agent.until(lambda: [one for one in nodes if nodes.reported(one.node, "ada")])
                one = Target(seen, present((await seen.report()).session("ada")))
                began, before = time.monotonic(), len(recorded)
                release = asyncio.create_task(share.release(actions, one, ADA))
                if worked_again:
                    await asyncio.sleep(0.02)
                    await works(peer)
                answers.append(await answer(release))
                assert answers[-1] in (words.RELEASED, RefusalCode.BUSY)
                assert time.monotonic() - began < BOUND
                assert len(recorded) == before + (answers[-1] == words.RELEASED)
                if answers[-1] is RefusalCode.BUSY or not worked_again:
                    await asyncio.sleep(0.5)
                    tier = Tier.RELEASED if answers[-1] == words.RELEASED else Tier.ACTIVE
                    assert present(agent.node.report().session("ada")).tier is tier
                    assert (await agent.annotations("ada")).tier is tier
                await works(peer)
                # a person acts on what a page shows
                await agent.until(lambda: seen_by_service(nodes).tier is Tier.ACTIVE)
        finally:
            await nodes.close()
    assert worked_again or answers[-1] == words.RELEASED, "the report of the work has come by then"
