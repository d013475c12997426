"""All nodes of the hub's cluster, updated by watches of pods and reports, and their agents for the culler.

An agent's reports come from a ConfigMap; idle actions are patches of pods.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kubernetes_asyncio.client import ApiClient

from gpushare_spawner.clients.api import ApiFailure, ClusterApi, Json, KubeconfigConnection
from gpushare_spawner.clients.object_watch import Object, Watched, whole
from gpushare_spawner.clocks import WallClock
from gpushare_spawner.model.control import (
    AgentUnreachable,
    AnswerRequest,
    ControlRefused,
    ControlsRequest,
    CordonRequest,
    MessageRequest,
    NoticeRequest,
    ResizeRequest,
    ServiceRequest,
    StopProcessesRequest,
    TierRequest,
)
from gpushare_spawner.model.kubernetes import annotations as patches
from gpushare_spawner.model.kubernetes.annotations import (
    LAYER_SELECTOR,
    SESSION_SELECTOR,
    ShareChange,
    ShareChangeAnswer,
)
from gpushare_spawner.model.kubernetes.node_reports import FirstIdentities, NodeReport
from gpushare_spawner.model.kubernetes.objects import (
    REPORT_COMPONENT,
    REPORT_SELECTOR,
    REPORT_STALE_SECONDS,
    cordon_name,
    report_name,
)
from gpushare_spawner.model.layers import LAYERS, IdleReach, LayerName
from gpushare_spawner.model.report import Report, SessionReport, shared_fields
from gpushare_spawner.model.share import Tier, voids_idle_action
from gpushare_spawner.service.kubernetes.clock_steps import PodInstants, shifted_report
from gpushare_spawner.service.kubernetes.pod_sessions import SessionPod, joined_report, made_by, session_pods, trimmed
from gpushare_spawner.service.reports import KnownReport, UnconfirmedSession
from gpushare_spawner.wording.actions import out_of_reach
from gpushare_spawner.wording.amounts import utc
from gpushare_spawner.wording.service import unconfirmed_sessions

log = logging.getLogger("gpushare.service.cluster")

POLL_EVERY = 0.5
"""Minimum seconds between checks for asks while reports change. In a cluster of 500 nodes, some change every second."""
UNCONFIRMED_AFTER = 30.0
"""Seconds for which a reported session may lack a pod before admins see it as unconfirmed. Our choice: a report follows
the end of a pod within seconds. Such a session never counts toward capacity or quotas."""
DECIDED_WITHIN = 10.0
"""Maximum seconds for an agent to decide on a change of a share or tier. Its watch delivers the change within a
second."""
DECISION_POLL_EVERY = 0.1
"""Seconds between checks for new data from the watches."""
_PREFIX = f"{REPORT_COMPONENT}-"
_UNTIL_CHART = "; waiting for the chart gpushare-agent, which gives the hub this right"


@dataclass(frozen=True)
class _NodePods:
    """The pods with shares on one node."""

    sessions: dict[str, SessionPod] = field(default_factory=dict)
    """Pods by session id. If a session has two pods, even on different nodes, `_precedence` selects one."""
    others: list[SessionPod] = field(default_factory=list)
    """Pods that count only with their units: other hubs' pods, and a session's other pods."""


class Cluster:
    """The cluster's nodes, as an iterable of new agents for each node with a report or sessions.

    Reports are read in ``namespace``, and sessions there or in all namespaces. If the cluster cannot be read, there is
    one agent, which reports the problem. ``hub`` is the hub's API address as in its pods; pods of other hubs are
    excluded (empty: none are excluded). ``on_change`` is called when something may have changed. ``clock`` returns
    seconds since the epoch.
    """

    def __init__(
        self,
        client: ApiClient,
        namespace: str,
        on_change: Callable[[], None] = lambda: None,
        all_namespaces: bool = False,
        clock: Callable[[], float] | None = None,
        hub: str = "",
    ) -> None:
        self.api = ClusterApi(KubeconfigConnection(client))
        self.namespace = namespace
        self._clock = WallClock.of(clock)
        self._hub = hub
        self._on_change = on_change
        here = where = f"the namespace {namespace}"
        pods, maps = f"/api/v1/namespaces/{namespace}/pods", f"/api/v1/namespaces/{namespace}/configmaps"
        if all_namespaces:
            pods, where = "/api/v1/pods", "all namespaces"
        self._identities = FirstIdentities(log)
        ours, others = {"labelSelector": SESSION_SELECTOR}, {"labelSelector": LAYER_SELECTOR}
        self._pods = Watched(self.api, pods, f"the pods of {where}", self._trimmed, ours, self._changed)
        self._layer_pods = Watched(
            self.api, pods, f"the pods of other layers of {where}", self._trimmed, others, self._changed
        )
        self._maps = Watched(
            self.api, maps, f"the reports of {here}", whole, {"labelSelector": REPORT_SELECTOR}, self._changed,
            missing_right=_UNTIL_CHART,
        )  # fmt: skip
        self._read: dict[str, NodeReport] = {}
        self._by_node: dict[str, _NodePods] | None = None
        self._instants = PodInstants()
        self._unconfirmed: dict[str, dict[str, float]] = {}
        """Time at which a reported session was first without a pod (seconds since the epoch), by node and session."""
        self._by_report: dict[str, tuple[str, NodeReport]] | None = None
        self._bad_pods: dict[str, str] = {}
        """The logged problems of the pods that are ignored now, by the pod's uid."""
        self._warned: set[str] = set()
        """Nodes with unconfirmed sessions that have been logged."""
        self._news = asyncio.Event()

    @property
    def _watched(self) -> tuple[Watched[Object], ...]:
        return self._pods, self._layer_pods, self._maps

    async def start(self, patience: float) -> None:
        """Start watching. Wait up to ``patience`` seconds for the first lists or their failure."""
        for watched in self._watched:
            watched.start()
        await asyncio.gather(*(watched.loaded(patience) for watched in self._watched))

    async def close(self) -> None:
        """Stop watching."""
        for watched in self._watched:
            await watched.close()

    def __iter__(self) -> Iterator[NodeAgent]:
        lost = [watched for watched in self._watched if not watched.current]
        with_pods = {node for node, pods in self._pods_by_node().items() if pods.sessions}
        names = {"?"} if lost else set(self._reports()) | with_pods
        return iter([NodeAgent(name, self, self._clock) for name in sorted(names)])

    async def asking(self) -> Sequence[NodeAgent]:
        """Wait until a report has asks, and return the agents of nodes with asks."""
        while True:
            self._news.clear()
            nodes = [node for node, (_, read) in self._reports().items() if self._asks(node, read)]
            if nodes:
                return [NodeAgent(node, self, self._clock) for node in sorted(nodes)]
            await self._news.wait()
            await asyncio.sleep(POLL_EVERY)

    def _asks(self, node: str, read: NodeReport) -> bool:
        if time.monotonic() >= read.asks_until:
            return False
        try:
            # an old report is rejected, because an ended agent's asks stay in it
            return any(session.asks for session in self.report(node)[0].sessions)
        except AgentUnreachable:
            return False

    def report(self, node: str) -> tuple[KnownReport, float]:
        """Return the node's report, joined with its pods, and its age in seconds.

        The age counts from the time at which a watch delivered the report, so the machines' clocks can differ. Raises
        AgentUnreachable if there is no report or only an old one.
        """
        for watched in self._watched:
            if not watched.current:
                raise AgentUnreachable(watched.problem or f"no news of {watched.title} from the API server")
        name, read = self._reports().get(node, ("", None))
        here = self._pods_by_node().get(node, _NodePods())
        now = self._clock()
        # after the clock was read, which detects a step of the clock
        pods = [self._instants.of_now(pod, self._clock.shift) for pod in here.sessions.values()]
        if read is None and pods and all(pod.session.layer is not LayerName.NATIVE for pod in pods):
            # the node needs no agent, because its sessions' data is in their pods
            return joined_report(Report(node=node, published_at=now, gpus=()), pods), 0.0
        if read is None or read.report is None:
            why = "its agent has published no report" if read is None else f"its report is refused: {read.problem}"
            raise AgentUnreachable(f"node {node}: {why}")
        report = shifted_report(read.report, self._clock)
        if read.age(report.published_at, now, time.monotonic()) > REPORT_STALE_SECONDS:
            raise AgentUnreachable(f"node {node}: its agent has published nothing since {utc(report.published_at)}")
        arrived = self._maps.arrived.get(name)
        age = time.monotonic() - arrived if arrived is not None else float("inf")
        return self._with_lasting(joined_report(report, pods, here.others, now)), age

    def _with_lasting(self, report: KnownReport) -> KnownReport:
        """Return the report with the sessions that have been unconfirmed for `UNCONFIRMED_AFTER`, and log them."""
        before = self._unconfirmed.pop(report.node, {})
        if not report.unconfirmed:
            self._warned.discard(report.node)
            return report
        since = {session.id: before.get(session.id, session.since) for session in report.unconfirmed}
        self._unconfirmed[report.node] = since
        lasting = tuple(
            UnconfirmedSession(id=name, since=at)
            for name, at in since.items()
            if self._clock() - at >= UNCONFIRMED_AFTER
        )
        # once per node, so that a node's reports cannot fill the log
        if lasting and report.node not in self._warned:
            self._warned.add(report.node)
            log.warning("%s", unconfirmed_sessions(report.node, [session.id for session in lasting]))
        return report.model_copy(update={"unconfirmed": lasting})

    def pods(self, node: str) -> Mapping[str, SessionPod]:
        """Return the node's pods by session id. If a session has two pods, `_precedence` selects one."""
        return self._pods_by_node().get(node, _NodePods()).sessions

    def patched(self, pod: SessionPod, item: dict[str, Any]) -> None:
        """Apply the API server's answer to a patch, unless the watch has a newer version."""
        watched = self._pods if pod.session.layer is LayerName.NATIVE else self._layer_pods
        if watched.replace(item, pod.version):
            self._by_node = None

    def report_version(self, node: str) -> str:
        """Return the resourceVersion of the node's report; empty if there is none."""
        name, _ = self._reports().get(node, ("", None))
        return str(self._maps.objects[name]["metadata"]["resourceVersion"]) if name else ""

    def patched_report(self, item: dict[str, Any], before: str) -> None:
        """Apply the API server's answer to a patch, unless the watch has a newer version."""
        if self._maps.replace(item, before):
            self._changed()

    def reported(self, node: str, session: str) -> SessionReport | None:
        """Return the session as the node's agent reports it; its pod's annotations can differ."""
        _, read = self._reports().get(node, ("", None))
        return read.report.session(session) if read is not None and read.report is not None else None

    def all_pods(self) -> Iterator[SessionPod]:
        """Return the sessions' pods on all nodes."""
        return (pod for here in self._pods_by_node().values() for pod in here.sessions.values())

    def _trimmed(self, pod: dict[str, Any]) -> dict[str, Any]:
        """Return the stored parts of a pod from a watch, with its first identity."""
        return dict(self._identities.with_first(trimmed(pod)))

    def _changed(self) -> None:
        self._by_node = self._by_report = None
        self._news.set()
        self._on_change()

    def _pods_by_node(self) -> dict[str, _NodePods]:
        if self._by_node is not None:
            return self._by_node
        objects = [*self._pods.objects.values(), *self._layer_pods.objects.values()]
        self._identities.forget((pod["metadata"].get("uid", "") for pod in objects), len(objects))
        ours = [pod for pod in objects if not self._hub or made_by(pod, self._hub)]
        good, bad = session_pods(ours)
        # the clock is read first: instants that are new after a step were written after it
        self._clock()
        self._instants.take_note(good, self._clock.shift)
        for uid, problem in bad.items():
            if self._bad_pods.get(uid) != problem:
                log.warning("%s", problem)
        self._bad_pods = bad
        self._by_node = {}
        # pods without a node have not yet been placed by another layer's scheduler
        placed = sorted((pod for pod in good if pod.node), key=_precedence)
        first: dict[str, SessionPod] = {}
        for pod in placed:
            here = self._by_node.setdefault(pod.node, _NodePods())
            if first.setdefault(pod.session.session, pod) is pod:
                here.sessions[pod.session.session] = pod
            else:
                here.others.append(pod)
        if len(ours) < len(objects):
            for pod in session_pods(pod for pod in objects if not made_by(pod, self._hub))[0]:
                self._by_node.setdefault(pod.node, _NodePods()).others.append(pod)
        return self._by_node

    def _reports(self) -> dict[str, tuple[str, NodeReport]]:
        """Return (name of the ConfigMap, its content) by node. Each ConfigMap is parsed once."""
        if self._by_report is not None:
            return self._by_report
        reports: dict[str, tuple[str, NodeReport]] = {}
        now = time.monotonic()
        self._read = {
            name: NodeReport.read(item, self._read.get(name), now, log) for name, item in self._maps.objects.items()
        }
        for name, read in self._read.items():
            node = read.report.node if read.report is not None else name.partition("/")[2].removeprefix(_PREFIX)
            reports[node] = name, read
        self._by_report = reports
        return reports


def _precedence(pod: SessionPod) -> tuple[object, ...]:
    """Return the sort key of a session's pods. The first pod is the session's pod.

    A restarted server has a new pod while the old pod ends; the pod that is not ending counts. Of two running pods, the
    older counts, because the younger one claims an existing session. Of two ending pods, the younger was the last
    server.
    """
    created = -pod.created if pod.ending else pod.created
    return pod.ending, not pod.runs, created, pod.namespace, pod.name


class NodeAgent:
    """The agent of one node, represented by its last report.

    Decisions are based on the last result of `report`, and an idle action is refused if the session has changed since.
    Each round has its own NodeAgent, so that no other reader changes the basis of a decision.
    """

    def __init__(self, node: str, cluster: Cluster, clock: Callable[[], float]) -> None:
        self.node = node
        self._cluster = cluster
        self._clock = clock
        self._decided_on: Mapping[str, SessionPod] = {}
        self._age = float("inf")
        self._reported_before = ""

    async def report(self) -> KnownReport:
        """Return the node's report, with tiers from the pods' annotations."""
        report, self._age = self._cluster.report(self.node)
        self._decided_on = self._cluster.pods(self.node)
        return report

    def report_age(self) -> float:
        """Return the age in seconds of the last result of `report`, which has no later events."""
        return self._age

    async def send(self, request: ServiceRequest) -> None:
        """Write the request to the session's pod, or a cordon to the report's ConfigMap.

        The agent applies it within seconds. It undoes a tier after new GPU work, and decides on a resize before this
        returns.
        """
        if isinstance(request, CordonRequest):
            await self._cordon(request)
            return
        pod = self._unchanged(request.id)
        match request:
            case TierRequest():
                patch = self._tier_patch(request, pod)
            case ResizeRequest():
                await self._resize(request, pod)
                return
            case NoticeRequest():
                patch = patches.notice_patch(request.notice)
            case ControlsRequest():
                patch = patches.controls_patch(request.controls)
                if request.answer is not None:
                    patch |= patches.answers_patch(pod.session.answers, request.answer)
            case MessageRequest():
                patch = patches.messages_patch(request.messages(pod.session.messages), request.changed_cause)
            case StopProcessesRequest():
                patch = patches.stop_processes_patch(request.processes)
            case AnswerRequest():
                patch = patches.answers_patch(pod.session.answers, request.answer)
        await self._patch(request.id, pod, patch)

    def _tier_patch(self, request: TierRequest, pod: SessionPod) -> dict[str, str | None]:
        """Return the annotations for another tier. Raises ControlRefused if the layer or the session's work forbids."""
        needed = IdleReach.RELEASE if request.tier is Tier.RELEASED else IdleReach.DOWNGRADE
        _check_reach(pod, needed)
        current = self._cluster.report(self.node)[0].session(request.id)
        if current is not None and voids_idle_action(
            current.gpu_busy or current.waiting,
            current.last_gpu_activity,
            current.gpu_seconds,
            request.if_idle_since,
            request.if_gpu_seconds,
        ):
            raise ControlRefused("busy", f"session {request.id} has worked on the GPU in the meantime")
        patch = patches.tier_patch(
            request.tier,
            self._clock(),
            request.effective_units,
            request.if_idle_since,
            request.yields_until,
            request.if_gpu_seconds,
            request.use,
            request.background,
        )
        if request.yields_until is not None:
            # in the same patch, because otherwise a spawn that is placed before the agent's patch would borrow the
            # units
            lost = pod.session.share_units - request.effective_units
            patch |= patches.borrowed_patch(max(pod.session.borrowed_units, lost))
        self._reported_before = self._cluster.report_version(self.node)
        return patch

    async def carried_out(self, request: TierRequest) -> bool:
        """Wait until the agent reports the tier or has undone it in the pod's annotations."""
        requested = (request.tier, request.effective_units)
        until = time.monotonic() + DECIDED_WITHIN
        while True:
            pod = self._cluster.pods(self.node).get(request.id)
            if pod is None:
                raise ControlRefused("unknown-session", f"the pod of session {request.id} is gone")
            if (pod.session.tier, pod.session.effective_units) != requested:
                raise ControlRefused("busy", f"session {request.id} has worked on the GPU in the meantime")
            # an older report, from before work restored the share, may have the same tier
            if self._cluster.report_version(self.node) != self._reported_before:
                reported = self._cluster.reported(self.node, request.id)
                if reported is not None and (reported.tier, reported.effective_units) == requested:
                    return True
            if time.monotonic() > until:
                return False
            await asyncio.sleep(DECISION_POLL_EVERY)

    async def _resize(self, request: ResizeRequest, pod: SessionPod) -> None:
        """Request a change of the share in the pod's annotations, and wait for the agent's decision."""
        _check_reach(pod, IdleReach.RESIZE)
        number = max(1, round(self._clock() * 1000))
        change = ShareChange(number=number, **shared_fields(request, ShareChange))
        await self._patch(request.id, pod, patches.resize_patch(change))
        until = time.monotonic() + DECIDED_WITHIN
        while (answer := self._answer_to(request.id, change)) is None:
            if time.monotonic() > until:
                await self._withdraw(request.id, change)
                raise AgentUnreachable(
                    f"the agent of node {self.node} did not decide on the change within {DECIDED_WITHIN:g} s"
                )
            await asyncio.sleep(DECISION_POLL_EVERY)
        if answer.refused is not None:
            raise ControlRefused(answer.refused.code, answer.refused.message)

    def _answer_to(self, session: str, change: ShareChange) -> ShareChangeAnswer | None:
        pod = self._cluster.pods(self.node).get(session)
        if pod is None:
            raise ControlRefused("unknown-session", f"the pod of session {session} is gone")
        answer = pod.session.resized
        return answer if answer is not None and answer.number == change.number else None

    async def _withdraw(self, session: str, change: ShareChange) -> None:
        """Withdraw the request. If that fails, the agent may still change the share, and the report will show it."""
        pod = self._cluster.pods(self.node).get(session)
        if pod is not None and pod.session.resize == change:
            with contextlib.suppress(ControlRefused, AgentUnreachable):
                await self._patch(session, pod, patches.resize_patch(None))

    async def _cordon(self, request: CordonRequest) -> None:
        """Write a cordon to the report's ConfigMap, or remove it."""
        uuids = [gpu.uuid for gpu in self._cluster.report(self.node)[0].gpus]
        if request.gpu and request.gpu not in uuids:
            raise ControlRefused("unknown-gpu", f"node {self.node} has no GPU {request.gpu}; it has {', '.join(uuids)}")
        text = None if request.cordon is None else request.cordon.model_dump_json(exclude_defaults=True)
        metadata: dict[str, Any] = {"annotations": {cordon_name(request.gpu): text}}
        before, about = self._cluster.report_version(self.node), f"ConfigMaps in {self._cluster.namespace}"
        path = f"/api/v1/namespaces/{self._cluster.namespace}/configmaps/{report_name(self.node)}"
        with _translated(f"a cordon of node {self.node}", about):
            try:
                # no owner until the agent has read it, because the cluster removes the ConfigMap with the agent's pod
                item = await self._cluster.api.patch(path, {"metadata": {**metadata, "ownerReferences": None}})
            except ApiFailure as failure:
                if failure.status != 403:
                    raise
                # some clusters require the right to delete an object to change its owners
                item = await self._cluster.api.patch(path, {"metadata": metadata})
        self._cluster.patched_report(item, before)

    def _unchanged(self, session: str) -> SessionPod:
        """Return the session's pod if its annotations have not changed since the decision."""
        now, then = self._cluster.pods(self.node).get(session), self._decided_on.get(session)
        if now is None or then is None or now.name != then.name or not now.runs:
            raise ControlRefused("unknown-session", f"there is no running pod of session {session} on node {self.node}")
        if now.session != then.session:
            raise ControlRefused("busy", f"session {session} has changed in the meantime")
        return now

    async def _patch(self, session: str, pod: SessionPod, annotations: Mapping[str, str | None]) -> None:
        with _translated(f"a patch of pod {pod.name}", f"pods in the namespace {pod.namespace}"):
            try:
                self._cluster.patched(pod, await patch_annotations(self._cluster.api, pod, annotations))
            except ApiFailure as failure:
                if failure.status == 409:
                    raise ControlRefused("busy", f"session {session} has changed in the meantime") from None
                if failure.status == 404:
                    gone = f"the pod {pod.name} of session {session} is gone"
                    raise ControlRefused("unknown-session", gone) from None
                raise


@contextlib.contextmanager
def _translated(what: str, objects: str) -> Iterator[None]:
    """Raise ControlRefused or AgentUnreachable for a failed request. ``objects``: what the service patches."""
    try:
        yield
    except ApiFailure as failure:
        if failure.status in (401, 403):
            raise ControlRefused("internal", f"the service may not patch {objects}: {failure.status}") from None
        if failure.status:
            raise AgentUnreachable(f"the API server answers {failure.status} to {what}") from None
        raise AgentUnreachable(f"{what} failed: {failure}") from None


async def patch_annotations(api: ClusterApi, pod: SessionPod, annotations: Mapping[str, str | None]) -> Json:
    """Merge annotations into a pod's, and return the patched pod from the API server.

    Raises ApiFailure, with 409 if the pod has changed since this version, for example by the agent.
    """
    return await api.patch(pod.path, {"metadata": {"resourceVersion": pod.version, "annotations": dict(annotations)}})


def _check_reach(pod: SessionPod, needed: IdleReach) -> None:
    """Raise ControlRefused if the session's sharing layer does not support the idle action."""
    layer = LAYERS[pod.session.layer]
    if needed not in layer.reach:
        raise ControlRefused("bad-request", out_of_reach(layer))
