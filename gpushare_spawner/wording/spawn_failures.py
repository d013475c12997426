"""Texts for a spawn's user about why it waits or fails, and the remedy.

The sentences cover placement, the queue (on the form's cards and on a spawn's page), the cluster's scheduler, and
failures of the agent, the machine or the cluster after placement. Sentences about a template's terms and invalid
options are in `wording.spawn_form`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from gpushare_spawner.model.share import UNITS_PER_GPU, Share
from gpushare_spawner.placement.obstacles import Lacking, Reason, Shortage, Unplaceable
from gpushare_spawner.wording.amounts import duration, either, elapsed, gpu_share, guarantee, memory, plural

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
"""What the node did, by the kubelet's reason for a failed pod (kubernetes pkg/kubelet)."""


_FIELDS_OF_TEMPLATES = {
    "last_units": "a fraction above 1 of GPUs (gpu.fraction)",
    "neighbours": "labels and rules of placement",
    "time_limit_units": "a limit of GPU time (gpu.time)",
    "engine": "a memory engine (gpu.memory.engine)",
}
"""What a template asks for with a field of `control.OpenRequest` that agents of earlier versions lack."""


def agent_refused_session(why: str) -> str:
    """Return that the agent did not open the session. ``why``: its message."""
    # pydantic's text for a field that the agent's version does not have
    if unknown := re.findall(r"(\w+): Extra inputs are not permitted", why):
        named = " and ".join(_FIELDS_OF_TEMPLATES.get(field, field) for field in unknown)
        return (
            f"The GPU agent of this machine is older than the hub: it does not support {named}. Ask the admin to "
            "update gpushare-spawner where the agent (gpushare-agent) runs and to restart it, or choose another "
            "template."
        )
    return f"The GPU agent refused the session: {why}. Tell the admin."


def agent_refused_process(why: str) -> str:
    """Return that the agent does not accept the session's process. ``why``: its message."""
    return f"The GPU agent does not accept the server's process: {why}"


def no_such_user(user: str) -> str:
    """Return that the machine has no user with that name."""
    return f"There is no user {user!r} on this machine. Ask the admin."


def user_not_made(user: str) -> str:
    """Return that a user could not be created on the machine."""
    return f"The user {user} could not be created on this machine. Ask the admin."


def setting_forbids_gpus(setting: str) -> str:
    """Return that a setting of the hub rules out templates with a GPU."""
    return f"Templates with a GPU cannot be started while this hub's setting {setting} is on. Tell the admin."


def api_unavailable(why: str) -> str:
    """Return that the cluster's API is unavailable. ``why``: its answer."""
    return (
        f"The cluster's API is unavailable at the moment ({why}). Nothing is reserved for you. Try again in a minute."
    )


def api_refused(why: str) -> str:
    """Return that the cluster's API does not allow the pod. ``why``: its message, without a period."""
    return f"The cluster refuses the server: {why}. Tell the admin."


def quota_exceeded(why: str) -> str:
    """Return that the namespace's quota does not allow the pod now. ``why``: the API's message, without a period."""
    return (
        f"The namespace's resource quota does not allow the server: {why}. Nothing is reserved for you. "
        "Stop another server, or tell the admin."
    )


def not_admitted(why: str, tries: int | None) -> str:
    """Return that no node admitted the pod. ``why``: the last node's answer, without a period.

    ``tries``: the number of attempts, if no more are allowed.
    """
    last = f" This was the last of {tries} attempts." if tries else ""
    return f"{why}.{last} Nothing is reserved for you. Try again in a minute. Tell the admin if the problem persists."


def another_place(why: str) -> str:
    """Return that the hub tries another node. ``why``: the node's answer, without a period."""
    return f"{why}. Looking for another node."


def too_slow(seconds: float, why: str) -> str:
    """Return that the server did not start in time. ``why``: the missing condition, or empty."""
    reason = f" ({why})" if why else ""
    return f"The server did not start within {duration(seconds)}{reason}. Try again, or tell the admin."


def pinned_elsewhere(placed: str, pinned: str, label: str) -> str:
    """Return that settings pin the pod to a node other than that of its share."""
    return (
        f"The server is placed on node {placed}, and its settings pin it to {pinned}. Tell the admin to set "
        f"{label} in node_selector, which placement takes into account."
    )


def what_node_did(reason: str) -> str:
    """Return what the node did, as the predicate for "Node node-a". ``reason``: Kubernetes' term, or empty."""
    if reason.startswith("OutOf"):
        return f"does not have enough {reason.removeprefix('OutOf')} left for the server"
    return _NODE_DID.get(reason, "ended the server")


def pod_ended(node: str, reason: str, message: str) -> str:
    """Return which node ended the pod and why, without a period. The arguments are Kubernetes' values, or empty."""
    where = f"Node {node}" if node else "The node"
    detail = f": {message}" if message else ""
    return f"{where} {what_node_did(reason)} ({reason or 'no reason given'}{detail})"


PLACING_FAILED = (
    "An internal error of gpushare-spawner prevented your server from being placed on a GPU. Nothing stays reserved. "
    "Tell the admin: the hub's log has the details."
)

NO_REPORT_YET = "No GPU agent has reported yet."
AGENT_SILENT = "The GPU agent of this machine does not answer"
ALLOCATIONS_UNKNOWN = "The allocations on the cluster's GPUs are unknown"
"""Why nothing can be placed, without a period, see `cannot_place`."""
_SMALLER = "Choose a template with a smaller share."


def capacity(why: Unplaceable) -> str:
    """Return the sentence why no GPU can take the share now."""
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
        case Reason.NEIGHBOURS:
            return _kept_apart(why)
        case Reason.NOT_NAMED:
            named = why.conditions
            what = f"GPU {named.gpu}" if named.gpu else f"node {either(named.nodes)}"
            if named.gpu and named.nodes:
                what += f" on {either(named.nodes)}"
            return f"This server needs {what}, and no agent reports it. Choose another template, or ask the admin."
        case Reason.NOT_ADMITTED:
            nodes = ", ".join(why.left_out)
            return f"{nodes} did not admit this server just now, and no other node has {share} free."
        case Reason.NODES_FULL:
            shortages = "; ".join(_shortage(shortage, why) for shortage in why.shortages)
            return f"Nodes with {_amount(share)} free lack another resource: {shortages}."
        case Reason.NODES_TOO_SMALL:
            shortages = "; ".join(_too_small(shortage, why) for shortage in why.shortages)
            sentence = f"{shortages[0].upper()}{shortages[1:]}"
            return f"{sentence}. Choose a template that asks for less CPU and memory, or ask the admin."
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
            limit = f"no node has more than {why.most_count} of one model" if why.most_count else "none is usable"
            return f"This needs {_amount(share)}, and {limit}. {_SMALLER}"
        case _ if share.count == 1:
            pin = why.conditions
            place = f"GPU {pin.gpu}" if pin.gpu else f"any GPU of node {either(pin.nodes)}" if pin.nodes else ""
            free = f"at most {gpu_share(why.best_units)} is free on {place or 'any GPU'}"
            if not why.best_units:
                free = f"none is free on {place}" if place else "none is free"
            return f"Not enough free capacity: this needs {share}, and {free}."
        case _:
            if share.units < UNITS_PER_GPU:
                free = f"at most {plural(why.best_count, 'GPU')} of any node can give {gpu_share(share.units)}"
            elif why.best_count:
                free = f"at most {plural(why.best_count, 'is', 'are')} free on any node"
            else:
                free = "no whole GPU is free on any node"
            return f"Not enough free capacity: this needs {_amount(share)}, and {free}."


def _kept_apart(why: Unplaceable) -> str:
    """Return which rules for sessions on one GPU keep the share from the free capacity."""
    rules, near, amount = why.conditions.neighbours, why.conditions.near, _amount(why.share)
    subject = f"GPU {why.conditions.gpu}" if why.conditions.gpu else ""
    if rules.alone:
        verb = "is shared" if subject else "All suitable GPUs have sessions"
        return f"{subject} {verb}, and the template wants {amount} alone.".lstrip()
    # a session of the template itself is named only once
    others = [label for label in rules.labels if label not in rules.apart_from]
    conditions = [
        f"with a session labelled {either(near)}" if near else "",
        f"without a session labelled {either(rules.apart_from)}" if rules.apart_from else "",
        f"with sessions that accept the label {either(others)}" if others else "",
    ]
    condition = " and ".join(filter(None, conditions))
    return (
        f"{subject} has {amount} free, and the template asks for a GPU {condition}."
        if subject
        else f"No GPU {condition} has {amount} free."
    )


def _shortage(shortage: Shortage, why: Unplaceable) -> str:
    nodes = plural(shortage.nodes, "node")
    match shortage.lacking:
        case Lacking.CPU:
            needed, left = f"{why.cpu / 1000:g} CPU", f"{shortage.most_left / 1000:g}"
        case Lacking.MEMORY:
            needed, left = f"{memory(why.memory)} of memory", memory(shortage.most_left)
        case _:
            return f"{nodes} cannot run more pods"
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
    """Return that a spawn is not queued because the queue is full."""
    why = (
        f"The queue is full ({plural(waiting, 'spawn')})"
        if waiting
        else f"No GPU has {share} free now, and this hub has no queue"
    )
    return f"{why}. Try again in a few minutes, or choose a template without a GPU."


def waited_too_long(share: Share, waited: str, why: str) -> str:
    """Return that a spawn left the queue without a placement; `why` is a sentence or empty."""
    reason = f" {why}" if why else ""
    return (
        f"No free capacity for {share} after {waited} in the queue.{reason} Nothing stays reserved. "
        "Try again later, or choose a smaller share."
    )


def impossible(template: str, where: str, node: str, why: str) -> str:
    """Return that a spawn of the template can never start.

    ``template``: its display name; ``where``: like "this machine"; ``why``: a sentence.
    ``node``: the only node that the spawn may use, or empty.
    """
    place = f"node {node}, the only node that your server may use" if node else where
    return f"{template} cannot be started on {place}: {why}"


def node_left_alone(node: str) -> str:
    """Return that a node gets no servers for some seconds because it did not admit one."""
    return f"{node} did not admit a server just now, so no server is placed there for some seconds."


def report_beyond_node(node: str, gpu: int, reported: int, offered: int) -> str:
    """Return that a node's report is rejected. ``gpu``: the GPU's index; ``reported`` and ``offered``: units."""
    return (
        f"The agent of node {node} reports {reported} units of GPU {gpu}, and the node itself offers {offered} "
        f"(gpushare-spawner.io/gpu-{gpu}), so no server is placed there."
    )


def report_beyond_claims(node: str, gpu: int, reported: int, most: int) -> str:
    """Return that a node's report is rejected where pods get GPUs through claims. See `report_beyond_node`."""
    return (
        f"The agent of node {node} reports {reported} units of GPU {gpu}, and by the hub's setting claims_overcommit "
        f"a GPU has at most {most}, so no server is placed there."
    )


def nodes_without_reports(nodes: Sequence[str], age: float) -> str:
    """Return which nodes send no reports. ``age``: seconds since the latest report from any of them."""
    subject = f"{len(nodes)} nodes send" if len(nodes) > 1 else f"Node {nodes[0]} sends"
    return f"{subject} no reports; the last one is {elapsed(age)} old."


def cannot_place(unavailable: str) -> str:
    """Return that nothing can be placed. ``unavailable``: the part that does not answer, without a period."""
    return (
        f"{unavailable}, so no server with a GPU can start. "
        "Try again in a minute, or choose a template without a GPU. Tell the admin if the problem persists."
    )


def refused_by_nodes(nodes: Mapping[str, str]) -> str:
    """Return which nodes did not take the server, each with its missing resource as a clause."""
    return f"{plural(len(nodes), 'node')} could not take this server: " + "; ".join(
        f"{node}: {missing}" for node, missing in nodes.items()
    )


def no_node_left(nodes: Mapping[str, str], why: str) -> str:
    """Return that no node can take the server. ``why``: a sentence about the nodes that were not tried, or empty."""
    return " ".join(
        filter(None, [f"{refused_by_nodes(nodes)}.", why, "Nothing is reserved for you. Try again in a few minutes."])
    )


STARTS_NOW = "Starts now"
STARTS_ON_LENT = "Starts now on lent units"
LENT_DETAIL = (
    "Idle sessions lend these units. When those sessions work again, they reclaim the units, and this share gets "
    "what is left."
)
UNKNOWN = "Unknown"
UNKNOWN_DETAIL = "Free capacity is unknown at the moment."
UNKNOWN_AFTER_ERROR = (
    "Free capacity is unknown because of an internal error; the hub's log has the details. "
    "You can start a server anyway."
)
NO_SUITABLE_GPU = "No suitable GPU"
NO_SUITABLE_NODE = "No suitable node"
NO_ESTIMATE = "No estimate: when sessions end is unknown."
NO_ESTIMATE_BEHIND = "No estimate: earlier spawns wait for the same GPUs."
EARLIER_FIRST = "Earlier spawns are placed first."
LOW_PRIORITY = "This template has a low priority in the queue."


def too_large(where: str) -> str:
    """Return that a template can never start at `where`, like "this machine"."""
    return f"Too large for {where}"


def waiting(ahead: int, share: Share, hint: str, wait: tuple[int, int, int] | None, elsewhere: bool = False) -> str:
    """Return the text for a waiting spawn's page: its position, its share, and when the wait ends.

    ``hint``: a sentence why it waits, or empty. ``wait``: the minutes of `estimated_wait`, or None. ``elsewhere``:
    whether only other sharing layers can serve it. ``{time}`` in the text stands for the instant at which the wait
    ends.
    """
    # most hints already name the share
    what = "" if str(share) in hint else f", waiting for {share}"
    parts = [
        f"{position(ahead)}{what}.",
        hint,
        f"{estimated_wait(*wait)}." if wait else NO_ESTIMATE_BEHIND if ahead and not elsewhere else NO_ESTIMATE,
        cancelled_unless_started("{time}"),
    ]
    return " ".join(part for part in parts if part)


def estimated_wait(earliest: int | None, likely: int, latest: int | None) -> str:
    """Return the estimated wait, without a period. In minutes; None: only the likely wait is known."""
    if latest is None or earliest in (None, latest):
        return f"Estimated wait: about {duration(likely * 60)}"
    if not earliest:
        return f"Estimated wait: probably at most {duration(latest * 60)}"
    return f"Estimated wait: probably {duration(earliest * 60)} to {duration(latest * 60)}"


def cancelled_unless_started(time: str) -> str:
    """Return when a waiting spawn is cancelled."""
    return f"If the server cannot start by {time}, the spawn is cancelled."


def template(title: str) -> str:
    """Return which template starts. ``title``: its display name."""
    return f"Template: {title}."


def suitable(gpus: str) -> str:
    """Return the GPUs that a spawn can be placed on, see `spawn_form.gpu_models`; empty if there are none."""
    return f"Suitable GPUs: {gpus}." if gpus else ""


def instead(startable: Sequence[str]) -> str:
    """Return which templates would start now while a spawn waits; empty for none. ``startable``: display names."""
    if not startable:
        return ""
    if len(startable) == 1:
        return f"{startable[0]} would start now. To start it instead, cancel this spawn."
    return f"These templates would start now: {', '.join(startable)}. To start one of them instead, cancel this spawn."


def placed_on(gpus: Sequence[tuple[int, str]], node: str) -> str:
    """Return GPUs with index and model, and the node if it has a name: "GPU 0 (NVIDIA L4) of node-a"."""
    return " and ".join(f"GPU {index} ({model})" for index, model in gpus) + (f" of {node}" if node else "")


def placed(where: str, share: Share, borrowed: int) -> str:
    """Return that a spawn is placed. ``where``: see `placed_on`; ``borrowed``: borrowed units of each GPU."""
    if borrowed <= 0:
        return f"Placed on {where}."
    owned = share.units - borrowed
    terms = guarantee(gpu_share(owned, share.count, share.last_units) if owned > 0 else "", str(share))
    most = "up to " if share.count > 1 else ""
    lent = f"idle sessions lend {most}{borrowed} % of each GPU and reclaim it when they work again"
    return f"Placed on {where}; {lent}. Guaranteed: {terms}."


def position(ahead: int) -> str:
    """Return a spawn's position in the queue. ``ahead``: the number of spawns before it."""
    return "First in queue" if ahead == 0 else f"Position {ahead + 1} in queue"


_SENTENCES = (
    (r"Insufficient gpushare-spawner\.io/gpu-\d+", "it does not offer the units of the GPU that its agent reports"),
    (r"cannot allocate all claims", "it does not offer the share of the GPU that its agent reports"),
    (r".*the (?P<what>\S+) feature is disabled.*", "the feature gate {what} is off in the cluster's scheduler"),
    (r"Insufficient cpu", "it has too little free CPU"),
    (r"Insufficient memory", "it has too little free memory"),
    (r"Insufficient ephemeral-storage", "it has too little free ephemeral storage"),
    (r"Insufficient (?P<what>\S+)", "it has too little free {what}"),
    (r"Too many pods", "it already runs its maximum number of pods"),
    (r".*taint.*node\.kubernetes\.io/(not-ready|unreachable).*", "it is not ready"),
    (r".*taint.*\{(?P<what>[^:}]+).*", "the server does not tolerate its taint {what}"),
    (r".*taint.*", "the server does not tolerate one of its taints"),
    (r"node\(s\) were unschedulable", "it is cordoned"),
    (r".*(affinity/selector|plugin\(s\) \[NodeAffinity\])", "it does not match the server's node selector or affinity"),
    (r".*volume node affinity conflict", "a volume of the server cannot be used there"),
    (r".*max volume count", "it already has its maximum number of volumes attached"),
    (r".*unbound immediate PersistentVolumeClaims", "a persistent volume claim of the server is not bound"),
    (r'persistentvolumeclaim "(?P<what>[^"]+)" not found', "the persistent volume claim {what} does not exist"),
    (r".*free ports.*", "a port that the server needs is in use there"),
)
"""Regular expressions for the scheduler's reasons (kubernetes pkg/scheduler/framework/plugins, 1.25 to 1.36), with the
text to show after "node-a: "."""


def missing(reasons: Iterable[str]) -> str:
    """Return the missing resources of a node, as a clause. Unknown reasons stay as the scheduler wrote them."""
    return " and ".join(dict.fromkeys(_plain(reason) for reason in reasons))


def not_taken(node: str, what: str) -> str:
    """Return that a node cannot take the server, without a period. ``what``: the reason, as a clause."""
    return f"Node {node} cannot take the server: {what}"


def cannot_start(what: str) -> str:
    """Return that no node can take the server, without a period. ``what``: the reason, as a clause."""
    return f"The server cannot start: {what}"


def _plain(reason: str) -> str:
    for pattern, sentence in _SENTENCES:
        if match := re.fullmatch(pattern, reason):
            return sentence.format(**{name: text for name, text in match.groupdict().items() if text is not None})
    return reason
