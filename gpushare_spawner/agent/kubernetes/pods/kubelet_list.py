"""What the kubelet says that pods hold: devices by pod and GPU, and which pods it no longer lists.

For about a second after its start the kubelet lists nothing, so an empty list frees nothing then. Which session a pod
is: pod_sessions.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping

from gpushare_spawner.agent.kubernetes.devices.device_owners import HeldDevices
from gpushare_spawner.agent.kubernetes.devices.pod_resources import Given, Handed, PodKey
from gpushare_spawner.log_once import EachOnce
from gpushare_spawner.model import kubernetes

log = logging.getLogger(__name__)

GONE_AFTER = 30.0
"""Seconds for which the kubelet must not have listed a pod that the API does not show, to be sure that it has ended."""
TRUST_KUBELET_AFTER = 10.0
"""Seconds from a start of the kubelet until a pod that it does not list is one that is not there: for about one second
it lists none."""


class KubeletList:
    """The kubelet's last list, and since when pods of sessions are missing in it."""

    def __init__(self, held: HeldDevices, warnings: EachOnce, clock: Callable[[], float]) -> None:
        """`held` knows the devices of this agent. `clock` gives the event loop's time in seconds."""
        self._held = held
        self._warnings = warnings
        self._clock = clock
        self._listed: dict[PodKey, dict[str, Given]] = {}
        self._absent_since: dict[PodKey, float] = {}
        self._kubelet_since = clock()
        self._kubelet_start: float | None = None

    def kubelet_started(self) -> None:
        """The kubelet started: for a while pods that it does not list may be there."""
        self._kubelet_since = self._clock()

    def take(self, handed: Handed, pods_of_sessions: Iterable[PodKey]) -> None:
        """Take the kubelet's newest list, and free devices that no pod holds.

        `pods_of_sessions`: the pods that sessions are of.
        """
        if handed.started != self._kubelet_start:
            self._kubelet_start = handed.started
            self.kubelet_started()
        self._listed = {
            key: devices for key, resources in handed.by_pod.items() if (devices := self._by_gpu(resources))
        }
        now = self._clock()
        self._absent_since = {
            key: self._absent_since.get(key, now) for key in pods_of_sessions if key not in self._listed
        }
        if self._is_complete():
            self._free_unclaimed(now)

    def pods(self) -> Iterator[tuple[PodKey, Mapping[str, Given]]]:
        """Yield each listed pod and its devices by GPU and container. The list may change meanwhile."""
        yield from list(self._listed.items())

    def drop(self, key: PodKey) -> bool:
        """The pod has ended: what the kubelet said of it before no longer counts. Return whether it was listed."""
        return self._listed.pop(key, None) is not None

    def has_ended(self, key: PodKey) -> bool:
        """Return whether the kubelet has not listed the pod for so long that it must have ended."""
        since = self._absent_since.get(key)
        return since is not None and self._clock() - since >= GONE_AFTER and self._is_complete()

    def _is_complete(self) -> bool:
        return self._clock() - self._kubelet_since >= TRUST_KUBELET_AFTER

    def _free_unclaimed(self, now: float) -> None:
        """Free devices that were allocated to a pod that never came."""
        listed = {ids for devices in self._listed.values() for given in devices.values() for ids in given}
        for grant in list(self._held.pending.values()):
            age = now - grant.made_at
            if grant.devices not in listed and (age > GONE_AFTER or not grant.asked_for):
                log.info(
                    "%d devices of GPU %s were allocated and no pod has them; they are free again",
                    len(grant.devices),
                    grant.gpu,
                )
                self._held.forget(grant)
        self._held.remove_unknown_folders(listed)

    def _by_gpu(self, resources: Mapping[str, Given]) -> dict[str, Given]:
        """A pod's devices that are this agent's."""
        found: dict[str, Given] = {}
        for resource, given in resources.items():
            if kubernetes.gpu_index_of(resource) is None:
                continue
            for ids in given:
                parts: dict[str, set[str]] = {}
                for device in ids:
                    gpu = self._held.gpu_of(device)
                    if gpu is None:
                        self._warnings.about(
                            f"device {device} of {resource} is of a GPU that this agent does not have (any more)"
                        )
                    else:
                        parts.setdefault(gpu, set()).add(device)
                for gpu, ours in parts.items():
                    found[gpu] = (*found.get(gpu, ()), frozenset(ours))
        return found
