"""Joins a node's report with its pods, and gives each reported session its identity.

No other module assigns an identity to a reported session. A pod keeps its first identity, see
`model.kubernetes.node_reports.FirstIdentities`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from gpushare_spawner.model.kubernetes.annotations import (
    HUB,
    PREFIX,
    AnnotationProblem,
    SessionAnnotations,
    pod_session,
)
from gpushare_spawner.model.kubernetes.container_requests import (
    RESIZE_PENDING,
    ContainerRequests,
    container_requests,
    lacks_requests,
    missing_requests,
    share_container,
)
from gpushare_spawner.model.kubernetes.objects import FINISHED, MIRROR, is_mirror, node_of
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.report import Report, SessionReport, shared_fields
from gpushare_spawner.model.share import MAX_LENGTH, split_session_id
from gpushare_spawner.service.reports import KnownReport, UnconfirmedSession


@dataclass(frozen=True)
class SessionPod:
    """A pod with a share."""

    namespace: str
    name: str
    version: str
    """Its resourceVersion."""
    node: str
    """The node on which it runs or to which it is bound."""
    created: float
    """Creation time in seconds since the epoch."""
    runs: bool
    """Whether it runs, and is not starting, ended or being deleted."""
    session: SessionAnnotations
    ending: bool = False
    """Whether it is being deleted."""
    requests: ContainerRequests | None = None
    """Requests of its container with the share; None unless it requests both CPU and memory."""
    not_requested: tuple[str, ...] = ()
    """The resources, cpu or memory, that this container does not request."""
    clock_moved: float = 0.0
    """Seconds by which the service's clock was set since the service first saw the pod."""

    @classmethod
    def of(cls, pod: dict[str, Any]) -> SessionPod:
        """Return the session pod from the API server's object. Raises AnnotationProblem."""
        metadata, spec, status = pod["metadata"], pod.get("spec", {}), pod.get("status", {})
        return cls(
            namespace=metadata["namespace"],
            name=metadata["name"],
            version=metadata["resourceVersion"],
            node=node_of(spec),
            created=datetime.fromisoformat(metadata["creationTimestamp"]).timestamp(),
            runs=status.get("phase") == "Running" and not metadata.get("deletionTimestamp"),
            session=pod_session(metadata.get("annotations"), metadata.get("labels")),
            ending=bool(metadata.get("deletionTimestamp")),
            requests=container_requests(pod),
            not_requested=missing_requests(pod),
        )

    @property
    def path(self) -> str:
        """Its path in the API."""
        return f"/api/v1/namespaces/{self.namespace}/pods/{self.name}"

    @property
    def lacks_requests(self) -> bool:
        """Whether the pod's requests were lowered while it was released and its node has not granted them back."""
        return lacks_requests(self.requests, self.session.tier)


def trimmed(pod: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a pod that are used here, because a large hub's complete pods would need much more memory."""
    kept = ("namespace", "name", "uid", "resourceVersion", "creationTimestamp", "deletionTimestamp")
    metadata, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    annotations, labels = metadata.get("annotations") or {}, metadata.get("labels") or {}
    share_name = (share_container(pod) or {}).get("name", "")
    return {
        "metadata": {
            **_picked(metadata, kept),
            "annotations": {
                name: text for name, text in annotations.items() if name.startswith(PREFIX) or name == MIRROR
            },
            "labels": {name: text for name, text in labels.items() if name.startswith(PREFIX)},
            # `kubernetes.is_mirror` uses them to detect a pod that its node has created
            "ownerReferences": [
                {"kind": "Node"} for owner in metadata.get("ownerReferences") or () if owner.get("kind") == "Node"
            ],
        },
        "spec": {
            **_picked(spec, ("nodeName", "nodeSelector", "affinity", "resourceClaims")),
            "containers": _only(share_name, spec.get("containers"), ("name", "resources")),
        },
        "status": {
            **_picked(status, ("phase", "qosClass")),
            "containerStatuses": _only(
                share_name, status.get("containerStatuses"), ("name", "resources", "allocatedResources")
            ),
            "conditions": [
                condition for condition in status.get("conditions") or [] if condition.get("type") == RESIZE_PENDING
            ],
        },
    }


def _only(name: str, items: list[dict[str, Any]] | None, kept: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the kept parts of the item with that name."""
    return [_picked(item, kept) for item in items or [] if name and item.get("name") == name]


def _picked(item: dict[str, Any], kept: tuple[str, ...]) -> dict[str, Any]:
    return {name: item[name] for name in kept if name in item}


def made_by(pod: dict[str, Any], hub: str) -> bool:
    """Return whether the pod belongs to this hub (identified by its API address) or does not name its hub."""
    annotations = pod["metadata"].get("annotations") or {}
    return bool(annotations.get(HUB, hub) == hub)


def session_pods(pods: Iterable[dict[str, Any]]) -> tuple[list[SessionPod], dict[str, str]]:
    """Return the pods with valid annotations, and sentences about the ignored pods by uid.

    Ended pods are excluded. A pod that its node has created is always a problem.
    """
    good: list[SessionPod] = []
    bad: dict[str, str] = {}
    for pod in pods:
        if pod.get("status", {}).get("phase") in FINISHED:
            continue
        metadata = pod["metadata"]
        uid, ignored = metadata.get("uid", metadata["name"]), f"Pod {metadata['name']}: ignored"
        if is_mirror(metadata):
            bad[uid] = f"{ignored}: its node has made it, so it is the server of no user"
            continue
        try:
            good.append(SessionPod.of(pod))
        except AnnotationProblem as problem:
            bad[uid] = f"{ignored}: {problem}"
    return good, bad


def joined_report(
    report: Report, pods: Iterable[SessionPod], others: Iterable[SessionPod] = (), now: float = 0.0
) -> KnownReport:
    """Return the report with only the sessions of the node's pods.

    The pod determines a session's user and promised share; the report adds figures. While a session's pod starts or
    stops, or while the agent has not reported the session, it is not confirmed, so there are no actions on it. A
    session of another layer needs only its pod, because no agent has to observe it. ``others`` are pods that count
    only with their units: other hubs' pods, and a session's other pods. Reported sessions without a pod are unconfirmed
    as of ``now`` (seconds since the epoch).
    """
    reported: dict[str, SessionReport] = {}
    for session in report.sessions:
        reported.setdefault(session.id, session)
    uuids = frozenset(gpu.uuid for gpu in report.gpus)
    here = {pod.session.session: pod for pod in pods}
    elsewhere = tuple(others)
    sessions = tuple(_with(reported[name], pod, uuids) if name in reported else _new(pod) for name, pod in here.items())
    vouched = here.keys() | {pod.session.session for pod in elsewhere}
    unconfirmed = tuple(UnconfirmedSession(id=name, since=now) for name in reported if name not in vouched)
    return KnownReport.of(report, sessions, unconfirmed, tuple(_units_alone(pod) for pod in elsewhere))


def _with(session: SessionReport, pod: SessionPod, uuids: Collection[str]) -> SessionReport:
    """Return the pod's session with the report's figures. ``uuids``: the node's GPUs.

    Annotations take precedence over the report, because the report can be older and a node can report false values.
    """
    annotations, identity = pod.session, _identity(pod)
    answered = {answer.number for answer in annotations.answers}
    if (
        pod.session.layer is not LayerName.NATIVE
        and len(session.gpus) == len(annotations.gpus)
        and set(session.gpus) <= set(uuids)
    ):
        # only an agent knows which GPUs another layer provides; their number is promised
        identity["gpus"] = session.gpus
    # a pod that does not run has no valid asks, because its user's next server may already run elsewhere
    asks = tuple(ask for ask in session.asks if ask.number not in answered) if pod.runs else ()
    return session.model_copy(
        update={
            **identity,
            "guaranteed_units": min(session.guaranteed_units, annotations.effective_units),
            "confirmed": session.confirmed and pod.runs,
            "lacks_requests": pod.lacks_requests,
            # the pod has an answer before the agent reports again
            "asks": asks,
        }
    )


def _new(pod: SessionPod) -> SessionReport:
    """Return a session that the agent has not reported yet, or another layer's session that no agent observes."""
    annotations = pod.session
    return SessionReport.model_validate(
        {
            **_identity(pod),
            "guaranteed_units": max(0, annotations.effective_units - annotations.borrowed_units),
            "confirmed": pod.session.layer is not LayerName.NATIVE and pod.runs,
            "gpu_use_known": pod.session.layer is LayerName.NATIVE,
        }
    )


def _units_alone(pod: SessionPod) -> SessionReport:
    """Return a pod's units as a session without a user."""
    no_owner = {"id": f"{pod.namespace}/{pod.name}"[:MAX_LENGTH], "user": "", "server": "", "quota": ""}
    return _new(pod).model_copy(update={**no_owner, "confirmed": False})


def _identity(pod: SessionPod) -> dict[str, Any]:
    """Return the data that the API server vouches for: the session's user and promised share."""
    annotations = pod.session
    user, server = split_session_id(annotations.session)
    return {
        **shared_fields(annotations, SessionReport),
        "id": annotations.session,
        "user": user,
        "server": server,
        "time_limit_units": max(annotations.time_limit_units, annotations.share_units),
        "yields": annotations.yields_until is not None,
        "opened_at": pod.created,
        "opened_by_node": False,
        "reader_moved": pod.clock_moved,
        **dict(annotations.controls),
        "message": annotations.messages[-1] if annotations.messages else None,
    }
