"""The ResourceSlice of a node's GPUs, as the API server is given it. Pure: slice_publisher.py writes it.

A feature gate that is off drops fields without an error, so what the server keeps is compared with what was written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.agent.kubernetes.cluster_api import Json
from gpushare_spawner.model.kubernetes import (
    CLAIMS_API,
    DRIVER,
    MEMORY_CAPACITY,
    PREFIX,
    UNITS_CAPACITY,
    UUID_ATTRIBUTE,
    capacity_of,
    device_name,
    quantity,
    slice_name,
)

API_VERSION = CLAIMS_API.removeprefix("/apis/")
SLICES = f"{CLAIMS_API}/resourceslices"
UNUSABLE = PREFIX + "unusable"
"""Key of the taint of a GPU that must get no new session."""


@dataclass(frozen=True)
class OfferedGpu:
    """A GPU as the scheduler is to see it."""

    gpu: Gpu
    units: int
    """Units of 1 % that claims may take in all, those that they have taken included: more than the GPU has while idle
    sessions lend theirs."""
    trouble: str | None = None
    """Why no new session may come, in one word; None: one may."""


def resource_slice(node: str, gpus: Iterable[OfferedGpu], unit_size: int, generation: int, taints: bool) -> Json:
    """Return the slice of a node. `unit_size`: claims are rounded up to a multiple of it.

    `taints`: the server keeps taints of devices. Where it does not, a GPU with a trouble is left out.
    """
    devices = [_device(one, unit_size) for one in gpus if one.units > 0 and (taints or one.trouble is None)]
    return {
        "apiVersion": API_VERSION,
        "kind": "ResourceSlice",
        "metadata": {"name": slice_name(node)},
        "spec": {
            "driver": DRIVER,
            "nodeName": node,
            "pool": {"name": node, "generation": generation, "resourceSliceCount": 1},
            "devices": devices,
        },
    }


def lost(wanted: Any, kept: Any, where: str = "") -> Iterator[str]:
    """Yield the path of each field that was written and is not kept. What the server adds by itself is no loss."""
    if isinstance(wanted, Mapping):
        for key, value in wanted.items():
            path = f"{where}.{key}" if where else key
            if not isinstance(kept, Mapping) or key not in kept:
                if value not in ({}, []):
                    yield path
            else:
                yield from lost(value, kept[key], path)
    elif isinstance(wanted, list):
        if not isinstance(kept, list) or len(kept) != len(wanted):
            yield where
        else:
            for number, (one, other) in enumerate(zip(wanted, kept, strict=True)):
                yield from lost(one, other, f"{where}[{number}]")
    elif wanted != kept and not _same_quantity(wanted, kept):
        yield where


def says_the_same(wanted: Json, kept: Json) -> bool:
    """Whether a slice as the server keeps it says what it should, whatever its generation is."""
    spec, other = ({**one["spec"], "pool": {**one["spec"]["pool"], "generation": 0}} for one in (wanted, kept))
    # a device that has lost its taint is another one too
    bare = [device for device in other.get("devices") or [] if device.get("taints")]
    tainted = [device for device in spec["devices"] if device.get("taints")]
    return len(bare) == len(tainted) and not list(lost(spec, {"devices": [], **other}))


def _device(offered: OfferedGpu, unit_size: int) -> Json:
    capacity = capacity_of(offered.units, offered.gpu.memory_bytes)
    # no validRange.max: the server refuses one above the value, and the value can fall
    smallest = {UNITS_CAPACITY: str(unit_size), MEMORY_CAPACITY: "1Mi"}
    device: Json = {
        "name": device_name(offered.gpu.uuid),
        "allowMultipleAllocations": True,
        "attributes": {
            UUID_ATTRIBUTE: {"string": offered.gpu.uuid},
            "model": {"string": offered.gpu.model[:64]},
            "index": {"int": offered.gpu.index},
        },
        "capacity": {
            name: {
                "value": amount,
                "requestPolicy": {
                    "default": smallest[name], "validRange": {"min": smallest[name], "step": smallest[name]},
                },
            }
            for name, amount in capacity.items()
        },
    }  # fmt: skip
    if offered.trouble is not None:
        device["taints"] = [{"key": UNUSABLE, "value": offered.trouble, "effect": "NoSchedule"}]
    return device


def _same_quantity(one: Any, other: Any) -> bool:
    if not isinstance(one, str) or not isinstance(other, str):
        return False
    try:
        return quantity(one) == quantity(other)
    except ValueError:
        return False
