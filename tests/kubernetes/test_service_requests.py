"""The requests of a released session's pod are lowered and restored, as the hub's service account may do it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType
from typing import Any

import pytest

from gpushare_spawner.model.kubernetes.annotations import tier_patch
from gpushare_spawner.model.kubernetes.container_requests import REQUESTS, Requests
from gpushare_spawner.model.kubernetes.objects import REPORT_STALE_SECONDS
from gpushare_spawner.model.report import HostUseReport
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.service.kubernetes.cluster import Cluster
from gpushare_spawner.service.kubernetes.pod_sessions import SessionPod
from gpushare_spawner.service.kubernetes.released_requests import ReleasedRequests
from tests.kubernetes.service_namespace import (
    HUB_RULES,
    HubNamespace,
    as_the_hub,
    eventually,
    has,
    make_namespace,
    seen,
)
from tests.kubernetes.standin.client import path
from tests.kubernetes.standin.cluster import Cluster as StandInCluster
from tests.service.conftest import (
    Clock,
    clock,  # noqa: F401
)

GIB = 2**30
RESOURCES = {"cpu": {"guarantee": 1, "limit": 4}, "memory": {"guarantee": "4Gi", "limit": "16Gi"}}
QUARTER = Template.model_validate(
    {
        "name": "quarter",
        "display_name": "0.25 GPU",
        "gpu": {"fraction": 0.25},
        "resources": RESOURCES,
        "idle": {"release_after": "45m", "release_resources": {"cpu": "100m", "memory": "1Gi"}},
    }
)
FULL = Requests(1000, 4 * GIB)
LOW = Requests(100, GIB)
RIGHTS = [*HUB_RULES, {"apiGroups": [""], "resources": ["pods/resize"], "verbs": ["patch"]}]
IDLE = HostUseReport(cpu_millicores=0, memory_bytes=0)


class Releases:
    """A namespace in which requests of released sessions are lowered; `look` is called by hand."""

    def __init__(self, namespace: HubNamespace, seen: Cluster) -> None:
        self.namespace = namespace
        self.seen = seen
        self.templates = {"quarter": QUARTER}
        self.now = 0.0
        self.requests = ReleasedRequests(seen, lambda: self.templates, clock=lambda: self.now)

    async def open(self, limits: Mapping[str, str] = MappingProxyType({"cpu": "4", "memory": "16Gi"})) -> None:
        """ann's pod, with a share, which requests `FULL`."""
        await self.make({"requests": FULL.written(), "limits": dict(limits)})
        await self.granted(FULL)
        await self.namespace.publish()

    async def make(self, resources: dict[str, dict[str, str]]) -> None:
        """ann's pod, with a share and these requests and limits."""
        share = {"gpushare-spawner.io/gpu-0": "25"}
        sides = {side: {**resources.get(side, {}), **share} for side in ("requests", "limits")}
        await self.namespace.open("ann", containers=[{"name": "notebook", "image": "notebook", "resources": sides}])

    async def resize(self, requests: Requests) -> None:
        """Somebody else does."""
        body = {"spec": {"containers": [{"name": "notebook", "resources": {"requests": requests.written()}}]}}
        await self.namespace.admin.patch(self.namespace.at("pods", "jupyter-ann", "resize"), body, "strategic")

    async def granted(self, requests: Requests) -> None:
        """The node's word."""
        state = {"name": "notebook", "image": "notebook", "imageID": "", "ready": True, "restartCount": 0}
        status = {"containerStatuses": [{**state, "resources": {"requests": requests.written()}}]}
        await self.namespace.admin.patch(self.namespace.at("pods", "jupyter-ann", "status"), {"status": status})

    async def tier(self, tier: Tier, use: HostUseReport | None = IDLE) -> None:
        """The service releases, or the agent restores, and the agent reports it."""
        units = 0 if tier is Tier.RELEASED else 25
        await self.namespace.annotate("ann", tier_patch(tier, self.namespace.now(), units))
        await self.namespace.publish(
            ann={"tier": tier, "effective_units": units, "host_use": use if tier is Tier.RELEASED else None}
        )
        await seen(self.seen, "node-a", has("ann", tier=tier, host_use=use if tier is Tier.RELEASED else None))

    async def pod(self) -> dict[str, Any]:
        pod: dict[str, Any] = await self.namespace.admin.get(self.namespace.at("pods", "jupyter-ann"))
        return pod

    async def asked(self) -> Requests | None:
        """What the pod requests of CPU and memory now."""
        return Requests.of((await self.pod())["spec"]["containers"][0]["resources"]["requests"])

    async def poll(self) -> None:
        """One look at what the API server has now."""
        version = (await self.pod())["metadata"]["resourceVersion"]
        await eventually(lambda: any(pod.version == version for pod in self.seen.all_pods()))
        await self.requests.poll()


@pytest.fixture
async def namespace(cluster: StandInCluster, clock: Clock) -> HubNamespace:  # noqa: F811
    await cluster.require_resize()
    namespace = await make_namespace(cluster, clock)
    await namespace.rights(RIGHTS)
    return namespace


@pytest.fixture
async def releases(namespace: HubNamespace) -> AsyncIterator[Releases]:
    async with as_the_hub(namespace) as running:
        yield Releases(namespace, running)


async def test_requests_go_down_with_the_release_and_up_with_the_return(releases: Releases) -> None:
    await releases.open()
    await releases.poll()
    assert await releases.asked() == FULL
    await releases.tier(Tier.RELEASED)
    await releases.poll()
    assert await releases.asked() == LOW
    limits = (await releases.pod())["spec"]["containers"][0]["resources"]["limits"]
    assert (limits["cpu"], limits["memory"]) == ("4", "16Gi")
    await releases.granted(LOW)
    before = (await releases.pod())["metadata"]["resourceVersion"]
    await releases.poll()
    assert (await releases.pod())["metadata"]["resourceVersion"] == before, "nothing is left to do"

    await releases.tier(Tier.ACTIVE, None)
    await releases.poll()
    assert await releases.asked() == FULL
    await seen(releases.seen, "node-a", has("ann", lacks_requests=True))
    await releases.poll()
    assert REQUESTS in (await releases.pod())["metadata"]["annotations"], "the node is full"
    await releases.granted(FULL)
    await seen(releases.seen, "node-a", has("ann", lacks_requests=False))
    await releases.poll()
    assert REQUESTS not in (await releases.pod())["metadata"]["annotations"]


async def test_never_below_what_the_pod_uses(releases: Releases) -> None:
    await releases.open()
    await releases.tier(Tier.RELEASED, HostUseReport(cpu_millicores=250, memory_bytes=2 * GIB))
    await releases.poll()
    assert await releases.asked() == Requests(250, 2 * GIB)
    await releases.tier(Tier.RELEASED, HostUseReport(cpu_millicores=50, memory_bytes=3 * GIB))
    await releases.poll()
    assert await releases.asked() == Requests(250, 3 * GIB)


async def test_not_while_the_agent_is_unavailable_or_says_no_use(releases: Releases, clock: Clock) -> None:  # noqa: F811
    await releases.open()
    await releases.tier(Tier.RELEASED, None)
    await releases.poll()
    assert await releases.asked() == FULL
    await releases.tier(Tier.RELEASED)
    clock.forward(REPORT_STALE_SECONDS + 1)
    await releases.poll()
    assert await releases.asked() == FULL


async def test_not_where_kubernetes_would_refuse_it(releases: Releases) -> None:
    """Guaranteed: the admin's settings beside the template make it so."""
    await releases.open(limits=FULL.written())
    await releases.tier(Tier.RELEASED)
    await releases.poll()
    assert await releases.asked() == FULL
    assert REQUESTS not in (await releases.pod())["metadata"]["annotations"]


async def test_not_where_the_template_does_not_say_so(releases: Releases) -> None:
    releases.templates = {}
    await releases.open()
    await releases.tier(Tier.RELEASED)
    await releases.poll()
    assert await releases.asked() == FULL


async def test_a_template_that_is_taken_back_restores_the_requests(releases: Releases) -> None:
    await releases.open()
    await releases.tier(Tier.RELEASED)
    await releases.poll()
    assert await releases.asked() == LOW
    releases.templates = {}
    await releases.poll()
    assert await releases.asked() == FULL


async def test_an_api_server_without_resize_is_left_alone_and_said_once(
    releases: Releases, caplog: pytest.LogCaptureFixture
) -> None:
    server = releases.namespace.cluster.standin("a real API server has what it has")
    server.in_place_resize = False
    await releases.open()
    await releases.tier(Tier.RELEASED)
    for _ in range(2):
        await releases.poll()
        releases.now += 1000.0
    assert await releases.asked() == FULL
    assert REQUESTS not in (await releases.pod())["metadata"]["annotations"]
    said = [record.message for record in caplog.records if "pods/resize" in record.message]
    assert len(said) == 1
    assert "Kubernetes 1.33 or later" in said[0]
    server.in_place_resize = True
    releases.now += 1000.0
    await releases.poll()
    assert await releases.asked() == LOW


async def test_refused_requests_are_logged_and_tried_again(
    releases: Releases, namespace: HubNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    await releases.open()
    await releases.tier(Tier.RELEASED)
    await releases.poll()
    await releases.granted(LOW)
    await releases.tier(Tier.ACTIVE, None)
    await namespace.rights(HUB_RULES)  # refused with 403, as by a quota
    await releases.poll()
    await releases.poll()
    assert await releases.asked() == LOW
    said = [record.message for record in caplog.records if "refuses requests of" in record.message]
    assert len(said) == 1
    assert "1 CPU and 4 GiB of memory" in said[0]
    await seen(releases.seen, "node-a", has("ann", lacks_requests=True))
    await namespace.rights(RIGHTS)
    await releases.poll()
    assert await releases.asked() == LOW, "not at once"
    releases.now += 31.0
    await releases.poll()
    assert await releases.asked() == FULL


@pytest.mark.parametrize("version", ["1.36", "1.33"])
async def test_a_node_that_could_never_grant_the_requests_is_named_in_the_log(
    releases: Releases, namespace: HubNamespace, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    """The node became smaller. From 1.36 on the API server refuses the resize; before, the kubelet does."""
    server = namespace.cluster.standin("a real API server is of one version")
    server.refuses_infeasible_resizes = version == "1.36"
    await releases.open()
    await releases.tier(Tier.RELEASED)
    await releases.poll()
    await releases.granted(LOW)
    small = {"cpu": "500m", "memory": "8Gi"}
    await namespace.admin.patch(path("nodes", name="node-a", subresource="status"), {"status": {"allocatable": small}})
    await releases.tier(Tier.ACTIVE, None)
    await releases.poll()
    if version == "1.33":
        assert await releases.asked() == FULL
        infeasible = {
            "type": "PodResizePending", "status": "True", "reason": "Infeasible",
            "message": "Node didn't have enough capacity: cpu, requested: 1000, capacity: 500",
        }  # fmt: skip
        await namespace.admin.patch(
            namespace.at("pods", "jupyter-ann", "status"), {"status": {"conditions": [infeasible]}}
        )
        await eventually(lambda: any(pod.requests and pod.requests.infeasible for pod in releases.seen.all_pods()))
        await releases.poll()
        granted: dict[str, Any] = {"status": {"conditions": []}}
        await namespace.admin.patch(namespace.at("pods", "jupyter-ann", "status"), granted)
    await seen(releases.seen, "node-a", has("ann", lacks_requests=True))
    assert await releases.asked() == LOW
    await releases.poll()
    assert await releases.asked() == LOW, "not at once"
    large = {"cpu": "64", "memory": "512Gi"}
    await namespace.admin.patch(path("nodes", name="node-a", subresource="status"), {"status": {"allocatable": large}})
    await eventually(lambda: any(pod.requests and pod.requests.requested == LOW for pod in releases.seen.all_pods()))
    releases.now += 31.0
    await releases.poll()
    assert await releases.asked() == FULL
    said = [record.message for record in caplog.records if "refuses requests of 1 CPU and 4 GiB" in record.message]
    assert len(said) == 1
    assert "Node didn't have enough" in said[0]
    assert "must allow what the templates guarantee" in said[0]


async def test_a_refused_way_down_is_tried_again(releases: Releases, namespace: HubNamespace) -> None:
    await releases.open()
    await releases.tier(Tier.RELEASED)
    await namespace.rights(HUB_RULES)
    await releases.poll()
    assert REQUESTS in (await releases.pod())["metadata"]["annotations"]
    assert await releases.asked() == FULL
    await namespace.rights(RIGHTS)
    releases.now += 31.0
    await releases.poll()
    assert await releases.asked() == LOW


async def test_a_change_makes_it_look_at_once(releases: Releases) -> None:
    await releases.open()
    releases.requests.start()
    try:
        await asyncio.sleep(0.05)
        await releases.tier(Tier.RELEASED)
        releases.requests.changed()
        async with asyncio.timeout(5):
            while await releases.asked() != LOW:
                await asyncio.sleep(0.05)
    finally:
        await releases.requests.close()


async def test_requests_that_another_writer_has_changed_since_are_not_overwritten(releases: Releases) -> None:
    """An admin or an autoscaler resizes the pod, and the watch has not brought it yet."""
    await releases.open()
    await releases.tier(Tier.RELEASED)
    await releases.poll()
    await releases.granted(LOW)
    await releases.tier(Tier.ACTIVE, None)
    before = _Frozen(releases.seen)
    theirs = Requests(2000, 8 * GIB)
    await releases.resize(theirs)
    late = ReleasedRequests(before, lambda: releases.templates, clock=lambda: releases.now)  # type: ignore[arg-type]
    await late.poll()
    assert await releases.asked() == theirs
    await releases.granted(theirs)
    await releases.poll()
    assert await releases.asked() == theirs, "more than the template gives is left"
    assert REQUESTS not in (await releases.pod())["metadata"]["annotations"]


class _Frozen:
    """Pods as a watch had them at one instant; the reports are current."""

    def __init__(self, cluster: Cluster) -> None:
        self.pods = list(cluster.all_pods())
        self.report, self.api = cluster.report, cluster.api

    def all_pods(self) -> list[SessionPod]:
        return self.pods


@pytest.mark.parametrize(
    ("resources", "why"),
    [
        ({"requests": {"cpu": "1"}}, "its container requests no memory. Give the template resources.memory.guarantee"),
        ({"requests": {"memory": "1Gi"}}, "its container requests no CPU. Give the template resources.cpu.guarantee"),
        (
            {"requests": FULL.written(), "limits": FULL.written()},
            "the pod's QoS class is Guaranteed, and Kubernetes keeps that class",
        ),
    ],
)
async def test_a_pod_that_keeps_its_requests_is_logged_once_with_the_reason(
    releases: Releases, caplog: pytest.LogCaptureFixture, resources: dict[str, dict[str, str]], why: str
) -> None:
    await releases.make(resources)
    for _ in range(2):
        await releases.poll()
    said = [
        record.message for record in caplog.records if "idle.release_resources of template quarter" in record.message
    ]
    assert len(said) == 1
    assert f"/jupyter-ann: {why}" in said[0]
    caplog.clear()
    releases.requests = ReleasedRequests(releases.seen, dict)
    await releases.poll()
    assert not caplog.records, "no template wants it"
