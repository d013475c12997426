"""The pod of a server whose GPU another sharing layer gives, and the admin's last word on it."""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes_asyncio.client.models import V1Container, V1ObjectMeta, V1Pod, V1PodSpec

from gpushare_spawner.model.kubernetes.annotations import HUB, NOTICE, PREFIX, pod_session
from gpushare_spawner.model.kubernetes.objects import OBSERVER
from gpushare_spawner.model.layers import LayerName, Placement
from gpushare_spawner.model.layers_file import HamiOptions, KaiOptions, LayerOptions, MigOptions, ReplicaOptions
from gpushare_spawner.model.template import Template
from gpushare_spawner.sharing.base import ClusterFacts, ClusterNode, ClusterPod, LayerRequest, Tenant
from gpushare_spawner.spawner.hub import SpawnRefused
from gpushare_spawner.spawner.kubernetes.cluster.pods import RESERVATION
from gpushare_spawner.spawner.kubernetes.pod import build_pod, fragment
from gpushare_spawner.spawner.kubernetes.reservations import PodReservation
from gpushare_spawner.spawner.queue.snapshot import LayerOffer, SpawnRequest


def built(
    scheduler: str | None = None,
    labels: dict[str, str] | None = None,
    excluded_nodes: frozenset[str] = frozenset(),
    **template: Any,
) -> V1Pod:
    """A pod for half a GPU of KAI."""
    values = {"name": "half", "display_name": "Half", "gpu": {"fraction": 0.5}, **template}
    asked = Template.model_validate(values)
    tenant = Tenant("ada", quota="group:ml")
    offer = LayerOffer(LayerName.KAI, LayerRequest(tenant, asked, KaiOptions(queue="notebooks")), excluded_nodes)
    share = PodReservation(SpawnRequest(tenant, asked), Placement("", ()), (), "token-1", offer=offer)
    pod = V1Pod(
        metadata=V1ObjectMeta(annotations={"theirs": "kept"}, labels=labels or {}),
        spec=V1PodSpec(containers=[V1Container(name="notebook")], scheduler_name=scheduler),
    )
    return build_pod(pod, share, 1, "http://hub/api")


def test_the_layer_s_terms_and_the_session_are_in_the_pod() -> None:
    pod = built(scheduler="user-scheduler")
    annotations, labels = pod.metadata.annotations, pod.metadata.labels
    assert (annotations["gpu-fraction"], labels["kai.scheduler/queue"]) == ("0.50", "notebooks")
    assert (pod.spec.scheduler_name, pod.spec.priority_class_name) == ("kai-scheduler", "build")
    assert (annotations["theirs"], annotations[RESERVATION], annotations[HUB]) == ("kept", "token-1", "http://hub/api")
    said = pod_session(annotations, labels)
    assert (said.layer, said.session, said.template, said.quota) == (LayerName.KAI, "ada", "half", "group:ml")
    assert said.share.units == 50
    container = pod.spec.containers[0]
    assert {one.name: one.value for one in container.env} == {
        "GPUSHARE_LAYER": "kai",
        "GPUSHARE_ANNOTATIONS": "/var/run/gpushare-session",
    }


def test_the_server_reads_its_own_notices_and_no_other_annotations() -> None:
    pod = built()
    (volume,) = fragment(pod)["spec"]["volumes"]
    items = {one["path"]: one["fieldRef"]["fieldPath"] for one in volume["downwardAPI"]["items"]}
    assert items[NOTICE.removeprefix(PREFIX)] == f"metadata.annotations['{NOTICE}']"
    assert items["messages"] == "metadata.annotations['gpushare-spawner.io/messages']"
    assert not {"quota", "hub"} & set(items), "the user need not know them"
    (mount,) = pod.spec.containers[0].volume_mounts
    assert (mount.name, mount.mount_path, mount.read_only) == (volume["name"], "/var/run/gpushare-session", True)


def test_a_node_that_is_kept_for_an_earlier_spawn_is_ruled_out() -> None:
    required = "required_during_scheduling_ignored_during_execution"
    pod = built(excluded_nodes=frozenset({"node-a"}))
    (term,) = getattr(pod.spec.affinity.node_affinity, required).node_selector_terms
    assert term.match_fields == [{"key": "metadata.name", "operator": "NotIn", "values": ["node-a"]}]
    assert built().spec.affinity is None


def test_what_the_template_overrides_itself_stays() -> None:
    override = {
        "scheduler_name": "my-scheduler",
        "extra_pod_config": {"priorityClassName": "train"},
        "extra_labels": {"kai.scheduler/queue": "mine"},
    }
    pod = built("my-scheduler", {"kai.scheduler/queue": "mine"}, kubespawner_override=override)
    assert pod.spec.scheduler_name == "my-scheduler"
    # extra_pod_config is applied by KubeSpawner before: this manifest had none
    assert pod.spec.priority_class_name is None
    assert pod.metadata.labels["kai.scheduler/queue"] == "mine"
    assert pod.metadata.annotations["gpu-fraction"] == "0.50"


def test_a_share_that_the_layer_cannot_give_is_refused_with_its_reason() -> None:
    template = Template.model_validate({"name": "half", "display_name": "Half", "gpu": {"fraction": 0.5}})
    tenant = Tenant("ada")
    offer = LayerOffer(LayerName.MIG, LayerRequest(tenant, template, MigOptions()))
    share = PodReservation(SpawnRequest(tenant, template), Placement("", ()), (), "token-1", offer=offer)
    pod = V1Pod(metadata=V1ObjectMeta(), spec=V1PodSpec(containers=[V1Container(name="notebook")]))
    with pytest.raises(SpawnRefused) as refused:
        build_pod(pod, share, 1, "")
    assert "MIG" in refused.value.jupyterhub_message


def limits_on(
    layer: LayerName, options: LayerOptions, *observers: int | None, observed: bool = True, taken: int = 0
) -> dict[str, str]:
    """The limits of a server on nodes with so many of the observers' resource; None: a node has no such resource.

    A pod of somebody else on the first node has `taken` of them.
    """
    nodes = tuple(
        ClusterNode(
            f"node-{number}",
            {
                "nvidia.com/gpu.product": "L4",
                "nvidia.com/gpu.replicas": "4",
                "nvidia.com/gpu.sharing-strategy": "time-slicing",
            },
            allocatable={"nvidia.com/gpu.shared": 4} | ({} if amount is None else {OBSERVER: amount}),
        )
        for number, amount in enumerate(observers)
    )
    asked = Template.model_validate({"name": "quarter", "display_name": "Quarter", "gpu": {"fraction": 0.25}})
    stranger = ClusterPod("stranger", "elsewhere", "node-0", requests={OBSERVER: taken})
    offer = LayerOffer(layer, LayerRequest(Tenant("ada"), asked, options, ClusterFacts(nodes=nodes, pods=(stranger,))))
    share = PodReservation(
        SpawnRequest(Tenant("ada"), asked), Placement("", ()), (), "token-1", offer=offer, observed=observed
    )
    pod = V1Pod(metadata=V1ObjectMeta(), spec=V1PodSpec(containers=[V1Container(name="notebook")]))
    limits: dict[str, str] | None = build_pod(pod, share, 1, "").spec.containers[0].resources.limits
    return limits or {}


def test_the_library_is_asked_for_where_every_node_of_the_layer_has_an_observer() -> None:
    shared = LayerName.TIME_SLICING, ReplicaOptions()
    assert limits_on(*shared, 512, 512) == {"nvidia.com/gpu.shared": "1", OBSERVER: "1"}
    for observers in ((512, None), (512, 0), (None,)):
        assert OBSERVER not in limits_on(*shared, *observers), "the pod could not run on a node without the resource"
    assert OBSERVER in limits_on(*shared, 512, 512, taken=511)
    assert OBSERVER not in limits_on(*shared, 512, 512, taken=512), "the pod would wait for a node with a free one"
    assert OBSERVER not in limits_on(*shared, 512, observed=False), "a node has refused such a pod a moment ago"


def test_no_library_of_ours_goes_beside_one_that_the_layer_preloads() -> None:
    assert OBSERVER not in limits_on(LayerName.HAMI, HamiOptions(), 512)
    assert OBSERVER not in limits_on(LayerName.KAI, KaiOptions(), 512)
