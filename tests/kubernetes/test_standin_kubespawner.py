"""KubeSpawner itself, unchanged, on the cluster of the tests: what GPUShareSpawner's tests build on."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from kubespawner import KubeSpawner
from tornado.httpclient import AsyncHTTPClient

from tests.notebook.jupyter import WITHOUT_PAGES
from tests.spawner.running_hub import until

from .sharing_hub import SharingHub, kube_access
from .standin.client import path
from .standin.cluster import HUB_RULES, Cluster


@pytest.fixture
async def make_hub(cluster: Cluster, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(kube_access(cluster, HUB_RULES))

        async def make(configure: Callable[[Any], None] = lambda config: None) -> SharingHub:
            hub = SharingHub(tmp_path, tmp_path, cluster, configure, spawner_class=KubeSpawner)
            await stack.enter_async_context(hub)
            return hub

        yield make


async def test_a_real_notebook_server(make_hub: Callable[..., Any], cluster: Cluster) -> None:
    node = await cluster.make_node()

    def configure(config: Any) -> None:
        config.KubeSpawner.cmd = [sys.executable, "-m", "jupyterhub.singleuser"]
        config.KubeSpawner.cpu_guarantee = 0.5
        config.KubeSpawner.storage_pvc_ensure = True
        config.KubeSpawner.storage_capacity = "1Gi"
        config.KubeSpawner.volumes = [{"name": "home", "emptyDir": {}}]
        config.KubeSpawner.volume_mounts = [{"name": "home", "mountPath": "/home/jovyan"}]
        config.KubeSpawner.working_dir = "/home/jovyan"
        config.KubeSpawner.notebook_dir = "/home/jovyan"
        config.Spawner.args = ["--allow-root", WITHOUT_PAGES]
        config.Spawner.start_timeout = 40
        config.Spawner.http_timeout = 40

    hub = await make_hub(configure)
    response = await hub.start_server("ada")
    assert response.code in (201, 202), response.body
    spawner = await hub.started("ada", timeout=40)
    pod = await cluster.pod("jupyter-ada")
    assert pod is not None
    assert pod["spec"]["nodeName"] == node.name
    assert pod["spec"]["containers"][0]["resources"]["requests"]["cpu"] == "500m"
    answer = await AsyncHTTPClient(force_instance=True).fetch(f"{spawner.server.url}api", raise_error=False)
    assert answer.code == 200
    assert b"version" in answer.body
    claims = await cluster.admin.list(path("persistentvolumeclaims", cluster.namespace))
    assert [claim["metadata"]["name"] for claim in claims] == ["claim-ada"]
    assert [event["message"] for event in spawner.events if event["reason"] == "Started"]
    assert (await hub.stop_server("ada")).code in (202, 204)
    await cluster.wait_until_gone("jupyter-ada")
    await until(lambda: not hub.spawner("ada").active)


async def test_a_start_that_no_node_has_room_for_times_out_with_its_event(
    make_hub: Callable[..., Any], cluster: Cluster
) -> None:
    await cluster.make_node(cpu="1")

    def configure(config: Any) -> None:
        config.KubeSpawner.cpu_guarantee = 2
        config.Spawner.start_timeout = 2

    hub = await make_hub(configure)
    await hub.start_server("ada")
    await until(lambda: not hub.spawner("ada").active)
    assert await cluster.pod("jupyter-ada") is None
    assert any(
        event["reason"] == "FailedScheduling" and "Insufficient cpu" in event["message"]
        for event in hub.spawner("ada").event_reflector.events
    )


async def test_a_pod_that_dies_is_noticed_and_can_be_started_again(
    make_hub: Callable[..., Any], cluster: Cluster
) -> None:
    await cluster.make_node()

    def configure(config: Any) -> None:
        server = Path(__file__).parents[1] / "spawner" / "small_server.py"
        config.KubeSpawner.cmd = [sys.executable, "-I", "-S", str(server)]

    hub = await make_hub(configure)
    await hub.start_server("ada")
    await hub.started("ada")
    await cluster.admin.delete(path("pods", cluster.namespace, "jupyter-ada"), grace=0)
    await until(lambda: not hub.spawner("ada").active)
    await hub.start_server("ada")
    await hub.started("ada")


async def test_spawns_survive_a_shaky_api(make_hub: Callable[..., Any], cluster: Cluster) -> None:
    await cluster.make_node()

    def configure(config: Any) -> None:
        server = Path(__file__).parents[1] / "spawner" / "small_server.py"
        config.KubeSpawner.cmd = [sys.executable, "-I", "-S", str(server)]

    hub = await make_hub(configure)
    # The pod is made, but its spawner does not hear of it: KubeSpawner gives up. If its view has no pod yet, it leaves
    # the pod behind, which the next start meets and replaces.
    cluster.faults.fail_next("create", "pods", "lost")
    assert (await hub.start_server("ada")).code == 500
    cluster.faults.fail_next("watch", "pods", "500")
    cluster.faults.cut_watches()
    await hub.start_server("ada")
    await hub.started("ada")
    cluster.faults.cut_watches()
    assert (await hub.stop_server("ada")).code in (202, 204)
    await cluster.wait_until_gone("jupyter-ada")
