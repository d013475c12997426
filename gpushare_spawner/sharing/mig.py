"""MIG with NVIDIA's device plugin: a session has one MIG device, of the smallest profile that holds its share.

Facts: NVIDIA/k8s-device-plugin 0.20.0, internal/lm/mig-strategy.go and resource.go. With the strategy "mixed" each
profile is a resource `nvidia.com/mig-<profile>`, and labels with that name tell its memory. With "single" all GPUs of a
node have one profile, the resource is `nvidia.com/gpu`, and the label `nvidia.com/gpu.product` ends in -MIG-<profile>.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from gpushare_spawner.model.layers import MigOptions
from gpushare_spawner.model.layers.mig import MigProfile, guaranteed_memory, smallest
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.sharing.base import LayerCannot, LayerCapacity, LayerRequest, PodSpec
from gpushare_spawner.sharing.cluster_facts import MEMORY_LABEL, PRODUCT_LABEL, ClusterNode
from gpushare_spawner.sharing.mig_profiles import profile
from gpushare_spawner.sharing.nodes import node_labels, resource_capacity, suitable
from gpushare_spawner.sharing.pod_changes import PodChange

GPU = "nvidia.com/gpu"
MIG_PREFIX = "nvidia.com/mig-"
STRATEGY_LABEL = "nvidia.com/mig.strategy"
SINGLE_MARK = "-MIG-"
"""Stands in a node's product label before the profile, with the strategy "single"."""


@dataclass(frozen=True)
class _Choice:
    """One way to serve the request: a resource on some nodes."""

    resource: str
    amount: int
    nodes: tuple[ClusterNode, ...]
    profile: MigProfile | None = None
    """None: whole GPUs."""


def render(form: PodSpec, request: LayerRequest) -> PodSpec:
    """Return the pod with one MIG device, or with whole GPUs. Raises LayerCannot where no profile is large enough.

    Of several GPU models the smallest profile with free devices counts: a pod can ask for one resource only.
    """
    choice, _ = _best(request)
    # the rule's nodes have GPUs of other models, or other profiles, too
    products = sorted({node.labels[PRODUCT_LABEL] for node in choice.nodes if PRODUCT_LABEL in node.labels})
    labels = {**node_labels(request), **({PRODUCT_LABEL: products} if products else {})}
    return PodChange(limits={choice.resource: str(choice.amount)}, node_labels=labels).apply(form)


def free(request: LayerRequest) -> LayerCapacity:
    """Return what is free of the profile that `render` takes. Raises LayerCannot as it does."""
    choice, capacity = _best(request)
    return replace(capacity, profile=choice.profile)


def profiles(node: ClusterNode, options: MigOptions) -> Iterator[tuple[MigProfile, str]]:
    """Yield the profiles of a node's MIG devices that are isolated parts of a GPU, and the resource of each."""
    strategy = options.strategy or node.labels.get(STRATEGY_LABEL, "")
    if strategy == "single":
        name = node.labels.get(PRODUCT_LABEL, "").partition(SINGLE_MARK)[2].removesuffix("-SHARED")
        # the label tells the memory of the MIG device, not that of the GPU
        found = profile(name, node.model, None, node.mebibytes(MEMORY_LABEL))
        if found is not None:
            yield found, GPU
    elif strategy == "mixed":
        for resource in sorted(node.allocatable):
            name = resource.removeprefix(MIG_PREFIX)
            if name == resource:
                continue
            found = profile(name, node.model, node.gpu_memory_bytes, node.mebibytes(f"{resource}.memory"))
            if found is not None:
                yield found, resource


def _best(request: LayerRequest) -> tuple[_Choice, LayerCapacity]:
    choices = [
        (choice, resource_capacity(request, choice.nodes, choice.resource, choice.amount))
        for choice in _choices(request)
    ]
    if not choices:
        there = sorted({found.name for node in request.facts.nodes for found, _ in profiles(node, _options(request))})
        raise LayerCannot(
            f"No MIG profile of the nodes holds {request.gpu.share} with the memory that the template guarantees: "
            + (
                f"there are {', '.join(there)}."
                if there
                else f"no node has MIG devices, by the label {STRATEGY_LABEL}."
            )
        )
    return min(choices, key=lambda one: (one[1].servers == 0, one[1].at_most == 0, *_size(one[0])))


def _size(choice: _Choice) -> tuple[object, ...]:
    return choice.profile.size if choice.profile is not None else (UNITS_PER_GPU,)


def _choices(request: LayerRequest) -> Iterator[_Choice]:
    options, share = _options(request), request.gpu.share
    by_profile: dict[tuple[str, MigProfile], list[ClusterNode]] = {}
    whole: list[ClusterNode] = []
    for node in suitable(request):
        found = dict(profiles(node, options))
        # CUDA uses one MIG device only, so that several GPUs are whole ones
        best = (
            smallest(found, share.units, guaranteed_memory(request.gpu.memory.guarantee)) if share.count == 1 else None
        )
        if best is not None:
            by_profile.setdefault((found[best], best), []).append(node)
        elif share.units == UNITS_PER_GPU and SINGLE_MARK not in node.labels.get(PRODUCT_LABEL, ""):
            whole.append(node)
    for (resource, best), nodes in by_profile.items():
        yield _Choice(resource, 1, tuple(nodes), best)
    if any(GPU in node.allocatable for node in whole):
        yield _Choice(GPU, share.count, tuple(node for node in whole if GPU in node.allocatable))


def _options(request: LayerRequest) -> MigOptions:
    assert isinstance(request.options, MigOptions)
    return request.options
