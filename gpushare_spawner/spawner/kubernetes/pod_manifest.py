"""The share in KubeSpawner's pod manifest, and what a pod of ours says for itself later."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from kubernetes_asyncio.client.models import V1EnvVar, V1Pod, V1ResourceRequirements

from gpushare_spawner.model.kubernetes import PREFIX, is_session
from gpushare_spawner.sharing.base import PodSpec
from gpushare_spawner.sharing.native_pod import NOTEBOOK

RESERVATION = PREFIX + "reservation"
"""Annotation: which reservation of the hub the pod was made from. By it the hub knows that the share has arrived."""

FINISHED = ("Failed", "Succeeded")
"""Phases of pods that hold nothing any more."""


def fragment(pod: V1Pod) -> PodSpec:
    """The parts of a manifest that a sharing layer looks at and changes, as plain data."""
    container = _notebook(pod)
    return {
        "metadata": {"annotations": dict(pod.metadata.annotations or {}), "labels": dict(pod.metadata.labels or {})},
        "spec": {
            "nodeSelector": dict(pod.spec.node_selector or {}),
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
    pod.spec.node_selector = changed["spec"]["nodeSelector"]
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


def holds_share(pod: Mapping[str, Any]) -> bool:
    """Whether a pod (as the API server writes it) holds a share: one that is being deleted does until it is gone."""
    return is_session(pod["metadata"].get("labels")) and phase(pod) not in FINISHED


def phase(pod: Mapping[str, Any]) -> str:
    """Pending, Running, Failed, Succeeded or Unknown."""
    return str((pod.get("status") or {}).get("phase") or "Pending")


def annotation(pod: Mapping[str, Any], name: str) -> str:
    """An annotation of a pod; empty where it has none of that name."""
    return str((pod["metadata"].get("annotations") or {}).get(name) or "")


def created_at(pod: Mapping[str, Any]) -> float:
    """When the pod was made, in seconds since the epoch; 0 where it does not say."""
    written = pod["metadata"].get("creationTimestamp")
    try:
        return datetime.fromisoformat(str(written)).timestamp() if written else 0.0
    except ValueError:
        return 0.0


def _notebook(pod: V1Pod) -> Any:
    containers = pod.spec.containers
    return next((container for container in containers if container.name == NOTEBOOK), containers[0])


def _get(thing: Any, name: str) -> Any:
    # KubeSpawner takes both models and dicts in several settings, and leaves them as they are
    if thing is None:
        return None
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name)
