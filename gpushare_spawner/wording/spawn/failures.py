"""Why a spawn with a share fails after it was placed: the agent, the machine or the cluster stands in the way."""

from __future__ import annotations

from gpushare_spawner.wording.amounts import duration

SERVER_ENDED = "The server ended while it started; its log says why."
CANCELLED = (
    "The spawn was cancelled before the server had started: on the hub's pages or by its API, by the server's user or "
    "by an admin."
)
SESSION_CLOSES = "The server's earlier session is being closed."
POD_NOT_SEEN = "the hub has not seen its pod"
_NODE_DID = {
    "UnexpectedAdmissionError": "could not give the server its GPU: the GPU is gone or taken, or the node "
    "was restarted",
    "FailedPrepareDynamicResources": "could not give the server its GPU share",
    "NodeShutdown": "was shut down",
    "Terminated": "was shut down",
    "Evicted": "evicted the server",
    "Preempting": "needed the capacity for a pod of higher priority",
    "NodeAffinity": "no longer matches the server's node selector or affinity",
    "TopologyAffinityError": "could not give the server CPUs and a GPU of one NUMA node",
}
"""By the kubelet's reason for a failed pod (kubernetes pkg/kubelet)."""


def agent_refused_session(why: str) -> str:
    """Return that the agent did not open the session. ``why``: its words."""
    return f"The GPU agent refused the session: {why}. Tell the admin."


def agent_refused_process(why: str) -> str:
    """Return that the agent does not accept the process of the session. ``why``: its words."""
    return f"The GPU agent does not accept the server's process: {why}"


def no_such_user(user: str) -> str:
    """Return that the machine has no user of that name."""
    return f"There is no user {user!r} on this machine. Ask the admin."


def user_not_made(user: str) -> str:
    """Return that a user of the machine could not be created."""
    return f"The user {user} could not be created on this machine. Ask the admin."


def setting_forbids_gpus(setting: str) -> str:
    """Return that no template with a GPU works with a setting of the hub."""
    return f"Templates with a GPU cannot be started while this hub's setting {setting} is on. Tell the admin."


def api_unavailable(why: str) -> str:
    """Return that the cluster's API fails for the moment. ``why``: its answer."""
    return (
        f"The cluster's API is unavailable at the moment ({why}). Nothing is reserved for you. Try again in a minute."
    )


def api_refused(why: str) -> str:
    """Return that the cluster's API does not allow the pod. ``why``: its words, without a full stop."""
    return f"The cluster refuses the server: {why}. Tell the admin."


def quota_exceeded(why: str) -> str:
    """Return that the namespace's quota does not allow the pod now. ``why``: the API's words, without a full stop."""
    return (
        f"The namespace's resource quota does not allow the server: {why}. Nothing is reserved for you. "
        "Stop another server, or tell the admin."
    )


def not_admitted(why: str, tries: int | None) -> str:
    """Return that no node took the pod. ``why``: the last node's answer, without a full stop.

    ``tries``: how many there were, where no more are allowed.
    """
    last = f" This was the last of {tries} attempts." if tries else ""
    return f"{why}.{last} Nothing is reserved for you. Try again in a minute. Tell the admin if the problem persists."


def another_place(why: str) -> str:
    """Return that another node is looked for. ``why``: the node's answer, without a full stop."""
    return f"{why}. Looking for another node."


def too_slow(seconds: float, why: str) -> str:
    """Return that the server did not start in time. ``why``: what it waits for, or empty."""
    reason = f" ({why})" if why else ""
    return f"The server did not start within {duration(seconds)}{reason}. Try again, or tell the admin."


def pinned_elsewhere(placed: str, pinned: str, label: str) -> str:
    """Return that settings pin the pod to another node than the one where its share is."""
    return (
        f"The server is placed on node {placed}, and its settings pin it to {pinned}. Tell the admin to set "
        f"{label} in node_selector, which placement takes into account."
    )


def what_node_did(reason: str) -> str:
    """Return what the node did, as half a sentence after "Node node-a". ``reason``: Kubernetes' word, or empty."""
    if reason.startswith("OutOf"):
        return f"has not enough {reason.removeprefix('OutOf')} left for the server"
    return _NODE_DID.get(reason, "ended the server")


def pod_ended(node: str, reason: str, message: str) -> str:
    """Return which node ended the pod and why, without a full stop. Each argument is Kubernetes' word, or empty."""
    where = f"Node {node}" if node else "The node"
    detail = f": {message}" if message else ""
    return f"{where} {what_node_did(reason)} ({reason or 'no reason given'}{detail})"
