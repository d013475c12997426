"""Sentences of the dashboard's answers. What stands on the page itself is in `service/web/pages`."""

from __future__ import annotations

from collections.abc import Sequence

from gpushare_spawner.model.layers import Layer, LayerName
from gpushare_spawner.wording.amounts import elapsed, gpu_share
from gpushare_spawner.wording.layers import NOT_MEASURED, kept_within, when_idle

AGENT_UNAVAILABLE = "An agent is unavailable, so sessions can be missing here."
LOG_IN = "Log in first, or send a token that may access this service."
MOST_NAMED = 5
"""Unconfirmed sessions of a node in one sentence: a report may have any number of them."""
LONGEST_NAME = 60
"""Letters of each."""


def unconfirmed_sessions(node: str, sessions: Sequence[str]) -> str:
    """Return that a node reports sessions that no pod vouches for. ``sessions``: what it calls them, any text."""
    names = [repr(name if len(name) <= LONGEST_NAME else name[:LONGEST_NAME] + "…") for name in sessions[:MOST_NAMED]]
    more = f" and {len(sessions) - MOST_NAMED} more" if len(sessions) > MOST_NAMED else ""
    one = len(sessions) == 1
    return (
        f"Unconfirmed: node {node} reports {'a session' if one else f'{len(sessions)} sessions'} without a pod of this "
        f"hub on that node: {', '.join(names)}{more}. {'It counts' if one else 'They count'} for nothing. Check the "
        "node and its agent, and that the service may read the namespaces of all pods with a share."
    )


def not_durable(node: str, reason: str) -> str:
    """Return that an agent cannot write its records. ``reason``: what the operating system says, with the folder."""
    return (
        f"The agent of {node} cannot write its records. Changes of sessions and tiers are in its memory only, and are "
        f"lost if it stops: {reason}. Free space there; the agent tries again every second."
    )


def restart_offer(node: str) -> str:
    """Return what a restart gives a borrower whose lender has returned. ``node``: where units are free."""
    return (
        "The owners of the borrowed units have reclaimed them. After a restart the server would own its full share: "
        f"node {node} has units that nobody owns."
    )


def metrics_refused(scope: str) -> str:
    """Return that a viewer may not read the metrics. ``scope``: of a token that may."""
    return f"The metrics are for admins, and for tokens with the scope {scope}."


def server_name(user: str, server: str) -> str:
    """Return the name of a server as the dashboard writes it: "ann", "bob / thesis"."""
    return f"{user} / {server}" if server else user


def session_terms(template: str, units: int, gpus: int) -> str:
    """Return what a session has. ``template``: its title; ``units``: of each GPU. The share can have been changed."""
    return f"template {template}, share {gpu_share(units, gpus)}" if units else f"template {template}"


def node_name(node: str) -> str:
    """Return what an action on a node names it."""
    return f"node {node}"


def gpu_name(index: int, node: str) -> str:
    """Return what an action on a GPU names it."""
    return f"GPU {index} of {node}"


def kept(seconds: float, by: str) -> str:
    """Return that a share is kept. ``seconds``: from now on; ``by``: who gave the keep."""
    return f"Kept for another {elapsed(seconds)}, by {by}."


def not_free(share: str) -> str:
    """Return a share of a list that no GPU of the session has free now."""
    return f"{share} (not free now)"


def exempt(seconds: float | None, by: str, reason: str) -> str:
    """Return that no idle action comes to a session. ``seconds``: from now on; None: without end."""
    said = f"for another {elapsed(seconds)}" if seconds is not None else "without end"
    return f"Exempt from idle actions {said}, by {by}" + (f": {reason}" if reason else ".")


def shared_by(layer: Layer, measured: bool) -> str:
    """Return by what a session's GPU is shared, and what idle actions can do to it; empty for our own layer.

    ``measured``: an agent sees its GPU work.
    """
    if layer.name is LayerName.NATIVE:
        return ""
    unmeasured = "" if measured else f" {NOT_MEASURED}"
    return f"{layer.title} shares its GPU. {kept_within(layer)}{unmeasured} {when_idle(layer)}"
