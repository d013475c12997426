"""Requests to foreign layers, for tests: a template with this GPU share, on these nodes."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings

from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.layers_file import LayerOptions, LayerRule, LayersFile
from gpushare_spawner.model.template import Template
from gpushare_spawner.sharing.base import ClusterFacts, ClusterNode, LayerRequest, PodSpec, Tenant

LOADED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""For property tests: the machine can have other work."""

A100, H100, T4 = "NVIDIA-A100-SXM4-80GB", "NVIDIA-H100-80GB-HBM3", "Tesla-T4"
GIB = 2**30

POD: PodSpec = {
    "metadata": {"name": "jupyter-ada", "annotations": {"hub.jupyter.org/username": "ada"}, "labels": {"app": "hub"}},
    "spec": {
        "schedulerName": "user-scheduler",
        "containers": [
            {"name": "sidecar", "resources": {"limits": {"cpu": "1"}}},
            {
                "name": "notebook",
                "env": [{"name": "JUPYTERHUB_USER", "value": "ada"}],
                "resources": {"limits": {"memory": "4Gi"}, "requests": {"memory": "1Gi"}},
            },
        ],
    },
}


def template(gpu: dict[str, Any], **fields: Any) -> Template:
    """A template with this share of GPUs."""
    return Template.model_validate({"name": "quarter-gpu", "display_name": "0.25 GPU", "gpu": gpu, **fields})


def request(
    gpu: dict[str, Any],
    options: LayerOptions,
    facts: ClusterFacts | None = None,
    *,
    rule: LayerRule | None = None,
    quota: str = "",
    **fields: Any,
) -> LayerRequest:
    """A request for a server of a template with this share."""
    return LayerRequest(
        Tenant("ada", quota=quota), template(gpu, **fields), options, facts or ClusterFacts(), rule=rule
    )


def options_of(layer: LayerName, **fields: Any) -> LayerOptions:
    """A layer's options as layers.yaml gives them."""
    return LayersFile.model_validate({"options": {layer.value: fields}}).options_of(layer)


def node(name: str = "a", product: str = A100, gpu_gib: int = 80, **more: Any) -> ClusterNode:
    """A node with GPUs of this model. ``labels`` and ``allocatable`` are added."""
    labels = {"nvidia.com/gpu.product": product, "nvidia.com/gpu.memory": str(gpu_gib * 1024), **more.pop("labels", {})}
    return ClusterNode(name, labels, **more)


def notebook(pod: PodSpec) -> dict[str, Any]:
    """The notebook server's container."""
    found: dict[str, Any] = next(one for one in pod["spec"]["containers"] if one["name"] == "notebook")
    return found


def required(pod: PodSpec) -> dict[str, list[str]]:
    """The labels that the pod's affinity requires of a node."""
    terms = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (term,) = terms["nodeSelectorTerms"]
    assert all(one["operator"] == "In" for one in term["matchExpressions"])
    return {one["key"]: one["values"] for one in term["matchExpressions"]}
