"""One node's report, joined with its pods: tiers and notices are those of the pods' annotations."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from gpushare_spawner.model import kubernetes
from gpushare_spawner.model.kubernetes import AnnotationProblem, ContainerRequests, PodSession
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.report import Report, SessionReport
from gpushare_spawner.model.session_id import split_session_id

_ENDED = ("Succeeded", "Failed")


@dataclass(frozen=True)
class SessionPod:
    """A pod with a share."""

    namespace: str
    name: str
    version: str
    """Its resourceVersion."""
    node: str
    """Where it runs, or is bound to."""
    created: float
    """Seconds since the epoch."""
    runs: bool
    """Neither starting, nor ended, nor being deleted."""
    session: PodSession
    requests: ContainerRequests | None = None
    """None: its container with the share does not request both CPU and memory."""
    not_requested: tuple[str, ...] = ()
    """Which of cpu and memory that container does not request."""
    layer: LayerName = LayerName.NATIVE
    """The sharing layer that gives it the GPU."""

    @classmethod
    def of(cls, pod: dict[str, Any]) -> SessionPod:
        """From the API server's object. Raises AnnotationProblem."""
        metadata, spec, status = pod["metadata"], pod.get("spec", {}), pod.get("status", {})
        labels, annotations, layer = metadata.get("labels"), metadata.get("annotations"), LayerName.NATIVE
        if kubernetes.is_layer_session(labels):
            found = kubernetes.layer_session(labels, annotations)
            session, layer = found.session, found.layer
        else:
            session = kubernetes.pod_session(annotations)
        return cls(
            namespace=metadata["namespace"],
            name=metadata["name"],
            version=metadata["resourceVersion"],
            node=kubernetes.node_of(spec),
            created=datetime.fromisoformat(metadata["creationTimestamp"]).timestamp(),
            runs=status.get("phase") == "Running" and not metadata.get("deletionTimestamp"),
            session=session,
            requests=kubernetes.container_requests(pod),
            not_requested=kubernetes.missing_requests(pod),
            layer=layer,
        )

    @property
    def lacks_requests(self) -> bool:
        """Whether the pod gave back requests while it was released, and its node has not granted them again."""
        return kubernetes.lacks_requests(self.requests, self.session.tier)


def trimmed(pod: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a pod that are used here: whole pods of a large hub would take much more memory."""
    kept = ("namespace", "name", "resourceVersion", "creationTimestamp", "deletionTimestamp")
    metadata, spec, status = pod["metadata"], pod.get("spec") or {}, pod.get("status") or {}
    annotations, labels = metadata.get("annotations") or {}, metadata.get("labels") or {}
    share_name = (kubernetes.share_container(pod) or {}).get("name", "")
    return {
        "metadata": {
            **{name: metadata[name] for name in kept if name in metadata},
            "annotations": {name: text for name, text in annotations.items() if name.startswith(kubernetes.PREFIX)},
            "labels": {name: text for name, text in labels.items() if name.startswith(kubernetes.PREFIX)},
        },
        "spec": {
            **{name: spec[name] for name in ("nodeName", "nodeSelector", "affinity", "resourceClaims") if name in spec},
            "containers": _only(share_name, spec.get("containers"), ("name", "resources")),
        },
        "status": {
            **{name: status[name] for name in ("phase", "qosClass") if name in status},
            "containerStatuses": _only(
                share_name, status.get("containerStatuses"), ("name", "resources", "allocatedResources")
            ),
        },
    }


def _only(name: str, items: list[dict[str, Any]] | None, kept: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the parts of the item of that name."""
    return [
        {part: item[part] for part in kept if part in item} for item in items or [] if name and item.get("name") == name
    ]


def made_by(pod: dict[str, Any], hub: str) -> bool:
    """Return whether the pod is one of this hub (the address of its API), or does not name its hub."""
    annotations = pod["metadata"].get("annotations") or {}
    return bool(annotations.get(kubernetes.HUB, hub) == hub)


def session_pods(pods: Iterable[dict[str, Any]]) -> tuple[list[SessionPod], dict[str, str]]:
    """Return the pods whose annotations are valid, and the problems of the others by name. Ended pods are left out."""
    good: list[SessionPod] = []
    bad: dict[str, str] = {}
    for pod in pods:
        if pod.get("status", {}).get("phase") in _ENDED:
            continue
        try:
            good.append(SessionPod.of(pod))
        except AnnotationProblem as problem:
            bad[pod["metadata"]["name"]] = str(problem)
    return good, bad


def merged(report: Report, pods: Iterable[SessionPod]) -> Report:
    """The report with the sessions as the pods' annotations have them.

    A session that only one side knows, or whose pod does not run, counts as unconfirmed: it is starting or stopping,
    and nothing is done to it. Of a session of another layer the pod alone is enough: no agent need observe it.
    """
    here = {pod.session.session: pod for pod in pods}
    sessions = [
        _with(session, here.pop(session.id)) if session.id in here else session.model_copy(update={"confirmed": False})
        for session in report.sessions
    ]
    sessions += [_new(pod) for pod in here.values()]
    return report.model_copy(update={"sessions": tuple(sessions)})


def _with(session: SessionReport, pod: SessionPod) -> SessionReport:
    """What the annotations say goes before what the report says: the report may be older."""
    said = pod.session
    answered = {answer.number for answer in said.answers}
    return session.model_copy(
        update={
            "template": said.template,
            "quota": said.quota,
            "share_units": said.share_units,
            "borrowed_units": said.borrowed_units,
            "tier": said.tier,
            "tier_since": said.tier_since,
            "effective_units": said.effective_units,
            "yields": said.yields_until is not None,
            "guaranteed_units": min(session.guaranteed_units, said.effective_units),
            "notice": said.notice,
            "confirmed": session.confirmed and pod.runs,
            "layer": pod.layer,
            "lacks_requests": pod.lacks_requests,
            # an answer is in the pod before the agent reports again
            "asks": tuple(ask for ask in session.asks if ask.number not in answered),
            **_controls(said),
        }
    )


def _controls(said: PodSession) -> dict[str, Any]:
    return {**dict(said.controls), "message": said.message}


def _new(pod: SessionPod) -> SessionReport:
    """A session that the agent has not reported yet, or of another layer whose GPU use no agent sees."""
    said = pod.session
    user, server = split_session_id(said.session)
    return SessionReport(
        id=said.session,
        user=user,
        server=server,
        template=said.template,
        quota=said.quota,
        gpus=said.gpus,
        share_units=said.share_units,
        borrowed_units=said.borrowed_units,
        tier=said.tier,
        tier_since=said.tier_since,
        effective_units=said.effective_units,
        yields=said.yields_until is not None,
        guaranteed_units=max(0, said.effective_units - said.borrowed_units),
        opened_at=pod.created,
        confirmed=pod.layer is not LayerName.NATIVE and pod.runs,
        layer=pod.layer,
        gpu_use_known=pod.layer is LayerName.NATIVE,
        notice=said.notice,
        **_controls(said),
    )
