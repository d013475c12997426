"""How a node ended a pod that it had accepted, in words for the server's user and for the hub's log."""

from __future__ import annotations

_BY_REASON = {
    "UnexpectedAdmissionError": "could not give the server its GPU: the GPU is gone or taken, or the node "
    "was restarted",
    "NodeShutdown": "was shut down",
    "Terminated": "was shut down",
    "Evicted": "evicted the server",
    "Preempting": "needed the capacity for a pod of higher priority",
    "NodeAffinity": "no longer matches the server's node selector or affinity",
    "TopologyAffinityError": "could not give the server CPUs and a GPU of one NUMA node",
}
"""By the kubelet's reason for a failed pod (kubernetes pkg/kubelet)."""


def what_happened(reason: str) -> str:
    """Return what the node did, as half a sentence after "Node node-a". ``reason``: Kubernetes' word, or empty."""
    if reason.startswith("OutOf"):
        return f"has not enough {reason.removeprefix('OutOf')} left for the server"
    return _BY_REASON.get(reason, "ended the server")


def ended(node: str, reason: str, message: str) -> str:
    """Return which node ended the pod and why, without a full stop. Each argument is Kubernetes' word, or empty."""
    where = f"Node {node}" if node else "The node"
    detail = f": {message}" if message else ""
    return f"{where} {what_happened(reason)} ({reason or 'no reason given'}{detail})"
