"""HAMi: its three resources, its scheduler, and the free capacity from its annotations on nodes and pods.

Facts: Project-HAMi/HAMi 4707fb0 (2.10). Resources: pkg/device/nvidia/device.go, GenerateResourceRequests; admission:
pkg/scheduler/webhook.go and MutateAdmission; fit on a GPU: Fit; annotations: pkg/device/devices.go.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import lru_cache
from typing import Any

from gpushare_spawner.model.layers_file import HamiOptions
from gpushare_spawner.model.quantity import resolve_bytes
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.placement.request import most_requests
from gpushare_spawner.sharing.base import ClusterNode, ClusterPod, LayerCapacity, LayerRequest, PodChange, PodSpec

REGISTER = "hami.io/node-nvidia-register"
"""Annotation with the GPUs of a node: JSON since 2.8, comma-separated fields in earlier versions."""
CORDON = "hami.io/device-cordon"
"""Annotation with the UUIDs of a node's GPUs that accept no new pods."""
ALLOCATED = "hami.io/vgpu-devices-allocated"
TO_ALLOCATE = "hami.io/vgpu-devices-to-allocate"
HANDSHAKE = "hami.io/node-handshake"
NODE = "hami.io/vgpu-node"
BIND_PHASE = "hami.io/bind-phase"
USE_TYPE = "nvidia.com/use-gputype"
"""Annotation with comma-separated parts of GPU model names. The model's name must contain one of them; case is ignored.
"""
MEMORY = "nvidia.com/gpumem"
"""The resource for GPU memory, in MiB or in units of `memoryFactor`. Admins can rename each resource in HAMi's chart.
In practice only the resource for the number of GPUs is renamed, because NVIDIA's device plugin uses the same name.
"""
MEMORY_PERCENTAGE = "nvidia.com/gpumem-percentage"
"""The resource for a part of the GPU's memory, in percent."""
CORES = "nvidia.com/gpucores"
"""The resource for a part of the GPU's time, in percent."""
_MEBIBYTE = 2**20
_AMOUNT = re.compile(r"[0-9]{1,9}")
"""HAMi parses 32-bit integers. Python raises ValueError for integers of more than 4300 digits, which users can write.
"""


@dataclass(frozen=True)
class HamiGpu:
    """A registered GPU of a node."""

    uuid: str
    model: str
    slots: int
    """The maximum number of pods."""
    memory_mib: int
    """The GPU's memory, scaled if the admin overcommits it."""
    cores: int
    """The cores in percent, scaled in the same way."""
    healthy: bool


def render(pod: PodSpec, request: LayerRequest) -> PodSpec:
    """Return the pod with the three resources and HAMi's scheduler.

    The scheduler's name is set because HAMi's webhook skips a pod with another name. Raises nothing.
    """
    options, gpu = request.options_as(HamiOptions), request.gpu
    limits = {options.resource: str(gpu.share.count), CORES: str(gpu.share.units)}
    guarantee = gpu.memory.guarantee
    if guarantee is None:
        limits[MEMORY_PERCENTAGE] = str(gpu.share.units)
    elif guarantee.endswith("%"):
        limits[MEMORY_PERCENTAGE] = str(_percent(guarantee))
    else:
        limits[MEMORY] = str(_mebibytes(request) // options.memory_factor)
    annotations = {}
    if request.models:
        types = sorted(
            {card.model for node in request.facts.nodes for card in gpus(node) if request.accepts(card.model)}
        )
        # without a registered GPU of such a model no pod can be placed; the patterns still document the request
        annotations[USE_TYPE] = ",".join(types or (pattern.strip("*") for pattern in request.models))
    return PodChange(
        annotations=annotations, limits=limits, node_labels=request.rule_labels(), scheduler=options.scheduler
    ).apply(pod)


def free(request: LayerRequest) -> LayerCapacity:
    """Return the free capacity from HAMi's annotations, for GPUs in HAMi-core mode."""
    nodes = [node for node in request.facts.nodes if any(request.accepts(gpu.model) for gpu in gpus(node))]
    allocated = _allocated(request.facts.pods)
    return request.counted(
        nodes,
        lambda node: 0 if _gone(request, node) else _servers(request, node, allocated.get(node.name, ())),
        lambda node: _servers(request, node, ()),
    )


def _gone(request: LayerRequest, node: ClusterNode) -> bool:
    """Return whether HAMi's device plugin no longer runs on a node that still has its registration.

    HAMi itself checks the node's resource, and also the time in the annotation, which is in HAMi's own time zone. The
    kubelet reports an amount of 0 for the resource some seconds after the plugin ends. (pkg/device/devices.go,
    CheckHealth.)
    """
    deleted = node.annotations.get(HANDSHAKE, "").startswith("Deleted")
    return deleted or node.allocatable.get(request.options_as(HamiOptions).resource) == 0


def gpus(node: ClusterNode) -> tuple[HamiGpu, ...]:
    """Return the registered GPUs of a node; none if the annotation is missing or unreadable."""
    return _registered(node.annotations.get(REGISTER, ""))


@lru_cache(maxsize=4096)
def _registered(written: str) -> tuple[HamiGpu, ...]:
    """Return the GPUs of an annotation. Cached, because each card of the form reads all nodes, which seldom change."""
    try:
        if written.lstrip().startswith("["):
            return tuple(_of_json(load) for load in json.loads(written))
        return tuple(_of_text(part) for part in written.split(":") if part)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError, RecursionError):
        return ()


def devices(pod: ClusterPod) -> tuple[tuple[str, int, int], ...]:
    """Return the GPUs that a pod has or will have, each as UUID, MiB and percent of cores."""
    written = pod.annotations.get(ALLOCATED) or pod.annotations.get(TO_ALLOCATE) or ""
    allocated = []
    for device in written.replace(";", ":").split(":"):
        fields = device.split(",")
        if len(fields) >= 4 and _AMOUNT.fullmatch(fields[2]) and _AMOUNT.fullmatch(fields[3]):
            allocated.append((fields[0], int(fields[2]), int(fields[3])))
    return tuple(allocated)


def _of_json(load: Mapping[str, Any]) -> HamiGpu:
    # HAMi omits fields with the value 0 or false: an unhealthy GPU has no "health", GPU 0 has no "index"
    return HamiGpu(
        uuid=load["id"],
        model=_model(load.get("type", "")),
        slots=int(load.get("count", 0)),
        memory_mib=int(load.get("devmem", 0)),
        cores=int(load.get("devcore", 0)),
        healthy=bool(load.get("health", False)),
    )


def _of_text(text: str) -> HamiGpu:
    """Parse "uuid,count,memory,cores,type,numa,health"; 2.6 and 2.7 append index and mode."""
    fields = text.split(",")
    return HamiGpu(fields[0], _model(fields[4]), int(fields[1]), int(fields[2]), int(fields[3]), fields[6] == "true")


def _model(written: str) -> str:
    return written.removeprefix("NVIDIA-")


def _allocated(pods: Iterable[ClusterPod]) -> dict[str, list[tuple[str, int, int]]]:
    by_node: dict[str, list[tuple[str, int, int]]] = {}
    for pod in pods:
        # HAMi counts a pod as bound before the API server shows its node
        node = pod.node or ("" if pod.annotations.get(BIND_PHASE) == "failed" else pod.annotations.get(NODE, ""))
        by_node.setdefault(node, []).extend(devices(pod))
    return by_node


def _servers(request: LayerRequest, node: ClusterNode, allocated: Iterable[tuple[str, int, int]]) -> int:
    """Return the number of servers that fit on a node's GPUs according to HAMi's `Fit`."""
    cordoned = {uuid.strip() for uuid in node.annotations.get(CORDON, "").split(",")}
    usable = [gpu for gpu in gpus(node) if gpu.healthy and gpu.uuid not in cordoned and request.accepts(gpu.model)]
    left = {gpu.uuid: gpu for gpu in usable}
    for uuid, mib, cores in allocated:
        if (gpu := left.get(uuid)) is not None:
            left[uuid] = replace(gpu, slots=gpu.slots - 1, memory_mib=gpu.memory_mib - mib, cores=gpu.cores - cores)
    fit = [_on_gpu(request, gpu, left[gpu.uuid]) for gpu in usable]
    return most_requests(fit, request.gpu.share.count)


def _on_gpu(request: LayerRequest, gpu: HamiGpu, left: HamiGpu) -> int:
    """Return the number of servers that fit on a GPU. ``left``: the part of it that its pods leave free."""
    units, mib = request.gpu.share.units, _mebibytes(request, gpu.memory_mib)
    if units == UNITS_PER_GPU == gpu.cores and left.slots < gpu.slots:
        # for a request of all cores, HAMi gives the GPU to no other pod
        return 0
    by_memory = left.memory_mib // mib if mib else left.slots
    return max(0, min(left.slots, left.cores // units, by_memory))


def _mebibytes(request: LayerRequest, gpu_mib: int = 0) -> int:
    """Return a server's memory on a GPU in MiB.

    HAMi rounds percentages down, and counts bytes in multiples of its memory factor.
    """
    guarantee = request.gpu.memory.guarantee or f"{request.gpu.share.units}%"
    if guarantee.endswith("%"):
        return gpu_mib * _percent(guarantee) // 100
    factor = request.options_as(HamiOptions).memory_factor
    return -(-resolve_bytes(guarantee, 0) // (_MEBIBYTE * factor)) * factor


def _percent(written: str) -> int:
    """Return a percentage rounded up to a whole number, at most 100, because HAMi rejects other values."""
    return min(100, math.ceil(Decimal(written[:-1].strip())))
