"""Nodes for a server with a foreign layer: which are suitable, how a pod is kept on them, and how many servers fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpushare_spawner.model.layer_rules import matches
from gpushare_spawner.model.quantity import resolve_bytes
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.sharing.base import PRODUCT_LABEL, ClusterNode, LayerCannot, LayerCapacity, LayerRequest

ENOUGH = 10**6
"""Servers that fit where nothing limits their number."""


def suitable(request: LayerRequest) -> list[ClusterNode]:
    """Return the nodes with a GPU model that the template accepts, those included that take no new pods now."""
    models = request.models
    return [
        node for node in request.facts.nodes if not models or any(matches(node.model, pattern) for pattern in models)
    ]


def rule_labels(request: LayerRequest) -> dict[str, Sequence[str]]:
    """Return the labels that keep a pod on the nodes of the rule of `layers.yaml` by which the layer was chosen."""
    return {name: [value] for name, value in request.rule.nodes.items()} if request.rule is not None else {}


def node_labels(request: LayerRequest) -> dict[str, Sequence[str]]:
    """Return the labels that keep a pod on suitable nodes. Raises LayerCannot where there are none by model."""
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


def memory_asked(request: LayerRequest, memory_bytes: int) -> int:
    """Return the memory that a server is to have of a GPU with so many bytes."""
    gpu = request.gpu
    return resolve_bytes(gpu.memory.guarantee or f"{gpu.share.units}%", memory_bytes)


def units_with_memory(request: LayerRequest, node: ClusterNode) -> int:
    """Return the units that a server needs on a node's GPUs: those of its share, or more for its memory.

    Of a GPU whose memory no label tells, a guarantee in bytes counts as nothing.
    """
    units, guarantee = request.gpu.share.units, request.gpu.memory.guarantee
    if guarantee is None:
        return units
    whole = node.gpu_memory_bytes if not guarantee.endswith("%") else 10**6
    return max(units, -(-memory_asked(request, whole) * UNITS_PER_GPU // whole)) if whole else units


def counted(
    request: LayerRequest,
    nodes: Sequence[ClusterNode],
    free: Callable[[ClusterNode], int],
    most: Callable[[ClusterNode], int],
) -> LayerCapacity:
    """Return the servers that fit on nodes. ``free``: GPU capacity of a node that is left; ``most``: all."""
    open_nodes = [node for node in nodes if not node.unschedulable]
    by_node = {node.name: min(free(node), _beside(request, node)) for node in open_nodes}
    at_most = {node.name: min(most(node), _beside(request, node, empty=True)) for node in nodes}
    able = frozenset(node.name for node in open_nodes if at_most[node.name] > 0)
    return LayerCapacity(sum(by_node.values()), sum(at_most.values()), by_node=by_node, able=able)


def resource_capacity(request: LayerRequest, nodes: Sequence[ClusterNode], resource: str, amount: int) -> LayerCapacity:
    """Return the servers that fit on nodes where each needs so much of one resource."""
    facts = request.facts
    return counted(
        request,
        nodes,
        lambda node: facts.free(node, resource) // amount,
        lambda node: node.allocatable.get(resource, 0) // amount,
    )


def _beside(request: LayerRequest, node: ClusterNode, *, empty: bool = False) -> int:
    """Return the servers of the template that a node's CPU, memory and number of pods have room for.

    ``empty``: if no pod was there. What a node does not say is no limit.
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
