"""What the hub knows of the cluster's GPUs: the agents' reports say what there is, the pods' annotations who has it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from gpushare_spawner.model.kubernetes import (
    REPORT_KEY,
    REPORT_STALE_SECONDS,
    AnnotationProblem,
    PodConstraints,
    gpu_index_of,
    misplaced_report,
    node_of,
    pod_session,
)
from gpushare_spawner.model.report import Notice, Report
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.placement import Allocation
from gpushare_spawner.sharing.native_pod import notebook_container
from gpushare_spawner.spawner.kubernetes.cluster.capacity import ClusterCapacity
from gpushare_spawner.spawner.kubernetes.cluster.pods import RESERVATION, annotation, created_at, holds_share
from gpushare_spawner.spawner.kubernetes.cluster.reflectors import SnapshotStale, freshen, has_listed
from gpushare_spawner.spawner.queue.snapshot import GpuSnapshot
from gpushare_spawner.wording import refusals

PODS = "pods"
REPORTS = "gpushare-reports"
"""Kinds in the key of a shared reflector; KubeSpawner's own for pods."""

DISTRUST_SECONDS = 10.0
"""How long a node is left alone after it did not admit a pod: the kubelet's status, by which the scheduler goes,
follows the device plugin within 10 s (``nodeStatusUpdateFrequency``)."""

CLOSED_SECONDS = 60.0
"""For how long a namespace that the hub may not look into is not tried again."""


@dataclass(frozen=True)
class _ParsedPod:
    """What the annotations of one version of a pod say."""

    version: str
    allocation: Allocation
    announced: Notice | None


class ClusterSnapshots:
    """Reads KubeSpawner's shared reflectors, after making sure that they show what is.

    ``reflectors`` is the dict that all spawners of the hub share. What pods and reports say is parsed once for each of
    their versions.
    """

    def __init__(
        self,
        reflectors: Mapping[tuple[Any, ...], Any],
        reports_key: tuple[Any, ...],
        unit_size: int,
        log: logging.Logger,
        clock: Callable[[], float] = time.time,
        capacity: ClusterCapacity | None = None,
    ) -> None:
        self.reflectors = reflectors
        self.reports_key = reports_key
        self.unit_size = unit_size
        self.log = log
        self._clock = clock
        self._capacity = capacity
        self._parsed_reports: dict[str, tuple[str, Report | None]] = {}
        self._parsed_pods: dict[str, _ParsedPod] = {}
        self._told: set[str] = set()
        self._distrusted: dict[str, float] = {}
        self._closed: dict[str | None, float] = {}
        self._last: tuple[float, GpuSnapshot] | None = None

    async def snapshot(self, max_age: float = 0.0, arrived: Iterable[str] = ()) -> GpuSnapshot:
        """The GPUs of all nodes with a fresh report, and what pods hold. Raises SnapshotStale.

        ``arrived``: reservations whose pods are left out, because they are counted elsewhere. A snapshot that is at
        most ``max_age`` seconds old will do.
        """
        if self._last is not None and time.monotonic() - self._last[0] < max_age:
            return self._last[1]
        reports = self.reflectors.get(self.reports_key)
        pods = [reflector for key, reflector in list(self.reflectors.items()) if key[0] == PODS]
        if reports is None or not pods:
            raise SnapshotStale("pods and reports are not watched yet")
        await freshen(reports)
        for reflector in pods:
            await self._freshen_pods(reflector)
        fresh, awaited = self._fresh_reports(reports)
        allocations = tuple(self._allocations(fresh, set(arrived)))
        announced = [(pod.allocation.session, pod.announced) for pod in self._parsed_pods.values()]
        snapshot = GpuSnapshot(
            fresh,
            allocations,
            awaited,
            tuple((name, due) for name, due in announced if due is not None),
            self._capacity.resources() if self._capacity is not None else {},
        )
        self._last = (time.monotonic(), snapshot)
        return snapshot

    def counted_pods(self) -> frozenset[str]:
        """Reservations whose pods are taken off the free CPU, memory and pods of their nodes already."""
        return self._capacity.bound() if self._capacity is not None else frozenset()

    def ineligible(self, constraints: PodConstraints) -> frozenset[str]:
        """Nodes whose taints or labels keep a pod out, as far as they are known."""
        return self._capacity.ineligible(constraints) if self._capacity is not None else frozenset()

    def read_capacity(self) -> None:
        """Begin to read what nodes have free of CPU, memory and pods; nothing happens where that was begun."""
        if self._capacity is not None:
            self._capacity.begin()

    async def _freshen_pods(self, reflector: Any) -> None:
        """Raises SnapshotStale; not for a namespace that this hub never could read: it has started nothing there."""
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
        """Leave a node alone for a moment: it did not admit a pod that it should have had room for."""
        self._distrusted[node] = time.monotonic() + DISTRUST_SECONDS

    def pods(self) -> Iterable[Mapping[str, Any]]:
        """All pods of the hub that are watched."""
        for key, reflector in list(self.reflectors.items()):
            if key[0] == PODS:
                yield from list(reflector.resources.values())

    # -- reports --

    def _fresh_reports(self, reflector: Any) -> tuple[tuple[Report, ...], str]:
        """Reports to place by, and a sentence about those that will not do."""
        now, fresh, silent, distrusted = self._clock(), [], [], []
        known = reflector.resources
        for key, config_map in list(known.items()):
            report = self._report(key, config_map)
            if report is None:
                continue
            if now - report.published_at > REPORT_STALE_SECONDS:
                silent.append(report)
            elif self._distrusted.get(report.node, 0.0) > time.monotonic():
                distrusted.append(report)
            else:
                fresh.append(report)
        for key in self._parsed_reports.keys() - known.keys():
            del self._parsed_reports[key]
        return tuple(fresh), _awaited(now, silent, distrusted, bool(fresh))

    def _report(self, key: str, config_map: Mapping[str, Any]) -> Report | None:
        version = config_map["metadata"].get("resourceVersion") or ""
        parsed = self._parsed_reports.get(key)
        if parsed is None or parsed[0] != version:
            parsed = self._parsed_reports[key] = (version, self._read(key, config_map))
        return parsed[1]

    def _read(self, key: str, config_map: Mapping[str, Any]) -> Report | None:
        try:
            report = Report.model_validate_json((config_map.get("data") or {}).get(REPORT_KEY) or "")
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or REPORT_KEY
            self.log.error("ConfigMap %s is no report of an agent (%s: %s)", key, where, first["msg"])
            return None
        if (problem := misplaced_report(config_map["metadata"]["name"], report)) is not None:
            self.log.error("%s: this report is ignored", problem)
            return None
        # who holds what is the pods' to say: a report is up to a minute behind them
        return report.model_copy(update={"sessions": ()})

    # -- pods --

    def _allocations(self, reports: Iterable[Report], arrived: set[str]) -> Iterable[Allocation]:
        seen = set()
        by_index: dict[tuple[str, int], str] = {}
        for pod in self.pods():
            if not holds_share(pod):
                continue
            uid, version = pod["metadata"]["uid"], pod["metadata"].get("resourceVersion") or ""
            seen.add(uid)
            if arrived and annotation(pod, RESERVATION) in arrived:
                continue
            parsed = self._parsed_pods.get(uid)
            if parsed is None or parsed.version != version:
                if not by_index:
                    by_index = {(report.node, gpu.index): gpu.uuid for report in reports for gpu in report.gpus}
                try:
                    parsed = self._parsed_pods[uid] = self._parsed(pod, version)
                except AnnotationProblem as problem:
                    # not kept: its GPUs may be known only later
                    yield self._by_limits(pod, by_index, problem)
                    continue
            yield parsed.allocation
        for uid in self._parsed_pods.keys() - seen:
            del self._parsed_pods[uid]

    def _parsed(self, pod: Mapping[str, Any], version: str) -> _ParsedPod:
        session = pod_session(pod["metadata"].get("annotations"))
        allocation = Allocation(
            session=_name(pod),
            gpus=session.gpus,
            share_units=self.whole_devices(session.share_units),
            borrowed_units=self.whole_devices(session.borrowed_units),
            effective_units=self.whole_devices(session.effective_units),
            opened_at=created_at(pod),
        )
        return _ParsedPod(version, allocation, session.notice)

    def whole_devices(self, units: int) -> int:
        """Units of the devices that so many units take: the kubelet gives out devices of ``unit_size`` units."""
        return -(-units // self.unit_size) * self.unit_size

    def _by_limits(
        self, pod: Mapping[str, Any], by_index: Mapping[tuple[str, int], str], problem: AnnotationProblem
    ) -> Allocation:
        """What the scheduler counts: more than the truth perhaps, never less."""
        name = _name(pod)
        if name not in self._told:
            self._told.add(name)
            self.log.error("Pod %s counts by its limits, its annotations will not do: %s", name, problem)
        spec = pod["spec"]
        node = node_of(spec)
        limits = (notebook_container(spec).get("resources") or {}).get("limits") or {}
        wanted = {
            index: int(amount) if str(amount).isdecimal() else UNITS_PER_GPU
            for key, amount in limits.items()
            if (index := gpu_index_of(key)) is not None
        }
        units = min(UNITS_PER_GPU, max([*wanted.values(), 1]) * self.unit_size)
        gpus = tuple(by_index[node, index] for index in wanted if (node, index) in by_index)
        return Allocation(name, gpus, units, 0, units, created_at(pod))


def _name(pod: Mapping[str, Any]) -> str:
    # two pods of one server can exist for a moment, the old one going and the new one coming: both count
    return f"{pod['metadata'].get('namespace')}/{pod['metadata']['name']}#{pod['metadata']['uid']}"


def _awaited(now: float, silent: list[Report], distrusted: list[Report], any_fresh: bool) -> str:
    if distrusted:
        return refusals.node_left_alone(distrusted[0].node)
    if silent:
        age = now - max(report.published_at for report in silent)
        return refusals.nodes_without_reports([report.node for report in silent], age)
    return "" if any_fresh else refusals.NO_REPORT_YET
