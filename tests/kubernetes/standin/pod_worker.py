"""One pod on a kubelet: admitted, started, watched over, ended."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .claim_plugins import NotPrepared
from .client import ApiStatus, path
from .container_environment import MissingReference, container_environment, expand, in_place
from .devices import AdmissionError
from .downward_volumes import write_downward_volumes
from .node_resize import CONDITIONS, Granted
from .programs import Launch, Running
from .scheduler import now, record_event

if TYPE_CHECKING:
    from .kubelet import StandInKubelet

log = logging.getLogger(__name__)

_BACKOFF_LIMIT = 300.0


@dataclass
class Container:
    """A container's present state, as its status says it."""

    spec: dict[str, Any]
    init: bool = False
    running: Running | None = None
    started_at: str = ""
    restarts: int = 0
    waiting: tuple[str, str] | None = ("ContainerCreating", "")
    ended: dict[str, Any] | None = None

    def status(self, pod_uid: str) -> dict[str, Any]:
        name = self.spec["name"]
        if self.running is not None:
            state: dict[str, Any] = {"running": {"startedAt": self.started_at}}
        elif self.ended is not None and self.waiting is None:
            state = {"terminated": self.ended}
        else:
            reason, message = self.waiting or ("PodInitializing", "")
            state = {"waiting": {"reason": reason, **({"message": message} if message else {})}}
        ready = self.running is not None or (self.init and self.ended is not None and self.ended["exitCode"] == 0)
        found = {
            "name": name,
            "state": state,
            "lastState": {"terminated": self.ended} if self.ended is not None and "terminated" not in state else {},
            "ready": ready,
            "started": self.running is not None,
            "restartCount": self.restarts,
            "image": self.spec["image"],
            "imageID": "",
        }
        if self.started_at:
            found["containerID"] = f"standin://{pod_uid}/{name}/{self.restarts}"
        return found


@dataclass
class PodWorker:
    """Runs a pod in a task of its own, until it has ended and, when it is deleted, is gone from the API server."""

    kubelet: StandInKubelet
    pod: dict[str, Any]
    address: str = ""
    ended: bool = False
    """Its containers have ended for good; it holds no devices any more."""
    containers: list[Container] = field(default_factory=list)
    init_containers: list[Container] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    _deleted: asyncio.Event = field(default_factory=asyncio.Event)
    _grace: float = 30.0
    _gone: bool = False
    _starting: asyncio.Lock = field(default_factory=asyncio.Lock)

    _phase: str = "Pending"
    """What was written last."""

    def __post_init__(self) -> None:
        spec = self.pod["spec"]
        self.granted = Granted.of(self.pod)
        self.containers = [Container(each) for each in spec["containers"]]
        waiting = ("PodInitializing", "")
        self.init_containers = [Container(each, init=True) for each in spec.get("initContainers") or []]
        if self.init_containers:
            for container in self.containers:
                container.waiting = waiting

    @property
    def uid(self) -> str:
        return str(self.pod["metadata"]["uid"])

    @property
    def is_running(self) -> bool:
        """Whether its status says Running, so that its resources can be changed in place."""
        return self._phase == "Running" and not self.ended

    @property
    def folder(self) -> Path:
        return self.kubelet.folder / "pods" / self.uid

    def start(self) -> asyncio.Task[None]:
        self.task = asyncio.create_task(self._run())
        return self.task

    def update(self, pod: dict[str, Any]) -> None:
        """The API server has a new state of the pod."""
        self.pod = pod
        if self.is_running:
            # a kubelet's own takes seconds, up to a minute (its sync period)
            asyncio.get_running_loop().call_later(self.kubelet.settings.volume_refresh, self._write_downward_volumes)
        if pod["metadata"].get("deletionTimestamp"):
            self.delete(float(pod["metadata"].get("deletionGracePeriodSeconds") or 0))

    def _write_downward_volumes(self) -> None:
        if not self.ended:
            write_downward_volumes(self.pod, self.folder / "volumes")

    def delete(self, grace: float, gone: bool = False) -> None:
        """End it within `grace` seconds; `gone`: the API server has forgotten it already."""
        self._grace = min(self._grace, grace) if self._deleted.is_set() else grace
        self._gone |= gone
        self._deleted.set()

    def power_off(self) -> None:
        """The node goes down: the processes end, and nobody writes it down."""
        if self.task is not None:
            self.task.cancel()
        for container in [*self.init_containers, *self.containers]:
            if container.running is not None:
                container.running.kill()

    async def wait_for_processes(self) -> None:
        """After `power_off`."""
        for container in [*self.init_containers, *self.containers]:
            if container.running is not None:
                await container.running.wait()

    async def _run(self) -> None:
        try:
            if not self._deleted.is_set():
                await self._live()
            await self._end()
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("the worker of pod %s has failed", self.pod["metadata"]["name"])

    async def _live(self) -> None:
        try:
            await self.kubelet.admit(self.pod)
        except AdmissionError as error:
            await self._refuse(error)
            return
        self.address = self.kubelet.addresses.next()
        self._make_folders()
        await self._write("Pending")
        living = asyncio.create_task(self._containers())
        deleted = asyncio.create_task(self._deleted.wait())
        try:
            await asyncio.wait({living, deleted}, return_when=asyncio.FIRST_COMPLETED)
            if living.done():
                living.result()
        finally:
            async with self._starting:  # a process whose start is cut short would be lost sight of
                living.cancel()
            deleted.cancel()
            await asyncio.gather(living, deleted, return_exceptions=True)

    async def _refuse(self, error: AdmissionError) -> None:
        self.ended = True
        self.kubelet.devices.free(self.uid)
        status = {"phase": "Failed", "reason": error.reason, "message": str(error), "startTime": now()}
        await self._patch(status)
        await self._event("Warning", error.reason, str(error).removeprefix("Pod was rejected: "))

    async def _containers(self) -> None:
        """Run them all, as the restart policy says, until all have ended for good."""
        await self._prepare()
        for container in self.init_containers:
            if await self._run_container(container) != 0:
                await self._finish("Failed")
                return
        for container in self.containers:
            container.waiting = ("ContainerCreating", "")
        # all are started before the pod's status says Running, which saves a write for each
        starts = [asyncio.create_task(self._run_container(container, first=True)) for container in self.containers]
        codes = await asyncio.gather(*starts)
        await self._finish("Succeeded" if all(code == 0 for code in codes) else "Failed")

    async def _prepare(self) -> None:
        """What a kubelet does before the first container: it waits for volumes, then has claims prepared."""
        while (missing := self._missing_volume()) is not None:
            await self._event("Warning", "FailedMount", missing)
            await asyncio.sleep(self.kubelet.settings.prepare_retry)
        while self.pod["spec"].get("resourceClaims"):
            try:
                await self.kubelet.claims.prepare(self.pod)
                return
            except NotPrepared as error:
                await self._event(
                    "Warning", "FailedPrepareDynamicResources", f"Failed to prepare dynamic resources: {error}"
                )
            await asyncio.sleep(self.kubelet.settings.prepare_retry)

    def _missing_volume(self) -> str | None:
        """Why a volume cannot be mounted."""
        for volume in self.pod["spec"].get("volumes") or []:
            source = volume.get("hostPath") or {}
            where, kind = Path(source.get("path", "/")), source.get("type", "")
            if (kind == "Directory" and not where.is_dir()) or (kind == "File" and not where.is_file()):
                why = f"hostPath type check failed: {where} is not a {kind.lower()}"
                return f'MountVolume.SetUp failed for volume "{volume["name"]}": {why}'
        return None

    async def _run_container(self, container: Container, first: bool = False) -> int:
        """Its last exit code."""
        policy = self.pod["spec"].get("restartPolicy", "Always")
        if container.init and policy == "Always":
            policy = "OnFailure"
        backoff = self.kubelet.settings.restart_backoff
        while True:
            code = await self._run_once(container)
            if policy == "Never" or (policy == "OnFailure" and code == 0):
                return code
            container.waiting = ("CrashLoopBackOff", f"back-off {backoff:g}s restarting failed container")
            await self._write("Running" if not container.init else "Pending")
            await asyncio.sleep(backoff)
            backoff = min(backoff * 2, _BACKOFF_LIMIT)
            container.restarts += 1

    async def _run_once(self, container: Container) -> int:
        name = container.spec["name"]
        while True:
            try:
                launch = await self._launch(container)
                break
            except MissingReference as error:
                container.waiting = ("CreateContainerConfigError", str(error))
                await self._write("Pending")
                await asyncio.sleep(1)
        try:
            async with self._starting:
                container.running = await self.kubelet.programs.start(launch)
        except OSError as error:
            container.waiting = None
            container.ended = _terminated(127, "StartError", f"failed to start: {error}")
            return 127
        container.started_at, container.waiting, container.ended = now(), None, None
        if all(each.running is not None or each.ended is not None for each in self.containers):
            await self._write("Running")
        elif container.init:
            await self._write("Pending")
        await self._event("Normal", "Started", f"Started container {name}")
        code = await container.running.wait()
        container.running = None
        container.ended = _terminated(code, "Completed" if code == 0 else "Error", "", container.started_at)
        return code

    async def _finish(self, phase: str) -> None:
        self.ended = True
        self.kubelet.devices.free(self.uid)
        self.kubelet.pod_ended()
        await self.kubelet.claims.unprepare(self.uid)
        await self._write(phase)
        await self._deleted.wait()

    async def _end(self) -> None:
        """Wait until it is deleted; then end what runs and let the API server forget it."""
        await self._deleted.wait()
        running = [container for container in self.containers + self.init_containers if container.running is not None]
        if running:
            await self._event("Normal", "Killing", f"Stopping container {running[0].spec['name']}")
        await asyncio.gather(*(self._stop(container) for container in running))
        self.ended = True
        self.kubelet.devices.free(self.uid)
        await self.kubelet.claims.unprepare(self.uid)
        if not self._gone:
            if running:
                ended = all(container.ended["exitCode"] == 0 for container in running if container.ended)
                await self._write("Succeeded" if ended else "Failed")
            await self._forget()

    async def _stop(self, container: Container) -> None:
        running = container.running
        assert running is not None
        running.terminate()
        exited = asyncio.create_task(running.wait())
        end = asyncio.get_running_loop().time()
        while not exited.done():
            # a second deletion may shorten the grace period
            left = end + self._grace - asyncio.get_running_loop().time()
            if left <= 0:
                running.kill()
                break
            await asyncio.wait({exited}, timeout=min(left, 0.2))
        code = await exited
        container.running = None
        container.ended = _terminated(code, "Completed" if code == 0 else "Error", "", container.started_at)

    async def _launch(self, container: Container) -> Launch:
        spec, metadata = container.spec, self.pod["metadata"]
        secrets, config_maps = await self._references(spec)
        given = self.kubelet.plugins.given(self.uid, spec["name"])
        mounts = await self._mounts(spec)
        mounts |= {mount.container_path: mount.host_path for mount in given.mounts}
        home = self.folder / "home"
        variables = {
            **self.kubelet.settings.image_environment,
            "HOME": str(home),
            "HOSTNAME": metadata["name"],
            **given.envs,  # the container's own come later and win, as on a kubelet
            **container_environment(self.pod, spec, secrets, config_maps),
        }
        command = [*(spec.get("command") or self.kubelet.settings.image_command), *(spec.get("args") or [])]
        working_directory = in_place(spec.get("workingDir") or "", mounts, self.address)
        return Launch(
            pod_uid=self.uid,
            container=spec["name"],
            command=[in_place(expand(word, variables), mounts, self.address) for word in command],
            environment={name: in_place(value, mounts, self.address) for name, value in variables.items()},
            working_directory=working_directory if os.path.isdir(working_directory) else str(home),
            log=self.folder / f"{spec['name']}.log",
            address=self.address,
        )

    async def _references(self, spec: dict[str, Any]) -> tuple[dict[str, dict[str, str]], dict[str, dict[str, str]]]:
        """The Secrets and ConfigMaps that a container's environment names."""
        wanted: dict[str, set[str]] = {"secrets": set(), "configmaps": set()}
        for source in spec.get("envFrom") or []:
            for key, plural in (("secretRef", "secrets"), ("configMapRef", "configmaps")):
                if key in source:
                    wanted[plural].add(source[key]["name"])
        for entry in spec.get("env") or []:
            source = entry.get("valueFrom") or {}
            for key, plural in (("secretKeyRef", "secrets"), ("configMapKeyRef", "configmaps")):
                if key in source:
                    wanted[plural].add(source[key]["name"])
        found: dict[str, dict[str, dict[str, str]]] = {"secrets": {}, "configmaps": {}}
        for plural, names in wanted.items():
            for name in names:
                with contextlib.suppress(_NotThere):
                    found[plural][name] = await self._data(plural, name)
        return found["secrets"], found["configmaps"]

    async def _data(self, plural: str, name: str) -> dict[str, str]:
        try:
            item = await self.kubelet.client.get(path(plural, self.pod["metadata"]["namespace"], name))
        except ApiStatus as error:
            if error.code == 404:
                raise _NotThere from None
            raise
        data: dict[str, str] = item.get("data") or {}
        if plural == "secrets":
            data = {key: base64.b64decode(value).decode("utf-8", "replace") for key, value in data.items()}
        return data

    async def _mounts(self, spec: dict[str, Any]) -> dict[str, str]:
        """Path inside -> path on this machine. Volumes of other kinds than these are not mounted."""
        namespace = self.pod["metadata"]["namespace"]
        volumes: dict[str, str] = {}
        for volume in self.pod["spec"].get("volumes") or []:
            name = volume["name"]
            own = self.folder / "volumes" / name
            if "hostPath" in volume:
                volumes[name] = volume["hostPath"]["path"]
            elif "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                volumes[name] = str(self.kubelet.claims_folder / namespace / claim)
            elif "secret" in volume or "configMap" in volume:
                plural = "secrets" if "secret" in volume else "configmaps"
                source = volume.get("secret") or volume["configMap"]
                volumes[name] = str(own)
                own.mkdir(parents=True, exist_ok=True)
                try:
                    data = await self._data(plural, source.get("secretName") or source["name"])
                except _NotThere:
                    if not source.get("optional"):
                        raise MissingReference(f"{plural} of volume {name} not found") from None
                    data = {}
                for key, value in data.items():
                    (own / key).write_text(value)
            elif "emptyDir" in volume:
                volumes[name] = str(own)
            elif "downwardAPI" in volume:
                volumes[name] = str(own)
                self._write_downward_volumes()
            with contextlib.suppress(OSError, KeyError):
                if "hostPath" not in volume:
                    os.makedirs(volumes[name], exist_ok=True)
        mounts = {}
        for mount in spec.get("volumeMounts") or []:
            if mount["name"] in volumes:
                mounts[mount["mountPath"]] = os.path.join(volumes[mount["name"]], mount.get("subPath") or "")
        return mounts

    def _make_folders(self) -> None:
        (self.folder / "home").mkdir(parents=True, exist_ok=True)

    async def write_again(self) -> None:
        """The pod's status, after a change of its resources."""
        await self._write(self._phase)

    async def _write(self, phase: str) -> None:
        """The pod's status."""
        self._phase = phase
        ready = all(container.running is not None for container in self.containers)
        initialized = all(each.ended is not None and each.ended["exitCode"] == 0 for each in self.init_containers)
        conditions = [
            condition
            for condition in (self.pod.get("status") or {}).get("conditions") or []
            if condition["type"]
            not in ("Initialized", "Ready", "ContainersReady", "PodReadyToStartContainers", *CONDITIONS)
        ]
        conditions += self.granted.conditions()
        for kind, value in (("Initialized", initialized), ("Ready", ready), ("ContainersReady", ready)):
            conditions.append({"type": kind, "status": str(value), "lastTransitionTime": now()})
        status: dict[str, Any] = {
            "phase": phase,
            "conditions": conditions,
            "hostIP": "127.0.0.1",
            "startTime": (self.pod.get("status") or {}).get("startTime") or now(),
            "containerStatuses": [
                container.status(self.uid) | self._resources_of(container) for container in self.containers
            ],
        }
        if self.init_containers:
            status["initContainerStatuses"] = [container.status(self.uid) for container in self.init_containers]
        if phase != "Pending" or self.init_containers:
            status |= {"podIP": self.address, "podIPs": [{"ip": self.address}]}
        await self._patch(status)

    def _resources_of(self, container: Container) -> dict[str, Any]:
        """What a container's status says of its resources: those in force only of one that runs."""
        name = container.spec["name"]
        allocated = self.granted.allocated[name].get("requests")
        found = {"allocatedResources": allocated} if allocated else {}
        return found | ({"resources": self.granted.in_force[name]} if container.running is not None else {})

    async def _patch(self, status: dict[str, Any]) -> None:
        metadata = self.pod["metadata"]
        await self.kubelet.up.wait()
        try:
            where = path("pods", metadata["namespace"], metadata["name"], "status")
            # the uid makes sure that it is this pod, not a later one of the same name
            patch = {"metadata": {"uid": self.uid}, "status": status}
            pod = await self.kubelet.client.patch(where, patch)
            self.pod = {**self.pod, "status": pod["status"]}
        except ApiStatus as error:
            another = error.code == 422 and "metadata.uid" in error.message
            if error.code not in (404, 409) and not another:
                raise

    async def _forget(self) -> None:
        metadata = self.pod["metadata"]
        await self.kubelet.up.wait()
        where = path("pods", metadata["namespace"], metadata["name"])
        await self.kubelet.client.delete(where, grace=0, uid=self.uid)

    async def _event(self, kind: str, reason: str, message: str) -> None:
        kubelet = self.kubelet
        if not self._gone:
            await record_event(kubelet.client, self.pod, kind, reason, message, "kubelet", kubelet.name)


class _NotThere(Exception):
    pass


def _terminated(code: int, reason: str, message: str, started_at: str = "") -> dict[str, Any]:
    found = {"exitCode": code, "reason": reason, "finishedAt": now(), "startedAt": started_at or now()}
    return {**found, "message": message} if message else found
