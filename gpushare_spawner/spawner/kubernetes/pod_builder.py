"""Builds the pod of a server with a share: KubeSpawner's manifest, and what the sharing layer adds to it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from kubernetes_asyncio.client.models import (
    V1Affinity,
    V1EnvVar,
    V1NodeAffinity,
    V1NodeSelector,
    V1NodeSelectorTerm,
    V1Pod,
    V1ResourceRequirements,
)
from kubespawner.utils import get_k8s_model

from gpushare_spawner.model.kubernetes import HOSTNAME_LABEL, HUB
from gpushare_spawner.sharing.base import PodSpec
from gpushare_spawner.sharing.native_pod import NOTEBOOK, NativePodLayer
from gpushare_spawner.spawner.kubernetes.cluster.pods import RESERVATION
from gpushare_spawner.spawner.kubernetes.reservations import PodShare
from gpushare_spawner.spawner.spawn_refused import SpawnRefused
from gpushare_spawner.wording.spawn import failures as words

WITHOUT_GPU = {"NVIDIA_VISIBLE_DEVICES": "void", "CUDA_VISIBLE_DEVICES": "-1"}
"""A server whose template has no GPU must not see those of its node because its image says "all". (NVIDIA Container
Toolkit, environment variables: void is "as if there were no GPU".)"""


def build_pod(pod: V1Pod, share: PodShare, unit_size: int, hub: str) -> V1Pod:
    """Return KubeSpawner's manifest with the share in it. ``hub``: the URL of the API of the hub that makes the pod.

    Raises SpawnRefused for a manifest that is pinned to another node than the share's.
    """
    placed, pinned = share.placement.node, (pod.spec.node_selector or {}).get(HOSTNAME_LABEL)
    if pinned not in (None, placed):
        raise SpawnRefused(
            words.pinned_elsewhere(placed, str(pinned), HOSTNAME_LABEL), reason="bad-template", status=500
        )
    indices = {gpu.uuid: gpu.index for gpu in share.gpus}
    layer = NativePodLayer(
        share.request.tenant,
        share.request.template,
        share.placement,
        indices,
        unit_size=unit_size,
        since=time.time(),
    )
    changed = layer.render(fragment(pod))
    changed["metadata"]["annotations"].update({RESERVATION: share.token, HUB: hub})
    return put_back(pod, changed)


def fragment(pod: V1Pod) -> PodSpec:
    """The parts of a manifest that a sharing layer looks at and changes, as plain data."""
    container = _notebook(pod)
    return {
        "metadata": {"annotations": dict(pod.metadata.annotations or {}), "labels": dict(pod.metadata.labels or {})},
        "spec": {
            "affinity": _plain(pod.spec.affinity),
            "containers": [
                {
                    "name": container.name,
                    "resources": {"limits": dict(_get(container.resources, "limits") or {})},
                    "env": [{"name": _get(variable, "name")} for variable in container.env or []],
                }
            ],
        },
    }


def put_back(pod: V1Pod, changed: PodSpec) -> V1Pod:
    """Write what a sharing layer made of the `fragment` into the manifest; everything else stays as it is."""
    container = _notebook(pod)
    pod.metadata.annotations = changed["metadata"]["annotations"]
    pod.metadata.labels = changed["metadata"]["labels"]
    _require_node(pod.spec, changed["spec"]["affinity"])
    (wanted,) = changed["spec"]["containers"]
    if container.resources is None:
        container.resources = V1ResourceRequirements()
    if isinstance(container.resources, dict):
        container.resources = {**container.resources, "limits": wanted["resources"]["limits"]}
    else:
        container.resources.limits = wanted["resources"]["limits"]
    set_here = {variable["name"]: variable["value"] for variable in wanted["env"] if "value" in variable}
    if set_here:
        kept = [variable for variable in container.env or [] if _get(variable, "name") not in set_here]
        container.env = kept + [V1EnvVar(name=name, value=value) for name, value in set_here.items()]
    return pod


def _require_node(spec: Any, affinity: Mapping[str, Any]) -> None:
    """Take over the required node affinity. An admin's hook sees models, as KubeSpawner makes them."""
    required = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    if isinstance(spec.affinity, Mapping):
        spec.affinity = dict(affinity)
        return
    spec.affinity = spec.affinity or V1Affinity()
    spec.affinity.node_affinity = spec.affinity.node_affinity or V1NodeAffinity()
    spec.affinity.node_affinity.required_during_scheduling_ignored_during_execution = V1NodeSelector(
        node_selector_terms=[get_k8s_model(V1NodeSelectorTerm, term) for term in required["nodeSelectorTerms"]]
    )


def _plain(affinity: Any) -> dict[str, Any]:
    """Return an affinity as the API server writes it."""
    if affinity is None or isinstance(affinity, Mapping):
        return dict(affinity or {})
    return dict(affinity.to_dict(serialize=True))


def _notebook(pod: V1Pod) -> Any:
    containers = pod.spec.containers
    return next((container for container in containers if container.name == NOTEBOOK), containers[0])


def _get(thing: Any, name: str) -> Any:
    # KubeSpawner takes both models and dicts in several settings, and leaves them as they are
    if thing is None:
        return None
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name)
