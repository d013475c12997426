"""Sessions of other sharing layers, as the service sees and stops them: no agent reports them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gpushare_spawner.model.control import AgentUnreachable, ControlRefused, ResizeRequest, TierRequest
from gpushare_spawner.model.kubernetes.annotations import LAYER, SessionAnnotations, gpu_names, pod_session
from gpushare_spawner.model.kubernetes.objects import REPORT_STALE_SECONDS
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.report import Report, SessionReport
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.actions.context import ActionContext
from gpushare_spawner.service.culler.culler import Culler
from gpushare_spawner.service.culler.decisions import CullerSettings
from gpushare_spawner.service.hub.client import Hub
from gpushare_spawner.service.kubernetes.cluster import Cluster
from tests.service.conftest import MINUTE, Clock, clock, hub, hub_server, templates  # noqa: F401
from tests.service.fake_hub import FakeHub

from ..service_namespace import HubNamespace, as_the_hub, has, make_namespace, seen
from ..standin.client import path
from ..standin.cluster import Cluster as StandInCluster


@pytest.fixture
async def namespace(cluster: StandInCluster, clock: Clock) -> HubNamespace:  # noqa: F811
    return await make_namespace(cluster, clock)


@pytest.fixture
async def nodes(namespace: HubNamespace) -> AsyncIterator[Cluster]:
    async with as_the_hub(namespace) as running:
        yield running


async def open_session(
    namespace: HubNamespace, user: str, node: str = "node-a", count: int = 1, phase: str = "Running"
) -> None:
    """A pod whose GPU KAI gives."""
    units = 25 if count == 1 else 100
    session = SessionAnnotations(
        session=user,
        template="quarter",
        share_units=units,
        gpus=gpu_names(LayerName.KAI, user, count),
        gpu_indices=tuple(range(count)),
        tier_since=namespace.now(),
        effective_units=units,
        layer=LayerName.KAI,
    )
    metadata = {"name": f"jupyter-{user}", "labels": session.labels(), "annotations": session.annotations()}
    spec: dict[str, Any] = {"containers": [{"name": "notebook", "image": "notebook"}]}
    if node:
        spec["nodeName"] = node
    else:
        spec["schedulerName"] = "kai-scheduler"
    await namespace.admin.create(namespace.at("pods"), {"metadata": metadata, "spec": spec})
    status = {"status": {"phase": phase}}
    await namespace.admin.patch(namespace.at("pods", f"jupyter-{user}", "status"), status)


async def test_a_session_without_an_agent_is_seen_with_its_layer(namespace: HubNamespace, nodes: Cluster) -> None:
    await open_session(namespace, "ann")
    await open_session(namespace, "bea", count=2)
    agent = await seen(nodes, "node-a", has("bea", confirmed=True, layer=LayerName.KAI))
    report = await agent.report()
    ann, bea = report.session("ann"), report.session("bea")
    assert ann is not None
    assert bea is not None
    assert (ann.share.units, ann.tier, ann.effective_units) == (25, Tier.ACTIVE, 25)
    assert (bea.share.count, bea.share.total_units) == (2, 200)
    assert report.gpus == ()


async def test_a_pod_that_its_scheduler_has_not_placed_is_no_session_yet(
    namespace: HubNamespace,
    nodes: Cluster,
    hub: Hub,  # noqa: F811
    templates: dict[str, Template],  # noqa: F811
    clock: Clock,  # noqa: F811
) -> None:
    await open_session(namespace, "ann", node="", phase="Pending")
    await open_session(namespace, "bea")
    await seen(nodes, "node-a", lambda report: [one.user for one in report.sessions] == ["bea"])
    assert [agent.node for agent in nodes] == ["node-a"]
    culler = Culler(ActionContext(nodes, hub, lambda: templates, clock=clock), CullerSettings(cull_every=1e-9))
    await culler.round()
    assert culler.counters.failures["agent"] == 0


async def test_sessions_of_two_layers_on_one_node_are_seen_together(namespace: HubNamespace, nodes: Cluster) -> None:
    await namespace.open("own")
    await namespace.publish()
    await open_session(namespace, "ann")
    agent = await seen(nodes, "node-a", has("ann", layer=LayerName.KAI, confirmed=True))
    report = await agent.report()
    assert {one.user: one.layer for one in report.sessions} == {"own": LayerName.NATIVE, "ann": LayerName.KAI}
    assert [gpu.uuid for gpu in report.gpus] == ["GPU-node-a"]


async def test_gpu_use_is_what_the_nodes_agent_reports_and_unknown_without_one(
    namespace: HubNamespace,
    nodes: Cluster,
    clock: Clock,  # noqa: F811
) -> None:
    await open_session(namespace, "ann")
    agent = await seen(nodes, "node-a", has("ann", confirmed=True))
    assert has("ann", gpu_use_known=False, gpu_busy=False)(await agent.report())
    said = {
        "id": "ann", "user": "ann", "template": "half", "gpus": ("kai/ann/0",), "layer": "kai", "share_units": 50,
        "tier_since": clock(), "opened_at": clock(), "effective_units": 50, "guaranteed_units": 50,
        "gpu_busy": True, "last_gpu_activity": clock(), "gpu_seconds": 7.0,
    }  # fmt: skip
    published = Report(node="node-a", published_at=clock(), gpus=(), sessions=(SessionReport.model_validate(said),))
    await namespace.write_report("node-a", published.model_dump_json())
    agent = await seen(nodes, "node-a", has("ann", gpu_busy=True, confirmed=True))
    ann = (await agent.report()).session("ann")
    assert ann is not None
    assert (ann.gpu_use_known, ann.gpu_seconds, ann.layer) == (True, 7.0, LayerName.KAI)
    assert (ann.template, ann.share_units, ann.guaranteed_units) == ("quarter", 25, 25), "the pod has the last word"
    # an agent that was there and is silent: nobody knows whether the GPU is busy
    clock.forward(REPORT_STALE_SECONDS + 1)
    with pytest.raises(AgentUnreachable, match="has published nothing since"):
        await agent.report()


async def test_tier_and_share_are_beyond_the_reach_of_the_layer(namespace: HubNamespace, nodes: Cluster) -> None:
    await open_session(namespace, "ann")
    agent = await seen(nodes, "node-a", has("ann", confirmed=True))
    with pytest.raises(ControlRefused, match=r"^KAI Scheduler provides this session's GPU and cannot change its share"):
        await agent.send(TierRequest(id="ann", tier=Tier.RELEASED, effective_units=0, reason="idle"))
    with pytest.raises(ControlRefused, match="You can stop the server"):
        await agent.send(ResizeRequest(id="ann", share_units=50, memory_limit=None, reason="more"))
    pod = await namespace.admin.get(path("pods", namespace.name, "jupyter-ann"))
    kept = pod_session(pod["metadata"]["annotations"], pod["metadata"]["labels"])
    assert (kept.tier, kept.share_units) == (Tier.ACTIVE, 25)


async def test_an_idle_server_is_neither_downgraded_nor_released_and_stopped_after_a_notice(
    namespace: HubNamespace,
    nodes: Cluster,
    hub_server: FakeHub,  # noqa: F811
    hub: Hub,  # noqa: F811
    templates: dict[str, Template],  # noqa: F811
    clock: Clock,  # noqa: F811
) -> None:
    # the API server's clock says when the pod was made
    opened = clock.now = time.time()
    hub_server.add("ann", last_activity=opened)
    await open_session(namespace, "ann")
    await seen(nodes, "node-a", has("ann", confirmed=True))
    culler = Culler(ActionContext(nodes, hub, lambda: templates, clock=clock), CullerSettings(cull_every=1e-9))
    told = []
    for minute in (10, 40, 50, 474, 476, 481):
        clock.now = opened + minute * MINUTE
        await culler.round()
        await asyncio.gather(*culler._under_way.values())
        pod = await namespace.admin.get(namespace.at("pods", "jupyter-ann"))
        said = pod_session(pod["metadata"]["annotations"], pod["metadata"]["labels"])
        assert said.tier is Tier.ACTIVE
        told.append(said.notice.tier if said.notice is not None else None)
        await seen(nodes, "node-a", has("ann", notice=said.notice))
    assert told == [None, None, None, None, Tier.STOPPED, Tier.STOPPED]
    assert hub_server.deleted == ["/users/ann/server"]
    assert culler.counters.actions == {Tier.STOPPED: 1}


async def test_a_pod_whose_label_is_wrong_is_left_out(
    namespace: HubNamespace, nodes: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    await open_session(namespace, "ann")
    await namespace.admin.patch(namespace.at("pods", "jupyter-ann"), {"metadata": {"labels": {LAYER: "magic"}}})
    await open_session(namespace, "bea")
    agent = await seen(nodes, "node-a", lambda report: [one.user for one in report.sessions] == ["bea"])
    assert agent.node == "node-a"
    assert "Pod jupyter-ann: ignored: the label gpushare-spawner.io/layer is 'magic'" in caplog.text
