"""Sentences about lowering and restoring the CPU and memory requests of a released session's pod."""

from __future__ import annotations

from collections.abc import Sequence

from gpushare_spawner.model.kubernetes.container_requests import Requests
from gpushare_spawner.wording.amounts import memory

_KEPT = "The pod keeps what it was granted, and the service tries again."


def requests(amounts: Requests) -> str:
    """Return the amounts that a pod requests: "1.5 CPU and 4 GiB of memory"."""
    return f"{amounts.cpu / 1000:g} CPU and {memory(amounts.memory)} of memory"


def requests_refused(amounts: Requests, why: str) -> str:
    """Return, for the log, that the API server or the node refused changed requests. ``why``: their message."""
    return (
        f"the API server or the node refuses requests of {requests(amounts)}: {why.rstrip('.')}. {_KEPT} "
        "The node, and the ResourceQuota and the LimitRange of the namespace, must allow what the templates guarantee."
    )


def requests_not_sent(amounts: Requests, why: str) -> str:
    """Return, for the log, that a call of the API server to change requests failed. ``why``: the error."""
    return f"cannot call the API server to set requests of {requests(amounts)}: {why}. {_KEPT}"


DISCOVERY_WORKS = "The API server now says whether it can resize pods (pods/resize)"
"""Log message after `discovery_failed`."""


GUARANTEED = (
    "the pod's QoS class is Guaranteed, and Kubernetes keeps that class. Set a limit of CPU or memory that is more "
    "than its guarantee"
)


REQUESTS_UNREADABLE = "its annotation gpushare-spawner.io/requests cannot be read. Restart the server"


_FIELDS = {
    "cpu": ("CPU", "resources.cpu.guarantee", "KubeSpawner.cpu_guarantee"),
    "memory": ("memory", "resources.memory.guarantee", "KubeSpawner.mem_guarantee"),
}


def discovery_failed(why: str) -> str:
    """Return, for the log, that the API server's resources cannot be discovered. ``why``: its status, or the error."""
    return (
        f"The API server does not say whether it can resize pods (pods/resize): {why}. Released sessions keep their "
        "CPU and memory requests meanwhile; the service tries again."
    )


def without_effect(pod: str, template: str, why: str) -> str:
    """Return, for the log, that a template's release_resources has no effect on a pod (namespace/name)."""
    return (
        f"idle.release_resources of template {template} has no effect on the pod {pod}: {why}. This is logged once "
        "for each template and cause."
    )


def not_requested(names: Sequence[str]) -> str:
    """Return that a container requests no cpu, no memory, or neither."""
    missing, fields = _missing(names)
    return f"its container requests no {missing}. Give the template {fields}"


def perhaps_not_requested(names: Sequence[str]) -> str:
    """Return that a template sets no such request, so its release_resources may have no effect."""
    missing, fields = _missing(names)
    configured = " and ".join(_FIELDS[name][2] for name in names)
    return (
        f"idle.release_resources has no effect on servers that request no {missing}, and this template gives them no "
        f"such request. Give it {fields}, unless the hub's configuration does ({configured})."
    )


def _missing(names: Sequence[str]) -> tuple[str, str]:
    return " and no ".join(_FIELDS[name][0] for name in names), " and ".join(_FIELDS[name][1] for name in names)


RESIZE_UNKNOWN = (
    "Templates have idle.release_resources, which has no effect on this cluster: its API server has no pods/resize, "
    "which needs Kubernetes 1.33 or later. Upgrade the cluster, or remove the field."
)
"""Log message if the API server has no pods/resize."""
