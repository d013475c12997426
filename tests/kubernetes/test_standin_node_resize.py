"""The stand-in kubelet resizes running pods as Kubernetes 1.36.2 was seen to."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from .standin.client import ApiStatus, path
from .standin.cluster import Cluster, a_pod
from .standin.kubelet import StandInKubelet
from .standin.programs import Listeners
from .standin.small_plugin import SmallPlugin

GPU = "example.org/gpu-0"


async def two_cores(cluster: Cluster, **settings: Any) -> StandInKubelet:
    await cluster.require_resize()
    return await cluster.make_node(programs=Listeners(), cpu="2", memory="4Gi", **settings)


async def make(cluster: Cluster, name: str, cpu: str, share: int = 0, **spec: Any) -> None:
    manifest = a_pod(name, limits={GPU: share} if share else {}, **spec)
    manifest["spec"]["containers"][0]["resources"]["requests"] = {"cpu": cpu, "memory": "64Mi"}
    await cluster.admin.create(path("pods", cluster.namespace), manifest)


async def runs(cluster: Cluster, name: str, cpu: str, **spec: Any) -> None:
    await make(cluster, name, cpu, **spec)
    await cluster.wait_for_phase(name, "Running")


async def resize(cluster: Cluster, name: str, cpu: str) -> None:
    requests = {"cpu": cpu, "memory": "64Mi"}
    body = {"spec": {"containers": [{"name": "notebook", "resources": {"requests": requests}}]}}
    await cluster.admin.patch(path("pods", cluster.namespace, name, "resize"), body, "strategic")


def state(pod: dict[str, Any]) -> tuple[str, str, str]:
    """CPU that is asked for, allocated and in force."""
    (container,), (here,) = pod["spec"]["containers"], pod["status"]["containerStatuses"]
    sides = container["resources"], {"requests": here["allocatedResources"]}, here["resources"]
    asked, allocated, in_force = (str(side["requests"]["cpu"]) for side in sides)
    return asked, allocated, in_force


def condition(pod: dict[str, Any], kind: str) -> dict[str, str]:
    found: dict[str, str]
    for found in pod["status"].get("conditions") or []:
        if found["type"] == kind:
            return found
    return {}


def pending(pod: dict[str, Any]) -> tuple[str, str]:
    """The reason and the message of a resize that waits."""
    found = condition(pod, "PodResizePending")
    return found.get("reason", ""), found.get("message", "")


async def in_force(cluster: Cluster, name: str, cpu: str) -> None:
    """Without a condition that says otherwise."""

    def done(pod: dict[str, Any]) -> bool:
        waits = pending(pod) != ("", "") or condition(pod, "PodResizeInProgress")
        return state(pod) == (cpu, cpu, cpu) and not waits

    await cluster.wait_for_pod(name, done)


async def test_less_is_carried_out_and_a_pod_that_waited_is_bound(cluster: Cluster) -> None:
    await two_cores(cluster)
    await runs(cluster, "ada", "1500m")
    await make(cluster, "bob", "1")
    await cluster.wait_for_pod("bob", lambda pod: condition(pod, "PodScheduled").get("reason") == "Unschedulable")
    await resize(cluster, "ada", "100m")
    await in_force(cluster, "ada", "100m")
    bob = await cluster.wait_for_phase("bob", "Running", timeout=5)
    assert state(bob) == ("1", "1", "1")


async def test_until_it_is_in_force_the_scheduler_counts_what_was_before(cluster: Cluster) -> None:
    await two_cores(cluster, resize_seconds=1.0)
    await runs(cluster, "ada", "1500m")
    await resize(cluster, "ada", "100m")
    await make(cluster, "bob", "1")
    ada = await cluster.wait_for_pod("ada", lambda pod: bool(condition(pod, "PodResizeInProgress")))
    assert state(ada) == ("100m", "100m", "1500m")
    await cluster.wait_for_pod("bob", lambda pod: condition(pod, "PodScheduled").get("reason") == "Unschedulable")
    await in_force(cluster, "ada", "100m")
    await cluster.wait_for_phase("bob", "Running")


async def test_more_than_is_free_waits_counts_at_once_and_is_granted_when_a_pod_goes(cluster: Cluster) -> None:
    await two_cores(cluster)
    await runs(cluster, "ada", "100m")
    await runs(cluster, "bob", "1")
    await resize(cluster, "ada", "1500m")
    ada = await cluster.wait_for_pod("ada", lambda pod: pending(pod)[0] == "Deferred")
    message = "Node didn't have enough resource: cpu, requested: 1500, used: 1000, capacity: 2000"
    assert pending(ada)[1] == message
    assert state(ada) == ("1500m", "100m", "100m")
    await make(cluster, "cem", "500m")
    await cluster.wait_for_pod("cem", lambda pod: condition(pod, "PodScheduled").get("reason") == "Unschedulable")
    await cluster.admin.delete(path("pods", cluster.namespace, "bob"), grace=0)
    await in_force(cluster, "ada", "1500m")
    await cluster.wait_for_phase("cem", "Running")


async def test_a_resize_of_another_pod_makes_room(cluster: Cluster) -> None:
    await two_cores(cluster)
    await runs(cluster, "ada", "100m")
    await runs(cluster, "bob", "1500m")
    await resize(cluster, "ada", "1")
    await cluster.wait_for_pod("ada", lambda pod: pending(pod)[0] == "Deferred")
    await resize(cluster, "bob", "1")
    await in_force(cluster, "ada", "1")


async def test_the_higher_priority_comes_first(cluster: Cluster) -> None:
    cluster.standin("a real API server takes no priority without a class")
    await two_cores(cluster)
    await runs(cluster, "ada", "100m", priority=1)
    await runs(cluster, "bob", "100m", priority=2)
    await runs(cluster, "cem", "1500m")
    for name in ("ada", "bob"):
        await resize(cluster, name, "1500m")
        await cluster.wait_for_pod(name, lambda pod: pending(pod)[0] == "Deferred")
    await cluster.admin.delete(path("pods", cluster.namespace, "cem"), grace=0)
    await in_force(cluster, "bob", "1500m")
    ada = await cluster.pod("ada")
    assert ada is not None
    assert pending(ada)[0] == "Deferred"


async def test_more_than_the_node_has_is_refused(cluster: Cluster) -> None:
    """From Kubernetes 1.36 on."""
    await two_cores(cluster)
    await runs(cluster, "ada", "100m")
    (refused,) = await asyncio.gather(resize(cluster, "ada", "3"), return_exceptions=True)
    if refused is None:
        pytest.skip("this API server is older than 1.36")
    assert isinstance(refused, ApiStatus)
    assert refused.code == 403
    assert "Node didn't have enough allocatable resources: cpu, requested: 3000" in refused.message


async def test_more_than_the_node_has_is_infeasible_before_1_36(cluster: Cluster) -> None:
    cluster.standin("a real API server is of one version").refuses_infeasible_resizes = False
    await two_cores(cluster)
    await runs(cluster, "ada", "100m")
    await resize(cluster, "ada", "3")
    ada = await cluster.wait_for_pod("ada", lambda pod: pending(pod)[0] == "Infeasible")
    assert pending(ada)[1] == "Node didn't have enough capacity: cpu, requested: 3000, capacity: 2000"


async def test_without_its_device_plugin_no_resize_is_granted(cluster: Cluster) -> None:
    node = await two_cores(cluster, resize_retry=0.3)
    plugin = SmallPlugin(node.plugin_folder, GPU, [f"unit-{number}" for number in range(10)])
    async with plugin:
        await cluster.wait_for_allocatable(node.name, GPU, 10)
        await runs(cluster, "ada", "1500m", share=5)
        await plugin.stop()
        await cluster.wait_for_allocatable(node.name, GPU, 0)
        await resize(cluster, "ada", "100m")
        ada = await cluster.wait_for_pod("ada", lambda pod: pending(pod)[0] == "Deferred")
        message = "Allocate failed due to no healthy devices present; cannot allocate unhealthy devices"
        assert message in pending(ada)[1]
        await plugin.start()
        await in_force(cluster, "ada", "100m")
        assert len(plugin.allocated) == 1, "a resize allocates nothing"
