"""KubeShare 2: the labels for its scheduler, and the free capacity from its pods.

Facts: NTHU-LSALAB/KubeShare a862311 (October 2022), README.md and pkg/scheduler: constants.go, pod.go. Its
capacity is published only as metrics, so free GPUs are counted from its pods' labels and annotations.
"""

from __future__ import annotations

from fractions import Fraction

from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.sharing.base import (
    ClusterNode,
    ClusterPod,
    LayerCannot,
    LayerCapacity,
    LayerRequest,
    PodChange,
    PodSpec,
    gpu_part,
    servers_by_parts,
)

SCHEDULER = "kubeshare-scheduler"
DOMAIN = "sharedgpu/"
REQUEST = DOMAIN + "gpu_request"
LIMIT = DOMAIN + "gpu_limit"
MEMORY = DOMAIN + "gpu_mem"
"""Label with the memory in bytes."""
PRIORITY = DOMAIN + "priority"
GUARANTEED = "100"
"""The highest priority; a priority of 0 makes a pod opportunistic."""
UUID = DOMAIN + "gpu_uuid"
"""Annotation with the GPU that the scheduler chose."""


def render(pod: PodSpec, request: LayerRequest) -> PodSpec:
    """Return the pod with the labels. Raises LayerCannot for memory as a percentage of GPUs of unknown size."""
    share = request.gpu.share
    # above 1, request and limit must be the same whole number
    amount = f"{share.count}.0" if share.units == UNITS_PER_GPU else f"{share.units / UNITS_PER_GPU:.2f}"
    limit = amount if share.count > 1 else "1.0"
    labels = {REQUEST: amount, LIMIT: limit, PRIORITY: GUARANTEED}
    guarantee = request.gpu.memory.guarantee
    if guarantee is not None:
        labels[MEMORY] = str(_memory(request))
    return PodChange(labels=labels, node_labels=request.node_labels(), scheduler=SCHEDULER).apply(pod)


def free(request: LayerRequest) -> LayerCapacity:
    """Return the free capacity of GPUs, from the units of the pods on each GPU."""
    return request.counted(
        request.suitable_nodes(),
        lambda node: _servers(request, node, request.facts.pods_on(node.name)),
        lambda node: _servers(request, node, []),
    )


def _servers(request: LayerRequest, node: ClusterNode, pods: list[ClusterPod]) -> int:
    used: dict[str, Fraction] = {}
    for pod in pods:
        uuids = [uuid for uuid in pod.annotations.get(UUID, "").split(",") if uuid]
        for uuid in uuids:
            used[uuid] = used.get(uuid, Fraction(0)) + _requested(pod) / len(uuids)
    gpus = node.gpu_count if node.gpu_count is not None else node.allocatable.get("nvidia.com/gpu", 0)
    each = Fraction(request.gpu.share.total_units, UNITS_PER_GPU)
    return servers_by_parts(gpus - len(used), used.values(), each)


def _requested(pod: ClusterPod) -> Fraction:
    """Return the GPUs that a pod requests. An unreadable label counts as one GPU."""
    try:
        return gpu_part(pod.labels[REQUEST])
    except (KeyError, ValueError):
        return Fraction(1)


def _memory(request: LayerRequest) -> int:
    guarantee = request.gpu.memory.guarantee or ""
    if not guarantee.endswith("%"):
        return request.requested_memory(0)
    sizes = [node.gpu_memory_bytes for node in request.suitable_nodes() if node.gpu_memory_bytes is not None]
    if not sizes:
        raise LayerCannot(
            f"KubeShare takes memory in bytes, and no node label has the size of a GPU: write gpu.memory.guarantee "
            f"({guarantee}) in bytes, such as 12Gi."
        )
    return request.requested_memory(max(sizes))
