"""Places that differ from what was thought: settings name a node, a node does not offer its units, a pod is late."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubespawner import KubeSpawner
from traitlets import TraitError
from traitlets.config import Config

from benchmarks.ledger_check import check_ledger
from gpushare_spawner.model.kubernetes.annotations import pod_session
from gpushare_spawner.model.kubernetes.objects import HOSTNAME_LABEL, resource_name
from gpushare_spawner.model.report import Report
from gpushare_spawner.placement.node import Allocation
from gpushare_spawner.spawner.kubernetes import attempt
from gpushare_spawner.spawner.kubernetes.attempt import LASTS, Cause
from gpushare_spawner.spawner.kubernetes.cluster.snapshot import ClusterSnapshots
from gpushare_spawner.spawner.kubernetes.spawner import GPUShareSpawner
from tests.placement.reports import ledger_of
from tests.present import present
from tests.spawner.running_hub import until

from .sharing_hub import GpuNodes, gpu
from .standin.cluster import Cluster

MakeHub = Callable[..., Any]


async def message_of(response: Any) -> str:
    return str(json.loads(response.body)["message"])


# a node that settings name


@pytest.mark.parametrize("by", ["node_selector", "extra_pod_config"])
async def test_a_server_that_is_pinned_to_a_node_is_placed_there(
    make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster, by: str
) -> None:
    names = sorted([await nodes.add(gpus=1) for _ in range(3)])
    selector = {HOSTNAME_LABEL: names[-1]}

    def configure(config: Any) -> None:
        config.GPUShareSpawner.queue_length = 0
        if by == "node_selector":
            config.KubeSpawner.node_selector = selector
        else:
            config.KubeSpawner.extra_pod_config = {"nodeSelector": selector}

    hub = await make_hub(configure)
    assert (await hub.start_server("ada", {"profile": "whole-gpu"})).code == 201
    assert await nodes.held() == {f"GPU-{names[-1]}-0": 100}
    # the others are free, and not for bob
    response = await hub.start_server("bob", {"profile": "half-gpu"})
    assert response.code == 503
    assert "No GPU has 0.50 GPU free now" in await message_of(response)


async def test_users_and_groups_of_placement_yaml_are_placed_on_their_nodes_and_wait_for_them(
    make_hub: MakeHub, nodes: GpuNodes, templates: Path
) -> None:
    first, second, _ = sorted([await nodes.add(gpus=1) for _ in range(3)])
    pins = {"users": {"ada": {"nodes": [second]}}, "groups": {"ml-course": {"nodes": [second]}}}
    (templates / "placement.yaml").write_text(json.dumps(pins))
    hub = await make_hub()
    assert (await hub.start_server("ada", {"profile": "whole-gpu"})).code == 201
    assert await nodes.held() == {f"GPU-{second}-0": 100}
    pinned = {"profile": "half-gpu", "placement": {"nodes": [first]}}
    assert (await hub.start_server("bob", pinned)).code == 201
    assert await nodes.held() == {f"GPU-{second}-0": 100, f"GPU-{first}-0": 50}
    refused = await message_of(await hub.start_server("mia", pinned))
    assert f"it asks for the nodes {second}, and not for {first}, as the option placement says" in refused
    starting = asyncio.ensure_future(hub.start_server("mia", {"profile": "half-gpu"}))
    why = f"Not enough free capacity: this needs 0.50 GPU, and none is free on any GPU of node {second}."
    await until(lambda: [ticket.hint for ticket in hub.reservations.queue] == [why])
    await hub.stop_server("ada")
    assert (await starting).code == 201
    assert await nodes.held() == {f"GPU-{second}-0": 50, f"GPU-{first}-0": 50}


async def test_a_report_for_another_node_is_ignored(make_hub: MakeHub, nodes: GpuNodes) -> None:
    honest, liar = [await nodes.add(gpus=1) for _ in range(2)]
    # that the other node has much more than there is
    lie = Report(node=honest, published_at=time.time(), gpus=tuple(gpu(honest, index) for index in range(8)))
    await nodes.write(liar, lie.model_dump_json(), lie.published_at)
    hub = await make_hub(lambda config: config.GPUShareSpawner.update(queue_length=0))
    assert (await hub.start_server("ada", {"profile": "whole-gpu"})).code == 201
    assert await nodes.held() == {f"GPU-{honest}-0": 100}
    response = await hub.start_server("bob", {"profile": "half-gpu"})
    assert response.code == 503
    assert "No GPU has 0.50 GPU free now" in await message_of(response)


async def test_a_server_that_is_pinned_to_a_node_without_gpus_is_refused(make_hub: MakeHub, nodes: GpuNodes) -> None:
    await nodes.add(gpus=1)
    hub = await make_hub(lambda config: config.KubeSpawner.update(node_selector={HOSTNAME_LABEL: "elsewhere"}))
    response = await hub.start_server("ada", {"profile": "half-gpu"})
    assert response.code == 409
    said = await message_of(response)
    assert "0.50 GPU cannot be started on node elsewhere, the only node that your server may use" in said


async def test_other_settings_of_an_admin_stay_beside_the_share(
    make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster
) -> None:
    node = await nodes.add(gpus=1)
    toleration = {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}
    wanted = {"matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "Exists"}]}

    def configure(config: Any) -> None:
        config.KubeSpawner.node_selector = {HOSTNAME_LABEL: node}
        config.KubeSpawner.node_affinity_required = [wanted]
        config.KubeSpawner.tolerations = [toleration]
        config.KubeSpawner.extra_resource_limits = {"memory": "96Mi"}
        config.KubeSpawner.extra_resource_guarantees = {"memory": "48Mi"}
        config.KubeSpawner.extra_annotations = {"mine": "{username}"}
        config.KubeSpawner.extra_labels = {"mine": "{username}"}

    hub = await make_hub(configure)
    assert (await hub.start_server("ada", {"profile": "half-gpu"})).code == 201
    pod = await cluster.pod("jupyter-ada")
    assert pod is not None
    spec, metadata = pod["spec"], pod["metadata"]
    affinity = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (term,) = affinity["nodeSelectorTerms"]
    assert wanted["matchExpressions"][0] in term["matchExpressions"]
    assert toleration in spec["tolerations"]
    assert spec["nodeSelector"] == {HOSTNAME_LABEL: node}
    resources = spec["containers"][0]["resources"]
    assert resources["limits"]["memory"] == "96Mi"
    assert resources["limits"][resource_name(0)] == "50"
    assert resources["requests"]["memory"] == "48Mi"
    assert (metadata["annotations"]["mine"], metadata["labels"]["mine"]) == ("ada", "ada")


# a server without a GPU


@pytest.mark.parametrize("placed", [True, False])
async def test_a_server_without_a_gpu_prefers_the_node_where_it_takes_no_cpu_from_gpus(
    make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster, placed: bool
) -> None:
    names = {await nodes.add(gpus=1) for _ in range(2)}

    def configure(config: Any) -> None:
        config.GPUShareSpawner.place_without_gpu = placed
        config.KubeSpawner.node_affinity_preferred = [
            {"weight": 1, "preference": {"matchExpressions": [{"key": "own", "operator": "Exists"}]}}
        ]

    hub = await make_hub(configure)
    assert (await hub.start_server("ada", {"profile": "whole-gpu"})).code == 201
    (used,) = {gpu_id.removeprefix("GPU-").removesuffix("-0") for gpu_id in await nodes.held()}
    assert (await hub.start_server("zoe", {"profile": "cpu-only"})).code == 201
    pod = present(await cluster.pod("jupyter-zoe"))
    own, *terms = pod["spec"]["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert own["weight"] == 1
    field = {"key": "metadata.name", "operator": "In", "values": [used]}
    assert terms == ([{"weight": 100, "preference": {"matchFields": [field]}}] if placed else [])
    assert used in names


async def test_a_server_without_a_gpu_prefers_no_node_that_an_admin_has_closed(
    make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster
) -> None:
    closed, other = [await nodes.add(gpus=1) for _ in range(2)]
    await nodes.cordon(closed, f"GPU-{closed}-0")
    hub = await make_hub(lambda config: config.GPUShareSpawner.update(place_without_gpu=True))
    assert (await hub.start_server("zoe", {"profile": "cpu-only"})).code == 201
    pod = present(await cluster.pod("jupyter-zoe"))
    (term,) = pod["spec"]["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert term["preference"]["matchFields"][0]["values"] == [other]


# units that a node does not offer


async def test_units_that_the_node_does_not_offer_are_looked_for_elsewhere(
    make_hub: MakeHub, nodes: GpuNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LASTS, Cause.UNITS, 0.3)
    first, second = sorted([await nodes.add(gpus=1, capacity=10), await nodes.add(gpus=1)])
    short, other = (first, second) if first == nodes.names[0] else (second, first)
    # its agent reports more than its status offers, and as the fuller one it is preferred
    await nodes.report(short, [gpu(short, 0, capacity=100)])
    await nodes.report(other, [gpu(other, 0, capacity=200)])
    hub = await make_hub(lambda config: config.JupyterHub.tornado_settings.update(slow_spawn_timeout=0.1))
    assert (await hub.start_server("ada", {"profile": "half-gpu"})).code == 202
    told = [event["message"] async for event in hub.spawner("ada").progress()]
    await hub.started("ada")
    assert any(f"Node {short} cannot take the server: it does not offer the units of the GPU" in line for line in told)
    assert await nodes.held() == {f"GPU-{other}-0": 50}
    assert not hub.reservations.in_flight()


async def test_shares_take_whole_devices(make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster, templates: Path) -> None:
    (templates / "twelve.yaml").write_text("name: twelve\ndisplay_name: Twelve\ngpu: {fraction: 0.12}\n")
    # 20 devices of 5 units; a share of 12 takes three
    node = await nodes.add(gpus=1, capacity=20)
    await nodes.report(node, [gpu(node, 0)])

    def configure(config: Any) -> None:
        config.GPUShareSpawner.share_unit_size = 5
        config.GPUShareSpawner.queue_length = 0

    hub = await make_hub(configure)
    names = [f"user-{number}" for number in range(7)]
    codes = [(await hub.start_server(name, {"profile": "twelve"})).code for name in names]
    assert codes == [201] * 6 + [503]
    assert {pod_session(pod["metadata"]["annotations"]).share_units for pod in await cluster.pods()} == {12}
    assert (await hub.reservations.availability_now()).check.ledger.free_units(f"GPU-{node}-0") == 10


@given(st.sampled_from([1, 2, 4, 5, 10, 20, 25, 50, 100]), st.lists(st.integers(1, 100), max_size=40))
def test_what_the_ledger_places_fits_into_the_devices(unit_size: int, shares: list[int]) -> None:
    view = ClusterSnapshots({}, (), unit_size, None, None)  # type: ignore[arg-type]
    ledger = ledger_of([Report(node="n", published_at=0, gpus=(gpu("n", 0),))])
    devices = 0
    for number, units in enumerate(shares):
        counted = view.whole_devices(units)
        if ledger.free_units("GPU-n-0") >= counted:
            ledger.add(Allocation(str(number), ("GPU-n-0",), counted, 0, counted))
            # what the pod's limits ask the kubelet for
            devices += -(-units // unit_size)
    check_ledger(ledger)
    assert devices <= 100 // unit_size


def test_a_unit_size_that_does_not_divide_a_gpu_is_refused() -> None:
    config = Config()
    config.GPUShareSpawner.share_unit_size = 30
    with pytest.raises(TraitError, match="share_unit_size 30 does not divide 100"):
        GPUShareSpawner(config=config, _mock=True)


# pods that are late


async def test_the_pod_of_a_failed_start_is_removed_when_it_shows(
    make_hub: MakeHub, nodes: GpuNodes, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def not_seen(spawner: Any) -> int:
        return 1

    await nodes.add(gpus=1)
    hub = await make_hub()
    # the pod is made and the answer is lost; the hub has not seen the pod, and stops nothing
    monkeypatch.setattr(attempt, "may_pass", lambda error: False)
    monkeypatch.setattr(KubeSpawner, "poll", not_seen)
    cluster.faults.fail_next("create", "pods", "lost")
    assert (await hub.start_server("ada", {"profile": "whole-gpu"})).code >= 500
    await cluster.wait_until_gone("jupyter-ada")
    monkeypatch.undo()
    for _ in range(100):
        # each pass over the queue finds which pods are there
        await hub.reservations.snapshot()
        if not hub.reservations.in_flight():
            break
        await asyncio.sleep(0.1)
    assert not hub.reservations.in_flight()
    assert (await hub.start_server("bob", {"profile": "whole-gpu"})).code == 201


async def test_options_of_templates_are_no_news_to_the_hub(
    make_hub: MakeHub, nodes: GpuNodes, caplog: pytest.LogCaptureFixture
) -> None:
    await nodes.add(gpus=1)
    hub = await make_hub()
    assert (await hub.start_server("ada", {"profile": "half-gpu"})).code == 201
    assert "unhandled" not in caplog.text
