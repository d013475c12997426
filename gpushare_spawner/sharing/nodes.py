"""Nodes for a server with a foreign layer: suitable nodes, labels that keep a pod on them, and servers that fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpushare_spawner.model.layer_rules import matches
from gpushare_spawner.model.quantity import resolve_bytes
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.sharing.base import PRODUCT_LABEL, ClusterNode, LayerCannot, LayerCapacity, LayerRequest

ENOUGH = 10**6
"""Number of servers that fit without any limit."""


def suitable(request: LayerRequest) -> list[ClusterNode]:
    """Return the nodes with a GPU model that the template accepts, including nodes that take no new pods now."""
    models = request.models
    return [
        node for node in request.facts.nodes if not models or any(matches(node.model, pattern) for pattern in models)
    ]


def rule_labels(request: LayerRequest) -> dict[str, Sequence[str]]:
    """Return the labels that keep a pod on the nodes of the layer's rule in `layers.yaml`."""
    return {name: [value] for name, value in request.rule.nodes.items()} if request.rule is not None else {}


def node_labels(request: LayerRequest) -> dict[str, Sequence[str]]:
    """Return the labels that keep a pod on suitable nodes. Raises LayerCannot if no node has a suitable model."""
    labels = rule_labels(request)
    if not request.models:
        return labels
    products = sorted({node.labels[PRODUCT_LABEL] for node in suitable(request) if PRODUCT_LABEL in node.labels})
    if not products:
        raise LayerCannot(
            f"No node's label {PRODUCT_LABEL} matches {' or '.join(request.models)}. NVIDIA's GPU feature discovery "
            "sets that label."
        )
    return {**labels, PRODUCT_LABEL: products}


def requested_memory(request: LayerRequest, memory_bytes: int) -> int:
    """Return the memory of a server on a GPU with so many bytes."""
    gpu = request.gpu
    return resolve_bytes(gpu.memory.guarantee or f"{gpu.share.units}%", memory_bytes)


def units_with_memory(request: LayerRequest, node: ClusterNode) -> int:
    """Return the units that a server needs on a node's GPUs: its share, or more for its memory.

    A guarantee in bytes is ignored for a GPU of unknown memory.
    """
    units, guarantee = request.gpu.share.units, request.gpu.memory.guarantee
    if guarantee is None:
        return units
    whole = node.gpu_memory_bytes if not guarantee.endswith("%") else 10**6
    return max(units, -(-requested_memory(request, whole) * UNITS_PER_GPU // whole)) if whole else units


def counted(
    request: LayerRequest,
    nodes: Sequence[ClusterNode],
    free: Callable[[ClusterNode], int],
    most: Callable[[ClusterNode], int],
) -> LayerCapacity:
    """Return the servers that fit on nodes. ``free``: servers by a node's free GPUs; ``most``: by all GPUs."""
    open_nodes = [node for node in nodes if not node.unschedulable]
    by_node = {node.name: min(free(node), _beside(request, node)) for node in open_nodes}
    at_most = {node.name: min(most(node), _beside(request, node, empty=True)) for node in nodes}
    able = frozenset(node.name for node in open_nodes if at_most[node.name] > 0)
    return LayerCapacity(sum(by_node.values()), sum(at_most.values()), by_node=by_node, able=able)


def resource_capacity(request: LayerRequest, nodes: Sequence[ClusterNode], resource: str, amount: int) -> LayerCapacity:
    """Return the servers that fit on nodes if each needs so much of one resource."""
    facts = request.facts
    return counted(
        request,
        nodes,
        lambda node: facts.free(node, resource) // amount,
        lambda node: node.allocatable.get(resource, 0) // amount,
    )


def _beside(request: LayerRequest, node: ClusterNode, *, empty: bool = False) -> int:
    """Return the servers of the template that fit by a node's CPU, memory and number of pods.

    ``empty``: without any pod there. Resources that a node does not report are no limit.
    """
    cpu, memory = request.template.resources.cpu, request.template.resources.memory
    # a limit alone is requested in full
    cores = cpu.guarantee if cpu.guarantee is not None else cpu.limit
    needed = {
        "cpu": int((cores or 0) * 1000),
        "memory": (memory.guarantee if memory.guarantee is not None else memory.limit) or 0,
    }
    facts = request.facts
    fit = ENOUGH
    for resource, amount in needed.items():
        if amount > 0 and resource in node.allocatable:
            fit = min(fit, (node.allocatable[resource] if empty else facts.free(node, resource)) // amount)
    if "pods" in node.allocatable:
        fit = min(fit, max(0, node.allocatable["pods"] - (0 if empty else len(facts.pods_on(node.name)))))
    return fit
