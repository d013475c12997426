"""A start with a share in a cluster, from the options to the pod and back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpushare_spawner.model.kubernetes.annotations import SESSION_LABEL, pod_session
from gpushare_spawner.model.kubernetes.objects import node_of, resource_name
from gpushare_spawner.model.share import Tier
from gpushare_spawner.spawner.kubernetes import pod
from gpushare_spawner.spawner.kubernetes.pod import fragment
from gpushare_spawner.spawner.queue.reservations import Reservations
from tests.spawner.running_hub import until

from .sharing_hub import MODEL, GpuNodes, gpu
from .standin.client import path
from .standin.cluster import Cluster
from .standin.programs import Listeners


class Told:
    """What the page of a spawn says, from now on."""

    def __init__(self, hub: Any, user: str) -> None:
        self.lines: list[str] = []
        self._progress = hub.spawner(user).progress()
        self._listening = asyncio.create_task(self._listen())

    async def _listen(self) -> None:
        async for event in self._progress:
            self.lines.append(event["message"])

    async def until(self, text: str) -> None:
        """Wait until it says this."""
        await until(lambda: any(text in line for line in self.lines))

    async def ended(self) -> None:
        """Wait until it says nothing more."""
        await asyncio.wait_for(self._listening, 5)


async def test_a_pod_carries_its_share(make_hub: Callable[..., Any], nodes: GpuNodes, cluster: Cluster) -> None:
    node = await nodes.add()
    hub = await make_hub()
    response = await hub.start_server("ada", {"profile": "quarter-gpu"})
    assert response.code == 201, response.body
    pod = await cluster.pod("jupyter-ada")
    assert pod is not None
    assert pod["metadata"]["labels"][SESSION_LABEL] == "true"
    session = pod_session(pod["metadata"]["annotations"])
    assert (session.session, session.template, session.share_units) == ("ada", "quarter-gpu", 25)
    assert (session.gpus, session.gpu_indices, session.tier) == ((f"GPU-{node}-0",), (0,), Tier.ACTIVE)
    assert node_of({**pod["spec"], "nodeName": ""}) == node
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["limits"] == {resource_name(0): "25"}
    # what holds the share now is the pod, and nothing else
    assert not hub.reservations.in_flight()
    ledger = (await hub.reservations.availability_now()).check.ledger
    assert [allocation.gpus for allocation in ledger.allocations.values()] == [(f"GPU-{node}-0",)]
    assert (await hub.stop_server("ada")).code == 204
    await until(lambda: not hub.spawner("ada").active)
    assert not await nodes.held()


async def test_a_spawn_is_refused_with_a_sentence(make_hub: Callable[..., Any], nodes: GpuNodes) -> None:
    await nodes.add()
    hub = await make_hub()
    for options, status, words in (
        ({"profile": "nothing"}, 400, "There is no template 'nothing'"),
        ({"profile": "half-gpu", "colour": "red"}, 400, "Unknown option 'colour'"),
        ({"profile": "course"}, 403, "You may not use the template Course (course)"),
        ({"profile": "a100"}, 409, "A100 cannot be started on this cluster"),
        ({"profile": "three-gpus"}, 409, "This needs 3 GPUs on one node"),
    ):
        response = await hub.start_server("ada", options)
        assert response.code == status, (options, response.body)
        assert words in json.loads(response.body)["message"]
    assert not hub.reservations.in_flight()
    assert not len(hub.reservations.queue)


async def test_a_template_without_a_gpu_takes_nothing(
    make_hub: Callable[..., Any], nodes: GpuNodes, cluster: Cluster
) -> None:
    await cluster.make_node(programs=Listeners())
    hub = await make_hub()
    assert (await hub.start_server("ada", {"profile": "cpu-only"})).code == 201
    pod = await cluster.pod("jupyter-ada")
    assert pod is not None
    assert SESSION_LABEL not in pod["metadata"]["labels"]
    environment = {variable["name"]: variable.get("value") for variable in pod["spec"]["containers"][0]["env"]}
    assert environment["NVIDIA_VISIBLE_DEVICES"] == "void"


CPU_QUOTAS = """\
groups:
  science: {cpu: {maximum: 3}, teams: {optics: {guarantee: 1, cpu: {guarantee: 1}}}}
"""


async def test_cpu_of_servers_with_and_without_a_gpu_counts_in_quotas_and_after_a_restart_of_the_hub(
    make_hub: Callable[..., Any], nodes: GpuNodes, cluster: Cluster, templates: Path
) -> None:
    await nodes.add(gpus=1)
    (templates / "quotas.yaml").write_text(CPU_QUOTAS)
    for name, gpu_part in (("cpu-only", ""), ("half-gpu", "gpu: {fraction: 0.5}\n")):
        text = f"name: {name}\ndisplay_name: {name}\n{gpu_part}resources: {{cpu: {{guarantee: 1}}}}\n"
        (templates / f"{name}.yaml").write_text(text)
    hub = await make_hub()
    await hub.api("POST", "groups/optics")
    for user in ("ada", "bob", "eve", "zoe"):
        await hub.add_user(user)
        await hub.api("POST", "groups/optics/users", {"users": [user]})
    for user, profile in (("ada", "cpu-only"), ("bob", "half-gpu"), ("eve", "cpu-only")):
        assert (await hub.start_server(user, {"profile": profile})).code == 201
        await hub.started(user)
    await hub.end(cleanup_servers=False)
    hub = await make_hub()
    for profile in ("half-gpu", "cpu-only"):
        refused = await hub.start_server("zoe", {"profile": profile})
        assert refused.code == 409
        assert (
            "This needs 1 CPU core, and the quota of group science is limited to 3 CPU cores, of which 3 CPU cores are"
        ) in json.loads(refused.body)["message"]
    # after its start the hub checks each server, and stops none meanwhile
    await until(lambda: hub.user("bob").spawner.pending is None, 60.0)
    assert (await hub.stop_server("bob")).code in (202, 204)
    await until(lambda: not hub.user("bob").running)
    await hub.start_server("zoe", {"profile": "cpu-only"})
    await hub.started("zoe")


async def test_a_share_of_several_gpus_lies_on_one_node(
    make_hub: Callable[..., Any], nodes: GpuNodes, cluster: Cluster
) -> None:
    node = await nodes.add(gpus=4)
    hub = await make_hub()
    assert (await hub.start_server("ada", {"profile": "three-gpus"})).code == 201
    pod = await cluster.pod("jupyter-ada")
    assert pod is not None
    uuids = [f"GPU-{node}-{index}" for index in range(3)]
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["limits"] == {resource_name(index): "100" for index in range(3)}
    environment = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert environment["CUDA_VISIBLE_DEVICES"] == environment["NVIDIA_VISIBLE_DEVICES"] == ",".join(uuids)


async def test_a_share_of_one_gpu_and_half_of_another_waits_for_both_and_lists_the_whole_one_first(
    make_hub: Callable[..., Any], nodes: GpuNodes, cluster: Cluster, templates: Path
) -> None:
    (templates / "more.yaml").write_text("{name: more, display_name: 1.5 GPU, gpu: {fraction: 1.5}}")
    node = await nodes.add(gpus=2)
    hub = await make_hub(lambda config: config.JupyterHub.tornado_settings.update(slow_spawn_timeout=0.2))
    assert (await hub.start_server("ada", {"profile": "quarter-gpu"})).code in (201, 202)
    await hub.started("ada")
    assert (await hub.start_server("bob", {"profile": "more"})).code in (201, 202)
    await hub.started("bob")
    pod = await cluster.pod("jupyter-bob")
    assert pod is not None
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["limits"] == {resource_name(1): "100", resource_name(0): "50"}
    environment = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert environment["CUDA_VISIBLE_DEVICES"] == f"GPU-{node}-1,GPU-{node}-0"
    assert pod["metadata"]["annotations"]["gpushare-spawner.io/share"] == "100,50"
    assert (await hub.start_server("cyd", {"profile": "more"})).code == 202
    told = Told(hub, "cyd")
    await told.until("this needs 1.50 GPU on one node")


async def test_a_spawn_waits_in_the_queue_and_says_so(
    make_hub: Callable[..., Any], nodes: GpuNodes, cluster: Cluster
) -> None:
    await nodes.add(gpus=1)
    hub = await make_hub(lambda config: config.JupyterHub.tornado_settings.update(slow_spawn_timeout=0.2))
    assert (await hub.start_server("ada", {"profile": "whole-gpu"})).code in (201, 202)
    await hub.started("ada")
    assert (await hub.start_server("bob", {"profile": "half-gpu"})).code == 202
    told = Told(hub, "bob")
    await told.until("First in queue. Not enough free capacity: this needs 0.50 GPU")
    assert (await hub.stop_server("ada")).code in (202, 204)
    await hub.started("bob")
    await told.until(f"Placed on GPU 0 ({MODEL}) of {nodes.names[0]}.")
    await told.ended()
    assert any("Started" in line for line in told.lines), told.lines


async def test_a_cordon_keeps_pods_off_a_gpu_or_a_node_until_it_is_ended(
    make_hub: Callable[..., Any], nodes: GpuNodes
) -> None:
    first, second = sorted([await nodes.add(gpus=1) for _ in range(2)])
    await nodes.cordon(first, "")
    await nodes.cordon(second, f"GPU-{second}-0")
    hub = await make_hub(lambda config: config.JupyterHub.tornado_settings.update(slow_spawn_timeout=0.2))
    assert (await hub.start_server("ada", {"profile": "whole-gpu"})).code == 202
    of_ada = Told(hub, "ada")
    await of_ada.until("An admin keeps new servers away from the GPUs that could take 1 GPU: they are cordoned.")
    await nodes.uncordon(second, f"GPU-{second}-0")
    await hub.started("ada")
    await of_ada.until(f"Placed on GPU 0 ({MODEL}) of {second}.")

    assert (await hub.start_server("bob", {"profile": "whole-gpu"})).code == 202
    of_bob = Told(hub, "bob")
    await of_bob.until("Not enough free capacity")
    assert not any("Placed" in line for line in of_bob.lines)
    await nodes.uncordon(first, "")
    await hub.started("bob")
    await of_bob.until(f"Placed on GPU 0 ({MODEL}) of {first}.")
    assert await nodes.held() == {f"GPU-{first}-0": 100, f"GPU-{second}-0": 100}


async def test_a_pod_that_goes_counts_until_it_is_gone(
    make_hub: Callable[..., Any], nodes: GpuNodes, cluster: Cluster
) -> None:
    await nodes.add(gpus=1)
    hub = await make_hub()
    assert (await hub.start_server("ada", {"profile": "whole-gpu"})).code == 201
    reservations, node = hub.reservations, cluster.nodes[nodes.names[0]]
    await node.stop()
    await cluster.admin.delete(path("pods", cluster.namespace, "jupyter-ada"), grace=30)
    await until(lambda: any(pod["metadata"].get("deletionTimestamp") for pod in reservations.cluster.pods()))
    assert (await reservations.availability_now()).check.ledger.free_units(f"GPU-{node.name}-0") == 0
    await node.start()
    await until(lambda: not list(reservations.cluster.pods()))
    assert (await reservations.availability_now()).check.ledger.free_units(f"GPU-{node.name}-0") == 100


async def test_reports_that_are_stale_or_wrong_give_no_place(
    make_hub: Callable[..., Any], nodes: GpuNodes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await nodes.add(gpus=1)
    monkeypatch.setattr(Reservations, "patience", 0.5)
    hub = await make_hub()
    await nodes.report(node, [gpu(node, 0)], age=200)
    await nodes.write("broken", "{}")
    response = await hub.start_server("ada", {"profile": "half-gpu"})
    assert response.code == 503
    assert "The allocations on the cluster's GPUs are unknown" in json.loads(response.body)["message"]
    log = caplog.text
    assert "the last one is 3 min" in log
    assert "not a report that this version can read" in log


async def test_a_spawn_reads_its_manifest_once(
    make_hub: Callable[..., Any], nodes: GpuNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cheap guard of what spawns cost beside KubeSpawner's: `benchmarks.spawn` measures it."""
    read: list[str] = []

    def counted(pod: Any) -> Any:
        read.append(pod.metadata.name)
        return fragment(pod)

    for module in (pod, pod):
        monkeypatch.setattr(module, "fragment", counted)
    await nodes.add(gpus=2)
    hub = await make_hub()
    users = ("ada", "bob", "eve")
    answers = await asyncio.gather(*(hub.start_server(user, {"profile": "quarter-gpu"}) for user in users))
    assert [answer.code for answer in answers] == [201] * len(users)
    assert sorted(read) == [f"jupyter-{user}" for user in users]
