"""Devices by pod, as listed by the kubelet (PodResources v1), and the loop that reads the list.

The list is read every `ASK_EVERY` seconds, and soon after a change. pods/sessions.py reconciles it with pods.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from gpushare_spawner.agent.kubernetes.kubelet import podresources_pb2 as messages
from gpushare_spawner.agent.kubernetes.kubelet import podresources_pb2_grpc as services
from gpushare_spawner.background import Background, set_within
from gpushare_spawner.log_once import LogOnce

log = logging.getLogger(__name__)


ANSWER_WITHIN = 5.0
"""Seconds within which the kubelet must answer."""

PodKey = tuple[str, str]
"""Namespace and name of a pod."""
DeviceIds = tuple[frozenset[str], ...]
"""IDs of devices, one set for each container that has any."""


@dataclass(frozen=True)
class KubeletAssignments:
    """The devices that the kubelet has assigned, at one instant."""

    by_pod: Mapping[PodKey, Mapping[str, DeviceIds]]
    """IDs of devices by pod, resource name and container."""
    offered: Mapping[str, frozenset[str]]
    """IDs of all healthy devices of all plugins on the node, by resource name."""
    started: float | None = None
    """Creation time of the kubelet's socket, by the node's clock: a different time means a restart."""


ASK_EVERY = 30.0
"""Seconds between reads of the device assignments while nothing changes."""
SOON = 0.1
"""Seconds until the list is read for the pod of a new grant; doubled at each attempt, up to `NOT_SO_SOON`."""
NOT_SO_SOON = 2.0


class PodResources(Background):
    """Reader of the kubelet's list. It makes one read at a time, so an older answer never follows a newer one."""

    def __init__(
        self, socket: Path, take: Callable[[KubeletAssignments | None], None], all_listed: Callable[[], bool]
    ) -> None:
        """`take` processes an answer; None: no answer. `all_listed`: whether the kubelet has listed all grants."""
        self._socket = socket
        self._take = take
        self._all_listed = all_listed
        self._due = asyncio.Event()
        self._asking = asyncio.Lock()
        self._trouble = LogOnce(
            log,
            "Cannot read device assignments from the kubelet; retrying",
            "Device assignments are read from the kubelet again",
        )

    def soon(self) -> None:
        """Read soon, and again until the kubelet has listed all grants."""
        self._due.set()

    async def once(self) -> None:
        """Read now.

        For about a second after its start, the kubelet lists no pods although they hold their devices, so an empty list
        does not prove that devices are free.
        """
        async with self._asking:
            started, assignments = self._started(), None
            try:
                async with grpc.aio.insecure_channel(f"unix://{self._socket}") as channel:
                    lister = services.PodResourcesListerStub(channel)  # type: ignore[no-untyped-call]
                    listed = await lister.List(messages.ListPodResourcesRequest(), timeout=ANSWER_WITHIN)
                    assignments = KubeletAssignments(_by_pod(listed), await self._offered(lister), started)
                self._trouble.resolved()
            except grpc.aio.AioRpcError as error:
                self._trouble.about(f"{self._socket} does not answer: {error.details()}")
            self._take(assignments)

    def _started(self) -> float | None:
        try:
            return self._socket.stat().st_ctime
        except OSError:
            return None

    async def _offered(self, lister: services.PodResourcesListerStub) -> dict[str, frozenset[str]]:
        offered: dict[str, frozenset[str]] = {}
        # this call can be disabled; the devices of other plugins are then unknown
        with contextlib.suppress(grpc.aio.AioRpcError):
            answer = await lister.GetAllocatableResources(messages.AllocatableResourcesRequest(), timeout=ANSWER_WITHIN)
            for devices in answer.devices:
                ids = offered.get(devices.resource_name, frozenset())
                offered[devices.resource_name] = ids | frozenset(devices.device_ids)
        return offered

    async def _run(self) -> None:
        while True:
            pause = SOON
            await set_within(self._due, ASK_EVERY)
            self._due.clear()
            while True:
                await asyncio.sleep(pause)
                try:
                    await self.once()
                except Exception:
                    log.exception("cannot process the kubelet's device assignments; retrying")
                if self._all_listed():
                    break
                pause = SOON if self._due.is_set() else min(2 * pause, NOT_SO_SOON)
                self._due.clear()


def _by_pod(listed: messages.ListPodResourcesResponse) -> dict[PodKey, dict[str, DeviceIds]]:
    by_pod: dict[PodKey, dict[str, DeviceIds]] = {}
    for pod in listed.pod_resources:
        held = by_pod.setdefault((pod.namespace, pod.name), {})
        for container in pod.containers:
            # a container's devices of one resource can be in several parts, one per NUMA node
            parts: dict[str, set[str]] = {}
            for devices in container.devices:
                parts.setdefault(devices.resource_name, set()).update(devices.device_ids)
            for resource, ids in parts.items():
                held[resource] = (*held.get(resource, ()), frozenset(ids))
    return by_pod
