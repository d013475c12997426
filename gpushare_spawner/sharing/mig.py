"""MIG with NVIDIA's device plugin, and the sizes of MIG profiles on Kubernetes as parts of their GPU.

A session has one MIG device of the smallest profile that holds its share.

Facts: NVIDIA/k8s-device-plugin 0.20.0, internal/lm/mig-strategy.go and resource.go. With the strategy "mixed" each
profile is a resource `nvidia.com/mig-<profile>`, and labels with that name contain its memory. With "single" all GPUs
of a node have one profile, the resource is `nvidia.com/gpu`, and the label `nvidia.com/gpu.product` ends in
-MIG-<profile>.

On one machine the agent reads all sizes from NVML (`agent.gpus.nvml`), and `SmallestInstance` in
placement/strategy.py chooses the device; this module is not used. On Kubernetes a profile's name contains its compute
slices. The memory of the profile and the GPU is in labels of NVIDIA's GPU feature discovery or in ResourceSlices;
otherwise it is derived from the name. Only a profile with all of the GPU's memory
reveals the compute slices of the whole GPU: ResourceSlices contain this profile if the driver creates MIG devices
itself. No label contains it, so there is a table by GPU model. (NVIDIA MIG user guide, "Partitioning"; go-nvlib
pkg/nvlib/device/mig_profile.go; k8s-device-plugin internal/lm.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from gpushare_spawner.model.layers_file import MEMORY_SLICES, MigOptions, MigProfile, guaranteed_memory, smallest
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.sharing.base import (
    MEMORY_LABEL,
    PRODUCT_LABEL,
    ClusterNode,
    LayerCannot,
    LayerCapacity,
    LayerRequest,
    ResourceChoice,
)

_PROFILE = re.compile(r"(?P<slices>[1-7])g\.(?P<gb>[1-9]\d*)gb(?P<suffix>[.+-][a-z0-9.+-]+)?")
_COMPUTE_SLICES = {"A30": 4, "RTX PRO 6000": 4, "RTX PRO 4500": 2}
"""Compute slices by a part of the GPU model's name, for models with other than 7 slices. (NVIDIA MIG user guide,
"Supported MIG Profiles"; NVIDIA AI Enterprise, "Blackwell Architecture vGPU Types".) For a model that is missing here
and has fewer slices, a profile is considered smaller than it is, never larger.
"""
_MOST_COMPUTE_SLICES = 7
_LEAST_OF_NAME = Fraction(7, 8)
"""The minimum part of the memory in its name that a profile has: 1g.18gb of an H200 has 16 GiB. (NVIDIA MIG user
guide.)
"""


def profile(
    name: str, model: str, gpu_memory_bytes: int | None, memory_bytes: int | None = None, of_slices: int | None = None
) -> MigProfile | None:
    """Return the profile of that name on a GPU model; None for a profile that is not an isolated part of a GPU.

    ``gpu_memory_bytes``: memory of the whole GPU; None to assume the largest GPU with a profile of that name.
    ``memory_bytes``: memory of the profile from a node's label; None to derive it from the name. ``of_slices``: compute
    slices of the whole GPU; None to derive them from the model's name.
    """
    match = _PROFILE.fullmatch(name)
    if match is None:
        # "1c.3g.20gb" is a part of an instance and shares the instance's memory with other parts
        return None
    slices, gigabytes = int(match["slices"]), int(match["gb"])
    whole = gpu_memory_bytes if gpu_memory_bytes is not None else _whole_memory(slices, gigabytes)
    own = memory_bytes if memory_bytes is not None else int(gigabytes * 2**30 * _LEAST_OF_NAME)
    eighths = Fraction((memory_bytes if memory_bytes is not None else gigabytes * 2**30) * MEMORY_SLICES, whole)
    of_slices = of_slices if of_slices is not None else compute_slices(model)
    return MigProfile(name, slices, of_slices, max(1, min(MEMORY_SLICES, round(eighths))), own)


def slices_of(name: str) -> int | None:
    """Return the compute slices in a profile's name; None for other names."""
    match = _PROFILE.fullmatch(name)
    return int(match["slices"]) if match is not None else None


def is_whole(memory_bytes: int | None, gpu_memory_bytes: int | None) -> bool:
    """Return whether a MIG device has all of its GPU, by the memory of both; None: unknown."""
    if memory_bytes is None or gpu_memory_bytes is None:
        return False
    return memory_bytes >= gpu_memory_bytes * _LEAST_OF_NAME


def compute_slices(model: str) -> int:
    """Return the compute slices of a GPU model."""
    plain = model.upper().replace("-", " ")
    return next((slices for part, slices in _COMPUTE_SLICES.items() if part in plain), _MOST_COMPUTE_SLICES)


def _whole_memory(slices: int, gigabytes: int) -> int:
    """Return the memory of a GPU in bytes, from one profile's name.

    Profiles with 1, 2, 3, 4 and 7 compute slices have 1, 2, 4, 4 and 8 memory slices, or more.
    """
    usual = {1: 1, 2: 2, 3: 4, 4: 4}.get(slices, MEMORY_SLICES)
    return gigabytes * 2**30 * MEMORY_SLICES // usual


GPU = "nvidia.com/gpu"
MIG_PREFIX = "nvidia.com/mig-"
STRATEGY_LABEL = "nvidia.com/mig.strategy"
SINGLE_MARK = "-MIG-"
"""The text before the profile in a node's product label, with the strategy "single"."""


def choose(request: LayerRequest) -> ResourceChoice:
    """Return the choice of one MIG device or of whole GPUs. Raises LayerCannot if no profile is large enough.

    Among several GPU models, the smallest profile with free devices is chosen, because a pod can request only one
    resource.
    """
    choices = list(_choices(request))
    if not choices:
        nodes, options = request.facts.nodes, request.options_as(MigOptions)
        there = sorted({candidate.name for node in nodes for candidate, _ in profiles(node, options)})
        present = (
            f"there are {', '.join(there)}" if there else f"no node has MIG devices, by the label {STRATEGY_LABEL}"
        )
        raise LayerCannot(
            f"No MIG profile of the nodes holds {request.gpu.share} with the memory that the template guarantees: "
            f"{present}."
        )
    best = min(choices, key=lambda choice: _rank(choice, request.resource_capacity(choice)))
    # the rule's nodes can also have GPUs of other models or with other profiles
    products = sorted({node.labels[PRODUCT_LABEL] for node in best.nodes if PRODUCT_LABEL in node.labels})
    return replace(best, labels={PRODUCT_LABEL: products} if products else {})


def profiles(node: ClusterNode, options: MigOptions) -> Iterator[tuple[MigProfile, str]]:
    """Yield the profiles of a node's MIG devices that are isolated parts of a GPU, each with its resource."""
    strategy = options.strategy or node.labels.get(STRATEGY_LABEL, "")
    if strategy == "single":
        name = node.labels.get(PRODUCT_LABEL, "").partition(SINGLE_MARK)[2].removesuffix("-SHARED")
        # the label contains the memory of the MIG device, not of the GPU
        match = profile(name, node.model, None, node.mebibytes(MEMORY_LABEL))
        if match is not None:
            yield match, GPU
    elif strategy == "mixed":
        for resource in sorted(node.allocatable):
            name = resource.removeprefix(MIG_PREFIX)
            if name == resource:
                continue
            match = profile(name, node.model, node.gpu_memory_bytes, node.mebibytes(f"{resource}.memory"))
            if match is not None:
                yield match, resource


def _rank(choice: ResourceChoice, capacity: LayerCapacity) -> tuple[object, ...]:
    size = choice.profile.size if choice.profile is not None else (UNITS_PER_GPU,)
    return capacity.servers == 0, capacity.at_most == 0, *size


def _choices(request: LayerRequest) -> Iterator[ResourceChoice]:
    options, share = request.options_as(MigOptions), request.gpu.share
    by_profile: dict[tuple[str, MigProfile], list[ClusterNode]] = {}
    whole: list[ClusterNode] = []
    for node in request.suitable_nodes():
        available = dict(profiles(node, options))
        # CUDA uses only one MIG device, so several GPUs are whole GPUs
        memory = guaranteed_memory(request.gpu.memory.guarantee)
        best = smallest(available, share.units, memory) if share.count == 1 else None
        if best is not None:
            by_profile.setdefault((available[best], best), []).append(node)
        elif share.units == UNITS_PER_GPU and SINGLE_MARK not in node.labels.get(PRODUCT_LABEL, ""):
            whole.append(node)
    for (resource, best), nodes in by_profile.items():
        yield ResourceChoice(resource, 1, nodes, profile=best)
    whole = [node for node in whole if GPU in node.allocatable]
    if whole:
        yield ResourceChoice(GPU, share.count, whole)
