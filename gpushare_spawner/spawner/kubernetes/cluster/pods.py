"""What a pod of ours says, as the API server writes it: what it holds, why it does not run, how it ended, whose it is.

Does not make or remove any: see `pod` and `cleanup`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from gpushare_spawner.model.kubernetes import HUB, PREFIX, SESSION, is_layer_session, is_mirror, is_session
from gpushare_spawner.model.session_id import split_session_id
from gpushare_spawner.sharing.pod_changes import NOTEBOOK
from gpushare_spawner.wording.spawn import failures as words

RESERVATION = PREFIX + "reservation"
"""Annotation: which reservation of the hub the pod was made from. By it the hub knows that the share has arrived."""

FINISHED = ("Failed", "Succeeded")
"""Phases of pods that hold nothing any more."""


def holds_share(pod: Mapping[str, Any]) -> bool:
    """Whether a pod (as the API server writes it) holds a share: one that is being deleted does until it is gone."""
    return of_session(pod) and phase(pod) not in FINISHED


def of_session(pod: Mapping[str, Any]) -> bool:
    """Return whether a pod is labelled as a server with a share, by somebody other than its node."""
    labels = pod["metadata"].get("labels")
    return (is_session(labels) or is_layer_session(labels)) and not is_mirror(pod["metadata"])


def phase(pod: Mapping[str, Any]) -> str:
    """Pending, Running, Failed, Succeeded or Unknown."""
    return str((pod.get("status") or {}).get("phase") or "Pending")


def annotation(pod: Mapping[str, Any], name: str) -> str:
    """An annotation of a pod; empty where it has none of that name."""
    return str((pod["metadata"].get("annotations") or {}).get(name) or "")


def created_at(pod: Mapping[str, Any]) -> float:
    """When the pod was made, in seconds since the epoch; 0 where it does not say."""
    written = pod["metadata"].get("creationTimestamp")
    try:
        return datetime.fromisoformat(str(written)).timestamp() if written else 0.0
    except ValueError:
        return 0.0


@dataclass(frozen=True)
class Ended:
    """A pod that was ended by its node or by the cluster, not by its program."""

    reason: str
    """In Kubernetes' word, like UnexpectedAdmissionError."""
    message: str
    node: str
    exit_code: int | None = None
    """Of the notebook's container; None where it has not ended by itself."""

    @property
    def what(self) -> str:
        """What happened, as half a sentence after "Node node-a"."""
        return words.what_node_did(self.reason)

    def __str__(self) -> str:
        """A sentence for people and logs, without a full stop."""
        return words.pod_ended(self.node, self.reason, self.message)


def ended_by_node(pod: Mapping[str, Any]) -> Ended | None:
    """How a finished pod was ended, if not by its notebook's own exit; None for any other pod.

    Pods that hold devices fail so after a restart of their node (kubernetes issue 125579); their containers may still
    be shown as running then.
    """
    status = pod.get("status") or {}
    if phase(pod) not in FINISHED:
        return None
    if exit_code(pod) is not None and status.get("reason") is None:
        return None
    node = (pod.get("spec") or {}).get("nodeName") or ""
    return Ended(str(status.get("reason") or ""), str(status.get("message") or "").strip(), node, exit_code(pod))


def exit_code(pod: Mapping[str, Any]) -> int | None:
    """The exit code of the notebook's container; None where it has not ended by itself."""
    for status in (pod.get("status") or {}).get("containerStatuses") or []:
        ended = (status.get("state") or {}).get("terminated")
        if status.get("name") == NOTEBOOK and ended:
            return int(ended.get("exitCode", 1))
    return None


def why_waiting(pod: Mapping[str, Any]) -> str:
    """Why a pod does not run yet, in Kubernetes' words; empty where it does not say."""
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
    """Pods that hold a share for servers that the hub which made them does not know any more.

    ``runs`` says whether the hub runs a user's server; ``made_before``: seconds since the epoch.
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
