"""Device plugins that offer replicas or parts of GPUs as a resource: NVIDIA's time-slicing and MPS, MetaGPU, nvshare.

With time-slicing or MPS a session has one replica of a GPU. Facts: NVIDIA/k8s-device-plugin 0.20.0. A label contains
the number of replicas of each GPU (internal/lm/resource.go). With MPS a request for several replicas is rejected; with
time-slicing it gives no additional GPU time (api/config/v1/replicas.go). The label `nvidia.com/gpu.product` ends in
-SHARED only if the resource is not renamed.

Each part of MetaGPU has an equal part of the GPU's memory, and a server with a larger memory guarantee gets more parts.
Facts: cnvrg/metagpu aa4ac9c (November 2022), README.md and config/config.yaml. Its allocator splits a share over
several GPUs if no GPU has enough parts left, so free capacity is counted by node.

nvshare gives a place on a node's only GPU. The sessions take turns, and each can use all of the GPU's memory. Facts:
grgalex/nvshare 1a8f211 (March 2025), kubernetes/device-plugin/server.go and README.md.
"""

from __future__ import annotations

from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.layers_file import MetaGpuOptions, ReplicaOptions
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.sharing.base import MEMORY_LABEL, ClusterNode, LayerCannot, LayerRequest, ResourceChoice

GPU = "nvidia.com/gpu"
SHARED = "nvidia.com/gpu.shared"
"""Name of the resource with `renameByDefault: true`."""
STRATEGY_LABEL = "nvidia.com/gpu.sharing-strategy"
REPLICAS_LABEL = "nvidia.com/gpu.replicas"
"""Label with the number of replicas of each GPU of a node, not of all GPUs in total."""
NVSHARE = "nvshare.com/gpu"
"""Resource of nvshare's device plugin: a place on a node's GPU."""


def choose_replica(request: LayerRequest, layer: LayerName, memory_divided: bool) -> ResourceChoice:
    """Return the choice of a replica or of whole GPUs. Raises LayerCannot if no node has replicas of that size.

    ``layer``: also the value of the nodes' label. ``memory_divided``: whether each replica has an equal part of the
    GPU's memory; otherwise all replicas share it.
    """
    options, share = request.options_as(ReplicaOptions), request.gpu.share
    if share.units == UNITS_PER_GPU:
        # Replicas are shared, so a whole GPU needs a node on which the plugin does not share GPUs.
        whole = [node for node in request.suitable_nodes() if node.labels.get(STRATEGY_LABEL) == "none"]
        return ResourceChoice(GPU, share.count, whole, {STRATEGY_LABEL: ["none"]})
    shared = [node for node in request.suitable_nodes() if node.labels.get(STRATEGY_LABEL) == layer]
    most = {node.name: _most_replicas(request, node, memory_divided) for node in shared}
    fit = {node.name: replicas for node in shared if 1 < (replicas := _replicas(node, options)) <= most[node.name]}
    if not fit:
        there = sorted({_replicas(node, options) for node in shared})
        present = f"nodes have {', '.join(map(str, there))}" if there else "there is no such node"
        raise LayerCannot(
            f"No node has at most {min(most.values(), default=UNITS_PER_GPU // share.units)} replicas of each GPU "
            f"with {STRATEGY_LABEL}={layer}: {present}."
        )
    best = max(fit.values())
    nodes = [node for node in shared if fit.get(node.name) == best]
    labels = {STRATEGY_LABEL: [layer.value]} | ({REPLICAS_LABEL: [str(best)]} if options.replicas is None else {})
    resource = options.resource or (SHARED if any(SHARED in node.allocatable for node in nodes) else GPU)
    return ResourceChoice(resource, 1, nodes, labels)


def _replicas(node: ClusterNode, options: ReplicaOptions) -> int:
    """Return the number of replicas of each GPU of a node; 0: unknown."""
    if options.replicas is not None:
        return options.replicas
    return node.number(REPLICAS_LABEL) or 0


def _most_replicas(request: LayerRequest, node: ClusterNode, memory_divided: bool) -> int:
    """Return the maximum number of replicas with which each has at least the share of the GPU's time and memory."""
    most = UNITS_PER_GPU // request.gpu.share.units
    if memory_divided and node.gpu_memory_bytes is not None:
        most = min(most, node.gpu_memory_bytes // max(1, request.requested_memory(node.gpu_memory_bytes)))
    return most


def choose_parts(request: LayerRequest) -> ResourceChoice:
    """Return the choice of MetaGPU's parts. Raises LayerCannot for memory that no GPU has or of unknown part."""
    options = request.options_as(MetaGpuOptions)
    share, guarantee, nodes = request.gpu.share, request.gpu.memory.guarantee, request.suitable_nodes()
    of_any_gpu = guarantee is None or guarantee.endswith("%")
    if not of_any_gpu and not all(node.gpu_memory_bytes for node in nodes):
        raise LayerCannot(
            f"MetaGPU gives memory in parts of a GPU, and the label {MEMORY_LABEL} does not contain the size of each "
            f"node's GPUs: write gpu.memory.guarantee ({guarantee}) as a percentage."
        )
    # a percentage needs no node
    candidates = nodes or [ClusterNode("")]
    units = max([share.units, *(request.units_with_memory(node) for node in candidates)])
    if units > UNITS_PER_GPU:
        raise LayerCannot(f"gpu.memory.guarantee ({guarantee}) is more than a GPU of the nodes has: write less.")
    return ResourceChoice(options.resource, -(-units * share.count * options.per_gpu // UNITS_PER_GPU), nodes)


def choose_place(request: LayerRequest) -> ResourceChoice:
    """Return the choice of nvshare's place on a GPU. Raises LayerCannot for several GPUs, because a node has one."""
    if request.gpu.share.count > 1:
        raise LayerCannot(f"nvshare shares one GPU of each node, and the template asks for {request.gpu.share}.")
    return ResourceChoice(NVSHARE, 1, request.suitable_nodes())
