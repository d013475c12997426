"""KAI Scheduler: annotations with a fraction or memory of a GPU, its queue, and the free capacity from its pods.

Facts: kai-scheduler/KAI-Scheduler d5bc503 (0.17). Requests: pkg/binder/plugins/gpusharing/gpu-request; groups of pods
on one GPU: pkg/common/resources/gpu_sharing.go; reservation pods: pkg/binder/binding/resourcereservation; priority
classes: deployments/kai-scheduler/templates/priorityclasses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction

from gpushare_spawner.model.kubernetes.container_requests import notebook_container
from gpushare_spawner.model.layers_file import KaiOptions
from gpushare_spawner.model.quantity import resolve_bytes
from gpushare_spawner.model.share import UNITS_PER_GPU, Share
from gpushare_spawner.sharing.base import (
    ClusterNode,
    ClusterPod,
    ClusterQueue,
    LayerCannot,
    LayerCapacity,
    LayerRequest,
    PodChange,
    PodSpec,
    gpu_part,
    servers_by_parts,
)

GPU = "nvidia.com/gpu"
QUEUE = "kai.scheduler/queue"
PREEMPTIBILITY = "kai.scheduler/preemptibility"
FRACTION = "gpu-fraction"
MEMORY = "gpu-memory"
"""Annotation with the memory in MiB."""
CONTAINER = "gpu-fraction-container-name"
GROUP = "runai-gpu-group"
"""Label of pods that share a GPU and of the GPU's reservation pod. A pod with several GPUs has a label for each group.
"""
RECEIVED = "received-resource-type"
"""Annotation that KAI's binder sets on a pod with a part of a GPU before it binds the pod. KAI's scheduler ignores the
groups of a pod without it. (pkg/binder/binding/binder.go, pkg/scheduler/api/pod_info)
"""
A_FRACTION = "Fraction"
"""KAI's own priority classes with a priority of 100 or more."""
PREEMPTIBLE_CLASSES = frozenset({"train", "build-preemptible"})
RESERVATIONS = "kai-resource-reservation"
"""Namespace of the reservation pods, as set by KAI Scheduler's chart."""
_MEBIBYTE = 2**20


def render(pod: PodSpec, request: LayerRequest) -> PodSpec:
    """Return the pod with the fraction or the GPUs, queue, scheduler and priority class.

    Raises LayerCannot if the memory needs a whole GPU and the share is a fraction.
    """
    options, share = request.options_as(KaiOptions), request.gpu.share
    labels = {QUEUE: queue_of(request)}
    if options.preemptible is not None:
        labels[PREEMPTIBILITY] = "preemptible" if options.preemptible else "non-preemptible"
    annotations, limits = {}, {}
    if share.units == UNITS_PER_GPU:
        # KAI rejects a fraction of 1, and a fraction in addition to whole GPUs
        limits[GPU] = str(share.count)
    else:
        annotations = _part(request)
        annotations[CONTAINER] = notebook_container(pod.get("spec") or {})["name"]
    return PodChange(
        annotations=annotations,
        labels=labels,
        limits=limits,
        node_labels=request.node_labels(),
        scheduler=options.scheduler,
        priority_class=options.priority_class,
    ).apply(pod)


def free(request: LayerRequest) -> LayerCapacity:
    """Return the free capacity of GPUs, limited by the queue's free capacity. Raises LayerCannot like `render`."""
    share = request.gpu.share
    part = _part(request) if share.units < UNITS_PER_GPU else {}
    nodes = [node for node in request.suitable_nodes() if GPU in node.allocatable]
    capacity = request.counted(
        nodes,
        lambda node: _servers(request, node, _each(share, part, node), empty=False),
        lambda node: _servers(request, node, _each(share, part, node), empty=True),
    )
    each = max((_each(share, part, node) for node in nodes), default=Fraction(share.total_units, UNITS_PER_GPU))
    for queue, left, most in _queues(request):
        if most is not None and (fit := int(most / each)) < capacity.at_most:
            limited = capacity.limited_by or _full(queue, most)
            capacity = replace(capacity, servers=min(capacity.servers, fit), at_most=fit, limited_by=limited)
        if left is not None and (fit := max(0, int(left / each))) < capacity.servers:
            capacity = replace(capacity, servers=fit, limited_by=_full(queue, left))
    return capacity


def queue_of(request: LayerRequest) -> str:
    """Return the user's queue: by the quota to which the share is charged, or else by the quota's group."""
    options, quota = request.options_as(KaiOptions), request.tenant.quota
    return options.queues.get(quota) or options.queues.get(quota.partition("/")[0]) or options.queue


def preemptible(options: KaiOptions) -> bool:
    """Return whether KAI Scheduler may preempt the pods; False for priority classes other than its own."""
    if options.preemptible is not None:
        return options.preemptible
    return options.priority_class in PREEMPTIBLE_CLASSES


def _part(request: LayerRequest) -> dict[str, str]:
    """Return the annotation for a part of a GPU: a fraction, or memory if the size of the GPUs is unknown."""
    guarantee, units = request.gpu.memory.guarantee, request.gpu.share.units
    nodes = request.suitable_nodes()
    if guarantee is not None and not guarantee.endswith("%") and not all(node.gpu_memory_bytes for node in nodes):
        return {MEMORY: str(-(-resolve_bytes(guarantee, 0) // _MEBIBYTE))}
    units = max([units, *(request.units_with_memory(node) for node in nodes)])
    if units >= UNITS_PER_GPU:
        raise LayerCannot(
            "KAI Scheduler gives less than a whole GPU as a fraction, and gpu.memory.guarantee "
            f"({guarantee}) needs all memory of a GPU: write count: 1 instead of the fraction, or a smaller guarantee."
        )
    return {FRACTION: f"{units / UNITS_PER_GPU:.2f}"}


def _each(share: Share, part: Mapping[str, str], node: ClusterNode) -> Fraction:
    """Return the amount of GPUs that a server takes from a node. ``part``: see `_part`; empty for whole GPUs."""
    if not part:
        return Fraction(share.count)
    return _fraction(ClusterPod("", "", annotations=part), node)


def _servers(request: LayerRequest, node: ClusterNode, each: Fraction, *, empty: bool) -> int:
    """Return the number of servers that fit on a node. ``each``: GPUs of one server; ``empty``: ignore pods there."""
    pods = [] if empty else request.facts.pods_on(node.name)
    groups, reserved = _groups(request, node, pods)
    # a reservation pod requests the whole GPU of its group
    whole = node.allocatable.get(GPU, 0) - sum(pod.requests.get(GPU, 0) for pod in pods) - len(groups.keys() - reserved)
    return servers_by_parts(whole, groups.values(), each)


def _groups(
    request: LayerRequest, node: ClusterNode, pods: list[ClusterPod]
) -> tuple[dict[str, Fraction], frozenset[str]]:
    """Return the used part of each shared GPU of a node, by group, and the groups with a reservation pod."""
    used: dict[str, Fraction] = {}
    reserved = set()
    for pod in pods:
        reserves = pod.namespace == RESERVATIONS
        if not reserves and pod.annotations.get(RECEIVED) != A_FRACTION:
            # users can write the label into their own pods
            continue
        for group in _groups_of(pod):
            used[group] = used.get(group, Fraction(0)) + (0 if reserves else _fraction(pod, node))
            if reserves:
                reserved.add(group)
    return used, frozenset(reserved)


def _groups_of(pod: ClusterPod) -> Iterator[str]:
    if GROUP in pod.labels:
        yield pod.labels[GROUP]
    yield from {value for name, value in pod.labels.items() if name.startswith(f"{GROUP}/")}


def _fraction(pod: ClusterPod, node: ClusterNode) -> Fraction:
    """Return the part of each shared GPU that a pod has. Unreadable annotations count as a whole GPU."""
    try:
        if FRACTION in pod.annotations:
            return min(Fraction(1), gpu_part(pod.annotations[FRACTION]))
        if node.gpu_memory_bytes:
            return min(Fraction(1), gpu_part(pod.annotations[MEMORY]) * _MEBIBYTE / node.gpu_memory_bytes)
    except (ValueError, KeyError):
        pass
    return Fraction(1)


def _queues(request: LayerRequest) -> Iterator[tuple[ClusterQueue, Fraction | None, Fraction | None]]:
    """Yield the user's queue and its parents, each with its free GPUs and its maximum; None: unlimited.

    A non-preemptible pod must fit into the quota of each of these queues. A missing queue ends the chain.
    """
    by_name = {queue.name: queue for queue in request.facts.queues}
    bound_to_quota = not preemptible(request.options_as(KaiOptions))
    name, seen = queue_of(request), set()
    while name in by_name and name not in seen:
        seen.add(name)
        queue = by_name[name]
        bounds = [(queue.limit, queue.allocated)]
        if bound_to_quota:
            bounds.append((queue.quota, queue.allocated_non_preemptible))
        most = [_exact(bound) for bound, _ in bounds if bound is not None]
        left = [_exact(bound) - _exact(used) for bound, used in bounds if bound is not None]
        yield queue, min(left, default=None), min(most, default=None)
        name = queue.parent


def _exact(gpus: float) -> Fraction:
    return Fraction(str(gpus))


def _full(queue: ClusterQueue, gpus: Fraction) -> str:
    return f"queue {queue.name} of KAI Scheduler has {max(0.0, float(gpus)):.2f} GPU left"
