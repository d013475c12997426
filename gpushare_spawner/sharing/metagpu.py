"""MetaGPU: so many parts of a GPU as a resource.

Facts: cnvrg/metagpu aa4ac9c (November 2022), README.md and config/config.yaml. Its allocator splits a share over
several GPUs where none has enough parts left, so that what is free counts by node.
"""

from __future__ import annotations

from gpushare_spawner.model.layers import MetaGpuOptions
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.sharing.base import LayerCapacity, LayerRequest, PodSpec
from gpushare_spawner.sharing.nodes import node_labels, resource_capacity, suitable
from gpushare_spawner.sharing.pod_changes import PodChange


def render(form: PodSpec, request: LayerRequest) -> PodSpec:
    """Return the pod with the parts."""
    resource, parts = _parts(request)
    return PodChange(limits={resource: str(parts)}, node_labels=node_labels(request)).apply(form)


def free(request: LayerRequest) -> LayerCapacity:
    """Return what nodes have left of the resource."""
    resource, parts = _parts(request)
    return resource_capacity(request, suitable(request), resource, parts)


def _parts(request: LayerRequest) -> tuple[str, int]:
    options = request.options
    assert isinstance(options, MetaGpuOptions)
    return options.resource, -(-request.gpu.share.total_units * options.per_gpu // UNITS_PER_GPU)
