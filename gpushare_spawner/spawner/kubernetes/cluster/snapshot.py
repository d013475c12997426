"""Snapshots of the cluster's GPUs: GPUs from the agents' reports, allocations from the pods' annotations."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from gpushare_spawner.clients.object_watch import BadObjects
from gpushare_spawner.clocks import WallClock
from gpushare_spawner.model.kubernetes.annotations import AnnotationProblem, pod_session
from gpushare_spawner.model.kubernetes.container_requests import notebook_container
from gpushare_spawner.model.kubernetes.node_reports import FirstIdentities, NodeReport
from gpushare_spawner.model.kubernetes.objects import REPORT_STALE_SECONDS, gpu_index_of, has_claim, is_mirror, node_of
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.report import ClaimsReport, Notice, Report
from gpushare_spawner.model.share import UNITS_PER_GPU, Share, split_session_id
from gpushare_spawner.placement.departures import IdleSince
from gpushare_spawner.placement.feed import EntrySource, LedgerFeed
from gpushare_spawner.placement.node import Allocation
from gpushare_spawner.sharing.base import Tenant
from gpushare_spawner.spawner.kubernetes.cluster.layers import LayerReader
from gpushare_spawner.spawner.kubernetes.cluster.node_resources import ChangedObjects, ClusterResources
from gpushare_spawner.spawner.kubernetes.cluster.pods import RESERVATION, annotation, created_at, holds_share
from gpushare_spawner.spawner.kubernetes.cluster.reflectors import PODS, SnapshotStale, freshen, has_listed
from gpushare_spawner.spawner.queue.queue import LoopBreaks
from gpushare_spawner.spawner.queue.snapshot import GpuInventory, GpuSnapshot, idle_sessions
from gpushare_spawner.wording import spawn_failures
from gpushare_spawner.wording.amounts import doubled_gpu

DISTRUST_SECONDS = 10.0
"""Seconds for which a node is excluded after it did not admit a pod: the kubelet's status, which the scheduler uses,
follows the device plugin within 10 s (``nodeStatusUpdateFrequency``).
"""

BEYOND_SECONDS = 30.0
"""Seconds for which a report may offer more than its node's status before the difference is logged: `DISTRUST_SECONDS`,
plus time for a kubelet to start. Meanwhile no spawn is placed there, because the scheduler would refuse it.
"""

DROPPED_AT_ONCE = 50
"""Number of reservations that are dropped from the ledger in one piece: about 2 ms."""

REPORTS_AT_ONCE = 1000
"""Number of reports checked for their age in one piece: less than 1 ms."""

CLOSED_SECONDS = 60.0
"""Seconds until the next attempt in a namespace that the hub may not read."""


@dataclass(frozen=True)
class _SeenPod:
    """The data of one version of a pod with a share."""

    uid: str
    version: str
    token: str
    allocation: Allocation
    notice: Notice | None
    session: str = ""
    """The session's id, as its node reports it."""
    odd: bool = False
    """Whether its annotations are invalid, so that its limits count and its GPUs may become known only later."""


class ClusterSnapshots:
    """Reader of KubeSpawner's shared reflectors, which it first checks to be up to date. Maintains a ledger.

    ``reflectors``: the dict that all spawners of the hub share. A snapshot reads only the changes since the last
    snapshot, in pieces, so that many pods do not block the event loop.
    """

    def __init__(
        self,
        reflectors: Mapping[tuple[Any, ...], Any],
        reports_key: tuple[Any, ...],
        unit_size: int,
        log: logging.Logger,
        node_resources: ClusterResources,
        clock: Callable[[], float] | None = None,
        layers: LayerReader | None = None,
        claimed_capacity: int = UNITS_PER_GPU,
    ) -> None:
        """Store the settings. ``claimed_capacity``: the maximum units of a GPU on a node with claims."""
        self.reflectors = reflectors
        self.reports_key = reports_key
        self.unit_size = unit_size
        self.claimed_capacity = claimed_capacity
        self.log = log
        self.feed = LedgerFeed()
        """The ledger of the pods' allocations and of the reservations that `snapshot` has received."""
        self._clock = WallClock.of(clock)
        self.node_resources = node_resources
        """Reader of the free CPU, memory and pods of nodes; all values are unknown before its `begin`."""
        self.layers = layers
        """Reader of other sharing layers; None if there are no such layers."""
        if layers is not None:
            layers.ours = self.shows
        self._inventory = GpuInventory()
        self._reading = asyncio.Lock()
        self._readings: set[asyncio.Task[GpuSnapshot]] = set()
        """The event loop keeps only weak references to tasks."""
        self._config_maps = ChangedObjects()
        self._idle: dict[str, dict[str, IdleSince]] = {}
        """Since when sessions are idle, by node and session id."""
        self._reports: dict[str, NodeReport] = {}
        """Reports by ConfigMap, without the sessions."""
        self._awaited = ""
        self._doubled: Mapping[str, Sequence[str]] = {}
        self._changed_pods: dict[tuple[Any, ...], ChangedObjects] = {}
        self._pods: dict[str, _SeenPod] = {}
        self._promised: Counter[str] = Counter()
        """The units promised to pods, by the GPU's UUID."""
        self._odd_pods: dict[str, Mapping[str, Any]] = {}
        self._of_token: dict[str, str] = {}
        self._notices: dict[str, Notice] = {}
        self._reserved: Set[str] = frozenset()
        self._identities = FirstIdentities(log)
        self._logged: set[str] = set()
        self._distrusted: dict[str, float] = {}
        self._beyond: dict[str, float] = {}
        """When a node's report began to offer too much, by node (`time.monotonic`); infinite once it has been logged.
        """
        self._closed: dict[str | None, float] = {}
        self._bad_objects = BadObjects(log)
        self._last: tuple[float, GpuSnapshot] | None = None

    async def snapshot(
        self,
        max_age: float = 0.0,
        reserved: Callable[[], Mapping[str, Allocation]] = dict,
        in_flight: Callable[[], Iterable[Allocation]] = tuple,
    ) -> GpuSnapshot:
        """Update `feed`, and return the other data. Raises SnapshotStale.

        ``reserved`` returns the reservations by their tokens; the reservations are counted instead of their pods.
        ``in_flight`` returns the allocations of all reservations. Data that are at most ``max_age`` seconds old are
        reused.
        """
        # The caller may be cancelled (a form that has waited too long); without a task of its own, changes being read
        # would be lost.
        reading = asyncio.ensure_future(self._read_changes(max_age, reserved, in_flight))
        self._readings.add(reading)
        reading.add_done_callback(self._has_read)
        return await asyncio.shield(reading)

    def _has_read(self, reading: asyncio.Task[GpuSnapshot]) -> None:
        self._readings.discard(reading)
        # retrieved here, because the caller may have been cancelled
        if not reading.cancelled():
            reading.exception()

    async def _read_changes(
        self,
        max_age: float,
        reserved: Callable[[], Mapping[str, Allocation]],
        in_flight: Callable[[], Iterable[Allocation]],
    ) -> GpuSnapshot:
        async with self._reading:
            if self._last is not None and time.monotonic() - self._last[0] < max_age:
                return self._last[1]
            reports = self.reflectors.get(self.reports_key)
            pods = {key: reflector for key, reflector in list(self.reflectors.items()) if key[0] == PODS}
            if reports is None or not pods:
                raise SnapshotStale("pods and reports are not watched yet")
            await freshen(reports)
            for reflector in pods.values():
                await self._freshen_pods(reflector)
            breaks = LoopBreaks(lasting=self._last is None)
            before = dict(reserved())
            try:
                await breaks.through(self._read_reports(reports))
                await breaks.through(self._count_reports())
                await breaks.through(self._read_pods(pods))
                await breaks.through(self.node_resources.count())
                await breaks.through(self._count_resources())
                await breaks.through(self._count_reservations(before, reserved, in_flight))
            except Exception:
                # some changes may have been read but not counted
                for objects in (self._config_maps, *self._changed_pods.values()):
                    objects.mark_all_changed()
                self.node_resources.mark_all_changed()
                raise
            layers = self.layers.snapshot() if self.layers is not None else None
            notices = tuple(self._notices.items())
            snapshot = GpuSnapshot(self._inventory, self._awaited, notices, self._idle_since, layers)
            self._last = (time.monotonic(), snapshot)
            return snapshot

    def _count_reservations(
        self,
        before: Mapping[str, Allocation],
        reserved: Callable[[], Mapping[str, Allocation]],
        in_flight: Callable[[], Iterable[Allocation]],
    ) -> Iterator[None]:
        """Count each reservation or its pod. Between two pieces, some are counted twice, but none is missing."""
        now, counted = reserved(), {allocation.session: allocation for allocation in in_flight()}
        # a reservation with a pod that appeared after the pods were read is still counted: its pod has not been read
        # yet
        late = {token: before[token] for token in before.keys() - now.keys() - self._of_token.keys()}
        counted.update((allocation.session, allocation) for allocation in late.values())
        gone, self._reserved = self._reserved - now.keys() - late.keys(), now.keys() | late.keys()
        for token in gone:
            if token in self._of_token:
                self.feed.put(EntrySource.SEEN, self._pods[self._of_token[token]].allocation)
                yield
        for allocation in counted.values():
            self.feed.put(EntrySource.RESERVED, allocation)
            yield
        for token in self._reserved:
            if token in self._of_token:
                self.feed.drop(EntrySource.SEEN, self._pods[self._of_token[token]].allocation.session)
                yield
        dropped = [session for session in self.feed.sessions(EntrySource.RESERVED) if session not in counted]
        for start in range(0, len(dropped), DROPPED_AT_ONCE):
            # some reservations may have been made since then
            current = {allocation.session for allocation in in_flight()}
            for session in dropped[start : start + DROPPED_AT_ONCE]:
                if session not in current:
                    self.feed.drop(EntrySource.RESERVED, session)
            yield

    def _count_resources(self) -> Iterator[None]:
        for node, resources in self.node_resources.changes():
            self.feed.resources(node, resources)
            yield

    def shows(self, token: str) -> bool:
        """Return whether a reservation's pod has been seen and is counted."""
        return token in self._of_token

    def claims_of(self, node: str) -> ClaimsReport | None:
        """Return how pods get GPUs by claims on a node; None: as extended resources."""
        report = self.feed.reported(node)
        return report.claims if report is not None else None

    async def _freshen_pods(self, reflector: Any) -> None:
        """Renew a reflector of pods. Raises SnapshotStale, except for a namespace that this hub could never read.

        The hub has started no server there.
        """
        if not has_listed(reflector) and time.monotonic() < self._closed.get(reflector.namespace, 0.0):
            return
        try:
            await freshen(reflector)
        except SnapshotStale as error:
            if has_listed(reflector) or not error.forbidden:
                raise
            self._closed[reflector.namespace] = time.monotonic() + CLOSED_SECONDS
            self.log.warning("%s; shares are placed without it", error)

    def distrust(self, node: str) -> None:
        """Exclude a node for `DISTRUST_SECONDS`: it did not admit a pod that fitted according to its report."""
        self._distrusted[node] = time.monotonic() + DISTRUST_SECONDS

    def pods(self) -> Iterable[Mapping[str, Any]]:
        """Return all watched pods of the hub, except mirror pods."""
        for key, reflector in list(self.reflectors.items()):
            if key[0] == PODS:
                yield from (pod for pod in list(reflector.resources.values()) if not is_mirror(pod["metadata"]))

    # -- reports --

    def _read_reports(self, reflector: Any) -> Iterator[None]:
        """Read the reports that have changed."""
        now = time.monotonic()
        for changed in self._config_maps.pieces(lambda: reflector.resources):
            for key, _, config_map in changed:
                with self._bad_objects.apart(f"ConfigMap {key}"):
                    self._take_report(key, config_map, now)
                yield
            yield

    def _take_report(self, key: str, config_map: Mapping[str, Any] | None, now: float) -> None:
        before = self._reports.get(key)
        if config_map is None:
            if before is not None and before.report is not None:
                self._idle.pop(before.report.node, None)
            self._reports.pop(key, None)
            return
        read = NodeReport.read(config_map, before, now, self.log)
        if read is not before and read.report is not None:
            self._idle[read.report.node] = idle_sessions(read.report, self._clock())
            # the pods' annotations decide which session holds which units: a report is up to a minute behind them
            read = replace(read, report=read.report.model_copy(update={"sessions": ()}))
        self._reports[key] = read

    def _count_reports(self) -> Iterator[None]:
        """Use the fresh reports for placement from now on. Set `_awaited`, a sentence on unusable reports."""
        now, monotonic = self._clock(), time.monotonic()
        silent: dict[str, float] = {}
        distrusted: list[Report] = []
        beyond: dict[str, str] = {}
        fresh: dict[str, Report] = {}
        for number, read in enumerate(self._reports.values()):
            if number % REPORTS_AT_ONCE == 0:
                yield
            report = read.report
            # an observing agent has no GPUs for placement
            if report is None or not report.gpus:
                continue
            age = read.age(self._clock.since_set(report.published_at), now, monotonic)
            if age > REPORT_STALE_SECONDS:
                silent[report.node] = age
            elif self._distrusted.get(report.node, 0.0) > monotonic:
                distrusted.append(report)
            elif problem := self._beyond_node(report):
                beyond[report.node] = problem
            else:
                fresh[report.node] = report
        for node, counted in self.feed.follow_reports(fresh):
            if counted is None:
                self._inventory.drop(node)
            else:
                self._inventory.put(node, counted.gpus)
            yield
        self._log_doubled()
        self._awaited = next(iter(beyond.values()), "") or _awaited(silent, distrusted, bool(fresh))
        self._log_beyond(beyond, monotonic)

    def _log_doubled(self) -> None:
        """Log GPUs that several nodes report, at the start and when their nodes change."""
        doubled = self._inventory.doubled
        for uuid, nodes in doubled.items():
            if self._doubled.get(uuid) != nodes:
                self.log.warning("%s", doubled_gpu(uuid, nodes))
        self._doubled = doubled

    def _beyond_node(self, report: Report) -> str:
        """Return a sentence if a report offers more than its node has; empty if it does not, or if unknown.

        A node's status contains the devices of its plugin: the pods' devices, and as many free devices as the GPU's
        remaining units allow. Sessions with a grown share use more units than their devices, at most the units promised
        to their pods. If pods get GPUs by claims, the status has no devices (0 after a plugin was removed), so each GPU
        counts with the units of the hub's settings. Lent units raise the ResourceSlice of such a node, but not its
        report.
        """
        devices = self.node_resources.gpu_devices(report.node)
        if devices is None:
            return ""
        by_claims = report.claims is not None and not any(devices.values())
        # all instances of a GPU have its index
        reported: Counter[int] = Counter()
        promised: Counter[int] = Counter()
        for gpu in report.gpus:
            reported[gpu.index] += gpu.capacity_units
            promised[gpu.index] += self._promised[gpu.uuid] if gpu.mig is None else 0
        for index, units in reported.items():
            if by_claims:
                if units > self.claimed_capacity:
                    return spawn_failures.report_beyond_claims(report.node, index, units, self.claimed_capacity)
                continue
            offered = devices.get(index, 0)
            if units > (offered + 1) * self.unit_size - 1 + promised[index]:
                return spawn_failures.report_beyond_node(report.node, index, units, offered * self.unit_size)
        return ""

    def _log_beyond(self, beyond: Mapping[str, str], now: float) -> None:
        """Log a persistent difference. A node that has just joined has no devices in its status for some seconds."""
        self._beyond = {node: self._beyond.get(node, now) for node in beyond}
        for node, since in self._beyond.items():
            if now - since >= BEYOND_SECONDS:
                self._beyond[node] = math.inf
                self.log.error("%s", beyond[node])

    # -- pods --

    def _read_pods(self, reflectors: Mapping[tuple[Any, ...], Any]) -> Iterator[None]:
        """Read the pods that have changed."""
        for key in self._changed_pods.keys() - reflectors.keys():
            yield from self._take_pods(self._changed_pods.pop(key), lambda: {})
        for key, reflector in reflectors.items():
            changed = self._changed_pods.setdefault(key, ChangedObjects())
            yield from self._take_pods(changed, functools.partial(getattr, reflector, "resources"))
        for name, pod in list(self._odd_pods.items()):
            with self._bad_objects.apart(f"Pod {name}"):
                self._take_pod(name, pod)
        self._identities.forget((pod.uid for pod in self._pods.values()), len(self._pods))

    def _take_pods(self, pods: ChangedObjects, objects: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
        for changed in pods.pieces(objects):
            for name, _, pod in changed:
                with self._bad_objects.apart(f"Pod {name}"):
                    self._take_pod(name, pod)
                yield
            yield

    def _take_pod(self, name: str, pod: Mapping[str, Any] | None) -> None:
        """Count a pod's allocation; ``pod`` is None if the pod was deleted."""
        before = self._pods.get(name)
        # Do the part that can fail first, so that an unreadable pod is counted as before.
        now = self._seen_pod(name, pod, before) if pod is not None and holds_share(pod) else None
        self._pods.pop(name, None)
        self._count_promised(before, now)
        if now is None or not now.odd:
            self._odd_pods.pop(name, None)
        if before is not None and (now is None or now.allocation.session != before.allocation.session):
            self.feed.drop(EntrySource.SEEN, before.allocation.session)
        if before is not None:
            self._notices.pop(before.allocation.session, None)
            self._of_token.pop(before.token, None)
        if now is None:
            return
        self._pods[name] = now
        if now.token:
            self._of_token[now.token] = name
        if now.notice is not None:
            self._notices[now.allocation.session] = now.notice
        if now.token not in self._reserved:
            self.feed.put(EntrySource.SEEN, now.allocation)

    def _count_promised(self, before: _SeenPod | None, now: _SeenPod | None) -> None:
        if before is not None:
            for uuid in before.allocation.gpus:
                self._promised[uuid] -= before.allocation.on(uuid).share_units
                if not self._promised[uuid]:
                    del self._promised[uuid]
        if now is not None:
            self._promised.update({uuid: now.allocation.on(uuid).share_units for uuid in now.allocation.gpus})

    def _seen_pod(self, name: str, pod: Mapping[str, Any], before: _SeenPod | None) -> _SeenPod:
        uid, version = pod["metadata"]["uid"], pod["metadata"].get("resourceVersion") or ""
        token = annotation(pod, RESERVATION)
        if before is not None and (before.uid, before.version, before.odd) == (uid, version, False):
            return before
        pod = self._identities.with_first(pod)
        try:
            allocation, notice, session = self._parsed(pod)
        except (AnnotationProblem, ValueError) as problem:
            # Read the pod again each time, because its GPUs may become known only later.
            self._odd_pods[name] = pod
            return _SeenPod(uid, version, token, self._by_limits(pod, problem), None, odd=True)
        return _SeenPod(uid, version, token, allocation, notice, session)

    def _parsed(self, pod: Mapping[str, Any]) -> tuple[Allocation, Notice | None, str]:
        metadata = pod["metadata"]
        session = pod_session(metadata.get("annotations"), metadata.get("labels"))
        user = split_session_id(session.session)[0]
        if session.layer is not LayerName.NATIVE:
            tenant = Tenant(user, quota=session.quota)
            elsewhere = allocation_elsewhere(_name(pod), session.share, tenant, session.template, created_at(pod))
            return elsewhere, None, session.session
        share = self.counted(session.share)
        allocation = Allocation(
            session=_name(pod),
            gpus=session.gpus,
            share_units=share.units,
            last_units=share.last_units,
            borrowed_units=self.whole_devices(session.borrowed_units),
            effective_units=self.whole_devices(session.effective_units),
            opened_at=created_at(pod),
            user=user,
            quota=session.quota,
            template=session.template,
            neighbours=session.neighbours,
        )
        return allocation, session.notice, session.session

    def _idle_since(self, name: str) -> IdleSince | None:
        """Return since when a pod's session is idle, as its node reports."""
        pod, node = self._pods.get(name.rpartition("#")[0]), self.feed.ledger.node_of(name)
        return self._idle.get(node or "", {}).get(pod.session) if pod is not None else None

    def counted(self, share: Share) -> Share:
        """Return the share in whole devices."""
        units, last = self.whole_devices(share.units), self.whole_devices(share.last_units)
        return Share(units, share.count, last if last < units else 0)

    def whole_devices(self, units: int) -> int:
        """Return the units, rounded up to whole devices: the kubelet allocates devices of ``unit_size`` units."""
        return -(-units // self.unit_size) * self.unit_size

    def _by_limits(self, pod: Mapping[str, Any], problem: Exception) -> Allocation:
        """Return the allocation as the scheduler counts it: at least the actual allocation, perhaps more."""
        name = _name(pod)
        if name not in self._logged:
            self._logged.add(name)
            self.log.error("Pod %s: its annotations are wrong, so its limits count instead: %s", name, problem)
        spec = pod["spec"]
        if has_claim(spec):
            # The pod does not contain the claim's units, so its GPUs count as whole GPUs.
            env = notebook_container(spec).get("env") or []
            visible = next(
                (variable.get("value") or "" for variable in env if variable["name"] == "CUDA_VISIBLE_DEVICES"), ""
            )
            uuids = tuple(filter(None, visible.split(",")))
            return Allocation(name, uuids, UNITS_PER_GPU, 0, UNITS_PER_GPU, created_at(pod))
        node = node_of(spec)
        limits = (notebook_container(spec).get("resources") or {}).get("limits") or {}
        devices = {
            index: int(amount) if str(amount).isdecimal() else UNITS_PER_GPU
            for key, amount in limits.items()
            if (index := gpu_index_of(key)) is not None
        }
        units = min(UNITS_PER_GPU, max([*devices.values(), 1]) * self.unit_size)
        report = self.feed.reported(node)
        by_index = {gpu.index: gpu.uuid for gpu in report.gpus} if report is not None else {}
        gpus = tuple(by_index[index] for index in devices if index in by_index)
        return Allocation(name, gpus, units, 0, units, created_at(pod))


def allocation_elsewhere(session: str, share: Share, tenant: Tenant, template: str, opened_at: float) -> Allocation:
    """Return a session's allocation on another sharing layer's GPUs, which reports do not contain, for the quotas."""
    gpus = tuple(f"{session}/{index}" for index in range(share.count))
    return Allocation(
        session=session,
        gpus=gpus,
        share_units=share.units,
        effective_units=share.units,
        opened_at=opened_at,
        user=tenant.user,
        quota=tenant.quota,
        template=template,
    )


def _name(pod: Mapping[str, Any]) -> str:
    # The old and the new pod of one server can exist at the same time. Both count.
    return f"{pod['metadata'].get('namespace')}/{pod['metadata']['name']}#{pod['metadata']['uid']}"


def _awaited(silent: Mapping[str, float], distrusted: list[Report], any_fresh: bool) -> str:
    if distrusted:
        return spawn_failures.node_left_alone(distrusted[0].node)
    if silent:
        return spawn_failures.nodes_without_reports(list(silent), min(silent.values()))
    return "" if any_fresh else spawn_failures.NO_REPORT_YET
