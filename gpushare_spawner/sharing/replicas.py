"""NVIDIA's device plugin with replicas, time-slicing or MPS: a session has one replica of a GPU.

Facts: NVIDIA/k8s-device-plugin 0.20.0. A label has the number of replicas of each GPU (internal/lm/resource.go). A
request for several replicas is rejected with MPS and gives no more GPU time with time-slicing
(api/config/v1/replicas.go). The label `nvidia.com/gpu.product` ends in -SHARED only if the resource is not renamed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpushare_spawner.model.layer_rules import ReplicaOptions
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.sharing.base import ClusterNode, LayerCannot, LayerCapacity, LayerRequest, PodChange, PodSpec

GPU = "nvidia.com/gpu"
SHARED = "nvidia.com/gpu.shared"
"""Name of the resource with `renameByDefault: true`."""
STRATEGY_LABEL = "nvidia.com/gpu.sharing-strategy"
REPLICAS_LABEL = "nvidia.com/gpu.replicas"
"""Label with the replicas of each GPU of a node, not of all together."""


@dataclass(frozen=True)
class _Replicas:
    """Request of a server: a resource on some nodes."""

    resource: str
    amount: int
    labels: dict[str, Sequence[str]]
    nodes: tuple[ClusterNode, ...]


@dataclass(frozen=True)
class ReplicaLayer:
    """Time-slicing or MPS. ``name``: also the value of the nodes' label."""

    name: LayerName
    memory_divided: bool
    """Whether each replica has an equal part of the GPU's memory; otherwise all replicas share it."""

    def render(self, form: PodSpec, request: LayerRequest) -> PodSpec:
        """Return the pod with a replica. Raises LayerCannot if no node has replicas of that size."""
        replicas = self._requested_replicas(request)
        labels = {**request.node_labels(), **replicas.labels}
        return PodChange(limits={replicas.resource: str(replicas.amount)}, node_labels=labels).apply(form)

    def free(self, request: LayerRequest) -> LayerCapacity:
        """Return the free capacity. Raises LayerCannot as `render` does."""
        replicas = self._requested_replicas(request)
        return request.resource_capacity(replicas.nodes, replicas.resource, replicas.amount)

    def _requested_replicas(self, request: LayerRequest) -> _Replicas:
        options = request.options_as(ReplicaOptions)
        share = request.gpu.share
        if share.units == UNITS_PER_GPU:
            # Replicas are shared, so a whole GPU needs a node where the plugin does not share.
            whole = tuple(node for node in request.suitable_nodes() if node.labels.get(STRATEGY_LABEL) == "none")
            return _Replicas(GPU, share.count, {STRATEGY_LABEL: ["none"]}, whole)
        shared = [node for node in request.suitable_nodes() if node.labels.get(STRATEGY_LABEL) == self.name]
        most = {node.name: _most_replicas(request, node, self.memory_divided) for node in shared}
        fit = {node.name: replicas for node in shared if 1 < (replicas := _replicas(node, options)) <= most[node.name]}
        if not fit:
            there = sorted({_replicas(node, options) for node in shared})
            present = f"nodes have {', '.join(map(str, there))}" if there else "there is no such node"
            raise LayerCannot(
                f"No node has at most {min(most.values(), default=UNITS_PER_GPU // share.units)} replicas of each GPU "
                f"with {STRATEGY_LABEL}={self.name}: {present}."
            )
        best = max(fit.values())
        nodes = tuple(node for node in shared if fit.get(node.name) == best)
        labels: dict[str, Sequence[str]] = {STRATEGY_LABEL: [self.name.value]}
        if options.replicas is None:
            labels[REPLICAS_LABEL] = [str(best)]
        return _Replicas(_resource(options, nodes), 1, labels, nodes)


TIME_SLICING = ReplicaLayer(LayerName.TIME_SLICING, memory_divided=False)
MPS = ReplicaLayer(LayerName.MPS, memory_divided=True)


def _replicas(node: ClusterNode, options: ReplicaOptions) -> int:
    """Return the replicas of each GPU of a node; 0: unknown."""
    if options.replicas is not None:
        return options.replicas
    return node.number(REPLICAS_LABEL) or 0


def _most_replicas(request: LayerRequest, node: ClusterNode, memory_divided: bool) -> int:
    """Return the most replicas of a GPU with which each has at least the share of its time and memory."""
    most = UNITS_PER_GPU // request.gpu.share.units
    if memory_divided and node.gpu_memory_bytes is not None:
        most = min(most, node.gpu_memory_bytes // max(1, request.requested_memory(node.gpu_memory_bytes)))
    return most


def _resource(options: ReplicaOptions, nodes: Sequence[ClusterNode]) -> str:
    if options.resource is not None:
        return options.resource
    return SHARED if any(SHARED in node.allocatable for node in nodes) else GPU
