"""Free CPU, memory and pods of nodes, known to the hub before it chooses one."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from gpushare_spawner.placement.node import NodeResources
from gpushare_spawner.wording.spawn_failures import EARLIER_FIRST
from tests.spawner.running_hub import until

from .charts import one, render
from .sharing_hub import GpuNodes, tolerates_own_nodes
from .standin.client import path
from .standin.cluster import RBAC, Cluster

MakeHub = Callable[..., Any]

GREEDY = """
name: greedy
display_name: Greedy
gpu: {fraction: 0.1}
resources: {cpu: {guarantee: 1}, memory: {guarantee: 1Gi}}
"""


SELECTIVE = """
name: selective
display_name: Selective
gpu: {fraction: 0.1}
kubespawner_override: {node_selector: {pool: notebooks}}
"""


@pytest.fixture
async def may_read(cluster: Cluster) -> AsyncIterator[None]:
    """The hub has the chart's right to read nodes and the pods of all namespaces."""
    rules = one(render({}), "ClusterRole")["rules"]
    account = {"kind": "ServiceAccount", "name": "hub", "namespace": cluster.namespace}
    name = f"{cluster.namespace}-capacity"
    await cluster._bind("ClusterRole", {"name": name}, rules, account, "")
    yield
    for kind in ("clusterrolebindings", "clusterroles"):
        await cluster.admin.delete(path(kind, name=name, group=RBAC))


async def test_four_users_start_where_cpu_is_free_without_one_refusal(
    may_read: None, make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster, templates: Path
) -> None:
    (templates / "greedy.yaml").write_text(GREEDY)
    small, large = await nodes.add(gpus=1, cpu="2", memory="4Gi"), await nodes.add(gpus=1, cpu="64")
    # a pod of another namespace takes its part of the small node
    other = await cluster.make_namespace("-other")
    container = {"name": "c", "image": "standin/notebook:1", "resources": {"requests": {"cpu": "500m"}}}
    pod = {"metadata": {"name": "system"}, "spec": {"containers": [container], "nodeName": small}}
    await cluster.admin.create(path("pods", other), pod)
    hub = await make_hub(tolerates_own_nodes)
    # the reader begins with the first spawn
    assert (await hub.start_server("zoe", {"profile": "quarter-gpu"})).code == 201
    capacity = hub.spawner("zoe").reservations.cluster.node_resources
    await until(lambda: small in capacity.resources())
    free = capacity.resources()[small]
    assert free.cpu == 1500
    for user in ("ada", "bob", "cyd", "dan"):
        response = await hub.start_server(user, {"profile": "greedy"})
        assert response.code == 201, response.body
    reasons = [reason for user in ("ada", "bob", "cyd", "dan") for reason, _ in await cluster.events(f"jupyter-{user}")]
    assert "FailedScheduling" not in reasons
    where = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in await cluster.pods()}
    assert sorted(where[f"jupyter-{user}"] for user in ("ada", "bob", "cyd", "dan")) == sorted([small] + [large] * 3)
    # nothing is counted twice once all run
    await until(lambda: capacity.resources()[large].cpu == 61_000)
    ledger = (await hub.reservations.availability_now()).check.ledger
    assert ledger.capacity.nodes[large].resources.cpu == 61_000


async def test_spawns_at_once_count_the_reservations_of_each_other(
    may_read: None, make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster, templates: Path
) -> None:
    (templates / "greedy.yaml").write_text(GREEDY)
    await nodes.add(gpus=1, cpu="2")
    await nodes.add(gpus=1, cpu="2")
    hub = await make_hub(tolerates_own_nodes)
    assert (await hub.start_server("zoe", {"profile": "cpu-only"})).code == 201
    assert (await hub.start_server("eve", {"profile": "quarter-gpu"})).code == 201
    capacity = hub.spawner("eve").reservations.cluster.node_resources
    # a cluster can have more nodes than the test's
    await until(lambda: set(nodes.names) <= capacity.resources().keys())
    users = ("ada", "bob", "cyd", "dan")
    answers = await asyncio.gather(*(hub.start_server(user, {"profile": "greedy"}) for user in users))
    assert [answer.code for answer in answers] == [201] * 4
    reasons = [reason for user in users for reason, _ in await cluster.events(f"jupyter-{user}")]
    assert "FailedScheduling" not in reasons


async def test_nodes_whose_taints_or_labels_keep_a_template_out_are_not_chosen(
    may_read: None, make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster, templates: Path
) -> None:
    (templates / "selective.yaml").write_text(SELECTIVE)
    (templates / "nowhere.yaml").write_text(SELECTIVE.replace("selective", "nowhere").replace("notebooks", "other"))
    tainted, plain = [await nodes.add(gpus=1) for _ in range(2)]
    labelled = await nodes.add(gpus=1, labels={"pool": "notebooks"})
    taint = {"key": "team", "value": "a", "effect": "NoSchedule"}
    before = (await cluster.node(tainted))["spec"].get("taints") or []
    await cluster.admin.patch(path("nodes", name=tainted), {"spec": {"taints": [*before, taint]}})
    hub = await make_hub(tolerates_own_nodes)
    assert (await hub.start_server("zoe", {"profile": "cpu-only"})).code == 201
    assert (await hub.start_server("eve", {"profile": "selective"})).code == 201
    capacity = hub.spawner("eve").reservations.cluster.node_resources
    await until(lambda: set(nodes.names) <= capacity.resources().keys())
    await hub.stop_server("eve")
    for user in ("ada", "bob"):
        assert (await hub.start_server(user, {"profile": "selective"})).code == 201
        pod = await cluster.pod(f"jupyter-{user}")
        assert pod is not None
        assert pod["spec"]["nodeName"] == labelled
        assert "FailedScheduling" not in [reason for reason, _ in await cluster.events(f"jupyter-{user}")]
    assert (await hub.start_server("cyd", {"profile": "whole-gpu"})).code == 201
    pod = await cluster.pod("jupyter-cyd")
    assert pod is not None
    assert pod["spec"]["nodeName"] == plain
    # the cards know it too: half of a GPU is free only on the tainted node then
    assert (await hub.start_server("eli", {"profile": "half-gpu"})).code == 201
    cards = await hub.spawner("zoe")._availability_now()
    found = {one.name: cards.availability(one) for one in hub.spawner("zoe").policy_folder.load().templates}
    assert found["half-gpu"].kind == "wait"
    assert found["quarter-gpu"].text == "Starts now"
    assert found["nowhere"].text == "No suitable node"
    response = await hub.start_server("dan", {"profile": "nowhere"})
    assert response.code == 409
    assert (
        "accept no server of this template, because of their taints or labels" in json.loads(response.body)["message"]
    )


async def test_a_spawn_that_waits_for_a_labelled_node_keeps_it_and_others_start_elsewhere(
    may_read: None, make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster, templates: Path
) -> None:
    (templates / "selective.yaml").write_text(SELECTIVE)
    (templates / "special.yaml").write_text(
        SELECTIVE.replace("selective", "special").replace("{fraction: 0.1}", "{count: 1}")
    )
    plain = await nodes.add(gpus=1)
    labelled = await nodes.add(gpus=1, labels={"pool": "notebooks"})

    def patient(config: Any) -> None:
        tolerates_own_nodes(config)
        config.JupyterHub.tornado_settings.update(slow_spawn_timeout=0.2)

    hub = await make_hub(patient)
    # the reader begins with the first spawn
    for user in ("zoe", "eve"):
        await hub.start_server(user, {"profile": "selective"})
        await hub.started(user)
        await until(lambda: len(hub.spawner("zoe").reservations.cluster.node_resources.resources()) == 2)
    await hub.stop_server("zoe")
    assert (await hub.start_server("ada", {"profile": "special"})).code == 202
    queue = hub.reservations.queue
    await until(lambda: [ticket.ahead for ticket in queue] == [0])
    await hub.start_server("bob", {"profile": "whole-gpu"})
    await hub.started("bob")
    pod = await cluster.pod("jupyter-bob")
    assert pod is not None
    assert pod["spec"]["nodeName"] == plain
    # the labelled node has 0.9 GPU free
    assert (await hub.start_server("dan", {"profile": "half-gpu"})).code == 202
    await until(lambda: EARLIER_FIRST in [ticket.hint for ticket in queue])
    await hub.stop_server("eve")
    await hub.started("ada")
    pod = await cluster.pod("jupyter-ada")
    assert pod is not None
    assert pod["spec"]["nodeName"] == labelled


async def test_without_the_right_nothing_is_known_and_nothing_is_an_error(
    make_hub: MakeHub, nodes: GpuNodes, caplog: pytest.LogCaptureFixture
) -> None:
    await nodes.add(gpus=1)
    hub = await make_hub(tolerates_own_nodes)
    for user in ("ada", "bob"):
        assert (await hub.start_server(user, {"profile": "half-gpu"})).code == 201
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    ledger = (await hub.reservations.availability_now()).check.ledger
    assert {node.resources for node in ledger.capacity.nodes.values()} == {NodeResources()}
