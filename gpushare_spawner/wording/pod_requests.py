"""Sentences about CPU and memory that a released session's server gives back to its node, and gets again."""

from __future__ import annotations

LACKING = (
    "This server gave back guaranteed CPU and memory while its GPU share was released. Its machine is full now, so the "
    "server runs with less guaranteed CPU and memory. It gets them again when capacity is free."
)
"""For the user, in JupyterLab and on the dashboard."""


def requests_refused(wanted: str, why: str) -> str:
    """Return that the API server refused other requests, for the log. ``wanted``: the requests; ``why``: its words."""
    return (
        f"the API server refuses requests of {wanted}: {why}. The pod keeps its requests, and the service tries again. "
        "A ResourceQuota or LimitRange of the namespace has to leave room for what the templates guarantee."
    )


def resize_unknown() -> str:
    """Return that `release_resources` has no effect here, for the log."""
    return (
        "Templates have idle.release_resources, which has no effect on this cluster: its API server has no "
        "pods/resize. It needs Kubernetes 1.33 or later."
    )
