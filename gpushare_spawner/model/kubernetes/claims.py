"""GPUs as devices of dynamic resource allocation (resource.k8s.io/v1): what agent, spawner and chart agree on.

An agent publishes each GPU as one device with consumable capacity; the spawner makes one claim for each session.

See `resources` for the other way, the device plugin's extended resources.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from gpushare_spawner.model.kubernetes.prefix import PREFIX
from gpushare_spawner.model.share import UNITS_PER_GPU

DRIVER = PREFIX.rstrip("/")
"""The driver's name: a DNS subdomain, and the domain of its devices' attributes."""
DEVICE_CLASS = DRIVER
"""The DeviceClass that selects the driver's devices; the chart makes it."""
CLAIMS_API = "/apis/resource.k8s.io/v1"
"""Kubernetes 1.34 and later have it."""
UNITS_CAPACITY = "units"
"""Capacity of a device: units of 1 %."""
MEMORY_CAPACITY = "memory"
"""Capacity of a device: bytes."""
UUID_ATTRIBUTE = "uuid"
"""Attribute of a device: the GPU's UUID. CEL does not see a device's name."""
POD_CLAIM = "gpushare"
"""The name of the claim in ``pod.spec.resourceClaims``."""

_MEBIBYTE = 2**20
_DEVICE_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")  # a DNS label
_MAX_NAME = 253  # an object's name is a DNS subdomain (RFC 1123)


def device_name(uuid: str) -> str:
    """Return the name of a GPU's device. It does not depend on the GPU's index, which can change: the scheduler counts
    by this name what claims have taken."""
    name = uuid.lower()
    return name if _DEVICE_NAME.fullmatch(name) else f"gpu-{_digest(uuid)}"


def slice_name(node: str) -> str:
    """Return the name of the ResourceSlice of a node's GPUs."""
    name = f"{node}-{DRIVER}"
    return name if len(name) <= _MAX_NAME else f"{node[: _MAX_NAME - len(DRIVER) - 18]}-{_digest(node)}-{DRIVER}"


def claim_name(pod: str, token: str) -> str:
    """Return the name of a session's claim. `token` tells one spawn from the next one, which has the same pod name."""
    return f"{pod[: _MAX_NAME - len(token) - 1]}-{token}"


def claim_folder(namespace: str, claim: str) -> str:
    """Return the name of the folder, below the agent's, that holds the sockets of a claim's session.

    Spawner and agent both compute it: the pod names the folder before the claim is prepared.
    """
    return _digest(f"{namespace}/{claim}")


def capacity_of(units: int, gpu_memory_bytes: int) -> dict[str, str]:
    """Return what so many units of a GPU are of its device's capacity: the units, and the memory in proportion."""
    mebibytes = gpu_memory_bytes * units // UNITS_PER_GPU // _MEBIBYTE
    return {UNITS_CAPACITY: str(units), MEMORY_CAPACITY: f"{mebibytes}Mi"}


def claim_spec(device_class: str, share_units: int, memory_by_gpu: Mapping[str, int]) -> dict[str, Any]:
    """Return the spec of a claim for so many units of each GPU. `memory_by_gpu`: bytes by the GPU's UUID."""
    requests = [
        {
            "name": f"gpu-{number}",
            "exactly": {
                "deviceClassName": device_class,
                "capacity": {"requests": capacity_of(share_units, memory)},
                "selectors": [{"cel": {"expression": _is_gpu(uuid)}}],
            },
        }
        for number, (uuid, memory) in enumerate(memory_by_gpu.items())
    ]
    return {"devices": {"requests": requests}}


def has_claim(spec: Mapping[str, Any]) -> bool:
    """Return whether a pod's spec names the claim of a session."""
    return any(one.get("name") == POD_CLAIM for one in spec.get("resourceClaims") or [])


def _is_gpu(uuid: str) -> str:
    # an attribute that a device lacks would be an error, which ends the whole allocation: so the driver comes first
    driver, value = json.dumps(DRIVER), json.dumps(uuid)
    return f"device.driver == {driver} && device.attributes[{driver}].{UUID_ATTRIBUTE} == {value}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
