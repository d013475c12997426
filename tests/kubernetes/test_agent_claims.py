"""The agent as a DRA driver: its slice, claims that are prepared, lent units, restarts of agent and kubelet."""

from __future__ import annotations

import asyncio
import errno
import itertools
import stat
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpushare_spawner.agent.gpus.nvml import GpuState
from gpushare_spawner.agent.kubernetes.claims import probe as probing
from gpushare_spawner.agent.kubernetes.claims.probe import ClaimsUnavailable, probe
from gpushare_spawner.agent.kubernetes.claims.slices import OfferedGpu, PublishedSlice
from gpushare_spawner.agent.kubernetes.devices import owners
from gpushare_spawner.clients.api import ClusterApi, KubeconfigConnection
from gpushare_spawner.doctor import cluster as doctor_cluster
from gpushare_spawner.doctor.cluster import ClaimFacts
from gpushare_spawner.model.controls import Cordon
from gpushare_spawner.model.kubernetes.annotations import ShareChange, resize_patch
from gpushare_spawner.model.kubernetes.objects import (
    DEVICE_CLASS,
    DRIVER,
    claim_folder,
    cordon_annotations,
    report_name,
    slice_name,
)
from gpushare_spawner.model.report import Report
from gpushare_spawner.model.share import Share, Tier
from tests.agent.conftest import short_folder  # noqa: F401
from tests.agent.peers import FIRST, SECOND

from .agent_account import AGENT_RULES, agent_token
from .claims import claim_of, claiming_pod, make_class, published_slice, units_of
from .node_agent import LIBRARY, NodeAgent
from .standin.claim_allocator import CANNOT, GROUP
from .standin.client import ApiStatus, path
from .standin.cluster import Cluster

GATES = "the feature gates of a real cluster stay as they are"


@pytest.fixture
async def agent(cluster: Cluster, short_folder: Path) -> AsyncIterator[NodeAgent]:  # noqa: F811
    await make_class(cluster)
    kubelet = await cluster.make_node(driver_grace=0.3, prepare_retry=0.1)
    agent = NodeAgent(cluster, kubelet, await agent_token(cluster, kubelet.name, claims=True), short_folder)
    agent.by_claims()
    await agent.start()
    await published(agent, lambda item: units_of(item) == 100)
    yield agent
    await agent.stop()


async def published(agent: NodeAgent, holds: Callable[[Any], bool]) -> Any:
    """The node's slice once it is as wanted."""
    return await published_slice(agent.cluster, agent.kubelet.name, holds)


async def running(agent: NodeAgent, name: str, **changes: Any) -> None:
    await claiming_pod(agent, name, **changes)
    await agent.cluster.wait_for_phase(name, "Running")
    await agent.session(name)


async def said_of(agent: NodeAgent, pod: str) -> str:
    """Why a pod's claims are not prepared, by its event."""
    end = asyncio.get_running_loop().time() + 10
    while True:
        said = [text for reason, text in await agent.cluster.events(pod) if "Prepare" in reason]
        # a kubelet can ask before it has seen the driver's socket
        if said := [text for text in said if "is not registered" not in text]:
            return said[0]
        assert asyncio.get_running_loop().time() < end
        await asyncio.sleep(0.05)


async def test_each_gpu_is_a_device_with_consumable_units_and_memory(agent: NodeAgent) -> None:
    item = await published(agent, lambda item: item is not None)
    assert item["spec"]["driver"] == DRIVER
    assert item["spec"]["nodeName"] == agent.kubelet.name
    devices = {device["attributes"]["uuid"]["string"]: device for device in item["spec"]["devices"]}
    assert devices.keys() == {FIRST.uuid, SECOND.uuid}
    capacity = devices[FIRST.uuid]["capacity"]
    assert devices[FIRST.uuid]["allowMultipleAllocations"]
    assert capacity["units"]["requestPolicy"] == {"default": "1", "validRange": {"min": "1", "step": "1"}}
    assert (capacity["memory"]["value"], capacity["memory"]["requestPolicy"]["default"]) == ("16Gi", "1Mi")


async def test_a_claim_becomes_a_session_with_a_socket_in_the_folder_of_its_name(agent: NodeAgent) -> None:
    await running(agent, "ada")
    session = await agent.session("ada")
    assert (session.gpus, session.share_units) == ((FIRST.uuid,), 25)
    folder = agent.folder / "pods" / claim_folder(agent.cluster.namespace, "ada-claim")
    report = agent.on_kubernetes.report()
    assert report.claims is not None
    assert report.claims.folder == str(folder.parent)
    assert stat.S_ISSOCK((folder / report.claims.socket).stat().st_mode)
    assert report.claims.environment["LD_PRELOAD"] == str(LIBRARY)
    assert [mount.host_path for mount in report.claims.mounts] == [str(LIBRARY)]
    # nothing that the hub's older versions read is another
    assert Report.model_validate_json(report.model_dump_json()) == report
    await agent.until(lambda: "HEALTHY" in agent.kubelet.claims.health[DRIVER].values())


async def test_a_claim_that_is_prepared_again_keeps_what_its_session_has(agent: NodeAgent) -> None:
    await running(agent, "ada")
    session, held = agent.node.sessions["ada"], agent.held("ada")
    pod = agent.kubelet.worker(agent.cluster.namespace, "ada").pod
    agent.kubelet.claims.prepared.clear()
    await agent.kubelet.claims.prepare(pod)
    assert [what for what, _ in agent.kubelet.claims.calls] == ["prepare", "prepare"]
    assert agent.node.sessions["ada"] is session
    assert agent.held("ada") == held
    assert session.socket is not None
    assert stat.S_ISSOCK(Path(session.socket.path).stat().st_mode)


async def test_pods_that_come_at_once_fill_the_gpu_exactly(agent: NodeAgent) -> None:
    names = [f"user-{number}" for number in range(6)]
    await asyncio.gather(*(claiming_pod(agent, name) for name in names))
    await agent.until(lambda: len(agent.node.sessions) == 4)
    await asyncio.sleep(0.3)
    assert len(agent.node.sessions) == 4
    pods = {pod["metadata"]["name"]: pod for pod in await agent.cluster.pods()}
    waiting = [name for name in names if not pods[name]["spec"].get("nodeName")]
    assert len(waiting) == 2
    assert CANNOT in pods[waiting[0]]["status"]["conditions"][-1]["message"]
    # one ends: its claim goes with it, and one of those that wait comes
    gone = next(iter(agent.node.sessions))
    await agent.delete(gone)
    await agent.until(lambda: gone not in agent.node.sessions and len(agent.node.sessions) == 4)
    assert await claim_of(agent, gone) is None
    await published(agent, lambda item: units_of(item) == 100)


async def test_a_pod_that_is_gone_before_its_claim_is_unprepared_is_counted_once(agent: NodeAgent) -> None:
    """As after a pod was deleted by force: to the scheduler its units are free, and its containers may still run."""
    unprepare, goes_on = agent.kubelet.claims.unprepare, asyncio.Event()

    async def late(uid: str) -> None:
        await goes_on.wait()
        await unprepare(uid)

    agent.kubelet.claims.unprepare = late  # type: ignore[method-assign]
    for name in ("ada", "ben"):
        await running(agent, name, share=50)
    await agent.delete("ada")
    for name in ("cem", "dan"):
        await claiming_pod(agent, name, share=50)
    await agent.until(lambda: "ada" not in agent.node.sessions)
    await asyncio.sleep(0.3)
    await published(agent, lambda item: units_of(item) == 100)
    bound = [pod["metadata"]["name"] for pod in await agent.cluster.pods() if pod["spec"].get("nodeName")]
    assert sorted(bound) == ["ben", "cem"]
    assert sorted(agent.node.sessions) == ["ben"]
    goes_on.set()
    await agent.until(lambda: sorted(agent.node.sessions) == ["ben", "cem"])


async def test_a_claim_that_the_kubelet_has_forgotten_is_free_once_the_api_has_forgotten_it(
    agent: NodeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    await running(agent, "ada", share=100)
    await agent.stop()
    monkeypatch.setattr("gpushare_spawner.agent.kubernetes.claims.claim_driver.FORGOTTEN_EVERY", 0.3)
    monkeypatch.setattr("gpushare_spawner.agent.kubernetes.pods.sessions.STRANGER_AFTER", 0.1)
    await agent.start()
    await asyncio.sleep(0.7)
    assert "ada" in agent.node.sessions
    agent.kubelet.claims.prepared.clear()
    await agent.delete("ada")
    # until then it is a session without a pod
    await agent.until(lambda: "ada" not in agent.node.sessions)
    await claiming_pod(agent, "ben", share=100)
    await agent.cluster.wait_for_phase("ben", "Running")
    await agent.until(lambda: sorted(agent.node.sessions) == ["ben"])


async def test_lent_units_raise_the_capacity_and_a_waiting_pod_comes(agent: NodeAgent) -> None:
    for name in ("ada", "ben"):
        await running(agent, name, share=50)
    await claiming_pod(agent, "cem", share=50)
    await asyncio.sleep(0.2)
    assert "cem" not in agent.node.sessions
    registry = agent.node.registry
    registry.tiers.change_tier(agent.node.sessions["ada"], Tier.RELEASED, 0, "idle")
    await published(agent, lambda item: units_of(item) == 150)
    await agent.cluster.wait_for_phase("cem", "Running")
    await agent.session("cem")
    # the owner is back: more is claimed than there is. The pods run on, and nothing new comes
    registry.tiers.work_begins(agent.node.sessions["ada"])
    await published(agent, lambda item: units_of(item) == 100)
    await claiming_pod(agent, "dan", share=50)
    await agent.delete("ben")
    await asyncio.sleep(0.2)
    assert sorted(agent.node.sessions) == ["ada", "cem"]
    await agent.delete("cem")
    await agent.until(lambda: sorted(agent.node.sessions) == ["ada", "dan"])


async def test_a_claim_on_units_that_were_taken_back_waits_until_they_are_free(agent: NodeAgent) -> None:
    for name in ("ada", "ben"):
        await running(agent, name, share=50)
    agent.node.registry.tiers.change_tier(agent.node.sessions["ada"], Tier.RELEASED, 0, "idle")
    await published(agent, lambda item: units_of(item) == 150)
    # the owner works again after the scheduler has bound the pod and before its claim is prepared
    prepare = agent.kubelet.claims.prepare
    ada = agent.node.sessions["ada"]

    async def late(pod: dict[str, Any]) -> None:
        if pod["metadata"]["name"] == "cem":
            agent.node.registry.tiers.work_begins(ada)
        await prepare(pod)

    agent.kubelet.claims.prepare = late  # type: ignore[method-assign]
    await claiming_pod(agent, "cem", share=50)
    assert "gpushare: GPU 0 has 0 free units and claim" in await said_of(agent, "cem")
    await agent.delete("ben")
    await agent.cluster.wait_for_phase("cem", "Running")


async def test_a_claim_of_one_gpu_and_half_of_another_holds_so_much_of_each(agent: NodeAgent) -> None:
    await claiming_pod(agent, "ada", gpus=(FIRST, SECOND), share=100, last_units=50)
    assert (await agent.session("ada")).share == Share(100, 2, 50)
    assert {uuid: len(ids) for uuid, ids in agent.held("ada").items()} == {FIRST.uuid: 100, SECOND.uuid: 50}
    await claiming_pod(agent, "ben", gpus=(SECOND,), share=50)
    assert (await agent.session("ben")).share == Share(50)


async def test_a_claim_of_two_gpus_of_which_one_cannot_be_granted_holds_nothing(
    agent: NodeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full between the two folders. The kubelet tries again until it is not."""
    made = itertools.count()
    make_fresh = owners.make_fresh

    def make_every_second(folder: Path) -> None:
        if next(made) % 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        make_fresh(folder)

    with monkeypatch.context() as full:
        full.setattr(owners, "make_fresh", make_every_second)
        await claiming_pod(agent, "ada", gpus=(FIRST, SECOND))
        said = await said_of(agent, "ada")
        assert "the folder of the session's socket cannot be created: [Errno 28] No space left on device" in said
        assert not agent.on_kubernetes.allocated.pending
        assert not list((agent.folder / "pods").iterdir())
    await agent.session("ada")
    assert {uuid: len(ids) for uuid, ids in agent.held("ada").items()} == {FIRST.uuid: 25, SECOND.uuid: 25}


async def test_a_share_that_is_changed_changes_what_others_can_have(agent: NodeAgent) -> None:
    """The claim cannot be changed; what it is counted for by the agent is, as with devices."""
    await running(agent, "ada")
    change = ShareChange(number=1, share_units=50)
    await agent.annotate("ada", dict(resize_patch(change)))
    await agent.until(lambda: agent.node.sessions["ada"].record.request.share_units == 50)
    # 25 are the claim's, 50 are free
    await published(agent, lambda item: units_of(item) == 75)


async def test_cpu_and_memory_of_a_server_with_a_claim_are_resized_in_place(agent: NodeAgent) -> None:
    """Kubernetes refuses it for a container that names a claim, so only the pod does."""
    await running(agent, "ada", cpu="200m")
    held = agent.held("ada")
    await resize(agent, "ada", "100m")
    await agent.cluster.wait_for_pod("ada", lambda pod: requested(pod) == "100m")
    assert agent.held("ada") == held
    named = await agent.cluster.pod("ada")
    assert named is not None
    spec = named["spec"]
    claim = {"name": spec["resourceClaims"][0]["name"]}
    # without its mounts: an API server has mounted the token of the pod's service account, a volume of that pod alone
    container = {
        **spec["containers"][0], "resources": {"requests": {"cpu": "200m"}, "claims": [claim]}, "volumeMounts": []
    }  # fmt: skip
    metadata = {"name": "other"}
    other = {"metadata": metadata, "spec": {"containers": [container], "resourceClaims": spec["resourceClaims"]}}
    await agent.cluster.admin.create(path("pods", agent.cluster.namespace), other)
    with pytest.raises(ApiStatus, match="only cpu and memory resources are mutable"):
        await resize(agent, "other", "100m")


async def resize(agent: NodeAgent, name: str, cpu: str) -> None:
    pod = await agent.cluster.pod(name)
    assert pod is not None
    (container,) = pod["spec"]["containers"]
    resources = {**container.get("resources", {}), "requests": {"cpu": cpu}}
    patch = {"spec": {"containers": [{**container, "resources": resources}]}}
    await agent.cluster.admin.patch(path("pods", agent.cluster.namespace, name, "resize"), patch)


def requested(pod: dict[str, Any]) -> str | None:
    found: str | None = pod["spec"]["containers"][0]["resources"].get("requests", {}).get("cpu")
    return found


async def test_a_server_that_has_ended_holds_nothing_though_its_pod_is_still_there(agent: NodeAgent) -> None:
    await running(agent, "ada", share=100, command=["sleep", "1"])
    await agent.cluster.wait_for_phase("ada", "Succeeded")
    await agent.until(lambda: "ada" not in agent.node.sessions)
    assert await claim_of(agent, "ada") is None
    await running(agent, "ben", share=100)


async def test_a_slice_that_is_deleted_is_written_again(agent: NodeAgent) -> None:
    await running(agent, "ada")
    name = slice_name(agent.kubelet.name)
    await agent.cluster.admin.delete(path("resourceslices", name=name, group=GROUP))
    await published(agent, lambda item: units_of(item) == 100)
    # the kubelet deletes it when it starts, and connects again by itself
    await agent.kubelet.restart(down=0.1)
    await published(agent, lambda item: units_of(item) == 100)
    await running(agent, "ben")
    assert sorted(agent.node.sessions) == ["ada", "ben"]


async def test_an_agent_that_is_back_knows_its_claims(agent: NodeAgent) -> None:
    await running(agent, "ada")
    await running(agent, "ben", gpus=(FIRST, SECOND))
    held = agent.held("ada"), agent.held("ben")
    await agent.stop()
    await published(agent, lambda item: item is None)
    await agent.delete("ben")
    agent = await agent.start()
    await published(agent, lambda item: units_of(item) == 100)
    assert agent.held("ada") == held[0]
    # what ended meanwhile is unprepared now
    await agent.until(lambda: "ben" not in agent.node.sessions)
    await agent.until(
        lambda: not any("ben" in claim["name"] for claims in agent.kubelet.claims.prepared.values() for claim in claims)
    )
    folders = {path.name for path in (agent.folder / "pods").iterdir()}
    assert folders == {claim_folder(agent.cluster.namespace, "ada-claim")}


@pytest.mark.parametrize("taints", [True, False])
async def test_an_unhealthy_or_cordoned_gpu_gets_no_new_session(agent: NodeAgent, taints: bool) -> None:
    await agent.stop()
    if not taints:
        agent.cluster.standin(GATES).gates = {"DRAConsumableCapacity"}
    agent.by_claims(taints)
    settings = replace(agent.cluster_settings.publish, refresh_every=0.2)
    agent.cluster_settings = replace(agent.cluster_settings, publish=settings)
    await agent.start()

    def kept_away(item: Any, why: str) -> bool:
        if not taints:
            return units_of(item) is None and units_of(item, SECOND.uuid) == 100
        marks = [device["taints"][0]["value"] for device in item["spec"]["devices"] if device.get("taints")]
        return marks == [why]

    agent.source.states[FIRST.uuid] = GpuState(healthy=False, trouble="fell off the bus")
    await published(agent, lambda item: item is not None and kept_away(item, "unhealthy"))
    agent.source.states.clear()
    cordon = Cordon(gpu=FIRST.uuid, by="root", reason="repair", since=1.0)
    report = path("configmaps", agent.cluster.namespace, report_name(agent.kubelet.name))
    annotations: dict[str, str | None] = dict(cordon_annotations([cordon]))
    await agent.cluster.admin.patch(report, {"metadata": {"annotations": annotations}})
    await published(agent, lambda item: item is not None and kept_away(item, "cordoned"))
    await agent.cluster.admin.patch(report, {"metadata": {"annotations": dict.fromkeys(annotations)}})
    await published(agent, lambda item: units_of(item) == 100 and "taints" not in item["spec"]["devices"][0])


class TestProbe:
    """What an agent says that cannot be a DRA driver."""

    @pytest.fixture
    async def api(self, cluster: Cluster) -> AsyncIterator[ClusterApi]:
        await make_class(cluster)
        kubelet = await cluster.make_node(name="node-a")
        token = await agent_token(cluster, kubelet.name, claims=True)
        api = ClusterApi(KubeconfigConnection(cluster.api_client(token)))
        yield api
        await api.close()

    async def asked(self, api: ClusterApi, cluster: Cluster) -> str:
        with pytest.raises(ClaimsUnavailable) as refusal:
            await probe(api, "node-a", cluster.namespace)
        if cluster.server is None or cluster.server.gates:
            assert not await cluster.admin.list(path("resourceslices", group=GROUP))
        return str(refusal.value)

    async def test_a_cluster_that_has_all_of_it(self, api: ClusterApi, cluster: Cluster) -> None:
        assert await probe(api, "node-a", cluster.namespace)
        # nothing was made
        assert not await cluster.admin.list(path("resourceslices", group=GROUP))

    async def test_no_api(self, api: ClusterApi, cluster: Cluster) -> None:
        cluster.standin(GATES).gates = None
        assert "no resource.k8s.io/v1 (Kubernetes 1.34 and later have it)" in await self.asked(api, cluster)

    async def test_no_consumable_capacity(self, api: ClusterApi, cluster: Cluster) -> None:
        cluster.standin(GATES).gates = {"DRADeviceTaints"}
        said = await self.asked(api, cluster)
        assert "drops allowMultipleAllocations, requestPolicy from ResourceSlices" in said
        assert "DRAConsumableCapacity is off" in said

    async def test_the_doctor_says_the_same(self, api: ClusterApi, cluster: Cluster) -> None:
        facts = await doctor_cluster.ask_cluster(api, "node-a", cluster.namespace, ClaimFacts())
        assert (facts.refused, facts.taints, facts.no_answer) == ("", True, "")
        assert facts.server.startswith("v1.")
        cluster.standin(GATES).gates = {"DRADeviceTaints"}
        facts = await doctor_cluster.ask_cluster(api, "node-a", cluster.namespace, ClaimFacts())
        assert "DRAConsumableCapacity is off" in facts.refused
        cluster.faults.fail_next("list", "resourceslices", times=2)
        facts = await doctor_cluster.ask_cluster(api, "node-a", cluster.namespace, ClaimFacts())
        assert facts.no_answer
        # nothing was made
        cluster.faults.clear()
        assert not await cluster.admin.list(path("resourceslices", group=GROUP))

    async def test_no_taints(self, api: ClusterApi, cluster: Cluster) -> None:
        cluster.standin(GATES).gates = {"DRAConsumableCapacity"}
        assert not await probe(api, "node-a", cluster.namespace)

    async def test_no_class(self, api: ClusterApi, cluster: Cluster) -> None:
        await cluster.admin.delete(path("deviceclasses", name=DEVICE_CLASS, group=GROUP))
        assert "there is no DeviceClass gpushare-spawner.io" in await self.asked(api, cluster)

    async def test_no_rights(self, api: ClusterApi, cluster: Cluster) -> None:
        token = await cluster.service_account("poor", AGENT_RULES)
        poor = ClusterApi(KubeconfigConnection(cluster.api_client(token)))
        try:
            said = await self.asked(poor, cluster)
        finally:
            await poor.close()
        assert "the agent's service account may not list resourceslices" in said

    async def test_a_server_that_does_not_answer_is_waited_for(
        self, api: ClusterApi, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(probing, "PAUSE", 0.05)
        cluster.faults.fail_next("list", "resourceslices", times=2)
        assert await probe(api, "node-a", cluster.namespace)

    async def test_an_agent_goes_on_without_an_answer_and_makes_no_slice_that_is_not_kept_whole(
        self, api: ClusterApi, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(probing, "PAUSE", 0.02)
        monkeypatch.setattr(probing, "PATIENCE", 0.1)
        cluster.faults.fail_next("list", "resourceslices", times=100)
        assert not await probe(api, "node-a", cluster.namespace)
        cluster.faults.clear()
        cluster.standin(GATES).gates = set()
        published = PublishedSlice(api, "node-a", lambda: [OfferedGpu(FIRST, 100)], 1, taints=False)
        published.start()
        while "drops allowMultipleAllocations" not in caplog.text:
            await asyncio.sleep(0.02)
        assert not await cluster.admin.list(path("resourceslices", group=GROUP))
        # the gate comes on
        cluster.standin(GATES).gates = {"DRAConsumableCapacity"}
        await published_slice(cluster, "node-a", lambda item: units_of(item) == 100)
        await published.close()
