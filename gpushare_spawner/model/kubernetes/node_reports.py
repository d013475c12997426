"""Reports of nodes, read from their ConfigMaps, and the identities that pods had when they were first seen.

The spawner and the service join reports with pods by these rules. A session's owner comes from its pod, never from a
report. Because a node's kubelet can later change its pods' annotations, the first identity of each pod is recorded. No
other data of a pod is recorded, because it can legitimately change.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from gpushare_spawner.model.controls import ASK_SECONDS
from gpushare_spawner.model.kubernetes.annotations import HUB, QUOTA, SESSION, TEMPLATE
from gpushare_spawner.model.kubernetes.objects import REPORT_KEY, is_mirror, misplaced_report, read_report
from gpushare_spawner.model.part import faults
from gpushare_spawner.model.report import Report, with_reported_since

IDENTITY = (SESSION, TEMPLATE, QUOTA, HUB)
"""Annotations that the hub writes when it creates a pod and that never change."""
MOST_GONE = 1000
"""Maximum number of pods recorded after they have left the watch: a pod with a label that is removed and set again is
not new."""


@dataclass(frozen=True)
class NodeReport:
    """A parsed ConfigMap."""

    version: str
    """Its resourceVersion."""
    report: Report | None
    """The report; None if this version cannot parse it."""
    problem: str
    """The reason why there is no report, as a clause; empty: there is a report."""
    at: float
    """Time at which it was read (`time.monotonic`)."""

    @classmethod
    def read(
        cls, config_map: Mapping[str, Any], before: NodeReport | None, now: float, log: logging.Logger
    ) -> NodeReport:
        """Return the report of a ConfigMap, or ``before`` if its version is the same. A new problem is logged.

        ``before``: the last result for this ConfigMap; ``now``: `time.monotonic`.
        """
        metadata = config_map["metadata"]
        version = metadata.get("resourceVersion") or ""
        if before is not None and before.version == version:
            return before
        report, problem = None, ""
        try:
            report = read_report(config_map)
        except ValidationError as error:
            problem = f"not a report that this version can read: {faults(error, REPORT_KEY)[0]}"
        else:
            if misplaced := misplaced_report(metadata["name"], report):
                report, problem = None, f"{misplaced}: this report is ignored"
        if report is not None:
            report = with_reported_since(report, before.report if before is not None else None, now)
        if problem and (before is None or before.problem != problem):
            log.error("ConfigMap %s: %s", metadata["name"], problem)
        return cls(version, report, problem, now)

    @cached_property
    def asks_until(self) -> float:
        """Time until which a notebook server's ask waits (`time.monotonic`); in the past: none waits."""
        if self.report is None:
            return 0.0
        asks = (ask.at for session in self.report.sessions for ask in session.asks)
        return self.at + ASK_SECONDS - max(0.0, self.report.published_at - max(asks, default=-math.inf))

    def age(self, published_at: float, now: float, monotonic: float) -> float:
        """Return the age in seconds by both clocks, so a node's fast clock cannot keep an ended agent's report fresh.

        ``published_at``: the report's time, on the clock of ``now``; ``monotonic``: `time.monotonic`.
        """
        return max(now - published_at, monotonic - self.at)


class FirstIdentities:
    """The first identities of pods, by uid, for as long as the pods exist."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._first: dict[str, tuple[str | None, ...]] = {}
        """Identities by uid, latest last."""
        self._refused: set[str] = set()
        """Uids of pods with a logged change."""

    def with_first(self, pod: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the pod with its first identity. Log a changed identity once per pod."""
        metadata = pod["metadata"]
        annotations, uid = metadata.get("annotations") or {}, metadata.get("uid")
        if not uid or is_mirror(metadata):
            return pod
        current = tuple(annotations.get(name) for name in IDENTITY)
        first = self._first.setdefault(uid, current)
        if first == current:
            return pod
        identity = {name: text for name, text in zip(IDENTITY, first, strict=True) if text is not None}
        others = {name: text for name, text in annotations.items() if name not in IDENTITY}
        if uid not in self._refused:
            self._refused.add(uid)
            changed = [name for name, before, now in zip(IDENTITY, first, current, strict=True) if before != now]
            self._log.error(
                "Pod %s/%s was the server of session %s when it was first seen; a change of %s is refused. Only "
                "the hub writes these annotations: check who may change pods, and node %s",
                metadata.get("namespace"),
                metadata["name"],
                first[0],
                ", ".join(changed),
                (pod.get("spec") or {}).get("nodeName", ""),
            )
        return {**pod, "metadata": {**metadata, "annotations": others | identity}}

    def forget(self, there: Iterable[str], count: int) -> None:
        """Discard the oldest pods that left, beyond `MOST_GONE`. ``there``: the uids of the ``count`` watched pods."""
        if len(self._first) <= count + 2 * MOST_GONE:  # not for each pod that leaves, because this reads all of them
            return
        present = set(there)
        gone = [uid for uid in self._first if uid not in present]
        for uid in gone[: max(0, len(gone) - MOST_GONE)]:
            del self._first[uid]
            self._refused.discard(uid)
