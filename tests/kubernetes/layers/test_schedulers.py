"""Layers with a scheduler of their own, from the form to the server that waited."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpushare_spawner.spawner.queue import queue as placer
from gpushare_spawner.wording.spawn_failures import EARLIER_FIRST
from tests.spawner.running_hub import until

from ..standin.client import path
from ..standin.cluster import Cluster
from ..standin.layers.hami import hami
from ..standin.layers.kai import GROUP, kai
from ..standin.layers.kubeshare import kubeshare
from .walk import limits, shows, walk


async def test_hami_places_parts_of_memory_and_cores(
    make_hub: Callable[..., Any], cluster: Cluster, templates: Path
) -> None:
    (templates / "layers.yaml").write_text("rules: [{layer: hami}]")
    async with hami(cluster):
        # zero-to-jupyterhub's user-scheduler would keep HAMi's webhook away
        hub = await make_hub(lambda config: config.KubeSpawner.update(scheduler_name="user-scheduler"))
        pods = await walk(hub, cluster, "half-gpu", fits=2)
    for pod in pods:
        assert pod["spec"]["schedulerName"] == "hami-scheduler"
        assert limits(pod) == {"nvidia.com/gpu": "1", "nvidia.com/gpumem-percentage": "50", "nvidia.com/gpucores": "50"}
        assert "GPU-hami-0,NVIDIA,40960,50" in pod["metadata"]["annotations"]["hami.io/vgpu-devices-allocated"]


async def test_kai_places_fractions_in_its_queues(
    make_hub: Callable[..., Any], cluster: Cluster, templates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reservations = await cluster.make_namespace("-reservation")
    monkeypatch.setattr("gpushare_spawner.sharing.kai.RESERVATIONS", reservations)
    (templates / "layers.yaml").write_text("rules: [{layer: kai}]\noptions: {kai: {queue: notebooks}}")
    (templates / "both.yaml").write_text(
        "{name: both, display_name: B, gpu: {fraction: 0.25, layer: kai},"
        " kubespawner_override: {extra_resource_limits: {nvidia.com/gpu: '1'}}}"
    )
    await make_queue(cluster)
    async with kai(cluster, reservations):
        hub = await make_hub()
        pods = await walk(hub, cluster, "half-gpu", fits=2)
        assert len(await cluster.admin.list(path("pods", reservations))) == 1
        # an admin's override that KAI's webhook refuses: the user reads its words
        assert (await hub.stop_server("user1")).code in (202, 204)
        await shows(hub, "both", "Starts now")
        await hub.start_server("user1", {"profile": "both"})
        spawner = hub.spawner("user1")
        await until(lambda: spawner._spawn_future.done())
        refused = spawner._spawn_future.exception().jupyterhub_message
        assert "cannot have both GPU fraction request and whole GPU" in refused
    for pod in pods:
        assert (pod["spec"]["schedulerName"], pod["spec"]["priorityClassName"]) == ("kai-scheduler", "build")
        assert pod["metadata"]["labels"]["kai.scheduler/queue"] == "notebooks"
        assert pod["metadata"]["annotations"]["gpu-fraction"] == "0.50"


async def make_queue(cluster: Cluster) -> None:
    """A queue without limits, and KAI's priority class for notebooks."""
    gpu = {"quota": -1, "limit": -1, "overQuotaWeight": 1}
    queue = {"metadata": {"name": "notebooks"}, "spec": {"resources": {"gpu": gpu}}}
    classes = {"metadata": {"name": "build"}, "value": 100}
    await cluster.make_cluster_wide("queues", GROUP, queue)
    await cluster.make_cluster_wide("priorityclasses", "scheduling.k8s.io/v1", classes)


@pytest.mark.slow
async def test_a_spawn_for_a_whole_gpu_starts_though_smaller_ones_keep_coming(
    make_hub: Callable[..., Any], cluster: Cluster, templates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placer, "MOST_OVERTAKEN", 1)
    reservations = await cluster.make_namespace("-reservation")
    monkeypatch.setattr("gpushare_spawner.sharing.kai.RESERVATIONS", reservations)
    (templates / "layers.yaml").write_text("rules: [{layer: kai}]\noptions: {kai: {queue: notebooks}}")
    (templates / "whole.yaml").write_text("{name: whole, display_name: W, gpu: {count: 1, layer: kai}}")
    await make_queue(cluster)
    async with kai(cluster, reservations):
        hub = await make_hub()
        await hub.add_user("eve")
        await shows(hub, "half-gpu", "Starts now")
        for user in ("ada", "ben"):
            await hub.start_server(user, {"profile": "half-gpu"})
            await hub.started(user)
        for user, template in (("big", "whole"), ("cem", "half-gpu"), ("dan", "half-gpu")):
            await hub.start_server(user, {"profile": template})
        await until(lambda: len(hub.reservations.queue) == 3)
        # the first that fits overtakes it, and then the node is kept
        await hub.stop_server("ada")
        await hub.started("cem")
        (big,) = [one for one in hub.reservations.queue if one.request.session == "big"]
        await until(lambda: big.held_elsewhere != "")
        await hub.stop_server("ben")
        (small,) = [one for one in hub.reservations.queue if one is not big]
        await until(lambda: small.hint == EARLIER_FIRST)
        assert await cluster.pod("jupyter-dan") is None
        await hub.stop_server("cem")
        await hub.started("big")
        assert await cluster.pod("jupyter-dan") is None
        await hub.stop_server("big")
        await hub.started("dan")


@pytest.mark.slow
async def test_kubeshare_creates_the_pod_again(make_hub: Callable[..., Any], cluster: Cluster, templates: Path) -> None:
    (templates / "layers.yaml").write_text("rules: [{layer: kubeshare}]")
    async with kubeshare(cluster):
        hub = await make_hub()
        (first, _) = await walk(hub, cluster, "half-gpu", fits=2)
    assert first["metadata"]["labels"]["sharedgpu/gpu_request"] == "0.50"
    assert first["metadata"]["annotations"]["sharedgpu/gpu_uuid"] == "GPU-kubeshare-0"
