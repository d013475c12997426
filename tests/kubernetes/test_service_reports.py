"""What the service believes of a cluster, and what it does not: clocks, other hubs, other services, failures."""

from __future__ import annotations

import asyncio
from unittest.mock import AsyncMock

import pytest
from kubernetes_asyncio.client import ApiClient
from kubernetes_asyncio.config import ConfigException

from gpushare_spawner.model.control import AgentUnreachable, NoticeRequest
from gpushare_spawner.model.kubernetes.annotations import (
    GPU,
    GPU_INDEX,
    HUB,
    NEIGHBOURS,
    SESSION,
    SHARE,
    TEMPLATE,
    TIER_SINCE,
)
from gpushare_spawner.model.report import Report
from gpushare_spawner.model.share import NeighbourRules, Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.actions.context import ActionContext
from gpushare_spawner.service.culler.culler import Culler
from gpushare_spawner.service.culler.decisions import CullerSettings
from gpushare_spawner.service.hub.client import Hub
from gpushare_spawner.service.kubernetes import cluster
from gpushare_spawner.service.kubernetes.cluster import Cluster
from gpushare_spawner.service.kubernetes.pod_sessions import SessionPod, joined_report, trimmed
from gpushare_spawner.service.units import gpu_bar, units_of
from tests.kubernetes.service_namespace import HubNamespace, as_the_hub, eventually, has, make_namespace, seen
from tests.kubernetes.standin.cluster import Cluster as StandInCluster
from tests.service.conftest import MINUTE, Clock, clock, hub, hub_server, templates  # noqa: F401

OURS, THEIRS = "http://hub:8081/hub/api", "http://other-hub:8081/hub/api"


@pytest.fixture
async def namespace(cluster: StandInCluster, clock: Clock) -> HubNamespace:  # noqa: F811
    return await make_namespace(cluster, clock)


async def test_an_agent_that_is_gone_is_not_believed_because_this_clock_is_behind(
    namespace: HubNamespace,
    clock: Clock,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await namespace.open("ann")
    clock.forward(3600)
    await namespace.publish()
    clock.forward(-3600)
    async with as_the_hub(namespace) as nodes:
        agent = await seen(nodes, "node-a", has("ann", confirmed=True))
        monkeypatch.setattr(cluster, "REPORT_STALE_SECONDS", 0.2)
        await asyncio.sleep(0.3)
        with pytest.raises(AgentUnreachable, match="has published nothing since"):
            await agent.report()


async def test_pods_of_another_hub_are_left_alone(namespace: HubNamespace, clock: Clock) -> None:  # noqa: F811
    """Two hubs in a namespace, or two with a namespace for each user, may both have a user of that name."""
    for user, hub_of_user in (("ann", OURS), ("bob", THEIRS), ("eve", None)):
        await namespace.open(user)
        await namespace.annotate(user, {HUB: hub_of_user})
    await namespace.open("zoe", node="node-of-theirs")
    await namespace.annotate("zoe", {HUB: THEIRS})
    await namespace.publish()
    async with namespace.cluster.api_client(namespace.token) as client:
        nodes = Cluster(client, namespace.name, clock=clock, hub=OURS)
        await nodes.start(10)
        try:
            agent = await seen(nodes, "node-a", has("ann", confirmed=True))
            report = await agent.report()
            assert {session.id: session.confirmed for session in report.sessions} == {"ann": True, "eve": True}
            (bob,) = report.others
            assert (bob.user, bob.share_units, report.unconfirmed) == ("", 25, ()), "bob's units are not free"
            assert [units_of(gpu_bar(gpu, report.allocated_to), "free") for gpu in report.gpus] == [25]
            # a node with nobody of ours on it, and no report for us, is not one that fails to answer
            assert [node.node for node in nodes] == ["node-a"]
        finally:
            await nodes.close()


async def test_two_services_at_once_take_each_step_once(
    namespace: HubNamespace,
    hub: Hub,  # noqa: F811
    templates: dict[str, Template],  # noqa: F811
    clock: Clock,  # noqa: F811
) -> None:
    """As while a hub's pod is replaced: of two patches on the same version of a pod the API server takes one."""
    await namespace.open("ann")
    opened = clock()
    async with as_the_hub(namespace) as first, as_the_hub(namespace) as second:
        cullers = [
            Culler(ActionContext(nodes, hub, lambda: templates, clock=clock), CullerSettings(cull_every=1e-9))
            for nodes in (first, second)
        ]
        for minute in (10, 15, 40, 45):
            clock.now = opened + minute * MINUTE
            await namespace.publish(ann={"gpu_seconds": float(minute)})
            said = await namespace.session("ann")
            up_to_date = has("ann", gpu_seconds=float(minute), tier=said.tier, notice=said.notice)
            await asyncio.gather(*(seen(nodes, "node-a", up_to_date) for nodes in (first, second)))
            await asyncio.gather(*(culler.round() for culler in cullers))
        assert (await namespace.session("ann")).tier is Tier.RELEASED
    for counted in ("actions", "notices"):
        for tier in (Tier.DOWNGRADED, Tier.RELEASED):
            assert sum(getattr(culler.counters, counted)[tier] for culler in cullers) == 1, (counted, tier)
    assert not sum(culler.counters.failures["agent"] for culler in cullers)


def test_of_a_pod_is_kept_what_is_looked_at() -> None:
    annotations = {
        **{SESSION: "ann", TEMPLATE: "quarter", SHARE: "25", GPU: "GPU-1"},
        **{GPU_INDEX: "0", TIER_SINCE: "1.000", "example.org/long": "x" * 1000},
        NEIGHBOURS: '{"labels": ["exam"], "alone": true}',
    }
    metadata = {
        "namespace": "jhub", "name": "jupyter-ann", "resourceVersion": "7", "uid": "u", "annotations": annotations,
        "creationTimestamp": "2026-01-01T00:00:00Z", "managedFields": [{"manager": "hub"}], "labels": {"a": "b"},
    }  # fmt: skip
    spec = {"nodeName": "node-a", "containers": [{"name": "notebook", "image": "i", "env": [{"name": "A"}]}]}
    pod = {"metadata": metadata, "spec": spec, "status": {"phase": "Running", "conditions": [{}]}}
    less = trimmed(pod)
    assert SessionPod.of(less) == SessionPod.of(pod)
    (joined,) = joined_report(Report(node="node-a", published_at=0.0, gpus=()), [SessionPod.of(less)]).sessions
    assert joined.neighbours == NeighbourRules(labels=("exam",), alone=True)
    assert "example.org/long" not in str(less)
    assert less["spec"]["containers"] == [], "containers without requests or limits tell nothing"
    assert "managedFields" not in str(less)
    going = {**pod, "metadata": {**metadata, "deletionTimestamp": "2026-01-01T00:00:00Z"}}
    assert not SessionPod.of(trimmed(going)).runs


@pytest.mark.parametrize("problem", [ConfigException("Token file exists but empty."), RuntimeError("what is this")])
async def test_no_failure_ends_a_watch_for_good(
    namespace: HubNamespace,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    problem: RuntimeError | ConfigException,
) -> None:
    """The kubelet replaces the token's file now and then; a call that finds none is tried again, like any other."""
    await namespace.open("ann")
    await namespace.publish()
    async with as_the_hub(namespace) as nodes:
        agent = await seen(nodes, "node-a", has("ann", confirmed=True))
        broken = AsyncMock(side_effect=problem)
        with monkeypatch.context() as patch:
            patch.setattr(ApiClient, "update_params_for_auth", broken)
            with pytest.raises(AgentUnreachable if isinstance(problem, ConfigException) else RuntimeError):
                await agent.send(NoticeRequest(id="ann", tier=None))

            def both_have_failed() -> bool:
                namespace.cluster.faults.cut_watches()  # again and again: one may only just be beginning
                return bool(nodes._pods.problem and nodes._maps.problem)

            await eventually(both_have_failed)
            assert str(problem) in nodes._pods.problem
        await namespace.publish(ann={"kernels_busy": 1})
        await seen(nodes, "node-a", has("ann", kernels_busy=1))
        await eventually(lambda: nodes._pods.problem == nodes._maps.problem == "")
    assert sum("the pods of the namespace" in record.message for record in caplog.records) == 1
