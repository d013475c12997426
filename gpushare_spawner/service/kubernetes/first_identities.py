"""The identity of each pod when the service saw it first: a node's kubelet can later write to its pods' annotations.

Does not keep other facts of a pod, which can change: see `pod_sessions`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from gpushare_spawner.model import kubernetes
from gpushare_spawner.model.kubernetes.annotations import QUOTA

log = logging.getLogger("gpushare.service.cluster")

IDENTITY = (kubernetes.SESSION, kubernetes.TEMPLATE, QUOTA, kubernetes.HUB)
"""Annotations that the hub writes when it creates a pod, and that never change."""
MOST_GONE = 1000
"""Pods that are remembered after they left the watch: a pod with a label removed and set again is not new."""


class FirstIdentities:
    """The identities of pods by their uids, for as long as the pods exist."""

    def __init__(self) -> None:
        self._first: dict[str, tuple[str | None, ...]] = {}
        """By uid, the latest at the end."""
        self._refused: set[str] = set()
        """Uids of pods with a logged change."""

    def keep(self, pod: dict[str, Any]) -> dict[str, Any]:
        """Write the first identity into a pod of our own, and return it. Log a change once for each pod."""
        metadata = pod["metadata"]
        annotations, uid = metadata["annotations"], metadata.get("uid")
        if not uid or kubernetes.is_mirror(metadata):
            return pod
        current = tuple(annotations.get(name) for name in IDENTITY)
        first = self._first.setdefault(uid, current)
        if first == current:
            return pod
        for name, text in zip(IDENTITY, first, strict=True):
            annotations.pop(name, None)
            if text is not None:
                annotations[name] = text
        if uid not in self._refused:
            self._refused.add(uid)
            changed = [name for name, before, now in zip(IDENTITY, first, current, strict=True) if before != now]
            log.error(
                "Pod %s/%s was the server of session %s when it was seen first; a change of %s is refused. Nobody but "
                "the hub writes these annotations: look who may change pods, and at node %s",
                metadata.get("namespace"),
                metadata["name"],
                first[0],
                ", ".join(changed),
                pod["spec"].get("nodeName", ""),
            )
        return pod

    def forget(self, there: Collection[str]) -> None:
        """Forget the pods that have left first, beyond `MOST_GONE`. ``there``: the uids of pods that are watched."""
        if len(self._first) <= len(there) + MOST_GONE:
            return
        gone = [uid for uid in self._first if uid not in there]
        for uid in gone[: max(0, len(gone) - MOST_GONE)]:
            del self._first[uid]
            self._refused.discard(uid)
