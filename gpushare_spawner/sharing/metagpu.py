"""MetaGPU: parts of a GPU as a resource. Each part has an equal part of the GPU's memory.

A server with a larger memory guarantee gets more parts.

Facts: cnvrg/metagpu aa4ac9c (November 2022), README.md and config/config.yaml. Its allocator splits a share over
several GPUs if none has enough parts left, so free capacity counts by node.
"""

from __future__ import annotations

from gpushare_spawner.model.layer_rules import MetaGpuOptions
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.sharing.base import (
    MEMORY_LABEL,
    ClusterNode,
    LayerCannot,
    LayerCapacity,
    LayerRequest,
    PodChange,
    PodSpec,
)


def render(form: PodSpec, request: LayerRequest) -> PodSpec:
    """Return the pod with the parts. Raises LayerCannot for memory that no GPU has, or of unknown part."""
    resource, parts = _parts(request)
    return PodChange(limits={resource: str(parts)}, node_labels=request.node_labels()).apply(form)


def free(request: LayerRequest) -> LayerCapacity:
    """Return the free amount of the resource on nodes. Raises LayerCannot as `render` does."""
    resource, parts = _parts(request)
    return request.resource_capacity(request.suitable_nodes(), resource, parts)


def _parts(request: LayerRequest) -> tuple[str, int]:
    options = request.options_as(MetaGpuOptions)
    share, guarantee, nodes = request.gpu.share, request.gpu.memory.guarantee, request.suitable_nodes()
    of_any_gpu = guarantee is None or guarantee.endswith("%")
    if not of_any_gpu and not all(node.gpu_memory_bytes for node in nodes):
        raise LayerCannot(
            f"MetaGPU gives memory in parts of a GPU, and the label {MEMORY_LABEL} does not tell the size of each "
            f"node's GPUs: write gpu.memory.guarantee ({guarantee}) as a percentage."
        )
    # a percentage needs no node
    candidates = nodes or [ClusterNode("")]
    units = max([share.units, *(request.units_with_memory(node) for node in candidates)])
    if units > UNITS_PER_GPU:
        raise LayerCannot(f"gpu.memory.guarantee ({guarantee}) is more than a GPU of the nodes has: write less.")
    return options.resource, -(-units * share.count * options.per_gpu // UNITS_PER_GPU)
