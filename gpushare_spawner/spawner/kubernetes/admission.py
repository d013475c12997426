"""Whether a node takes the pod that was placed on it: noticed at once, or after a while where units are missing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpushare_spawner.spawner.kubernetes.pods import (
    RESERVATION,
    UNSCHEDULABLE,
    Ended,
    annotation,
    ended_by_node,
    lacks_units,
)

SCHEDULED_WITHIN = 15.0
"""Seconds that the units of a pod may be missing on its node: units that idle neighbours have lent reach the node's
status within 10 s (the kubelet's ``nodeStatusUpdateFrequency``)."""


class NotAdmitted(Exception):
    """The node that a pod was placed on did not take it."""

    def __init__(self, ended: Ended) -> None:
        super().__init__(str(ended))
        self.ended = ended


@dataclass(frozen=True)
class _Missed:
    """The scheduler's words where it does not find a pod's units, and since when it does not (seconds)."""

    said: str
    since: float


class Admission:
    """One try to get a pod onto its node. ``token`` is the annotation of the pod that is meant."""

    def __init__(self, token: str, node: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._token = token
        self._node = node
        self._clock = clock
        self._seen: Any = None
        self._missed: _Missed | None = None

    def runs(self, pod: Mapping[str, Any] | None, runs: Callable[[Any], bool]) -> bool:
        """Return whether the pod runs, by ``runs``. Raises NotAdmitted where its node does not take it.

        A node that does not have the pod's units refuses it too, after `SCHEDULED_WITHIN`: what the agent reports and
        what the node offers differ, because somebody else was quicker, or the plugin is away.
        """
        if pod is not None and pod is self._seen and self._missed is None:
            # asked for again and again, and the same until the watch brings another
            return False
        if runs(pod):
            return True
        if pod is None:
            return False
        if pod is not self._seen:
            self._look_at(pod)
        if self._missed is not None and self._clock() - self._missed.since >= SCHEDULED_WITHIN:
            raise NotAdmitted(Ended(UNSCHEDULABLE, self._missed.said, self._node))
        return False

    def _look_at(self, pod: Mapping[str, Any]) -> None:
        self._seen = pod
        ours = annotation(pod, RESERVATION) == self._token
        ended = ended_by_node(pod) if ours else None
        if ended is not None:
            raise NotAdmitted(ended)
        said = lacks_units(pod) if ours else ""
        since = self._missed.since if self._missed is not None else self._clock()
        self._missed = _Missed(said, since) if said else None
