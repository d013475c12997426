"""One spawn of a pod: its state, and the pods that are started for it until a node admits one.

A spawn has one `PodAttempt`, its state until the end of the server. `PodLauncher` starts pods for it, one after
another, and retries temporary errors of the cluster's API. Each of these pods has one `PodAdmission`, which detects a
refusal by the kubelet immediately, and a refusal by the scheduler after the times in `LASTS`; `Unschedulable` contains
the scheduler's reasons. The texts are in `wording.spawn_failures`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from aiohttp import ClientError
from kubernetes_asyncio.client.rest import ApiException

from gpushare_spawner.clients.api import ApiFailure
from gpushare_spawner.model.kubernetes.annotations import TEMPLATE
from gpushare_spawner.model.kubernetes.objects import RESOURCE_PREFIX
from gpushare_spawner.spawner.attempt import SpawnAttempt, SpawnPhase, SpawnProgress, interleaved
from gpushare_spawner.spawner.hub import SpawnRefused
from gpushare_spawner.spawner.kubernetes.cluster.pods import (
    RESERVATION,
    Ended,
    annotation,
    ended_by_node,
    of_session,
    why_waiting,
)
from gpushare_spawner.spawner.kubernetes.cluster.reflectors import SnapshotStale
from gpushare_spawner.spawner.kubernetes.reservations import PodReservation, PodReservations
from gpushare_spawner.spawner.options import Overrides
from gpushare_spawner.wording import spawn_failures as words
from gpushare_spawner.wording.amounts import http_status, reason
from gpushare_spawner.wording.spawn_failures import cannot_start, missing, not_taken

UNSCHEDULABLE = "Unschedulable"
"""Kubernetes' reason for a pod without a suitable node."""

CLAIMS = "cannot allocate all claims"
"""The scheduler's text if a claim of the pod cannot be allocated (its plugin dynamicresources, 1.34 to 1.36)."""

SCHEDULER_ERROR = "SchedulerError"
"""Kubernetes' reason for a scheduler error on a pod."""
GATE_OFF = "feature is disabled"
"""The scheduler's text if a claim needs a feature gate that is off in the scheduler and on in the API server
(kubernetes dynamic-resource-allocation/structured, 1.34 to 1.36).
"""

TRIGGERED_SCALE_UP = "TriggeredScaleUp"
"""The reason in the cluster autoscaler's event when it adds a node for a pod."""


class Cause(Enum):
    """Kinds of reasons why a pod is unschedulable."""

    UNITS = "units"
    """The node's status or its ResourceSlice lacks units of a GPU."""
    NOT_READY = "not ready"
    """The node is being added, or its kubelet is restarting."""
    CLAIM = "claim"
    """A volume claim is not bound. Another node does not help."""
    GATE = "gate"
    """A feature gate of the scheduler is off. Another node does not help."""
    NODE = "node"
    """Any other reason that concerns the node: CPU, memory, pods, taints, affinity, volumes."""


LASTS: dict[Cause, float] = {
    # Units that idle sessions on the node lend reach its status within 10 s (the kubelet's nodeStatusUpdateFrequency).
    Cause.UNITS: 15.0,
    # The node lifecycle controller waits 50 s for a kubelet (node-monitor-grace-period).
    Cause.NOT_READY: 60.0,
    # Our value: an update of the scheduler may be in progress.
    Cause.GATE: 5.0,
    # Our value: provisioners of cloud disks take 10 to 40 s.
    Cause.CLAIM: 60.0,
    # Our value: another pod of the node may be about to end.
    Cause.NODE: 5.0,
}
"""Seconds for which a reason of each kind may last; after that the pod counts as not admitted."""


@dataclass(frozen=True)
class Unschedulable:
    """The scheduler's reasons that concern the pod's own node."""

    reasons: tuple[str, ...]
    message: str
    """The scheduler's full text."""

    @property
    def causes(self) -> frozenset[Cause]:
        """The kinds of the reasons."""
        return frozenset(_cause(reason) for reason in self.reasons)

    @property
    def concerns_node(self) -> bool:
        """Whether another node may admit the pod."""
        return not self.causes <= {Cause.CLAIM, Cause.GATE}


def unschedulable(pod: Mapping[str, Any]) -> Unschedulable | None:
    """Return why a pod is not scheduled; None if it is not unschedulable, or waits for pods that it preempts."""
    status = pod.get("status") or {}
    if status.get("nominatedNodeName"):
        # The scheduler has preempted pods on the node, which has enough capacity after they end.
        return None
    for condition in status.get("conditions") or []:
        if condition.get("type") != "PodScheduled" or condition.get("status") != "False":
            continue
        message = str(condition.get("message") or "")
        if condition.get("reason") == UNSCHEDULABLE:
            return Unschedulable(own_reasons(message), message)
        # Most scheduler errors are temporary, for example if the API server does not answer.
        if condition.get("reason") == SCHEDULER_ERROR and GATE_OFF in message:
            return Unschedulable((message,), message)
    return None


def own_reasons(message: str) -> tuple[str, ...]:
    """Return the reasons in the scheduler's message, without the reasons of other nodes.

    The message contains a count of nodes for each reason: "0/3 nodes are available: 1 Insufficient cpu, 2 node(s)
    didn't match Pod's node affinity/selector. preemption: ...". A pod is pinned to one node, so the others do not match
    it.
    """
    match = re.match(r"\d+/\d+ nodes are available: (.*?)\.(?:\s|$)", message, re.DOTALL)
    if match is None:
        return (message,) if message else (UNSCHEDULABLE,)
    parts = [re.sub(r"^\d+ ", "", part) for part in re.split(r", (?=\d+ )", match[1])]
    own = [part for part in parts if not _mismatch(part)]
    return tuple(own or parts)


def _mismatch(reason: str) -> bool:
    return reason.endswith(("affinity/selector", "didn't match node selector", "plugin(s) [NodeAffinity]"))


def _cause(reason: str) -> Cause:
    if GATE_OFF in reason:
        return Cause.GATE
    # The scheduler's text on claims does not contain the cause.
    if RESOURCE_PREFIX in reason or CLAIMS in reason:
        return Cause.UNITS
    if "node.kubernetes.io/not-ready" in reason or "node.kubernetes.io/unreachable" in reason:
        return Cause.NOT_READY
    if "unbound immediate PersistentVolumeClaims" in reason or reason.startswith("persistentvolumeclaim "):
        return Cause.CLAIM
    return Cause.NODE


NOT_PREPARED = "FailedPrepareDynamicResources"
"""The reason in the kubelet's event if a claim of the pod could not be prepared. The kubelet retries after 15 to 65 s.
"""
BY_AGENT = "gpushare: "
"""Prefix of the agent's text in that event; if it is missing, the agent has not started yet."""


class NotAdmitted(Exception):
    """A pod that its node did not admit. ``str()`` is a sentence for people, without a period."""

    def __init__(
        self, sentence: str, missing: str, *, distrust: bool, elsewhere: bool = True, detail: str = ""
    ) -> None:
        super().__init__(sentence)
        self.missing = missing
        """The resource that the node lacks, as a phrase for a message."""
        self.distrust = distrust
        """Whether the agent's report on the node must be distrusted for all spawns."""
        self.elsewhere = elsewhere
        """Whether another node may admit the pod."""
        self.detail = detail
        """The cluster's original message, for the log."""

    @classmethod
    def ended(cls, ended: Ended) -> NotAdmitted:
        """Return the error for a refusal by the kubelet."""
        return cls(str(ended), ended.what, distrust=True)

    @classmethod
    def unschedulable(cls, node: str, refusal: Unschedulable) -> NotAdmitted:
        """Return the error for a persistent refusal by the scheduler."""
        what = missing(refusal.reasons)
        sentence = not_taken(node, what) if refusal.concerns_node else cannot_start(what)
        return cls(
            sentence,
            what,
            distrust=Cause.UNITS in refusal.causes,
            elsewhere=refusal.concerns_node,
            detail=f"{UNSCHEDULABLE}: {refusal.message}",
        )


@dataclass
class PodAdmission:
    """The admission of one pod by its node. While the cluster autoscaler adds a node, time is not counted."""

    token: str
    """The value of the pod's reservation annotation."""
    node: str
    clock: Callable[[], float] = time.monotonic
    events: Callable[[], Iterable[Mapping[str, Any]]] = tuple
    """Returns the events for pods of that name."""
    unlimited: bool = False
    """Whether time is not counted at all, because another layer's scheduler can keep a pod waiting."""
    _seen: Any = field(default=None, init=False)
    _unschedulable: Unschedulable | None = field(default=None, init=False)
    _since: dict[Cause, float] = field(default_factory=dict, init=False)

    def runs(self, pod: Mapping[str, Any] | None, runs: Callable[[Any], bool]) -> bool:
        """Return whether the pod is running, as ``runs`` determines. Raises NotAdmitted if its node refuses it.

        A pod that stays unschedulable for longer than `LASTS` allows is not admitted either: the hub's data on the node
        differ from the scheduler's, or the hub does not check the missing resource.
        """
        if pod is not None and pod is self._seen and self._unschedulable is None:
            # KubeSpawner calls this method with the same object until the watch has a new version
            self._check_prepared(pod)
            return False
        if runs(pod):
            return True
        if pod is None:
            return False
        if pod is not self._seen:
            self._read_pod(pod)
        if self._unschedulable is not None and self._lasts():
            raise NotAdmitted.unschedulable(self.node, self._unschedulable)
        return False

    def _read_pod(self, pod: Mapping[str, Any]) -> None:
        self._seen = pod
        ours = annotation(pod, RESERVATION) == self.token
        ended = ended_by_node(pod) if ours else None
        if ended is not None:
            raise NotAdmitted.ended(ended)
        self._unschedulable = unschedulable(pod) if ours else None
        causes = self._unschedulable.causes if self._unschedulable is not None else frozenset()
        # A reason of another kind starts a new wait; changed figures in the message do not.
        self._since = {cause: self._since.get(cause, self.clock()) for cause in causes}

    def _check_prepared(self, pod: Mapping[str, Any]) -> None:
        """Raise NotAdmitted if the agent cannot give the pod the GPUs of its claim."""
        if not pod["spec"].get("resourceClaims"):
            return
        for event in self.events():
            message = str(event.get("message") or "")
            if (
                event.get("reason") == NOT_PREPARED
                and BY_AGENT in message
                and event["involvedObject"].get("uid") == pod["metadata"]["uid"]
            ):
                words = message.partition(BY_AGENT)[2].strip()
                raise NotAdmitted.ended(Ended(NOT_PREPARED, words, self.node))

    def _lasts(self) -> bool:
        now = self.clock()
        if self.unlimited or any(event.get("reason") == TRIGGERED_SCALE_UP for event in self.events()):
            self._since = dict.fromkeys(self._since, now)
        return any(now - since >= LASTS[cause] for cause, since in self._since.items())


def may_pass(error: Exception) -> bool:
    """Return whether the API may succeed on a retry."""
    status = getattr(error, "status", None)
    return not isinstance(status, int) or ApiFailure(status, "").may_pass


def worded(error: Exception) -> str:
    if isinstance(error, ApiException):
        return http_status(error.status, error.reason)
    return reason(error)


def api_refused(error: Exception) -> SpawnRefused:
    if may_pass(error):
        return SpawnRefused(words.api_unavailable(worded(error)), reason="api-failed", status=503, retry_after=60)
    message = getattr(error, "body", "") or ""
    try:
        message = str(json.loads(message)["message"])
    except (ValueError, KeyError, TypeError):
        message = worded(error)
    if "exceeded quota" in message:
        # The text is from kubernetes plugin/pkg/admission/resourcequota. Other servers in the namespace may end.
        return SpawnRefused(words.quota_exceeded(message), reason="quota-exceeded", status=503, retry_after=60)
    return SpawnRefused(words.api_refused(message), reason="api-refused", status=502)


async def request_succeeded(request: Awaitable[bool], what: str, log: logging.Logger) -> bool:
    """Return whether a request has succeeded; False also after a temporary failure of the API: the caller retries.

    ``what``: the log text for the unfinished step. Raises permanent errors.
    """
    try:
        return await request
    except (ApiException, ClientError) as error:
        if not may_pass(error):
            raise
        log.warning("%s: %s", what, worded(error))
        return False


class PodAttempt(SpawnAttempt[PodReservation]):
    """One spawn on Kubernetes, for which several pods may be started in turn.

    ``give_back`` is called with the unneeded reservation and with whether a pod may have been created from it.
    """

    def __init__(self, overrides: Overrides, give_back: Callable[[PodReservation, bool], None]) -> None:
        super().__init__(overrides)
        self.retry_events = SpawnProgress()
        """Events about nodes that refused the pod, shown among the pod's own events."""
        self.preferred_node = ""
        """Node that a pod without a GPU prefers; empty: none."""
        self.perhaps_created = False
        """Whether the reservation's pod may exist."""
        self.admission: PodAdmission | None = None
        """The admission of the pod that is being started; None if there is none, and for a server without a share."""
        self.secret: tuple[object, Callable[[str], dict[str, Any]] | None] = (None, None)
        """The pod's manifest, and a function that takes the pod's uid and returns the Secret with the pod's secret
        values. None if there is no Secret."""
        self._give_back = give_back

    def reserved(self, reservation: PodReservation) -> None:
        """Record the share. No pod exists for it yet."""
        self.reservation, self.perhaps_created = reservation, False

    def give_back(self) -> None:
        reservation, self.reservation = self.reservation, None
        if reservation is not None:
            perhaps_created, self.perhaps_created = self.perhaps_created, False
            self._give_back(reservation, perhaps_created)

    async def pod_created(self, request: Awaitable[bool], name: str, log: logging.Logger) -> bool:
        """Return whether the request has created the pod. With a share, return False after a temporary failure too.

        ``name``: the pod's name, for the log. Raises permanent errors.
        """
        if self.reservation is None:
            return bool(await request)
        before, self.perhaps_created = self.perhaps_created, True
        try:
            return await request_succeeded(request, f"Pod {name} is not created yet", log)
        except ApiException:
            # The refusal is final. Only an earlier request with a lost response can have created a pod.
            self.perhaps_created = before
            raise

    def ended_by_node(self, pod: Mapping[str, Any] | None) -> Ended | None:
        """Return how the node ended the server's pod; None while the server starts, and if the node did not end it.

        If the hub was killed before it saved the server's state, this method restores the template from the pod.
        """
        if pod is None or not of_session(pod):
            return None
        self.template_name = self.template_name or annotation(pod, TEMPLATE)
        return ended_by_node(pod) if self.phase is not SpawnPhase.STARTING else None

    async def events(self, placing: bool, of_pod: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of placement if ``placing``, then the events of the pod and of nodes that refuse it."""
        if placing:
            async for event in self.progress.events():
                yield event
        if self.template is not None:
            of_pod = interleaved(of_pod, self.retry_events.events())
        async for event in of_pod:
            yield event

    def cancel(self) -> None:
        super().cancel()
        self.retry_events.end()


START_ATTEMPTS = 4
"""Number of refusals by kubelets and failures of the API after which a spawn fails. Our value: a report may be slightly
outdated, and each attempt reads the GPUs again. Refusals by the scheduler do not count, because each excludes one more
node.
"""


@dataclass(frozen=True)
class ServerPod:
    """Operations on the pod of one server."""

    reserve: Callable[[], Awaitable[PodReservation]]
    """Reserves another share."""
    start: Callable[[], Awaitable[Any]]
    """Creates the pod for the attempt's share and waits until it runs. Returns the server's address."""
    remove: Callable[[], Awaitable[None]]
    read: Callable[[], Mapping[str, Any] | None]
    """Returns the pod as last seen by the watch."""
    events: Callable[[], Iterable[Mapping[str, Any]]] = tuple
    """Returns the pod's events."""


@dataclass
class PodLauncher:
    """Starts pods for one spawn, one after another, until a node runs one, an error is permanent, or the time runs out.

    Afterwards, either a pod's annotations contain the share, or the share is free again.
    """

    attempt: PodAttempt
    reservations: PodReservations
    pod: ServerPod
    start_timeout: float
    """Seconds for all attempts together."""
    log: logging.Logger
    name: str
    _refused: dict[str, str] = field(default_factory=dict)
    """The nodes that refused the pod, each with its missing resource."""

    async def launch(self) -> Any:
        """Start the server and return its address. Raises SpawnRefused or KubeSpawner's errors; then the share is free.

        It ends shortly before the hub's own timeout, so that the user gets a clear error.
        """
        limit = asyncio.timeout(self.start_timeout - min(1.0, 0.05 * self.start_timeout))
        try:
            async with limit:
                address = await self._start_somewhere()
            self._let_arrive()
            return address
        except BaseException as error:
            self.attempt.give_back()
            if isinstance(error, TimeoutError):
                raise self._too_slow(str(error) if not limit.expired() else "") from None
            raise
        finally:
            self.attempt.admission = None

    async def _start_somewhere(self) -> Any:
        failures = 0
        while True:
            share = self.attempt.reservation
            if share is None:
                # after a refusal by a node, retry the pod without optional parts
                share = replace(await self._reserve_on_another_node(), observed=not failures)
                self.attempt.reserved(share)
            # another layer's scheduler can keep a pod waiting indefinitely
            self.attempt.admission = PodAdmission(
                share.token, share.placement.node, events=self.pod.events, unlimited=share.offer is not None
            )
            try:
                return await self.pod.start()
            except NotAdmitted as error:
                failures += error.distrust
                await self._leave(error, share, last=failures >= START_ATTEMPTS)
            except (ApiException, ApiFailure, ClientError, SnapshotStale) as error:
                failures += 1
                if not may_pass(error) or failures >= START_ATTEMPTS:
                    raise api_refused(error) from error
                self.log.warning("%s: the cluster's API failed: %s; trying again", self.name, worded(error))
                await asyncio.sleep(0.1 * 2**failures)

    async def _reserve_on_another_node(self) -> PodReservation:
        try:
            return await self.pod.reserve()
        except SpawnRefused as refusal:
            if not self._refused:
                raise
            message = refusal.jupyterhub_message
            if words.refused_by_nodes(self._refused) not in message:
                message = words.no_node_left(self._refused, message)
            raise SpawnRefused(message, reason="not-admitted", status=503, retry_after=60) from refusal

    async def _leave(self, error: NotAdmitted, share: PodReservation, last: bool) -> None:
        """Remove a pod that its node did not admit and free its place. The caller reserves another place."""
        self.log.warning("%s: %s%s", self.name, error, f" ({error.detail})" if error.detail else "")
        node = share.placement.node
        if error.elsewhere and node:
            self._refused[node] = error.missing
            self.reservations.exclusions.leave_out(share.request, node, error.missing)
        if error.distrust and node:
            self.reservations.cluster.distrust(node)
        self.reservations.give_back(share)
        self.attempt.reservation = None
        # if the removal fails, the creation of the next pod finds this pod and retries
        await self.pod.remove()
        if last or not error.elsewhere:
            message = words.not_admitted(str(error), START_ATTEMPTS if last else None)
            raise SpawnRefused(message, reason="not-admitted", status=503, retry_after=60)
        self.attempt.retry_events.add(words.another_place(str(error)))

    def _let_arrive(self) -> None:
        share = self.attempt.reservation
        if share is None:
            return
        if self.reservations.arrived(share, self.pod.read()):
            self.attempt.reservation = None
        else:
            # the share stays reserved until the server stops, so that no unit is allocated twice while this hub runs
            self.log.error(
                "The pod of %s has lost the annotations or the label of its GPU share; does a modify_pod_hook replace "
                "them?",
                self.name,
            )

    def _too_slow(self, text: str) -> SpawnRefused:
        pod = self.pod.read()
        why = (why_waiting(pod) if pod is not None else "") or text or ("" if pod else words.POD_NOT_SEEN)
        return SpawnRefused(words.too_slow(self.start_timeout, why), reason="too-slow", status=503)
