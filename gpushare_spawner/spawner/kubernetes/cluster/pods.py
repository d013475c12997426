"""Reads a pod as the API server writes it: its requests, share, owner, reason for a wait, and end. Pure.

Pods are created and removed elsewhere: see `pod` and `owned_objects`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from typing import Any

from gpushare_spawner.model.kubernetes.annotations import HUB, PREFIX, SESSION, is_layer_session, is_session
from gpushare_spawner.model.kubernetes.container_requests import NOTEBOOK, quantity
from gpushare_spawner.model.kubernetes.objects import FINISHED, is_mirror
from gpushare_spawner.model.share import split_session_id
from gpushare_spawner.wording import spawn_failures as words

Amounts = dict[str, Decimal]
"""Amounts by resource: cores of ``cpu``, bytes of ``memory``, other resources in their own unit."""


def pod_requests(pod: Mapping[str, Any]) -> Amounts:
    """Return the amounts that a pod requests from its node.

    The amounts of containers and sidecars are added. An ordinary init container runs before the containers and
    alongside the sidecars started before it; the larger of the two sums counts. For a container that was resized in
    place, the largest of the requested, allocated and current amounts counts. The pod's overhead is added. (kubernetes
    component-helpers/resource/helpers.go; measured on 1.36.)
    """
    spec, status = pod.get("spec") or {}, pod.get("status") or {}
    in_force = {entry.get("name"): entry for entry in _statuses(status)}
    running = _total(_requested(container, in_force) for container in spec.get("containers") or [])
    sidecars: Amounts = {}
    most: Amounts = {}
    for container in spec.get("initContainers") or []:
        requested = _requested(container, in_force)
        if container.get("restartPolicy") == "Always":
            sidecars = _total([sidecars, requested])
            most = _largest([most, sidecars])
        else:
            most = _largest([most, _total([sidecars, requested])])
    total = _largest([_total([running, sidecars]), most])
    # pod-level requests (1.34 and later) replace the sum
    of_pod = _amounts((spec.get("resources") or {}).get("requests"))
    return _total([{**total, **of_pod}, _amounts(spec.get("overhead"))])


def _statuses(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*(status.get("containerStatuses") or []), *(status.get("initContainerStatuses") or [])]


def _requested(container: Mapping[str, Any], in_force: Mapping[Any, Mapping[str, Any]]) -> Amounts:
    resources = container.get("resources") or {}
    # the API server copies a limit without a request to the requests; a manifest that it has not processed lacks the
    # request
    written = _amounts({**(resources.get("limits") or {}), **(resources.get("requests") or {})})
    status = in_force.get(container.get("name"), {})
    actual = (status.get("resources") or {}).get("requests")
    return _largest([written, _amounts(status.get("allocatedResources")), _amounts(actual)])


def _amounts(written: Mapping[str, Any] | None) -> Amounts:
    return {name: quantity(amount) for name, amount in (written or {}).items()}


def _total(parts: Iterable[Amounts]) -> Amounts:
    total: Amounts = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, Decimal(0)) + amount
    return total


def _largest(parts: Iterable[Amounts]) -> Amounts:
    most: Amounts = {}
    for part in parts:
        for name, amount in part.items():
            most[name] = max(most.get(name, amount), amount)
    return most


RESERVATION = PREFIX + "reservation"
"""Annotation with the hub's reservation from which the pod was created; it shows the hub that the pod holds the share.
"""


def holds_share(pod: Mapping[str, Any]) -> bool:
    """Return whether a pod (as the API server writes it) holds a share, even while it is being deleted."""
    return of_session(pod) and phase(pod) not in FINISHED


def of_session(pod: Mapping[str, Any]) -> bool:
    """Return whether a pod has the labels of a server with a share and is not a mirror pod."""
    labels = pod["metadata"].get("labels")
    return (is_session(labels) or is_layer_session(labels)) and not is_mirror(pod["metadata"])


def phase(pod: Mapping[str, Any]) -> str:
    """Return the phase: Pending, Running, Failed, Succeeded or Unknown."""
    return str((pod.get("status") or {}).get("phase") or "Pending")


def annotation(pod: Mapping[str, Any], name: str) -> str:
    """Return an annotation of a pod; empty if it is missing."""
    return str((pod["metadata"].get("annotations") or {}).get(name) or "")


def created_at(pod: Mapping[str, Any]) -> float:
    """Return when the pod was created, in seconds since the epoch; 0 if unknown."""
    written = pod["metadata"].get("creationTimestamp")
    try:
        return datetime.fromisoformat(str(written)).timestamp() if written else 0.0
    except ValueError:
        return 0.0


@dataclass(frozen=True)
class Ended:
    """The end of a pod that its node or the cluster, not its program, caused."""

    reason: str
    """Kubernetes' reason, such as UnexpectedAdmissionError."""
    message: str
    node: str
    exit_code: int | None = None
    """The exit code of the notebook's container; None if it has not exited."""

    @property
    def what(self) -> str:
        """The node's action, as a clause that follows "Node node-a"."""
        return words.what_node_did(self.reason)

    def __str__(self) -> str:
        """Return a sentence for people and logs, without a period."""
        return words.pod_ended(self.node, self.reason, self.message)


def ended_by_node(pod: Mapping[str, Any]) -> Ended | None:
    """Return how a finished pod ended, unless its notebook exited; None for any other pod.

    Pods with devices fail in this way after a restart of their node (kubernetes issue 125579); their status may still
    show the containers as running.
    """
    status = pod.get("status") or {}
    if phase(pod) not in FINISHED:
        return None
    if exit_code(pod) is not None and status.get("reason") is None:
        return None
    node = (pod.get("spec") or {}).get("nodeName") or ""
    return Ended(str(status.get("reason") or ""), str(status.get("message") or "").strip(), node, exit_code(pod))


def exit_code(pod: Mapping[str, Any]) -> int | None:
    """Return the exit code of the notebook's container; None if it has not exited."""
    for status in (pod.get("status") or {}).get("containerStatuses") or []:
        ended = (status.get("state") or {}).get("terminated")
        if status.get("name") == NOTEBOOK and ended:
            return int(ended.get("exitCode", 1))
    return None


def why_waiting(pod: Mapping[str, Any]) -> str:
    """Return why a pod does not run yet, in Kubernetes' words; empty if unknown."""
    status = pod.get("status") or {}
    for container in status.get("containerStatuses") or []:
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("message") or waiting.get("reason"):
            return f"{waiting.get('reason', '')}: {waiting.get('message', '')}".strip(": ")
    for condition in status.get("conditions") or []:
        if condition.get("status") == "False" and condition.get("message"):
            return f"{condition.get('reason', '')}: {condition['message']}".strip(": ")
    return ""


def orphans(
    pods: Iterable[Mapping[str, Any]], hub: str, runs: Callable[[str, str], bool], made_before: float
) -> list[Mapping[str, Any]]:
    """Return the hub's pods that hold a share for servers that the hub no longer has.

    ``runs`` returns whether the hub runs a user's server; ``made_before``: seconds since the epoch.
    """
    return [
        pod
        for pod in pods
        if holds_share(pod)
        and not pod["metadata"].get("deletionTimestamp")
        and annotation(pod, HUB) == hub
        and annotation(pod, SESSION)
        and 0 < created_at(pod) < made_before
        and not runs(*split_session_id(annotation(pod, SESSION)))
    ]
