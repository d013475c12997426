"""The part of KubeSpawner's manifest that sharing layers see, as plain data, and the way back into the manifest.

KubeSpawner and an admin's `modify_pod_hook` work with models of the Kubernetes client; sharing layers with plain data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kubernetes_asyncio.client.models import (
    V1Affinity,
    V1EnvVar,
    V1NodeAffinity,
    V1NodeSelector,
    V1NodeSelectorTerm,
    V1Pod,
    V1PodResourceClaim,
    V1ResourceRequirements,
    V1Volume,
    V1VolumeMount,
)
from kubespawner.utils import get_k8s_model

from gpushare_spawner.sharing.base import PodSpec
from gpushare_spawner.sharing.pod_changes import NOTEBOOK

_POD = {"nodeSelector": "node_selector", "schedulerName": "scheduler_name", "priorityClassName": "priority_class_name"}
"""Fields of a pod's spec that a layer can replace, and the model's names of them."""
_POD_LISTS = {"resourceClaims": ("resource_claims", V1PodResourceClaim), "volumes": ("volumes", V1Volume)}
"""Lists in a pod's spec that a layer can add to, with the model's names and the types of their items."""
_AMOUNTS = ("limits", "requests")


def fragment(pod: V1Pod) -> PodSpec:
    """Return the parts of a manifest that a sharing layer looks at and changes, as plain data."""
    container = _notebook(pod)
    resources = {name: dict(_get(container.resources, name) or {}) for name in _AMOUNTS}
    claims = _plain(_get(container.resources, "claims"))
    spec = {name: _plain(getattr(pod.spec, attribute)) for name, attribute in _POD.items()}
    spec |= {name: _plain(getattr(pod.spec, attribute)) for name, (attribute, _) in _POD_LISTS.items()}
    return {
        "metadata": {"annotations": dict(pod.metadata.annotations or {}), "labels": dict(pod.metadata.labels or {})},
        "spec": {
            "affinity": _plain(pod.spec.affinity) or {},
            **{name: value for name, value in spec.items() if value},
            "containers": [
                {
                    "name": container.name,
                    "resources": {**resources, **({"claims": claims} if claims else {})},
                    "env": [_plain(variable) for variable in container.env or []],
                    "volumeMounts": [_plain(mount) for mount in container.volume_mounts or []],
                }
            ],
        },
    }


def put_back(pod: V1Pod, before: PodSpec, changed: PodSpec) -> V1Pod:
    """Write what a sharing layer made of the manifest's `fragment` into it; everything else stays as it is.

    ``before``: the fragment, which layers do not change in place.
    """
    pod.metadata.annotations = changed["metadata"]["annotations"]
    pod.metadata.labels = changed["metadata"]["labels"]
    spec = changed["spec"]
    if spec["affinity"] != before["spec"]["affinity"]:
        _require_node(pod.spec, spec["affinity"])
    for name, attribute in _POD.items():
        if spec.get(name) != before["spec"].get(name):
            setattr(pod.spec, attribute, spec.get(name))
    for name, (attribute, model) in _POD_LISTS.items():
        _add(pod.spec, attribute, model, before["spec"].get(name) or [], spec.get(name) or [])
    (was,), (wanted,) = before["spec"]["containers"], spec["containers"]
    _put_back_container(_notebook(pod), was, wanted)
    return pod


def _put_back_container(container: Any, was: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    if container.resources is None:
        container.resources = V1ResourceRequirements()
    resources = wanted["resources"]
    if isinstance(container.resources, dict):
        container.resources = {**container.resources, **{name: one for name, one in resources.items() if one}}
    else:
        for name in _AMOUNTS:
            if resources.get(name) != was["resources"].get(name):
                setattr(container.resources, name, resources[name])
        # the client's model of these has another name in each of its versions
        _add(container.resources, "claims", dict, was["resources"].get("claims") or [], resources.get("claims") or [])
    set_here = {variable["name"]: variable for variable in wanted["env"] if variable not in was["env"]}
    if set_here:
        kept = [variable for variable in container.env or [] if _get(variable, "name") not in set_here]
        container.env = kept + [get_k8s_model(V1EnvVar, variable) for variable in set_here.values()]
    _add(container, "volume_mounts", V1VolumeMount, was["volumeMounts"], wanted.get("volumeMounts") or [])


def _add(target: Any, attribute: str, model: type, before: Sequence[Any], wanted: Sequence[Any]) -> None:
    """Append to a list of models what a layer has added."""
    added = [item if model is dict else get_k8s_model(model, item) for item in wanted if item not in before]
    if added:
        setattr(target, attribute, [*(getattr(target, attribute) or []), *added])


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


def _plain(value: Any) -> Any:
    """Return models as the API server writes them, without empty fields; everything else as it is."""
    if hasattr(value, "to_dict"):
        return _plain(value.to_dict(serialize=True))
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items() if item is not None}
    return value


def _notebook(pod: V1Pod) -> Any:
    containers = pod.spec.containers
    return next((container for container in containers if container.name == NOTEBOOK), containers[0])


def _get(thing: Any, name: str) -> Any:
    # KubeSpawner takes both models and dicts in several settings, and leaves them as they are
    if thing is None:
        return None
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name)
