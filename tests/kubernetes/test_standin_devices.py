"""The stand-in kubelet treats device plugins as a real one was seen to."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from gpushare_spawner.agent.kubernetes.kubelet import podresources_pb2 as messages
from gpushare_spawner.agent.kubernetes.kubelet import podresources_pb2_grpc as services

from .standin.client import path
from .standin.cluster import Cluster, restarts
from .standin.kubelet import StandInKubelet
from .standin.small_plugin import SmallPlugin

GPU = "example.org/gpu-0"


def ids(count: int) -> list[str]:
    return [f"unit-{number:03}" for number in range(count)]


@pytest.fixture
async def node(cluster: Cluster) -> StandInKubelet:
    return await cluster.make_node(restart_backoff=0.1)


@pytest.fixture
async def plugin(cluster: Cluster, node: StandInKubelet) -> AsyncIterator[SmallPlugin]:
    async with SmallPlugin(node.plugin_folder, GPU, ids(100)) as plugin:
        await cluster.wait_for_allocatable(node.name, GPU, 100)
        yield plugin


async def ask_pod_resources(node: StandInKubelet) -> dict[str, list[str]]:
    """Pod -> ids."""
    async with grpc.aio.insecure_channel(f"unix:{node.pod_resources_folder}/kubelet.sock") as channel:
        answer = await services.PodResourcesListerStub(channel).List(messages.ListPodResourcesRequest())  # type: ignore[no-untyped-call]
    return {
        pod.name: [one for container in pod.containers for device in container.devices for one in device.device_ids]
        for pod in answer.pod_resources
    }


async def rejected(cluster: Cluster, name: str) -> str:
    pod = await cluster.wait_for_phase(name, "Failed")
    assert pod["status"]["reason"] == "UnexpectedAdmissionError"
    return str(pod["status"]["message"])


async def test_ids_are_the_preferred_ones_and_reach_the_process(
    cluster: Cluster, node: StandInKubelet, plugin: SmallPlugin
) -> None:
    await cluster.create_pod("a", limits={GPU: 3}, command=["sh", "-c", "echo $DEVICES; sleep 300"])
    pod = await cluster.wait_for_phase("a", "Running")
    assert await ask_pod_resources(node) == {"a": ids(3)}
    log = node.folder / "pods" / pod["metadata"]["uid"] / "notebook.log"
    while not log.read_text():
        await asyncio.sleep(0.02)
    assert log.read_text() == "unit-000,unit-001,unit-002\n"
    await cluster.admin.delete(path("pods", cluster.namespace, "a"))
    await cluster.wait_until_gone("a")
    assert await ask_pod_resources(node) == {}


async def test_without_a_preference_ids_are_scattered(cluster: Cluster, node: StandInKubelet) -> None:
    random.seed(3)
    async with SmallPlugin(node.plugin_folder, GPU, ids(100), prefers_low=False):
        await cluster.wait_for_allocatable(node.name, GPU, 100)
        await cluster.create_pod("a", limits={GPU: 20})
        await cluster.wait_for_phase("a", "Running")
        assert (await ask_pod_resources(node))["a"] != ids(20)


async def test_the_list_grows_and_shrinks_under_running_pods(
    cluster: Cluster, node: StandInKubelet, plugin: SmallPlugin
) -> None:
    await cluster.create_pod("a", limits={GPU: 50})
    await cluster.wait_for_phase("a", "Running")
    await plugin.offer(ids(130))
    await cluster.wait_for_allocatable(node.name, GPU, 130)
    await cluster.create_pod("b", limits={GPU: 80})
    await cluster.wait_for_phase("b", "Running")
    await plugin.offer(ids(60))
    await cluster.wait_for_allocatable(node.name, GPU, 60)
    assert [pod["status"]["phase"] for pod in await cluster.pods()] == ["Running", "Running"]


async def test_unhealthy_devices_are_capacity_but_not_allocatable(
    cluster: Cluster, node: StandInKubelet, plugin: SmallPlugin
) -> None:
    await plugin.offer(ids(100), unhealthy=set(ids(10)))
    await cluster.wait_for_allocatable(node.name, GPU, 90)
    assert (await cluster.node(node.name))["status"]["capacity"][GPU] == "100"


async def test_admission_counts_ids_not_arithmetic(cluster: Cluster) -> None:
    # the node's status is late on purpose: the scheduler still counts with 100
    node = await cluster.make_node(status_interval=3.0)
    async with SmallPlugin(node.plugin_folder, GPU, ids(100), prefers_low=False) as plugin:
        await cluster.wait_for_allocatable(node.name, GPU, 100)
        await cluster.create_pod("holder", limits={GPU: 25})
        await cluster.wait_for_phase("holder", "Running")
        held = set((await ask_pod_resources(node))["holder"])
        kept = sorted(held)[:11] + [one for one in ids(100) if one not in held][:19]
        await plugin.offer(kept)
        await asyncio.sleep(0.1)
        await cluster.create_pod("late", limits={GPU: 60})
        assert "Requested: 60, Available: 19" in await rejected(cluster, "late")
        holder = await cluster.pod("holder")
        assert holder is not None
        assert holder["status"]["phase"] == "Running"


async def test_a_failing_allocate_rejects_the_pod(cluster: Cluster, plugin: SmallPlugin) -> None:
    def fail(_: Any) -> dict[str, str]:
        raise RuntimeError("no such session")

    plugin.answer = fail
    await cluster.create_pod("a", limits={GPU: 1})
    assert "no such session" in await rejected(cluster, "a")
    plugin.answer = lambda ids: {}
    await cluster.create_pod("b", limits={GPU: 100})
    await cluster.wait_for_phase("b", "Running")


async def test_a_plugin_that_dies_and_comes_back(cluster: Cluster, node: StandInKubelet, plugin: SmallPlugin) -> None:
    await cluster.create_pod("a", limits={GPU: 5})
    await cluster.wait_for_phase("a", "Running")
    await plugin.stop()
    await cluster.wait_for_allocatable(node.name, GPU, 0)
    assert (await cluster.node(node.name))["status"]["capacity"][GPU] == "100"
    await plugin.start()
    await cluster.wait_for_allocatable(node.name, GPU, 100)
    assert await ask_pod_resources(node) == {"a": ids(5)}


async def test_of_two_plugins_the_last_sender_wins(cluster: Cluster, node: StandInKubelet, plugin: SmallPlugin) -> None:
    async with SmallPlugin(node.plugin_folder, GPU, ids(7), endpoint="second.sock"):
        await cluster.wait_for_allocatable(node.name, GPU, 7)
    await cluster.wait_for_allocatable(node.name, GPU, 0)
    await plugin.stop()
    await plugin.start()
    await cluster.wait_for_allocatable(node.name, GPU, 100)


async def test_a_container_restarts_on_its_old_ids(cluster: Cluster, node: StandInKubelet, plugin: SmallPlugin) -> None:
    await cluster.create_pod("a", limits={GPU: 2}, command=["sh", "-c", "echo $DEVICES; exit 1"])
    pod = await cluster.wait_for_pod("a", lambda pod: restarts(pod) >= 2)
    lines = (node.folder / "pods" / pod["metadata"]["uid"] / "notebook.log").read_text().splitlines()
    assert set(lines) == {"unit-000,unit-001"}
    assert [sorted(given) for given in plugin.allocated] == [ids(2)]


async def test_a_kubelet_restart(cluster: Cluster, node: StandInKubelet, plugin: SmallPlugin) -> None:
    await cluster.create_pod("a", limits={GPU: 5})
    before = await cluster.wait_for_phase("a", "Running")
    await node.restart()
    assert not (node.plugin_folder / plugin.endpoint).exists()
    assert await ask_pod_resources(node) == {}  # blind for a moment, though ids are held
    await cluster.wait_for_allocatable(node.name, GPU, 0)
    await plugin.stop()
    await plugin.start()
    await cluster.wait_for_allocatable(node.name, GPU, 100)
    await asyncio.sleep(1.0)
    assert await ask_pod_resources(node) == {"a": ids(5)}
    after = await cluster.pod("a")
    assert after is not None
    assert after["status"]["containerStatuses"] == before["status"]["containerStatuses"]
    await cluster.create_pod("b", limits={GPU: 5})
    await cluster.wait_for_phase("b", "Running")
    assert (await ask_pod_resources(node))["b"] == ids(10)[5:]


async def test_after_a_reboot_pods_that_held_devices_are_rejected(
    cluster: Cluster, node: StandInKubelet, plugin: SmallPlugin
) -> None:
    await cluster.create_pod("a", limits={GPU: 5})
    await cluster.wait_for_phase("a", "Running")
    await plugin.stop()
    await node.reboot()
    assert "no healthy devices present" in await rejected(cluster, "a")
    await plugin.start()
    await cluster.wait_for_allocatable(node.name, GPU, 100)
    assert await ask_pod_resources(node) == {}
