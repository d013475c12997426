"""A hub whose nodes give GPUs by claims: what a server's pod and claim say, and a node where lent units are used."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gpushare_spawner.agent.kubernetes.devices.owners import DevicesRefused
from gpushare_spawner.model.kubernetes.annotations import pod_session, tier_patch
from gpushare_spawner.model.kubernetes.objects import RESOURCE_PREFIX, device_name
from gpushare_spawner.model.share import Tier
from tests.agent.conftest import short_folder  # noqa: F401
from tests.agent.peers import FIRST
from tests.spawner.running_hub import until

from .agent_account import agent_token
from .claims import make_class
from .node_agent import LIBRARY, NodeAgent
from .sharing_hub import SHARING_RULES, SharingHub, kube_access
from .standin.claim_allocator import GROUP
from .standin.client import path
from .standin.cluster import Cluster
from .standin.programs import Listeners

CLAIM_RULE = {"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims"], "verbs": ["get", "create", "delete"]}


@pytest.fixture
async def agent(cluster: Cluster, short_folder: Path) -> AsyncIterator[NodeAgent]:  # noqa: F811
    await make_class(cluster)
    kubelet = await cluster.make_node(programs=Listeners(), prepare_retry=0.1)
    agent = NodeAgent(cluster, kubelet, await agent_token(cluster, kubelet.name, claims=True), short_folder)
    agent.gpus = (FIRST,)
    agent.by_claims()
    await agent.start()
    while await agent.report() is None:
        await asyncio.sleep(0.02)
    yield agent
    await agent.stop()


@pytest.fixture
async def hub(
    agent: NodeAgent, cluster: Cluster, templates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[SharingHub]:
    monkeypatch.setattr("gpushare_spawner.spawner.kubernetes.attempt.START_ATTEMPTS", 1)
    hub = SharingHub(tmp_path, templates, cluster)
    async with kube_access(cluster, [*SHARING_RULES, CLAIM_RULE]), hub:
        yield hub


async def claims_in(cluster: Cluster) -> list[dict[str, Any]]:
    return await cluster.admin.list(path("resourceclaims", cluster.namespace, group=GROUP))


async def test_a_server_gets_its_share_by_a_claim_that_goes_with_its_pod(
    agent: NodeAgent, hub: SharingHub, cluster: Cluster
) -> None:
    response = await hub.start_server("ada", {"profile": "quarter-gpu"})
    assert response.code == 201, response.body
    pod = await cluster.pod("jupyter-ada")
    assert pod is not None
    (claim,) = await claims_in(cluster)
    assert [one["uid"] for one in claim["metadata"]["ownerReferences"]] == [pod["metadata"]["uid"]]
    (result,) = claim["status"]["allocation"]["devices"]["results"]
    assert result["consumedCapacity"]["units"] == "25"
    assert result["device"] == device_name(FIRST.uuid)
    # the pod names the claim, and no container does: so Kubernetes resizes it in place
    assert pod["spec"]["resourceClaims"] == [{"name": "gpushare", "resourceClaimName": claim["metadata"]["name"]}]
    (notebook,) = pod["spec"]["containers"]
    assert "claims" not in notebook["resources"]
    assert not any(name.startswith(RESOURCE_PREFIX) for name in notebook["resources"].get("limits") or {})
    assert pod_session(pod["metadata"]["annotations"]).gpus == (FIRST.uuid,)
    # what a device plugin would have brought
    env = {variable["name"]: variable.get("value") for variable in notebook["env"]}
    session = await agent.session("ada")
    assert agent.node.sessions["ada"].socket is not None
    assert env["GPUSHARE_SOCKET"] == str(agent.node.sessions["ada"].socket.path)
    assert (env["CUDA_VISIBLE_DEVICES"], env["LD_PRELOAD"]) == (FIRST.uuid, str(LIBRARY))
    assert session.share_units == 25
    mounts = {mount["mountPath"]: mount["readOnly"] for mount in notebook["volumeMounts"] if "readOnly" in mount}
    folder = Path(env["GPUSHARE_SOCKET"]).parent.parent
    assert mounts == {str(folder): True, str(LIBRARY): True}
    where = {volume["name"]: volume["hostPath"] for volume in pod["spec"]["volumes"] if "hostPath" in volume}
    assert sorted(each["path"] for each in where.values()) == sorted([str(folder), str(LIBRARY)])
    # a folder's type would be checked before the claim is prepared, which makes the folder
    assert not any(each["type"] for each in where.values())
    assert (await hub.stop_server("ada")).code == 204
    await until(lambda: not hub.spawner("ada").active)
    assert not await claims_in(cluster)
    await agent.until(lambda: not agent.node.sessions)


async def test_units_that_an_idle_server_lends_let_a_queued_server_start(
    agent: NodeAgent, hub: SharingHub, cluster: Cluster
) -> None:
    for name in ("ada", "ben"):
        assert (await hub.start_server(name, {"profile": "half-gpu"})).code == 201
    queued = asyncio.create_task(hub.start_server("cem", {"profile": "half-gpu"}))
    await until(lambda: len(hub.reservations.queue) == 1)
    # as the service does
    await agent.session("ada")
    patch = tier_patch(Tier.RELEASED, 2_000_000_000.0, 0, idle_since=2_000_000_000.0)
    await agent.annotate("jupyter-ada", patch)
    assert (await queued).code == 201
    session = await agent.session("cem")
    assert session.borrowed_units == 50
    assert sorted(agent.node.sessions) == ["ada", "ben", "cem"]


async def test_a_claim_that_the_agent_does_not_prepare_fails_the_spawn_with_its_words(
    agent: NodeAgent, hub: SharingHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise DevicesRefused("the folder of the session's socket cannot be created: no space left on device")

    monkeypatch.setattr(agent.on_kubernetes.allocated, "grant", full)
    response = await hub.start_server("ada", {"profile": "quarter-gpu"})
    assert response.code == 503, response.body
    said = json.loads(response.body)["message"]
    assert "could not give the server its GPU share" in said
    assert "no space left on device" in said
    await until(lambda: not hub.reservations.in_flight())
    # nothing is left of it on the node, and the next one gets the units
    monkeypatch.undo()
    await until(lambda: not agent.kubelet.claims.prepared)
    assert len(agent.on_kubernetes.allocated.free_ids(FIRST.uuid, ())) == 100


async def test_the_api_fails_for_a_moment_while_a_claim_is_made(
    agent: NodeAgent, hub: SharingHub, cluster: Cluster
) -> None:
    cluster.faults.fail_next("create", "resourceclaims", "500")
    # done, and the answer is lost: the second try finds it
    cluster.faults.fail_next("create", "resourceclaims", "lost")
    assert (await hub.start_server("ada", {"profile": "quarter-gpu"})).code == 201
    assert len(await claims_in(cluster)) == 1
