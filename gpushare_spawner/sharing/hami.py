"""HAMi: its three resources, its scheduler, and what its annotations of nodes and pods say is free.

Facts: Project-HAMi/HAMi 4707fb0 (2.10). Resources: pkg/device/nvidia/device.go, GenerateResourceRequests; admission:
pkg/scheduler/webhook.go and MutateAdmission; what fits on a GPU: Fit; annotations: pkg/device/devices.go.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

from gpushare_spawner.model.layer_rules import HamiOptions, matches
from gpushare_spawner.model.quantity import resolve_bytes
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.sharing.base import ClusterNode, ClusterPod, LayerCapacity, LayerRequest, PodChange, PodSpec
from gpushare_spawner.sharing.nodes import counted, rule_labels

REGISTER = "hami.io/node-nvidia-register"
"""A node's GPUs: JSON from 2.8 on, fields between commas before it."""
CORDON = "hami.io/device-cordon"
"""UUIDs of a node's GPUs that take no new pods."""
ALLOCATED = "hami.io/vgpu-devices-allocated"
TO_ALLOCATE = "hami.io/vgpu-devices-to-allocate"
HANDSHAKE = "hami.io/node-handshake"
NODE = "hami.io/vgpu-node"
BIND_PHASE = "hami.io/bind-phase"
USE_TYPE = "nvidia.com/use-gputype"
"""Parts of GPU model names between commas, of which one must be in the model's name; case is ignored."""
_MEBIBYTE = 2**20
_AMOUNT = re.compile(r"[0-9]{1,9}")
"""HAMi reads 32 bits. Python raises ValueError for an integer of more than 4300 digits, and anybody can write one."""


@dataclass(frozen=True)
class HamiGpu:
    """A GPU as its node registered it."""

    uuid: str
    model: str
    slots: int
    """Pods that it takes at most."""
    memory_mib: int
    """Scaled, where the admin lets pods together have more than the GPU."""
    cores: int
    """In percent, scaled likewise."""
    healthy: bool


@dataclass
class _Left:
    slots: int
    memory_mib: int
    cores: int
    used: int = 0


def render(form: PodSpec, request: LayerRequest) -> PodSpec:
    """Return the pod with the three resources and HAMi's scheduler.

    The scheduler's name is given, because HAMi's webhook skips a pod that names another one. Raises nothing.
    """
    options, gpu = _options(request), request.gpu
    limits = {options.resource: str(gpu.share.count), options.cores_resource: str(gpu.share.units)}
    guarantee = gpu.memory.guarantee
    if guarantee is None:
        limits[options.memory_percentage_resource] = str(gpu.share.units)
    elif guarantee.endswith("%"):
        limits[options.memory_percentage_resource] = str(_percent(guarantee))
    else:
        limits[options.memory_resource] = str(_mebibytes(request) // options.memory_factor)
    annotations = {}
    if request.models:
        types = sorted({one.model for node in request.facts.nodes for one in gpus(node) if _accepted(request, one)})
        # without a registered GPU of such a model no pod can be placed; the patterns' texts say what was meant
        annotations[USE_TYPE] = ",".join(types or (pattern.strip("*") for pattern in request.models))
    return PodChange(
        annotations=annotations, limits=limits, node_labels=rule_labels(request), scheduler=options.scheduler
    ).apply(form)


def free(request: LayerRequest) -> LayerCapacity:
    """Return what is free by HAMi's annotations, for GPUs in the mode of HAMi-core."""
    nodes = [node for node in request.facts.nodes if any(_accepted(request, gpu) for gpu in gpus(node))]
    allocated = _allocated(request.facts.pods)
    return counted(
        request,
        nodes,
        lambda node: 0 if _gone(request, node) else _servers(request, node, allocated.get(node.name, ())),
        lambda node: _servers(request, node, ()),
    )


def _gone(request: LayerRequest, node: ClusterNode) -> bool:
    """Return whether HAMi's device plugin is not on a node any more, though what it registered still is.

    HAMi itself also compares the time in the annotation, which is in its own time zone, with the node's resource; the
    kubelet says 0 of it some seconds after the plugin is gone. (pkg/device/devices.go, CheckHealth.)
    """
    deleted = node.annotations.get(HANDSHAKE, "").startswith("Deleted")
    return deleted or node.allocatable.get(_options(request).resource) == 0


def gpus(node: ClusterNode) -> tuple[HamiGpu, ...]:
    """Return the GPUs that a node registered; none where the annotation is missing or cannot be read."""
    return _registered(node.annotations.get(REGISTER, ""))


@lru_cache(maxsize=4096)
def _registered(written: str) -> tuple[HamiGpu, ...]:
    """Return the GPUs of an annotation. A large cluster's are read for each card of the form, and seldom change."""
    try:
        if written.lstrip().startswith("["):
            return tuple(_of_json(load) for load in json.loads(written))
        return tuple(_of_text(one) for one in written.split(":") if one)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError, RecursionError):
        return ()


def devices(pod: ClusterPod) -> tuple[tuple[str, int, int], ...]:
    """Return the GPUs that a pod has, or is about to have: UUID, MiB and percent of cores of each."""
    written = pod.annotations.get(ALLOCATED) or pod.annotations.get(TO_ALLOCATE) or ""
    found = []
    for device in written.replace(";", ":").split(":"):
        fields = device.split(",")
        if len(fields) >= 4 and _AMOUNT.fullmatch(fields[2]) and _AMOUNT.fullmatch(fields[3]):
            found.append((fields[0], int(fields[2]), int(fields[3])))
    return tuple(found)


def _of_json(one: Mapping[str, Any]) -> HamiGpu:
    # fields with the value 0 or false are left out: an unhealthy GPU has no "health", GPU 0 no "index"
    return HamiGpu(
        uuid=one["id"],
        model=_model(one.get("type", "")),
        slots=int(one.get("count", 0)),
        memory_mib=int(one.get("devmem", 0)),
        cores=int(one.get("devcore", 0)),
        healthy=bool(one.get("health", False)),
    )


def _of_text(one: str) -> HamiGpu:
    """Read "uuid,count,memory,cores,type,numa,health", to which 2.6 and 2.7 add index and mode."""
    fields = one.split(",")
    return HamiGpu(fields[0], _model(fields[4]), int(fields[1]), int(fields[2]), int(fields[3]), fields[6] == "true")


def _model(written: str) -> str:
    return written.removeprefix("NVIDIA-")


def _accepted(request: LayerRequest, gpu: HamiGpu) -> bool:
    models = request.models
    return not models or any(matches(gpu.model, pattern) for pattern in models)


def _allocated(pods: Iterable[ClusterPod]) -> dict[str, list[tuple[str, int, int]]]:
    found: dict[str, list[tuple[str, int, int]]] = {}
    for pod in pods:
        # HAMi has counted a pod that it bound, before the API server shows its node
        node = pod.node or ("" if pod.annotations.get(BIND_PHASE) == "failed" else pod.annotations.get(NODE, ""))
        found.setdefault(node, []).extend(devices(pod))
    return found


def _servers(request: LayerRequest, node: ClusterNode, allocated: Iterable[tuple[str, int, int]]) -> int:
    """Return the servers that fit on a node's GPUs, as HAMi's `Fit` decides it."""
    cordoned = {uuid.strip() for uuid in node.annotations.get(CORDON, "").split(",")}
    usable = [gpu for gpu in gpus(node) if gpu.healthy and gpu.uuid not in cordoned and _accepted(request, gpu)]
    left = {one.uuid: _Left(one.slots, one.memory_mib, one.cores) for one in usable}
    for uuid, mib, cores in allocated:
        if uuid in left:
            there = left[uuid]
            there.slots, there.memory_mib, there.cores = there.slots - 1, there.memory_mib - mib, there.cores - cores
            there.used += 1
    fit = [_on_gpu(request, one, left[one.uuid]) for one in usable]
    count = request.gpu.share.count
    return sum(fit) if count == 1 else sum(1 for number in fit if number > 0) // count


def _on_gpu(request: LayerRequest, gpu: HamiGpu, left: _Left) -> int:
    units, mib = request.gpu.share.units, _mebibytes(request, gpu.memory_mib)
    if units == UNITS_PER_GPU == gpu.cores and left.used:
        # all cores are asked for: HAMi gives the GPU to nobody else
        return 0
    by_memory = left.memory_mib // mib if mib else left.slots
    return max(0, min(left.slots, left.cores // units, by_memory))


def _mebibytes(request: LayerRequest, gpu_mib: int = 0) -> int:
    """Return the MiB that a server is to have of a GPU.

    HAMi rounds percentages down, and counts bytes in multiples of its memory factor.
    """
    guarantee = request.gpu.memory.guarantee or f"{request.gpu.share.units}%"
    if guarantee.endswith("%"):
        return gpu_mib * _percent(guarantee) // 100
    factor = _options(request).memory_factor
    return -(-resolve_bytes(guarantee, 0) // (_MEBIBYTE * factor)) * factor


def _percent(written: str) -> int:
    """Return a percentage rounded up to a whole number: HAMi takes no others, and none over 100."""
    return min(100, math.ceil(Decimal(written[:-1].strip())))


def _options(request: LayerRequest) -> HamiOptions:
    assert isinstance(request.options, HamiOptions)
    return request.options
