"""Pods that the scheduler does not bring onto their node, for want of something that is not a GPU."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpushare_spawner.spawner.kubernetes.attempt import LASTS, Cause
from tests.present import present
from tests.spawner.running_hub import until

from .sharing_hub import GpuNodes
from .standin.client import path
from .standin.cluster import Cluster

MakeHub = Callable[..., Any]

GREEDY = """
name: greedy
display_name: Greedy
gpu: {fraction: 0.1}
resources: {cpu: {guarantee: 1}, memory: {guarantee: 1Gi}}
"""


@pytest.fixture(autouse=True)
def greedy(templates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that wants a whole CPU; what lasts is known soon."""
    (templates / "greedy.yaml").write_text(GREEDY)
    for cause in (Cause.NODE, Cause.CLAIM, Cause.UNITS):
        monkeypatch.setitem(LASTS, cause, 0.5)


def slow(config: Any) -> None:
    config.JupyterHub.tornado_settings.update(slow_spawn_timeout=0.1)


async def told_to(hub: Any, user: str) -> list[str]:
    return [event["message"] async for event in hub.spawner(user).progress()]


async def message_of(response: Any) -> str:
    return str(json.loads(response.body)["message"])


async def test_four_users_start_on_a_small_node_beside_an_empty_large_one(
    make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster
) -> None:
    small = await nodes.add(gpus=1, cpu="2")
    large = await nodes.add(gpus=1, cpu="64")
    hub = await make_hub()
    for user in ("ada", "bob", "cyd", "dan"):
        response = await hub.start_server(user, {"profile": "greedy"})
        assert response.code == 201, response.body
    where = [pod["spec"]["nodeName"] for pod in await cluster.pods()]
    assert (where.count(small), where.count(large)) == (2, 2)
    assert not hub.reservations.in_flight()


async def test_the_page_and_the_refusal_say_what_is_missing_where(
    make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster
) -> None:
    tiny, tainted = [await nodes.add(gpus=1, cpu="500m"), await nodes.add(gpus=1)]
    taint = {"key": "team", "value": "a", "effect": "NoSchedule"}
    await cluster.admin.patch(path("nodes", name=tainted), {"spec": {"taints": [taint]}})

    def configure(config: Any) -> None:
        slow(config)
        config.GPUShareSpawner.queue_timeout = 1

    hub = await make_hub(configure)
    assert (await hub.start_server("ada", {"profile": "greedy"})).code == 202
    told = await told_to(hub, "ada")
    cpu = f"Node {tiny} cannot take the server: it has too little free CPU. Looking for another node."
    assert cpu in told
    assert f"Node {tainted} cannot take the server: the server does not tolerate its taint team" in " ".join(told)
    assert any(
        "2 nodes could not take this server:" in line
        and f"{tiny}: it has too little free CPU" in line
        and f"{tainted}: the server does not tolerate its taint team" in line
        for line in told
    ), told
    await until(lambda: not hub.spawner("ada").pending)
    assert not await cluster.pods()
    assert not hub.reservations.in_flight()


async def test_a_node_that_one_request_avoids_is_there_for_others(
    make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster
) -> None:
    node = await nodes.add(gpus=1, cpu="500m")
    hub = await make_hub(lambda config: config.GPUShareSpawner.update(queue_timeout=1))
    assert (await hub.start_server("ada", {"profile": "greedy"})).code == 503
    # a second try does not wait for what is known to be missing
    response = await hub.start_server("ada", {"profile": "greedy"})
    assert response.code == 503
    assert f"1 node could not take this server: {node}: it has too little free CPU" in await message_of(response)
    assert (await hub.start_server("bob", {"profile": "half-gpu"})).code == 201


async def test_a_pod_that_waits_for_preempted_pods_stays_on_its_node(
    make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LASTS, Cause.NODE, 1.0)
    node = await nodes.add(gpus=1, cpu="1500m")
    await nodes.add(gpus=1)
    await cluster.create_pod("unimportant", limits={"cpu": "1"}, nodeName=node)
    await cluster.wait_for_phase("unimportant", "Running")
    hub = await make_hub(slow)
    # of two empty GPUs the first is taken
    assert (await hub.start_server("ada", {"profile": "greedy"})).code == 202
    await cluster.wait_for_pod("jupyter-ada", lambda pod: bool(pod["status"].get("conditions")))
    status = {"status": {"nominatedNodeName": node}}
    await cluster.admin.patch(path("pods", cluster.namespace, "jupyter-ada", "status"), status)
    await asyncio.sleep(2.5)
    pod = await cluster.pod("jupyter-ada")
    assert pod is not None
    await cluster.admin.delete(path("pods", cluster.namespace, "unimportant"), grace=1)
    await hub.started("ada")
    assert present(await cluster.pod("jupyter-ada"))["metadata"]["uid"] == pod["metadata"]["uid"]
