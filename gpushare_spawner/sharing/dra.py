"""DRA with NVIDIA's driver: a ResourceClaimTemplate for whole GPUs, a MIG device, or a part of a shared GPU.

Facts: kubernetes-sigs/dra-driver-nvidia-gpu 9593204, cmd/gpu-kubelet-plugin: deviceinfo.go and mig.go (attributes type,
productName, profile, parentUUID; capacity memory), consumable_shares.go (capacity shares), partitions.go (counters that
MIG devices of one GPU share); Kubernetes 1.36, dynamic-resource-allocation/structured.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gpushare_spawner.model.kubernetes.container_requests import quantity
from gpushare_spawner.model.kubernetes.objects import REPORT_COMPONENT_LABEL
from gpushare_spawner.model.layers_file import DraOptions, MigProfile, guaranteed_memory, smallest
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.sharing.base import (
    ENOUGH,
    ClaimedDevice,
    ClusterDevice,
    ClusterNode,
    ClusterSlice,
    LayerCannot,
    LayerCapacity,
    LayerRequest,
    PodChange,
    PodSpec,
)
from gpushare_spawner.sharing.mig import is_whole, profile, slices_of

API_VERSION = "resource.k8s.io/v1"
CLAIM = "gpu"
"""Name of the claim in the pod, and of the request in the claim."""
CLAIM_TEMPLATE_LABELS = {REPORT_COMPONENT_LABEL: "gpushare-claim-template"}
"""Labels of each ResourceClaimTemplate, by which an admin finds them; the templates are never deleted."""
MIG_CLASS = "mig.nvidia.com"
"""DeviceClass of MIG devices, created by the chart of NVIDIA's driver."""
MEMORY = "memory"
SHARES = "shares"
"""Capacity with which NVIDIA's driver counts the shares of a GPU (consumable_shares.go)."""
_MEBIBYTE = 2**20
_DEFAULTS = {"allocationMode": "ExactCount", "count": 1}
_PARTS = re.compile(r"\[!?\]?[^\]]*\]|.", re.DOTALL)
"""Parts of an fnmatch pattern: a set of letters, or one letter."""
_PLAIN_SET = re.compile(r"\[!?(?:[A-Za-z0-9]|0-9|a-z|A-Z)+\]")
_Counter = tuple[str, str]


@dataclass(frozen=True)
class _Ask:
    """The request of one claim."""

    device_class: str
    kind: str
    """The devices' attribute `type`: gpu or mig."""
    count: int = 1
    profile: MigProfile | None = None
    """Profile of the MIG device; None if there is no MIG device."""
    capacity: Mapping[str, int] = field(default_factory=dict)
    """The consumption of a shared device; empty: an exclusive device."""


@dataclass
class _Pool:
    """The remaining devices of a pool on a node."""

    devices: list[ClusterDevice] = field(default_factory=list)
    counters: dict[_Counter, int] = field(default_factory=dict)


def render(pod: PodSpec, request: LayerRequest) -> PodSpec:
    """Return the pod with a claim from the template that `objects` returns. Raises LayerCannot like `objects`."""
    (template,) = objects(request)
    claims = {CLAIM: template["metadata"]["name"]}
    return PodChange(claim_templates=claims, node_labels=request.rule_labels()).apply(pod)


def objects(request: LayerRequest) -> tuple[dict[str, Any], ...]:
    """Return the ResourceClaimTemplate. Its name is derived from its content, because a template is immutable.

    Raises LayerCannot if no device of the driver can hold the share.
    """
    ask, options = _ask(request), request.options_as(DraOptions)
    exactly: dict[str, Any] = {"deviceClassName": ask.device_class}
    if ask.count > 1:
        exactly["count"] = ask.count
    expressions = list(_expressions(request, ask, options.driver))
    if expressions:
        exactly["selectors"] = [{"cel": {"expression": expression}} for expression in expressions]
    if ask.capacity:
        exactly["capacity"] = {"requests": {name: _quantity(name, amount) for name, amount in ask.capacity.items()}}
    spec = {"spec": {"devices": {"requests": [{"name": CLAIM, "exactly": exactly}]}}}
    digest = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:8]
    name = f"gpushare-{request.template.name}-{digest}"
    metadata = {"name": name, "labels": dict(CLAIM_TEMPLATE_LABELS)}
    return ({"apiVersion": API_VERSION, "kind": "ResourceClaimTemplate", "metadata": metadata, "spec": spec},)


def same(desired: Mapping[str, Any], existing: Mapping[str, Any]) -> bool:
    """Return whether a ResourceClaimTemplate equals an existing template, as the API server shows it.

    The server writes amounts in a different form, and adds the default number of devices. (kubernetes
    pkg/apis/resource/v1, defaults.go)
    """
    return bool(_normal(desired["spec"]) == _normal(existing["spec"]))


def _normal(value: Any) -> Any:
    """Return a part of a claim template's spec without defaults and empty values, with amounts as numbers."""
    if isinstance(value, Mapping):
        normal = {name: _amounts(part) if name == "requests" else _normal(part) for name, part in value.items()}
        return {name: part for name, part in normal.items() if part not in (None, {}, [], _DEFAULTS.get(name))}
    return [_normal(part) for part in value] if isinstance(value, list) else value


def _amounts(requests: Any) -> Any:
    """Return the normalized requests of a claim, or a capacity's amounts by name."""
    if isinstance(requests, Mapping):
        return {name: quantity(amount) for name, amount in requests.items()}
    return _normal(requests)


def free(request: LayerRequest) -> LayerCapacity:
    """Return the free capacity from ResourceSlices and allocated claims. Raises LayerCannot like `objects`."""
    ask = _ask(request)
    empty = _pools(request)
    by_node = _less_claims(request, empty)

    def servers(pools: Mapping[str, Mapping[str, _Pool]], node: ClusterNode) -> int:
        return _servers(request, ask, pools.get(node.name, {}).values())

    capacity = request.counted(
        [node for node in request.facts.nodes if node.name in by_node],
        lambda node: servers(by_node, node),
        lambda node: servers(empty, node),
    )
    return replace(capacity, profile=ask.profile)


def _ask(request: LayerRequest) -> _Ask:
    options, share = request.options_as(DraOptions), request.gpu.share
    shared = [device for device in _devices(request) if device.shared and _suitable(request, device, "gpu")]
    if share.units == UNITS_PER_GPU:
        # a claim that names no capacity gets only a part of a shared GPU
        return _Ask(options.device_class, "gpu", share.count, capacity=_capacity(request, shared) if shared else {})
    if options.consumable:
        if not shared:
            raise LayerCannot(
                f"No GPU in the ResourceSlices of {options.driver} is shared by claims (allowMultipleAllocations): "
                "start the driver with --consumable-shares=100, and enable the feature gate DRAConsumableCapacity."
            )
        return _Ask(options.device_class, "gpu", capacity=_capacity(request, shared))
    match = smallest(_profiles(request), share.units, guaranteed_memory(request.gpu.memory.guarantee))
    if match is not None:
        return _Ask(MIG_CLASS, "mig", profile=match)
    raise LayerCannot(
        f"No MIG device in the ResourceSlices of {options.driver} holds {share}: create MIG devices, set "
        "options.dra.consumable in layers.yaml if the driver publishes shares, or write count: 1 for a whole GPU."
    )


def _capacity(request: LayerRequest, shared: list[ClusterDevice]) -> dict[str, int]:
    """Return the consumption of a claim on a shared GPU."""
    units = request.gpu.share.units
    requested: dict[str, int] = {}
    shares = max(device.capacity.get(SHARES, 0) for device in shared)
    if shares:
        requested[SHARES] = -(-shares * units // UNITS_PER_GPU)
    sizes = [request.requested_memory(device.capacity.get(MEMORY, 0)) for device in shared]
    # a claim of all shares also excludes others from the rest of a larger GPU's memory
    amount = min(sizes) if shares and units == UNITS_PER_GPU else max(sizes)
    # Whole mebibytes, as in the driver, rounded down so that shares that add up to a whole GPU fit on it.
    requested[MEMORY] = amount // _MEBIBYTE * _MEBIBYTE
    return requested


def _expressions(request: LayerRequest, ask: _Ask, driver: str) -> Iterator[str]:
    """Yield CEL expressions that select devices, in addition to the device class's expressions."""
    attributes = f"device.attributes['{driver}']"
    if ask.profile is not None:
        yield f"{attributes}.profile == '{ask.profile.name}'"
    if request.models:
        yield f"{attributes}.productName.matches('{_regular_expression(request.models)}')"


def _regular_expression(patterns: Iterable[str]) -> str:
    """Return patterns of GPU model names as one RE2 expression, to be quoted in CEL."""
    return f"(?i)^({'|'.join(_PARTS.sub(_translated, pattern) for pattern in patterns)})$"


def _translated(part: re.Match[str]) -> str:
    """Return a part of an fnmatch pattern as an expression.

    Characters that would end a quoted string become "any character", as do sets with such characters or with ranges
    other than a-z, A-Z and 0-9.
    """
    text = part[0]
    if len(text) > 1:
        return f"[{text[1:-1].replace('!', '^')}]" if _PLAIN_SET.fullmatch(text) else "."
    if text in " -":
        # node labels have dashes where NVML has spaces, and patterns can have either
        return "[ -]"
    return {"*": ".*", "?": "."}.get(text) or (text if text.isalnum() else "." if text in "'\\^[]" else f"[{text}]")


def _quantity(name: str, amount: int) -> str:
    return f"{amount // _MEBIBYTE}Mi" if name == MEMORY and amount % _MEBIBYTE == 0 else str(amount)


def _slices(request: LayerRequest) -> list[ClusterSlice]:
    """Return the driver's slices of the newest generation of each pool, on the request's nodes."""
    ours = [slice for slice in request.facts.slices if slice.driver == request.options_as(DraOptions).driver]
    newest: dict[str, int] = {}
    for our in ours:
        newest[our.pool] = max(our.generation, newest.get(our.pool, 0))
    nodes = {node.name for node in request.facts.nodes}
    return [our for our in ours if our.generation == newest[our.pool] and our.node in nodes]


def _devices(request: LayerRequest) -> list[ClusterDevice]:
    return [device for slice in _slices(request) for device in slice.devices]


def _suitable(request: LayerRequest, device: ClusterDevice, kind: str) -> bool:
    return device.attributes.get("type") == kind and request.accepts(_attribute(device, "productName"))


def _profiles(request: LayerRequest) -> Iterator[MigProfile]:
    """Yield the suitable profiles of MIG devices for the template."""
    devices = _devices(request)
    whole = {
        _attribute(device, "uuid"): device.capacity.get(MEMORY)
        for device in devices
        if device.attributes.get("type") == "gpu"
    }
    mig = [
        (_attribute(device, "parentUUID"), _attribute(device, "profile"), device)
        for device in devices
        if device.attributes.get("type") == "mig"
    ]
    slices = {
        gpu: slices_of(name) for gpu, name, device in mig if is_whole(device.capacity.get(MEMORY), whole.get(gpu))
    }
    for gpu, name, device in mig:
        if _suitable(request, device, "mig"):
            model, memory = _attribute(device, "productName"), device.capacity.get(MEMORY)
            match = profile(name, model, whole.get(gpu), memory, slices.get(gpu))
            if match is not None:
                yield match


def _attribute(device: ClusterDevice, name: str) -> str:
    return str(device.attributes.get(name, ""))


def _pools(request: LayerRequest) -> dict[str, dict[str, _Pool]]:
    """Return the devices of each node by pool, without allocations."""
    pools_by_node: dict[str, dict[str, _Pool]] = {}
    for slice in _slices(request):
        pool = pools_by_node.setdefault(slice.node, {}).setdefault(slice.pool, _Pool())
        pool.devices += slice.devices
        pool.counters.update(slice.counters)
    return pools_by_node


def _less_claims(request: LayerRequest, pools: Mapping[str, Mapping[str, _Pool]]) -> dict[str, dict[str, _Pool]]:
    """Return copies of the pools without the devices of claims."""
    used: dict[str, list[ClaimedDevice]] = {}
    for claim in request.facts.claims:
        for claimed in claim.devices:
            if claimed.driver == request.options_as(DraOptions).driver:
                used.setdefault(claimed.pool, []).append(claimed)
    remaining = {
        node: {name: _Pool(list(pool.devices), dict(pool.counters)) for name, pool in there.items()}
        for node, there in pools.items()
    }
    for there in remaining.values():
        for name, pool in there.items():
            for claimed in used.get(name, ()):
                _take(pool, claimed.device, claimed.consumed)
    return remaining


def _take(pool: _Pool, name: str, consumed: Mapping[str, int]) -> None:
    """Remove a device, or a part of it, from a pool."""
    for place, device in enumerate(pool.devices):
        if device.name != name:
            continue
        if device.shared and consumed:
            left = {key: amount - consumed.get(key, 0) for key, amount in device.capacity.items()}
            pool.devices[place] = replace(device, capacity=left)
            return
        for counter, amount in device.counters.items():
            pool.counters[counter] = pool.counters.get(counter, 0) - amount
        del pool.devices[place]
        return


def _servers(request: LayerRequest, ask: _Ask, pools: Iterable[_Pool]) -> int:
    """Return the number of servers that fit on a node's devices. A claim of several GPUs can use all pools."""
    devices = 0
    for pool in pools:
        counters = dict(pool.counters)
        for device in pool.devices:
            if device.tainted or not _suitable(request, device, ask.kind):
                continue
            if ask.profile is not None and device.attributes.get("profile") != ask.profile.name:
                continue
            if ask.capacity:
                devices += _parts(device, ask.capacity)
            elif all(counters.get(counter, 0) >= amount for counter, amount in device.counters.items()):
                for counter, amount in device.counters.items():
                    counters[counter] -= amount
                devices += 1
    return devices // ask.count


def _parts(device: ClusterDevice, requested: Mapping[str, int]) -> int:
    """Return the number of claims that fit on a shared device. Capacities not named by a claim use the default."""
    if not device.shared:
        return 0
    fit = ENOUGH
    for name, left in device.capacity.items():
        each = requested.get(name, device.defaults.get(name, left))
        if each > 0:
            fit = min(fit, max(0, left) // each)
    return fit if fit < ENOUGH else 0
