"""All nodes of the hub's cluster, kept current by watches of pods and reports. Does not act on them: see `node`."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from kubernetes_asyncio.client import ApiClient, CoreV1Api
from pydantic import ValidationError

from gpushare_spawner.clients.object_watch import Watched
from gpushare_spawner.clocks import WallClock
from gpushare_spawner.model.control import AgentUnreachable
from gpushare_spawner.model.controls import ASK_SECONDS
from gpushare_spawner.model.kubernetes.annotations import LAYER_SELECTOR, SESSION_SELECTOR
from gpushare_spawner.model.kubernetes.objects import (
    REPORT_COMPONENT,
    REPORT_KEY,
    REPORT_SELECTOR,
    REPORT_STALE_SECONDS,
    misplaced_report,
    read_report,
)
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.report import Report, SessionReport, with_reported_since
from gpushare_spawner.service.kubernetes.clock_steps import PodInstants, moved_report
from gpushare_spawner.service.kubernetes.node import NodeAgent
from gpushare_spawner.service.kubernetes.pod_sessions import (
    FirstIdentities,
    SessionPod,
    joined_report,
    made_by,
    session_pods,
    trimmed,
)
from gpushare_spawner.service.reports import KnownReport, UnconfirmedSession
from gpushare_spawner.wording.amounts import utc
from gpushare_spawner.wording.service import unconfirmed_sessions

log = logging.getLogger("gpushare.service.cluster")

POLL_EVERY = 0.5
"""Seconds between two checks for asks while reports change: of 500 nodes some change each second."""
UNCONFIRMED_AFTER = 30.0
"""Seconds for which a reported session may lack a pod before it counts as unconfirmed for admins. Our value: a report
follows the end of a pod within seconds. Such a session never counts for capacity or quotas."""
_PREFIX = f"{REPORT_COMPONENT}-"
_UNTIL_CHART = "; waiting for the chart gpushare-agent, which gives the hub this right"


@dataclass(frozen=True)
class _NodePods:
    """The pods with shares on one node."""

    sessions: dict[str, SessionPod] = field(default_factory=dict)
    """By session id. Of two pods of one session, also on different nodes, `_precedence` selects."""
    others: list[SessionPod] = field(default_factory=list)
    """Pods of which only the units count: pods of other hubs, and other pods of a session."""


@dataclass(frozen=True)
class _Read:
    """A parsed ConfigMap."""

    version: str
    """Its resourceVersion."""
    report: Report | None
    """The report; None if this version cannot read it."""
    problem: str
    """The reason why there is no report, as half a sentence; empty: there is a report."""
    at: float
    """Time of reading (`time.monotonic`)."""

    @cached_property
    def asks_until(self) -> float:
        """Time until which an ask of the node's notebook servers waits (`time.monotonic`); in the past: none waits."""
        if self.report is None:
            return 0.0
        asks = (ask.at for session in self.report.sessions for ask in session.asks)
        last = max(asks, default=-math.inf)
        return self.at + ASK_SECONDS - max(0.0, self.report.published_at - last)


class Cluster:
    """The cluster's nodes: an iterable of new agents, for each node with a report or sessions.

    Reports are read in ``namespace``, sessions there or in all namespaces. If the cluster cannot be read, there is one
    agent, which reports the problem. ``hub`` is the address of the hub's API as its pods have it: pods of another hub
    are left out (empty: none are). ``on_change`` is called when something may have changed; ``clock`` gives seconds
    since the epoch.
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
        self._api = CoreV1Api(client)
        self.namespace = namespace
        self._clock = WallClock.of(clock)
        self._hub = hub
        self._on_change = on_change
        here = f"the namespace {namespace}"
        pods: Callable[..., Awaitable[Any]] = partial(self._api.list_namespaced_pod, namespace)
        where = here
        if all_namespaces:
            pods, where = self._api.list_pod_for_all_namespaces, "all namespaces"
        maps = partial(self._api.list_namespaced_config_map, namespace)
        self._identities = FirstIdentities()
        self._pods = Watched("pods", pods, where, SESSION_SELECTOR, self._changed, self._kept)
        self._layer_pods = Watched("pods of other layers", pods, where, LAYER_SELECTOR, self._changed, self._kept)
        self._maps = Watched("reports", maps, here, REPORT_SELECTOR, self._changed, missing_right=_UNTIL_CHART)
        self._read: dict[str, _Read] = {}
        self._by_node: dict[str, _NodePods] | None = None
        self._instants = PodInstants()
        self._unconfirmed: dict[str, dict[str, float]] = {}
        """By node and session: the first time without a pod (seconds since the epoch)."""
        self._by_report: dict[str, tuple[str, _Read]] | None = None
        self._logged: dict[str, str] = {}
        """By pod: the problem that was logged."""
        self._warned: set[str] = set()
        """Nodes with logged unconfirmed sessions."""
        self._news = asyncio.Event()

    @property
    def _watched(self) -> tuple[Watched, ...]:
        return self._pods, self._layer_pods, self._maps

    async def start(self, patience: float) -> None:
        """Begin to watch, and wait up to ``patience`` seconds for the first lists, or for their failure."""
        for watched in self._watched:
            watched.start()
        await asyncio.gather(*(watched.loaded(patience) for watched in self._watched))

    async def close(self) -> None:
        """Stop watching."""
        await self._pods.close()
        await self._layer_pods.close()
        await self._maps.close()

    def __iter__(self) -> Iterator[NodeAgent]:
        lost = [watched for watched in self._watched if not watched.known]
        with_pods = {node for node, pods in self._pods_by_node().items() if pods.sessions}
        names = {"?"} if lost else set(self._reports()) | with_pods
        return iter([NodeAgent(name, self, self._api, self._clock) for name in sorted(names)])

    async def asking(self) -> Sequence[NodeAgent]:
        """Wait until a report has asks, and return the agents of such nodes."""
        while True:
            self._news.clear()
            nodes = [node for node, (_, read) in self._reports().items() if self._asks(node, read)]
            if nodes:
                return [NodeAgent(node, self, self._api, self._clock) for node in sorted(nodes)]
            await self._news.wait()
            await asyncio.sleep(POLL_EVERY)

    def _asks(self, node: str, read: _Read) -> bool:
        if time.monotonic() >= read.asks_until:
            return False
        try:
            # an old report is refused: the asks of an ended agent stay in it
            return any(session.asks for session in self.report(node)[0].sessions)
        except AgentUnreachable:
            return False

    def report(self, node: str) -> tuple[KnownReport, float]:
        """Return the node's report, joined with its pods, and its age in seconds.

        The age counts from the time when a watch brought the report, so the machines' clocks can differ. Raises
        AgentUnreachable if there is no report, or only an old one.
        """
        for watched in self._watched:
            if not watched.known:
                raise AgentUnreachable(watched.problem or f"no news of the {watched.what} from the API server")
        name, read = self._reports().get(node, ("", None))
        here = self._pods_by_node().get(node, _NodePods())
        now = self._clock()
        # after the clock was read: this detects a step of the clock
        pods = [self._instants.of_now(pod, self._clock.moved) for pod in here.sessions.values()]
        if read is None and pods and all(pod.layer is not LayerName.NATIVE for pod in pods):
            # the node needs no agent: the facts of its sessions are in their pods
            return joined_report(Report(node=node, published_at=now, gpus=()), pods), 0.0
        if read is None or read.report is None:
            why = "its agent has published no report" if read is None else f"its report is refused: {read.problem}"
            raise AgentUnreachable(f"node {node}: {why}")
        report = moved_report(read.report, self._clock)
        # by both clocks: a report of an ended agent must not stay valid because the machines' clocks differ
        age = max(now - report.published_at, time.monotonic() - read.at)
        if age > REPORT_STALE_SECONDS:
            raise AgentUnreachable(f"node {node}: its agent has published nothing since {utc(report.published_at)}")
        arrived = self._maps.arrived.get(name)
        age = time.monotonic() - arrived if arrived is not None else float("inf")
        return self._with_lasting(joined_report(report, pods, here.others, now)), age

    def _with_lasting(self, report: KnownReport) -> KnownReport:
        """Return the report with the sessions that are unconfirmed for `UNCONFIRMED_AFTER`, and log them."""
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
        # once for each node: the reports of a node must not fill the log
        if lasting and report.node not in self._warned:
            self._warned.add(report.node)
            log.warning("%s", unconfirmed_sessions(report.node, [session.id for session in lasting]))
        return report.model_copy(update={"unconfirmed": lasting})

    def pods(self, node: str) -> Mapping[str, SessionPod]:
        """Return the node's pods by the ids of their sessions; `_precedence` selects one of two pods of a session."""
        return self._pods_by_node().get(node, _NodePods()).sessions

    def patched(self, pod: SessionPod, item: dict[str, Any]) -> None:
        """Apply the API server's answer to a patch, unless the watch has a newer version."""
        watched = self._pods if pod.layer is LayerName.NATIVE else self._layer_pods
        if watched.replace(item, pod.version):
            self._by_node = None

    def report_version(self, node: str) -> str:
        """Return the resourceVersion of the node's report; empty: there is none."""
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

    def _kept(self, pod: dict[str, Any]) -> dict[str, Any]:
        """Return the kept parts of a pod from a watch, with its first identity."""
        return self._identities.keep(trimmed(pod))

    def _changed(self) -> None:
        self._by_node = self._by_report = None
        self._news.set()
        self._on_change()

    def _pods_by_node(self) -> dict[str, _NodePods]:
        if self._by_node is not None:
            return self._by_node
        objects = [*self._pods.objects.values(), *self._layer_pods.objects.values()]
        self._identities.forget({pod["metadata"].get("uid", "") for pod in objects})
        ours = [pod for pod in objects if not self._hub or made_by(pod, self._hub)]
        good, bad = session_pods(ours)
        # the clock comes first: instants that are new after a step were written after it
        self._clock()
        self._instants.take_note(good, self._clock.moved)
        self._log_once({f"Pod {name}": f"ignored: {problem}" for name, problem in bad.items()})
        self._by_node = {}
        # another layer's scheduler has not yet placed the pods without a node
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

    def _reports(self) -> dict[str, tuple[str, _Read]]:
        """Return (name of the ConfigMap, its content) by node; each ConfigMap is parsed once."""
        if self._by_report is not None:
            return self._by_report
        reports: dict[str, tuple[str, _Read]] = {}
        now = time.monotonic()
        self._read = {name: self._parse(name, item, now) for name, item in self._maps.objects.items()}
        for name, read in self._read.items():
            node = read.report.node if read.report is not None else name.partition("/")[2].removeprefix(_PREFIX)
            reports[node] = name, read
        self._by_report = reports
        return reports

    def _parse(self, name: str, item: dict[str, Any], now: float) -> _Read:
        version = item["metadata"]["resourceVersion"]
        previous = self._read.get(name)
        if previous is not None and previous.version == version:
            return previous
        report, problem = None, ""
        try:
            report = read_report(item)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or REPORT_KEY
            problem = f"not a report that this version can read: {where}: {first['msg']}"
        else:
            misplaced = misplaced_report(item["metadata"]["name"], report)
            report, problem = (report, "") if misplaced is None else (None, f"{misplaced}: this report is ignored")
        if report is not None:
            report = with_reported_since(report, previous.report if previous is not None else None, now)
        # once for each problem, not with each report
        if problem and (previous is None or previous.problem != problem):
            log.warning("ConfigMap %s: %s", name, problem)
        return _Read(version, report, problem, now)

    def _log_once(self, problems: dict[str, str]) -> None:
        for about, text in problems.items():
            if self._logged.get(about) != text:
                log.warning("%s: %s", about, text)
        self._logged = problems


def _precedence(pod: SessionPod) -> tuple[object, ...]:
    """Return the sort key of the pods of one session: the first pod is the session's.

    A restarted server has a new pod while the old pod ends: the pod that is not ending counts. Of two running pods the
    older counts: the younger came later with the same session. Of two ending pods the younger was the last server.
    """
    created = -pod.created if pod.ending else pod.created
    return pod.ending, not pod.runs, created, pod.namespace, pod.name
