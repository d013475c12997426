"""Why a spawn waits or fails, for the person who asked for it: what is wrong, and what helps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpushare_spawner.model.share import Share
from gpushare_spawner.placement import Lacking, Reason, Shortage, Unplaceable
from gpushare_spawner.wording.amounts import elapsed, gpu_share, memory, plural

PLACING_FAILED = (
    "An internal error of gpushare-spawner kept your server from being placed on a GPU. Nothing stays reserved. "
    "Tell the admin: the hub's log has the details."
)

NO_REPORT_YET = "No GPU agent has reported yet."
AGENT_SILENT = "The GPU agent of this machine does not answer"
ALLOCATIONS_UNKNOWN = "The allocations on the cluster's GPUs are unknown"
"""Why nothing can be placed, without a full stop: see `nothing_known`."""
_SMALLER = "Choose a template with a smaller share."


def capacity(why: Unplaceable) -> str:
    """Return why no GPU can take the share now, as a sentence."""
    share = why.share
    match why.reason:
        case Reason.NO_GPUS:
            return "No GPU is known: no agent has reported one. Ask the admin whether the agent is running."
        case Reason.NO_MODEL:
            return (
                "No GPU is of a model that the template asks for. "
                f"Available models: {', '.join(why.models)}. Choose another template, or ask the admin."
            )
        case Reason.INELIGIBLE:
            return (
                "The nodes with suitable GPUs accept no server of this template, because of their taints or labels. "
                "Ask the admin."
            )
        case Reason.NOT_ADMITTED:
            nodes = ", ".join(why.left_out)
            return f"{nodes} did not admit this server just now, and no other node has {share} free."
        case Reason.NODES_FULL:
            shortages = "; ".join(_shortage(shortage, why) for shortage in why.shortages)
            return f"Nodes with {_amount(share)} free lack another resource: {shortages}."
        case Reason.NODES_TOO_SMALL:
            shortages = "; ".join(_too_small(shortage, why) for shortage in why.shortages)
            said = f"{shortages[0].upper()}{shortages[1:]}"
            return f"{said}. Choose a template that asks for less CPU and memory, or ask the admin."
        case Reason.UNHEALTHY if share.count == 1:
            return f"No suitable GPU is healthy ({why.suitable} found). Ask the admin: the agent's log says why."
        case Reason.UNHEALTHY:
            return (
                f"Too few suitable GPUs are healthy: this needs {_amount(share)}. "
                "Ask the admin: the agent's log says why."
            )
        case Reason.CORDONED:
            return (
                f"An admin keeps new servers away from the GPUs that could take {_amount(share)}: they are cordoned. "
                "Ask the admin."
            )
        case Reason.TOO_BIG if share.count == 1:
            return f"This needs {share}, and a GPU here can give at most {gpu_share(why.most_units)}. {_SMALLER}"
        case Reason.TOO_BIG:
            found = f"no node has more than {why.most_count} of one model" if why.most_count else "none is usable"
            return f"This needs {_amount(share)}, and {found}. {_SMALLER}"
        case _ if share.count == 1:
            free = f"at most {gpu_share(why.best_units)} is free on any GPU" if why.best_units else "none is free"
            return f"Not enough free capacity: this needs {share}, and {free}."
        case _:
            free = (
                f"at most {plural(why.best_count, 'is', 'are')} free on any node"
                if why.best_count
                else "no whole GPU is free on any node"
            )
            return f"Not enough free capacity: this needs {_amount(share)}, and {free}."


def _shortage(shortage: Shortage, why: Unplaceable) -> str:
    nodes = plural(shortage.nodes, "node")
    match shortage.lacking:
        case Lacking.CPU:
            needed, left = f"{why.cpu / 1000:g} CPU", f"{shortage.most_left / 1000:g}"
        case Lacking.MEMORY:
            needed, left = f"{memory(why.memory)} of memory", memory(shortage.most_left)
        case _:
            return f"{nodes} can run no more pods"
    return f"this needs {needed}, and at most {left} is free on {nodes}"


def _too_small(shortage: Shortage, why: Unplaceable) -> str:
    if shortage.lacking is Lacking.MOST_CPU:
        needed, most = f"{why.cpu / 1000:g} CPU", f"{shortage.most_left / 1000:g} CPU"
    else:
        needed, most = f"{memory(why.memory)} of memory", memory(shortage.most_left)
    return f"this needs {needed}, and a node with suitable GPUs has at most {most}, even when nothing runs there"


def _amount(share: Share) -> str:
    return f"{share} on one node" if share.count > 1 else str(share)


def queue_full(share: Share, waiting: int) -> str:
    """Return that a spawn is not queued, because as many spawns as are allowed to are waiting already."""
    why = (
        f"The queue is full ({plural(waiting, 'spawn')})"
        if waiting
        else f"No GPU has {share} free now, and this hub has no queue"
    )
    return f"{why}. Try again in a few minutes, or choose a template without a GPU."


def waited_too_long(share: Share, waited: str, why: str) -> str:
    """Return that a spawn has left the queue without a placement; `why` is a sentence or empty."""
    reason = f" {why}" if why else ""
    return (
        f"No free capacity for {share} after {waited} in the queue.{reason} Nothing stays reserved. "
        "Try again later, or choose a smaller share."
    )


def impossible(template: str, where: str, node: str, why: str) -> str:
    """Return that no wait would help a spawn of the template.

    ``template``: its display name; ``where``: like "this machine"; ``why``: a sentence.
    ``node``: the only node that the spawn may use, or empty.
    """
    place = f"node {node}, the only node that your server may use" if node else where
    return f"{template} cannot be started on {place}: {why}"


def node_left_alone(node: str) -> str:
    """Return that a node that has just not admitted a server gets none for some seconds."""
    return f"{node} did not admit a server just now, so no server is placed there for some seconds."


def report_beyond_node(node: str, gpu: int, reported: int, offered: int) -> str:
    """Return that a node's report is refused. ``gpu``: its index; the others are units of 1 %."""
    return (
        f"The agent of node {node} reports {reported} units of GPU {gpu}, and the node itself offers {offered} "
        f"(gpushare-spawner.io/gpu-{gpu}), so no server is placed there."
    )


def report_beyond_claims(node: str, gpu: int, reported: int, most: int) -> str:
    """Return that a node's report is refused where pods get GPUs by claims. The others as `report_beyond_node`."""
    return (
        f"The agent of node {node} reports {reported} units of GPU {gpu}, and by the hub's setting claims_overcommit "
        f"a GPU has at most {most}, so no server is placed there."
    )


def nodes_without_reports(nodes: Sequence[str], age: float) -> str:
    """Return which nodes send no reports. ``age``: seconds since the latest report of one of them."""
    who = f"{len(nodes)} nodes send" if len(nodes) > 1 else f"Node {nodes[0]} sends"
    return f"{who} no reports; the last one is {elapsed(age)} old."


def nothing_known(unavailable: str) -> str:
    """Return that nothing can be placed. ``unavailable`` says what does not answer, without a full stop."""
    return (
        f"{unavailable}, so no server with a GPU can start. "
        "Try again in a minute, or choose a template without a GPU. Tell the admin if the problem persists."
    )


def not_admitted(nodes: Mapping[str, str]) -> str:
    """Return which nodes did not take the server, and what is missing there: half a sentence for each."""
    return f"{plural(len(nodes), 'node')} could not take this server: " + "; ".join(
        f"{node}: {missing}" for node, missing in nodes.items()
    )


def no_node_left(nodes: Mapping[str, str], why: str) -> str:
    """Return that no node takes the server. ``why``: a sentence about the nodes that were not tried, or nothing."""
    return " ".join(
        filter(None, [f"{not_admitted(nodes)}.", why, "Nothing is reserved for you. Try again in a few minutes."])
    )
