"""What goes wrong in a cluster: nodes that refuse, an API that fails, views that are dead or behind, hubs that die."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from kubespawner import KubeSpawner

from gpushare_spawner.model.kubernetes.annotations import SESSION_LABEL, TEMPLATE
from gpushare_spawner.spawner.kubernetes import owned_objects
from gpushare_spawner.spawner.kubernetes.cluster.reflectors import PODS, Dated
from gpushare_spawner.spawner.queue.reservations import Reservations
from tests.spawner.running_hub import until

from .sharing_hub import GpuNodes, SharingHub, gpu
from .standin.client import path
from .standin.cluster import Cluster
from .standin.devices import AdmissionError

MakeHub = Callable[..., Any]


def refuse(node: Any) -> None:
    """The node's device plugin has nothing to give any more, and its status does not say so yet."""

    async def admit(pod: dict[str, Any]) -> None:
        raise AdmissionError("UnexpectedAdmissionError", "Allocate failed: requested 50, available 0")

    node.admit = admit


async def message_of(response: Any) -> str:
    return str(json.loads(response.body)["message"])


async def units_in_flight(hub: SharingHub) -> int:
    return sum(allocation.share_units for allocation in hub.reservations.in_flight())


# nodes


async def test_a_node_that_does_not_admit_is_left_for_another(
    make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster
) -> None:
    first, second = sorted([await nodes.add(gpus=1), await nodes.add(gpus=1)])
    refuse(cluster.nodes[first])
    hub = await make_hub(lambda config: config.JupyterHub.tornado_settings.update(slow_spawn_timeout=0.1))
    assert (await hub.start_server("ada", {"profile": "half-gpu"})).code == 202
    told = [event["message"] async for event in hub.spawner("ada").progress()]
    await hub.started("ada")
    assert any("UnexpectedAdmissionError" in line and "Looking for another node" in line for line in told)
    assert await nodes.held() == {f"GPU-{second}-0": 50}
    assert not hub.reservations.in_flight()


async def test_the_page_says_that_the_only_node_is_left_alone(
    make_hub: MakeHub, nodes: GpuNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpushare_spawner.spawner.kubernetes.cluster.snapshot.DISTRUST_SECONDS", 2.0)
    node = await nodes.add(gpus=1)
    hub = await make_hub(lambda config: config.JupyterHub.tornado_settings.update(slow_spawn_timeout=0.1))
    await hub.start_server("bea", {"profile": "half-gpu"})
    await hub.started("bea")
    hub.reservations.cluster.distrust(node)
    assert (await hub.start_server("ada", {"profile": "half-gpu"})).code == 202
    told = [event["message"] async for event in hub.spawner("ada").progress()]
    await hub.started("ada")
    assert any(f"{node} did not admit a server just now" in line for line in told), told


async def test_when_no_node_admits_it_ends_with_the_reason(
    make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        refuse(cluster.nodes[await nodes.add(gpus=1)])
    monkeypatch.setattr("gpushare_spawner.spawner.kubernetes.attempt.START_ATTEMPTS", 2)
    hub = await make_hub()
    response = await hub.start_server("ada", {"profile": "half-gpu"})
    assert response.code == 503
    assert "the GPU is gone or taken, or the node was restarted" in await message_of(response)
    assert "This was the last of 2 attempts" in await message_of(response)
    assert not await cluster.pods()
    assert not hub.reservations.in_flight()


async def test_a_restarted_node_stops_the_server_and_it_starts_again(
    make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    node = cluster.nodes[await nodes.add(gpus=1)]
    hub = await make_hub()
    assert (await hub.start_server("ada", {"profile": "whole-gpu"})).code == 201
    admit = node.admit
    refuse(node)
    await node.reboot()
    await cluster.wait_for_phase("jupyter-ada", "Failed")
    await until(lambda: not hub.spawner("ada").active)
    assert "UnexpectedAdmissionError" in caplog.text
    assert await cluster.pod("jupyter-ada") is None
    node.admit = admit  # type: ignore[method-assign]
    assert (await hub.start_server("ada", {"profile": "whole-gpu"})).code == 201


async def test_a_failed_pod_whose_containers_seem_to_run_counts_as_stopped(
    make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster
) -> None:
    await nodes.add(gpus=1)
    hub = await make_hub(lambda config: config.Spawner.update(poll_interval=1000))
    assert (await hub.start_server("ada", {"profile": "whole-gpu"})).code == 201
    node = cluster.nodes[nodes.names[0]]
    await node.stop()
    status = {"phase": "Failed", "reason": "UnexpectedAdmissionError", "message": "no healthy devices"}
    await cluster.admin.patch(path("pods", cluster.namespace, "jupyter-ada", "status"), {"status": status})
    spawner = hub.spawner("ada")
    await until(lambda: spawner._pod()["status"]["phase"] == "Failed")
    assert spawner._pod()["status"]["containerStatuses"][0]["state"].get("running")
    # it holds nothing while it is still there
    assert (await hub.reservations.availability_now()).check.ledger.free_units(f"GPU-{node.name}-0") == 100
    assert await spawner.poll() == 1
    await node.start()


async def test_a_pod_that_never_runs_ends_the_spawn_with_what_it_waits_for(
    make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster
) -> None:
    node = await nodes.add(gpus=1)
    await nodes.report(node, [gpu(node, 0), gpu(node, 7)])
    hub = await make_hub(lambda config: config.Spawner.update(start_timeout=3))
    assert (await hub.start_server("ada", {"profile": "whole-gpu"})).code == 201
    response = await hub.start_server("bob", {"profile": "whole-gpu"})
    # the report says there is a GPU 7, the node's status does not
    assert response.code == 503
    assert "did not start within 3 s (Unschedulable" in await message_of(response)
    await cluster.wait_until_gone("jupyter-bob")


# the API


@pytest.mark.parametrize("fault", ["500", "429", "reset", "lost"])
async def test_an_api_that_fails_for_a_moment_is_asked_again(
    make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster, fault: Any
) -> None:
    await nodes.add(gpus=1)
    hub = await make_hub()
    for resource in ("pods", "configmaps", "events"):
        cluster.faults.fail_next("list", resource, fault)
    cluster.faults.fail_next("create", "pods", fault, times=2)
    response = await hub.start_server("ada", {"profile": "whole-gpu"})
    assert response.code == 201, response.body
    assert await nodes.held() == {f"GPU-{nodes.names[0]}-0": 100}
    assert not hub.reservations.in_flight()
    cluster.faults.fail_next("delete", "pods", fault)
    assert (await hub.stop_server("ada")).code == 204
    await cluster.wait_until_gone("jupyter-ada")


async def test_an_api_that_does_not_come_back_ends_the_spawn(
    make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await nodes.add(gpus=1)
    hub = await make_hub(lambda config: config.KubeSpawner.update(k8s_api_request_retry_timeout=1))
    cluster.faults.fail_next("create", "pods", "500", times=1000)
    response = await hub.start_server("ada", {"profile": "whole-gpu"})
    assert response.code == 503
    assert "Could not create pod" in await message_of(response)
    # a pod may yet appear: its place is kept for a while
    assert await units_in_flight(hub) == 100
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 60)
    monkeypatch.setattr("gpushare_spawner.spawner.kubernetes.reservations.time", later)
    assert await units_in_flight(hub) == 0


async def test_what_the_api_forbids_is_said(make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster) -> None:
    await nodes.add(gpus=1)
    hub = await make_hub(lambda config: config.KubeSpawner.update(extra_labels={"no label": "x"}))
    response = await hub.start_server("ada", {"profile": "whole-gpu"})
    assert response.code == 502
    assert "The cluster refuses the server:" in await message_of(response)


# the views


async def test_a_dead_view_is_brought_back_before_anything_is_placed(
    make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster
) -> None:
    await nodes.add(gpus=1)
    hub = await make_hub()
    assert (await hub.start_server("ada", {"profile": "whole-gpu"})).code == 201
    spawner = hub.spawner("ada")
    for key in [(PODS, cluster.namespace), spawner._reports_key]:
        # what giving up, or a first list that failed, leaves: nothing, for ever
        reflector = KubeSpawner.reflectors[key]
        reflector.watch_task.cancel()
        await asyncio.wait({reflector.watch_task})
        reflector.resources = {}
    hub.reservations.place_every = 0.1
    availability = await hub.reservations.availability_now()
    assert availability.check.ledger.free_units(f"GPU-{nodes.names[0]}-0") == 0
    assert await spawner.poll() is None


async def test_nothing_is_placed_on_a_view_that_cannot_be_had(
    make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await nodes.add(gpus=1)
    monkeypatch.setattr(Reservations, "patience", 0.5)
    hub = await make_hub()
    cluster.faults.fail_next("list", "configmaps", "500", times=1000)
    response = await hub.start_server("ada", {"profile": "half-gpu"})
    assert response.code == 503
    assert "The allocations on the cluster's GPUs are unknown" in await message_of(response)
    assert not await cluster.pods()
    cluster.faults.clear()
    assert (await hub.start_server("ada", {"profile": "half-gpu"})).code == 201


async def test_a_namespace_that_is_closed_to_the_hub_stops_nobody_else(
    make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster
) -> None:
    elsewhere = {"display_name": "There", "slug": "there", "kubespawner_override": {"namespace": "kube-system"}}
    await nodes.add(gpus=1)
    hub = await make_hub(lambda config: config.KubeSpawner.update(profile_list=[elsewhere]))
    assert (await hub.start_server("ada", {"profile": "there"})).code == 500
    # KubeSpawner keeps the watch that never came about
    assert (PODS, "kube-system") in KubeSpawner.reflectors
    assert (await hub.start_server("bob", {"profile": "half-gpu"})).code == 201


async def test_lists_that_are_behind_give_nothing_away_twice(
    make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster
) -> None:
    await nodes.add(gpus=2)
    hub = await make_hub(lambda config: config.GPUShareSpawner.update(queue_length=0))
    _, before = await cluster.admin.list_with_version(path("pods", cluster.namespace))
    assert (await hub.start_server("ada", {"profile": "whole-gpu"})).code == 201
    cluster.faults.stale_at = int(before)
    for key in list(KubeSpawner.reflectors):
        KubeSpawner.reflectors[key].watch_task.cancel()
    await asyncio.sleep(0)
    assert (await hub.start_server("bob", {"profile": "whole-gpu"})).code == 201
    assert sorted((await nodes.held()).values()) == [100, 100]
    assert (await hub.start_server("cyd", {"profile": "half-gpu"})).code == 503


async def test_reflectors_say_how_fresh_they_are(make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster) -> None:
    await nodes.add(gpus=1)
    hub = await make_hub()
    assert (await hub.start_server("ada", {"profile": "half-gpu"})).code == 201
    reflector = hub.spawner("ada").pod_reflector
    assert isinstance(reflector, Dated)
    before = reflector.listed_at
    # a watch that hangs: nothing comes, and it does not end either
    hanging = reflector.watch_task
    reflector.listed_at = time.monotonic() - reflector.oldest_healthy - 1
    views = await asyncio.gather(*(hub.reservations.availability_now() for _ in range(3)))
    assert reflector.listed_at is not None
    assert before is not None
    assert reflector.listed_at >= before
    # it was ended, and one other writes what is seen
    assert hanging.done()
    assert reflector.watch_task is not hanging
    assert not reflector.watch_task.done()
    assert [len(view.check.ledger.allocations) for view in views] == [1, 1, 1]


async def test_a_list_that_is_read_again_keeps_the_objects_that_are_as_known(
    make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster
) -> None:
    """KubeSpawner's reflectors list every 10 s: a hub of 5,000 pods held all of them twice until it placed again."""
    await nodes.add(gpus=1)
    hub = await make_hub()
    for name in ("ada", "bob"):
        assert (await hub.start_server(name, {"profile": "quarter-gpu"})).code == 201
    await hub.reservations.availability_now()
    reflector = hub.spawner("ada").pod_reflector
    before = dict(reflector.resources)
    (name,) = (key for key in before if "bob" in key)
    patch = {"metadata": {"annotations": {"touched": "yes"}}}
    await cluster.admin.patch(path("pods", cluster.namespace, before[name]["metadata"]["name"]), patch)
    await reflector._list_and_update()
    assert len(before) == len(reflector.resources) == 2
    changed = [key for key, pod in reflector.resources.items() if pod is not before[key]]
    assert changed == [name]
    assert reflector.resources[name]["metadata"]["annotations"]["touched"] == "yes"
    await hub.reservations.availability_now()
    (seen,) = hub.reservations.cluster._changed_pods.values()
    assert all(seen._seen[key] is pod for key, pod in reflector.resources.items())


# hubs


async def test_a_hub_that_lost_everything_still_counts_the_pods(
    make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster
) -> None:
    await nodes.add(gpus=1)
    first = await make_hub()
    assert (await first.start_server("ada", {"profile": "half-gpu"})).code == 201
    await first.end(cleanup_servers=False)
    await KubeSpawner._stop_all_reflectors()
    (first.folder / "hub.sqlite").unlink()

    second = await make_hub(lambda config: config.GPUShareSpawner.update(queue_length=0))
    assert (await second.start_server("bob", {"profile": "whole-gpu"})).code == 503
    # the server's own pod from before is in nobody's way
    assert (await second.start_server("ada", {"profile": "whole-gpu"})).code == 201
    assert await nodes.held() == {f"GPU-{nodes.names[0]}-0": 100}


async def test_pods_of_servers_that_nobody_knows_are_removed(
    make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await nodes.add(gpus=1)
    hub = await make_hub()
    for name in ("ada", "bob"):
        assert (await hub.start_server(name, {"profile": "quarter-gpu"})).code == 201
    pod = await cluster.pod("jupyter-ada")
    assert pod is not None
    ghost = {**pod, "metadata": {**pod["metadata"], "name": "jupyter-ghost"}}
    for key in ("uid", "resourceVersion", "creationTimestamp"):
        del ghost["metadata"][key]
    annotations = dict(ghost["metadata"]["annotations"])
    ghost["spec"] = {"containers": [{"name": "notebook", "image": "standin/notebook:1"}], "nodeName": nodes.names[0]}
    for name, extra in (
        ("jupyter-ghost", {"gpushare-spawner.io/session": "ghost"}),
        ("jupyter-theirs", {"gpushare-spawner.io/session": "them", "gpushare-spawner.io/hub": "http://other/hub/api"}),
    ):
        ghost["metadata"] = {**ghost["metadata"], "name": name, "annotations": {**annotations, **extra}}
        await cluster.admin.create(path("pods", cluster.namespace), ghost)
    monkeypatch.setattr(owned_objects, "ORPHANS_EVERY", 0.0)
    monkeypatch.setattr(owned_objects, "ORPHAN_AGE", -10.0)
    assert (await hub.start_server("cyd", {"profile": "quarter-gpu"})).code == 201
    await cluster.wait_until_gone("jupyter-ghost")
    names = {pod["metadata"]["name"] for pod in await cluster.pods()}
    assert names == {"jupyter-ada", "jupyter-bob", "jupyter-cyd", "jupyter-theirs"}


async def test_a_hub_restarted_before_it_saved_anything_learns_from_the_pod(
    make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster
) -> None:
    await nodes.add(gpus=1)
    hub = await make_hub()
    assert (await hub.start_server("ada", {"profile": "half-gpu"})).code == 201
    hub.spawner("ada").orm_spawner.state = {}
    hub.app.db.commit()
    await hub.end(cleanup_servers=False)
    await KubeSpawner._stop_all_reflectors()
    again = await make_hub()
    await until(lambda: again.spawner("ada").ready)
    assert again.spawner("ada")._attempt.template_name == "half-gpu"


async def test_a_hook_that_drops_the_annotations_gives_nothing_away_twice(
    make_hub: MakeHub,
    nodes: GpuNodes,
    cluster: Cluster,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def bare(spawner: Any, pod: Any) -> Any:
        pod.metadata.annotations = {}
        pod.metadata.labels.pop(SESSION_LABEL, None)
        return pod

    def configure(config: Any) -> None:
        config.GPUShareSpawner.queue_length = 0
        config.KubeSpawner.modify_pod_hook = bare

    await nodes.add(gpus=1)
    hub = await make_hub(configure)
    assert (await hub.start_server("ada", {"profile": "whole-gpu"})).code == 201
    assert "does a modify_pod_hook replace them?" in caplog.text
    assert (await hub.start_server("bob", {"profile": "half-gpu"})).code == 503
    # nobody waits out the 20 s in which the pod of a stopped server might still appear
    monkeypatch.setattr("gpushare_spawner.spawner.kubernetes.reservations.LINGER_SECONDS", 1.0)
    assert (await hub.stop_server("ada")).code == 204
    assert hub.reservations.in_flight(), "the pod may still be there"
    await until(lambda: not hub.reservations.in_flight(), 10)


async def test_annotations_that_cannot_be_read_count_by_the_limits(
    make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster
) -> None:
    node = await nodes.add(gpus=1)
    hub = await make_hub()
    assert (await hub.start_server("ada", {"profile": "half-gpu"})).code == 201
    where = path("pods", cluster.namespace, "jupyter-ada")
    await cluster.admin.patch(where, {"metadata": {"annotations": {TEMPLATE: None}}})
    await until(lambda: TEMPLATE not in hub.spawner("ada")._pod()["metadata"]["annotations"])
    assert (await hub.reservations.availability_now()).check.ledger.free_units(f"GPU-{node}-0") == 50
