"""The CPU and memory requests of a session's container, and the part that a released session returns. Pure data.

Kubernetes changes a running container's requests in place (subresource pods/resize, 1.33 and later). A lower request
counts once the node has applied it. A higher request counts immediately, and is pending while the node is full: the
container then keeps the amount granted earlier. (Measured on Kubernetes 1.36.2.)

The module also converts Kubernetes quantities such as 500m, 2, 4Gi and 1e3 to numbers.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from gpushare_spawner.model.kubernetes.annotations import PREFIX
from gpushare_spawner.model.kubernetes.objects import gpu_index_of, has_claim
from gpushare_spawner.model.share import Tier

_SUFFIXES = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "": Decimal(1),
    "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9), "T": Decimal(10**12), "P": Decimal(10**15),
    "E": Decimal(10**18),
    "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30), "Ti": Decimal(2**40), "Pi": Decimal(2**50),
    "Ei": Decimal(2**60),
}  # fmt: skip
_QUANTITY = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)(n|u|m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)?")


def quantity(value: Any) -> Decimal:
    """Return a quantity from the API server as a number. Raises ValueError for other text."""
    match = _QUANTITY.fullmatch(str(value).strip())
    if match is None:
        raise ValueError(f"{value!r} is not a quantity: Kubernetes writes them like 500m, 2 or 4Gi")
    return Decimal(match[1]) * _SUFFIXES[match[2] or ""]


def millicores(amounts: Mapping[str, Any]) -> int:
    """Return the CPU of amounts from the API server, in millicores, rounded up."""
    return math.ceil(quantity(amounts.get("cpu", 0)) * 1000)


def memory_bytes(amounts: Mapping[str, Any]) -> int:
    """Return the memory of amounts from the API server, in bytes."""
    return int(quantity(amounts.get("memory", 0)))


REQUESTS = PREFIX + "requests"
"""Annotation: JSON of the CPU and memory requests that the template gives the session's container, in the API server's
format. Present only while the requests are lowered or not yet restored."""

NOTEBOOK = "notebook"
"""KubeSpawner's name of the notebook server's container."""
RESIZE_PENDING = "PodResizePending"
"""Condition of a pod on a node that has not granted the requests in its spec."""
_BURSTABLE = "Burstable"
"""The only QoS class in which requests can be lowered while limits stay unchanged. Kubernetes rejects a resize that
changes the class."""


@dataclass(frozen=True)
class Requests:
    """The requests of one container."""

    cpu: int
    """Millicores."""
    memory: int
    """Bytes."""

    @classmethod
    def of(cls, amounts: Any) -> Requests | None:
        """Return amounts from the API server as requests; None if CPU or memory is missing or not a quantity."""
        try:
            if "cpu" in amounts and "memory" in amounts:
                return cls(millicores(amounts), memory_bytes(amounts))
        except (TypeError, ValueError):
            pass
        return None

    def written(self) -> dict[str, str]:
        """Return the requests in the API server's format."""
        return {"cpu": f"{self.cpu}m", "memory": str(self.memory)}

    def largest(self, other: Requests) -> Requests:
        """Return the larger amount of CPU and of memory."""
        return Requests(max(self.cpu, other.cpu), max(self.memory, other.memory))

    def smallest(self, other: Requests) -> Requests:
        """Return the smaller amount of CPU and of memory."""
        return Requests(min(self.cpu, other.cpu), min(self.memory, other.memory))

    def covers(self, other: Requests) -> bool:
        """Return whether each amount is at least that of ``other``."""
        return self.largest(other) == self


@dataclass(frozen=True)
class ContainerRequests:
    """The requests of the container that has the GPU share."""

    container: str
    requested: Requests
    """The requests in the pod's spec."""
    granted: Requests
    """The requests that the node has granted."""
    full: Requests | None
    """The template's requests; None: equal to `requested`."""
    changeable: bool
    """Whether Kubernetes can lower the requests, which depends on the QoS class."""
    infeasible: str = ""
    """The kubelet's reason why the node can never grant the requests in the spec; empty: it can. As of Kubernetes 1.36,
    the API server itself rejects such requests."""

    @property
    def lacking(self) -> bool:
        """Whether the node has granted less than the template's requests."""
        return self.full is not None and not self.granted.covers(self.full)

    @property
    def whole(self) -> Requests | None:
        """The requests for a session that is not released; None if the requests were not lowered.

        They are the template's requests, or more if another client has raised them.
        """
        return None if self.full is None else self.full.largest(self.requested)

    @property
    def restored(self) -> bool:
        """Whether lowered requests are restored to those of the template."""
        return self.full is not None and self.requested.covers(self.full) and not self.lacking

    def released(self, cpu: int | None, memory: int | None, used: Requests) -> Requests:
        """Return the requests for a released session's container, never less than ``used``.

        ``cpu`` and ``memory``: the template's values for released sessions, in millicores and bytes; None: unchanged.
        Lowered requests can only rise, so varying use does not cause repeated patches.
        """
        full = self.full or self.requested
        left = Requests(full.cpu if cpu is None else cpu, full.memory if memory is None else memory)
        desired = left.largest(used).smallest(full)
        # requests that cover `full` are recorded but not lowered: the API server refused, or the service restarted
        return desired if self.requested.covers(full) else desired.largest(self.requested)

    def patch(self, requests: Requests, version: str) -> dict[str, Any]:
        """Return the strategic merge patch for pods/resize. It has both amounts: a missing request becomes the limit.

        ``version``: the pod's resourceVersion. The API server rejects the patch for any other version, because another
        client may have resized the pod.
        """
        container = {"name": self.container, "resources": {"requests": requests.written()}}
        return {"metadata": {"resourceVersion": version}, "spec": {"containers": [container]}}


def container_requests(pod: Mapping[str, Any]) -> ContainerRequests | None:
    """Return the requests of the container with the GPU share; None if CPU or memory has no request."""
    annotations = pod["metadata"].get("annotations") or {}
    container = share_container(pod)
    requested = Requests.of(((container or {}).get("resources") or {}).get("requests"))
    full = None
    if REQUESTS in annotations:
        full = _full(annotations[REQUESTS])
        if full is None:
            return None
    if container is None or requested is None:
        return None
    status = pod.get("status") or {}
    here: Mapping[str, Any] = next(
        (entry for entry in status.get("containerStatuses") or [] if entry.get("name") == container["name"]), {}
    )
    in_force = Requests.of((here.get("resources") or {}).get("requests"))
    return ContainerRequests(
        container=container["name"],
        requested=requested,
        granted=in_force or Requests.of(here.get("allocatedResources")) or requested,
        full=full,
        changeable=status.get("qosClass") == _BURSTABLE,
        infeasible=_infeasible(status),
    )


def lacks_requests(requests: ContainerRequests | None, tier: Tier) -> bool:
    """Return whether a session that is not released has less than its template's requests because its node is full.

    ``requests``: those of its container, see `container_requests`.
    """
    return requests is not None and requests.lacking and tier is not Tier.RELEASED


def missing_requests(pod: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the resources (cpu, memory) that the container with the GPU share does not request."""
    requested = ((share_container(pod) or {}).get("resources") or {}).get("requests") or {}
    return tuple(name for name in ("cpu", "memory") if name not in requested)


def share_container(pod: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the container of a pod's spec that has the GPU share.

    In a pod with a claim, no container names the claim. The result is then the notebook server's container, or else the
    first.
    """
    spec = pod.get("spec") or {}
    containers: list[dict[str, Any]] = spec.get("containers") or []
    if containers and has_claim(spec):
        return notebook_container(spec)
    for container in containers:
        limits = (container.get("resources") or {}).get("limits") or {}
        if any(gpu_index_of(name) is not None for name in limits):
            return container
    return None


def notebook_container(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the notebook server's container, found by name, or else the first. Raises ValueError if there is none."""
    containers: list[dict[str, Any]] = spec.get("containers") or []
    if not containers:
        raise ValueError("the pod has no container")
    return next((container for container in containers if container.get("name") == NOTEBOOK), containers[0])


def requests_patch(full: Requests | None) -> dict[str, str | None]:
    """Return the annotations of a merge patch that records the template's requests, or removes the record (None)."""
    return {REQUESTS: None if full is None else json.dumps(full.written())}


def _infeasible(status: Mapping[str, Any]) -> str:
    for condition in status.get("conditions") or []:
        if (condition.get("type"), condition.get("reason")) == (RESIZE_PENDING, "Infeasible"):
            return condition.get("message") or "Infeasible"
    return ""


def _full(text: str) -> Requests | None:
    try:
        return Requests.of(json.loads(text))
    except ValueError:
        return None
