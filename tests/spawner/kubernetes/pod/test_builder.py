"""The pod of a server with a share, from KubeSpawner's manifest."""

from __future__ import annotations

from typing import Any

import pytest
from kubernetes_asyncio.client.models import (
    V1Affinity,
    V1Container,
    V1EnvVar,
    V1NodeAffinity,
    V1NodeSelector,
    V1NodeSelectorTerm,
    V1ObjectMeta,
    V1Pod,
    V1PodSpec,
)
from kubespawner.utils import get_k8s_model

from gpushare_spawner.model.kubernetes.annotations import HUB, pod_session
from gpushare_spawner.model.kubernetes.objects import HOSTNAME_LABEL
from gpushare_spawner.spawner.hub import SpawnRefused
from gpushare_spawner.spawner.kubernetes.cluster.pods import RESERVATION
from gpushare_spawner.spawner.kubernetes.pod import build_pod

from ..parts import share


def manifest(node_selector: dict[str, str] | None = None, **container: Any) -> V1Pod:
    notebook = V1Container(name="notebook", image="i", env=[V1EnvVar(name="MINE", value="1")], **container)
    return V1Pod(
        metadata=V1ObjectMeta(annotations={"theirs": "kept"}, labels={"theirs": "kept"}),
        spec=V1PodSpec(containers=[V1Container(name="sidecar"), notebook], node_selector=node_selector),
    )


def test_the_pod_has_its_share_its_node_and_its_hub() -> None:
    pod = build_pod(manifest(), share(), 1, "http://hub/api")
    assert pod.spec.node_selector is None
    required = pod.spec.affinity.node_affinity.required_during_scheduling_ignored_during_execution
    (term,) = required.node_selector_terms
    assert term.match_fields == [{"key": "metadata.name", "operator": "In", "values": ["node-a"]}]
    sidecar, notebook = pod.spec.containers
    assert sidecar.resources is None
    assert notebook.resources.limits == {"gpushare-spawner.io/gpu-3": "50"}
    annotations = pod.metadata.annotations
    assert (annotations["theirs"], annotations[RESERVATION], annotations[HUB]) == ("kept", "token-1", "http://hub/api")
    session = pod_session(annotations)
    assert (session.session, session.share_units, session.gpus) == ("ada", 50, ("GPU-node-a",))


def test_limits_that_are_there_are_kept_and_devices_count_in_their_own_steps() -> None:
    pod = build_pod(manifest(resources={"limits": {"cpu": 2}, "requests": {"cpu": 1}}), share(), 25, "")
    resources = pod.spec.containers[1].resources
    assert resources == {"limits": {"cpu": 2, "gpushare-spawner.io/gpu-3": "2"}, "requests": {"cpu": 1}}


def test_a_pod_that_is_pinned_elsewhere_is_refused() -> None:
    with pytest.raises(SpawnRefused, match="placed on node node-a, and its settings pin it to node-b"):
        build_pod(manifest({HOSTNAME_LABEL: "node-b"}), share(), 1, "")


@pytest.mark.parametrize("as_models", [True, False])
def test_the_node_s_name_goes_into_each_term_of_an_admin_s_affinity(as_models: bool) -> None:
    theirs = [{"matchExpressions": [{"key": zone, "operator": "Exists"}]} for zone in ("a", "b")]
    pod = manifest()
    preferred: dict[str, Any] = {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    if as_models:
        terms = [get_k8s_model(V1NodeSelectorTerm, term) for term in theirs]
        selector = V1NodeSelector(node_selector_terms=terms)
        pod.spec.affinity = V1Affinity(
            node_affinity=V1NodeAffinity(required_during_scheduling_ignored_during_execution=selector)
        )
    else:
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": theirs}}
        pod.spec.affinity = {**preferred, "nodeAffinity": required}  # type: ignore[assignment]
    built = build_pod(pod, share(), 1, "").spec.affinity
    affinity: Any = built.to_dict(serialize=True) if as_models else built
    if not as_models:
        assert affinity["podAffinity"] == preferred["podAffinity"]
    named = [{"key": "metadata.name", "operator": "In", "values": ["node-a"]}]
    required = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert required["nodeSelectorTerms"] == [{**term, "matchFields": named} for term in theirs]
