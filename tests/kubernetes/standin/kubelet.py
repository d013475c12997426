"""The stand-in kubelet: a node, its devices and its pods, each pod a process on this machine.

An ordinary client of the API server it is given, be that the stand-in or a real one. Several live in one test.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from .claim_plugins import ClaimPlugins
from .client import ApiStatus, KubeClient, path
from .devices import AdmissionError, Devices
from .loopback import PodAddresses
from .node_resize import Resizes, check_free
from .plugin_socket import PluginSocket
from .pod_resources import BLIND_SECONDS, PodResourcesSocket
from .pod_worker import PodWorker
from .programs import Processes, Programs
from .quantities import quantity
from .scheduler import now, requests

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[3]
_HEARTBEAT = 10.0


def image_environment() -> dict[str, str]:
    """What an image would set: here, that this source tree's package is found."""
    return {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8", "PYTHONPATH": str(ROOT)}


@dataclass
class KubeletSettings:
    """How a node is."""

    cpu: str = "64"
    memory: str = "512Gi"
    pods: str = "250"
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: Sequence[Mapping[str, str]] = ()
    static_resources: Mapping[str, int] = field(default_factory=dict)
    """Extended resources without a device plugin, which an admin has written into the node's status."""
    status_interval: float = 0.2
    """Seconds between a change of devices and the node's status; a kubelet's own is 10."""
    restart_backoff: float = 10.0
    """Seconds before a container that has ended is started again; doubled each time."""
    resize_seconds: float = 0.0
    """Seconds until a granted resize is in force."""
    resize_retry: float = 180.0
    """Seconds until a resize that was not granted is tried again where nothing has changed."""
    volume_refresh: float = 0.05
    """Seconds from a change of a pod's annotations until its files say so."""
    prepare_retry: float = 0.5
    """Seconds until a claim is tried again that could not be prepared; a kubelet's own are 15 to 65."""
    driver_grace: float = 30.0
    """Seconds from the end of a DRA driver until its slices are deleted."""
    image_environment: Mapping[str, str] = field(default_factory=image_environment)
    image_command: tuple[str, ...] = ()
    """What a container without a command runs."""


class StandInKubelet:
    """Start with ``async with``. `folder` holds what would be below /var/lib/kubelet."""

    def __init__(
        self,
        name: str,
        client: KubeClient,
        folder: Path,
        addresses: PodAddresses,
        settings: KubeletSettings | None = None,
        programs: Programs | None = None,
    ) -> None:
        self.name = name
        self.client = client
        self.folder = folder
        self.addresses = addresses
        self.settings = settings or KubeletSettings()
        self.programs = programs or Processes()
        self.claims_folder = folder.parent / "claims"
        self.up = asyncio.Event()
        folder.mkdir(parents=True, exist_ok=True)
        self.devices = Devices(folder / "kubelet_internal_checkpoint")
        self.plugins = PluginSocket(self.plugin_folder, self.devices, self._devices_changed)
        self.pod_resources = PodResourcesSocket(self.pod_resources_folder, self.devices, self.active_pods)
        self.claims = ClaimPlugins(name, client, folder, self.settings.driver_grace)
        self._workers: dict[str, PodWorker] = {}
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._admission = asyncio.Lock()
        self._resizes = Resizes(
            lambda: self._workers.values(), self._check_resize, self._admission,
            self.settings.resize_retry, self.settings.resize_seconds,
        )  # fmt: skip
        self._published: dict[str, str] = {}
        self._started_before = False

    @property
    def plugin_folder(self) -> Path:
        """Where plugins put their sockets and find kubelet.sock; Unix sockets want it short (107 bytes in all)."""
        return self.folder / "device-plugins"

    @property
    def pod_resources_folder(self) -> Path:
        return self.folder / "pod-resources"

    def active_pods(self) -> list[dict[str, Any]]:
        """Pods that have not ended."""
        return [worker.pod for worker in self._workers.values() if not worker.ended]

    def worker(self, namespace: str, name: str) -> PodWorker:
        """Raises KeyError for a pod that is not here."""
        for worker in self._workers.values():
            metadata = worker.pod["metadata"]
            if (metadata["namespace"], metadata["name"]) == (namespace, name):
                return worker
        raise KeyError(f"no pod {namespace}/{name} on {self.name}")

    async def __aenter__(self) -> StandInKubelet:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.power_off()
        with contextlib.suppress(ApiStatus, aiohttp.ClientError, OSError):
            await self.client.delete(path("nodes", name=self.name))

    async def start(self) -> None:
        """The kubelet starts: plugin sockets go, pods keep what they hold, plugins must register again."""
        self.devices.load()
        await self.plugins.start()
        await self.pod_resources.start(BLIND_SECONDS if self._started_before else 0.0)
        self._started_before = True
        await self.claims.start()
        await self._register()
        self.up.set()
        selector = f"spec.nodeName={self.name}"
        self._tasks = [
            _task(self.client.follow(path("pods"), self._all_pods, self._pod, fields=selector)),
            _task(self._publish()),
            _task(self._resizes.run()),
        ]

    async def stop(self) -> None:
        """The kubelet ends; its containers run on."""
        self.up.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.claims.stop()
        await self.plugins.stop()
        await self.pod_resources.stop()

    async def restart(self, down: float = 0.0) -> None:
        """`down`: seconds without a kubelet."""
        await self.stop()
        await asyncio.sleep(down)
        await self.start()

    async def power_off(self) -> None:
        """The node goes down with everything on it."""
        await self.stop()
        workers = list(self._workers.values())
        for worker in workers:
            worker.power_off()
        for worker in workers:
            if worker.task is not None:
                await asyncio.gather(worker.task, return_exceptions=True)
            await worker.wait_for_processes()
        self._workers.clear()

    async def reboot(self) -> None:
        """Power off and start again: pods that were running are admitted anew, and fail without their devices."""
        await self.power_off()
        await self.start()

    async def admit(self, pod: dict[str, Any]) -> None:
        """Give a pod its devices. Raises AdmissionError when it cannot run here."""
        async with self._admission:
            self._check_node(pod)
            for container in [*(pod["spec"].get("initContainers") or []), *pod["spec"]["containers"]]:
                try:
                    await self.plugins.allocate(pod, container)
                except AdmissionError:
                    self.devices.free(pod["metadata"]["uid"])
                    raise
            self._check_free(pod)

    def _check_node(self, pod: dict[str, Any]) -> None:
        wanted = pod["spec"].get("nodeSelector") or {}
        labels = self._labels()
        if any(labels.get(key) != value for key, value in wanted.items()):
            raise AdmissionError("NodeAffinity", "Pod was rejected: Predicate NodeAffinity failed")

    def _check_free(self, pod: dict[str, Any]) -> None:
        others = [
            worker.granted.asks(worker.pod)
            for uid, worker in self._workers.items()
            if not worker.ended and uid != pod["metadata"]["uid"]
        ]
        capacity = {"cpu": self.settings.cpu, "memory": self.settings.memory, "pods": self.settings.pods}
        check_free(requests(pod), others, capacity)

    def _check_resize(self, worker: PodWorker, pod: dict[str, Any]) -> None:
        """Raises AdmissionError: a kubelet asks its device manager again at each resize."""
        self._check_free(pod)
        for container in pod["spec"]["containers"]:
            for name, amount in ((container.get("resources") or {}).get("limits") or {}).items():
                if name in self.devices.offers:
                    self.devices.missing(worker.uid, container["name"], name, int(quantity(amount)))

    def pod_ended(self) -> None:
        """What a pod of this node held is free."""
        self._resizes.wake()

    async def _all_pods(self, pods: list[dict[str, Any]]) -> None:
        known = {pod["metadata"]["uid"] for pod in pods}
        for uid, worker in list(self._workers.items()):
            if uid not in known:
                worker.delete(1.0, gone=True)
        for uid in [uid for uid in self.devices.held if uid not in known]:
            self.devices.free(uid)
        for pod in pods:
            self._see(pod)

    async def _pod(self, what: str, pod: dict[str, Any]) -> None:
        worker = self._workers.get(pod["metadata"]["uid"])
        if what != "DELETED":
            self._see(pod)
        elif worker is not None:
            # without grace: it is ended all the same
            worker.delete(1.0, gone=True)

    def _see(self, pod: dict[str, Any]) -> None:
        uid = pod["metadata"]["uid"]
        if any(owner.get("kind") == "DaemonSet" for owner in pod["metadata"].get("ownerReferences") or []):
            return  # a real cluster's daemons, for which this is no node
        worker = self._workers.get(uid)
        if worker is None:
            worker = PodWorker(self, pod)
            if (pod.get("status") or {}).get("phase") in ("Failed", "Succeeded"):
                worker.ended = True
                self.devices.free(uid)
                if not pod["metadata"].get("deletionTimestamp"):
                    return
                worker.delete(0)
            self._workers[uid] = worker
            worker.update(pod)
            worker.start().add_done_callback(lambda _: self._forget(uid))
        else:
            worker.update(pod)
            self._resizes.wake()

    def _forget(self, uid: str) -> None:
        self._workers.pop(uid, None)
        self.pod_ended()

    def _devices_changed(self) -> None:
        self._changed.set()

    def _labels(self) -> dict[str, str]:
        return {
            "kubernetes.io/hostname": self.name,
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": "amd64",
            **self.settings.labels,
        }

    def _resources(self) -> tuple[dict[str, str], dict[str, str]]:
        """(capacity, allocatable)"""
        capacity = {"cpu": self.settings.cpu, "memory": self.settings.memory, "pods": self.settings.pods}
        capacity |= {name: str(amount) for name, amount in self.settings.static_resources.items()}
        allocatable = dict(capacity)
        for resource, (total, healthy) in self.devices.amounts().items():
            capacity[resource], allocatable[resource] = str(total), str(healthy)
        return capacity, allocatable

    async def _register(self) -> None:
        capacity, allocatable = self._resources()
        status = {
            "capacity": capacity,
            "allocatable": allocatable,
            "conditions": self._conditions(),
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}, {"type": "Hostname", "address": self.name}],
            "nodeInfo": {
                "kubeletVersion": "v1.34.0", "operatingSystem": "linux", "architecture": "amd64",
                "machineID": "", "systemUUID": "", "bootID": "", "kernelVersion": "", "osImage": "stand-in",
                "containerRuntimeVersion": "standin://1", "kubeProxyVersion": "",
            },
        }  # fmt: skip
        spec = {"taints": [dict(taint) for taint in self.settings.taints]} if self.settings.taints else {}
        node = {"metadata": {"name": self.name, "labels": self._labels()}, "spec": spec, "status": status}
        try:
            await self.client.create(path("nodes"), node)
        except ApiStatus as error:
            if error.reason != "AlreadyExists":
                raise
            await self.client.patch(path("nodes", name=self.name, subresource="status"), {"status": status})
        self._published = allocatable

    def _conditions(self) -> list[dict[str, str]]:
        return [
            {
                "type": "Ready",
                "status": "True",
                "reason": "KubeletReady",
                "message": "kubelet is posting ready status",
                "lastHeartbeatTime": now(),
                "lastTransitionTime": now(),
            }
        ]

    async def _publish(self) -> None:
        """Keep the node's status up to date."""
        while True:
            # not wait_for: up to Python 3.11 it may swallow a cancellation
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_HEARTBEAT):
                    await self._changed.wait()
            await asyncio.sleep(self.settings.status_interval)
            self._changed.clear()
            capacity, allocatable = self._resources()
            status = {"capacity": capacity, "allocatable": allocatable, "conditions": self._conditions()}
            try:
                await self.client.patch(path("nodes", name=self.name, subresource="status"), {"status": status})
            except (ApiStatus, aiohttp.ClientError, OSError) as error:
                log.warning("the status of node %s could not be written: %s", self.name, error)
                self._changed.set()


def _task(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task whose failure is said."""
    task = asyncio.create_task(work)

    def ended(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            log.error("a kubelet's task has failed", exc_info=task.exception())

    task.add_done_callback(ended)
    return task
