"""Sentences about the CPU and memory that a released session's pod does not request, and about their restoration."""

from __future__ import annotations

from gpushare_spawner.model.kubernetes import Requests
from gpushare_spawner.wording.amounts import memory

LACKING = (
    "This server has less guaranteed CPU and memory at the moment. They were lowered while its GPU share was released, "
    "and its machine has not granted them again yet, most likely because it is full. They are restored when capacity "
    "is free. Tell the admin if this lasts."
)
"""For the user, in JupyterLab and on the dashboard."""
_KEPT = "The pod keeps its requests, and the service tries again."


def requests(amounts: Requests) -> str:
    """Return what a pod requests: "1.5 CPU and 4 GiB of memory"."""
    return f"{amounts.cpu / 1000:g} CPU and {memory(amounts.memory)} of memory"


def requests_refused(wanted: Requests, why: str) -> str:
    """Return that the API server refused other requests, for the log. ``why``: its words."""
    return (
        f"the API server refuses requests of {requests(wanted)}: {why.rstrip('.')}. {_KEPT} "
        "The ResourceQuota and the LimitRange of the namespace must allow what the templates guarantee."
    )


def requests_not_sent(wanted: Requests, why: str) -> str:
    """Return that the API server could not be asked for other requests, for the log. ``why``: the error."""
    return f"the API server cannot be asked for requests of {requests(wanted)}: {why}. {_KEPT}"


def resize_unknown() -> str:
    """Return that `release_resources` has no effect here, for the log."""
    return (
        "Templates have idle.release_resources, which has no effect on this cluster: its API server has no "
        "pods/resize, which needs Kubernetes 1.33 or later. Upgrade the cluster, or remove the field."
    )
