"""Sessions of pods: reconciles the pods of the API server with the device assignments of the kubelet.

There are three inputs, each with its own delay: the grants of Allocate calls (`AllocatedDevices`), the kubelet's list
of devices by pod (`KubeletList`), and the pods with their annotations (pod_watch.py). `PodReconciler` compares them
after each change until they agree. It does not rely on the order of events. `PodSockets` listens on one socket per
grant, or on one socket for the claim.

For about a second after its start, the kubelet lists nothing, so an empty list frees nothing during that time.
annotations.py handles the tiers, notices and shares in annotations.

A grant is the devices of one GPU that the kubelet assigned to one container. The kubelet requests each grant separately
and does not name the pod, so each grant gets a folder that is mounted into the container. Once the pod is known, the
session's socket is created in the folder of each grant. The mount refers to the folder that existed when the container
started, so a later agent can replace its contents but must not replace the folder. devices/owners.py creates and
removes the folders.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from pydantic import ValidationError

from gpushare_spawner.agent.kubernetes.devices import owners
from gpushare_spawner.agent.kubernetes.devices.owners import AllocatedDevices, devices_for
from gpushare_spawner.agent.kubernetes.devices.pod_resources import DeviceIds, KubeletAssignments, PodKey
from gpushare_spawner.agent.kubernetes.pods.annotations import (
    AnnotationWriter,
    follow_share,
    follow_tier,
    needed_patch,
    remember,
    tier_decision_key,
)
from gpushare_spawner.agent.kubernetes.pods.pod_watch import Pod, Pods, open_request
from gpushare_spawner.agent.node import Node
from gpushare_spawner.agent.session_records import PodOwner, SessionRecord
from gpushare_spawner.agent.session_socket import (
    FrameHandler,
    ProcessEndpoints,
    SessionEndpoint,
    SessionSocket,
    Traffic,
)
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.agent.state_folder import SessionFolder, StateFolder
from gpushare_spawner.background import Soon
from gpushare_spawner.clients.api import ClusterApi, Json
from gpushare_spawner.log_once import EachOnce, log_failure
from gpushare_spawner.model.control import OpenRequest
from gpushare_spawner.model.kubernetes.annotations import SESSION_SELECTOR, AnnotationProblem, SessionAnnotations
from gpushare_spawner.model.kubernetes.container_requests import lacks_requests
from gpushare_spawner.model.kubernetes.objects import gpu_index_of
from gpushare_spawner.model.report import shared_fields
from gpushare_spawner.model.share import UNITS_PER_GPU, units_on

log = logging.getLogger(__name__)


FOREIGN_TEMPLATE = "none"
"""Template name of a pod that was not created from a template."""
MAX_SESSION_ID = 200
"""Maximum length in characters."""


def pod_record(
    pod: Pod, annotated: SessionAnnotations, devices: Mapping[str, DeviceIds], seen: tuple[str, ...]
) -> SessionRecord:
    """Return the record of a session from its pod's annotations, with its tier. Raises pydantic.ValidationError.

    `devices`: the IDs by GPU and container. The devices, not the annotations, determine which GPUs the session uses.
    `seen`: see `PodOwner.seen`.
    """
    gpus = annotated.gpus if set(annotated.gpus) == set(devices) else tuple(devices)
    return SessionRecord(
        request=open_request(annotated, gpus),
        opened_at=pod.created,
        pod=PodOwner(
            namespace=pod.namespace,
            name=pod.name,
            uid=pod.uid,
            devices=ids_by_gpu(devices),
            given=grants_of(devices),
            seen=seen,
            placed_units=annotated.placed_units,
            resized=annotated.resized,
        ),
        **shared_fields(annotated, SessionRecord),
    )


def foreign_record(
    key: PodKey, devices: Mapping[str, DeviceIds], unit_size: int, now: float, uid: str = ""
) -> SessionRecord:
    """Return the record of a pod that holds devices but does not belong to the hub.

    Its share equals its devices, and its tier is always active. `now`: seconds since the epoch.
    """
    namespace, name = key
    held = ids_by_gpu(devices)
    share = min(UNITS_PER_GPU, max(map(len, held.values())) * unit_size)
    request = OpenRequest(
        id=_foreign_id(key),
        user=f"{namespace}/{name}",
        uid=0,
        template=FOREIGN_TEMPLATE,
        gpus=tuple(devices),
        share_units=share,
    )
    record = SessionRecord.opened(request, now)
    record.pod = PodOwner(namespace=namespace, name=name, uid=uid, devices=held, given=grants_of(devices))
    return record


def _foreign_id(key: PodKey) -> str:
    id = f"pod:{key[0]}:{key[1]}"
    if len(id) <= MAX_SESSION_ID:
        return id
    digest = hashlib.sha256(id.encode()).hexdigest()[:16]
    return f"{id[: MAX_SESSION_ID - len(digest) - 1]}:{digest}"


def ids_by_gpu(devices: Mapping[str, DeviceIds]) -> dict[str, tuple[str, ...]]:
    """Return all containers' IDs, by GPU."""
    return {gpu: tuple(sorted(frozenset().union(*given))) for gpu, given in devices.items()}


def grants_of(devices: Mapping[str, DeviceIds]) -> tuple[tuple[str, ...], ...]:
    """Return the IDs that were granted together, for `PodOwner.given`."""
    return tuple(sorted(tuple(sorted(ids)) for given in devices.values() for ids in given))


GONE_AFTER = 30.0
"""Seconds after which a pod that neither the API server shows nor the kubelet lists counts as ended."""
TRUST_KUBELET_AFTER = 10.0
"""Seconds from a start of the kubelet until its list is complete: for about one second it lists no pods."""


class KubeletList:
    """The kubelet's last list, and the time since which pods of sessions have been missing from it."""

    def __init__(self, allocated: AllocatedDevices, warnings: EachOnce, clock: Callable[[], float]) -> None:
        """`allocated` contains the devices of this agent. `clock` returns the event loop's time in seconds."""
        self._allocated = allocated
        self._warnings = warnings
        self._clock = clock
        self._listed: dict[PodKey, dict[str, DeviceIds]] = {}
        self._absent_since: dict[PodKey, float] = {}
        self._kubelet_since = clock()
        self._kubelet_start: float | None = None

    def kubelet_started(self) -> None:
        """Record a start of the kubelet: for a while, running pods can be missing from its list."""
        self._kubelet_since = self._clock()

    def take(self, assignments: KubeletAssignments, pods_of_sessions: Iterable[PodKey]) -> None:
        """Process the kubelet's newest list, and free devices that no pod holds.

        `pods_of_sessions`: the pods of the node's sessions.
        """
        if assignments.started != self._kubelet_start:
            self._kubelet_start = assignments.started
            self.kubelet_started()
        self._listed = {
            key: devices for key, resources in assignments.by_pod.items() if (devices := self._by_gpu(resources))
        }
        now = self._clock()
        self._absent_since = {
            key: self._absent_since.get(key, now) for key in pods_of_sessions if key not in self._listed
        }
        if self._is_complete():
            self._free_unclaimed(now)

    def pods(self) -> Iterator[tuple[PodKey, Mapping[str, DeviceIds]]]:
        """Yield each listed pod and its devices by GPU and container. The list can change meanwhile."""
        yield from list(self._listed.items())

    def drop(self, key: PodKey) -> bool:
        """Drop an ended pod from the last list. Return whether it was listed."""
        return self._listed.pop(key, None) is not None

    def has_ended(self, key: PodKey) -> bool:
        """Return whether the pod has been missing from the list long enough to count as ended."""
        since = self._absent_since.get(key)
        return since is not None and self._clock() - since >= GONE_AFTER and self._is_complete()

    def _is_complete(self) -> bool:
        return self._clock() - self._kubelet_since >= TRUST_KUBELET_AFTER

    def _free_unclaimed(self, now: float) -> None:
        """Free allocated devices that no pod has."""
        listed = {ids for devices in self._listed.values() for given in devices.values() for ids in given}
        for grant in list(self._allocated.pending.values()):
            age = now - grant.made_at
            if grant.devices not in listed and (age > GONE_AFTER or not grant.requested):
                log.info(
                    "%d allocated devices of GPU %s have no pod; they are free again", len(grant.devices), grant.gpu
                )
                self._allocated.forget(grant)
        self._allocated.remove_unknown_folders(listed)

    def _by_gpu(self, resources: Mapping[str, DeviceIds]) -> dict[str, DeviceIds]:
        """Return a pod's devices of this agent, by GPU."""
        by_gpu: dict[str, DeviceIds] = {}
        for resource, given in resources.items():
            if gpu_index_of(resource) is None:
                continue
            for ids in given:
                parts: dict[str, set[str]] = {}
                for device in ids:
                    gpu = self._allocated.gpu_of(device)
                    if gpu is None:
                        self._warnings.about(
                            f"device {device} of {resource} belongs to a GPU that this agent does not have (any more)"
                        )
                    else:
                        parts.setdefault(gpu, set()).add(device)
                for gpu, ours in parts.items():
                    by_gpu[gpu] = (*by_gpu.get(gpu, ()), frozenset(ours))
        return by_gpu


ALL_GPUS_WITHIN = 10.0
"""Seconds within which the kubelet requests all GPUs of a pod, one after another."""
STRANGER_AFTER = 5.0
"""If a pod holds devices but has not appeared in the watch after this many seconds, the agent lists the pods again.

If the pod is also missing from the new list, it does not belong to the hub.
"""
UNSEEN_AFTER = 20.0
"""Seconds after which such a pod gets a session named after the pod, even if the API server has not answered a list
request, so that its GPU time is arbitrated. Our choice: a restarted API server answers within that time."""


class PodReconciler:
    """Keeps the node's sessions in sync with its pods."""

    def __init__(
        self, node: Node, pods: Pods, api: ClusterApi, allocated: AllocatedDevices, ask_kubelet: Callable[[], None]
    ) -> None:
        """`ask_kubelet` reads the kubelet's list soon and passes it to `take_assignments`."""
        self._node = node
        self._ask_kubelet = ask_kubelet
        self._pods = pods
        self._allocated = allocated
        self._loop = asyncio.get_running_loop()
        self._warnings = EachOnce(log)
        self._listed = KubeletList(allocated, self._warnings, self._loop.time)
        self._writer = AnnotationWriter(api, self._pod_of, self._needed_patch, self._written, self.changed)
        self._reconciling = Soon(self._reconcile)

    def changed(self) -> None:
        """Reconcile all sessions soon."""
        self._reconciling.request()

    def kubelet_started(self) -> None:
        """Record a start of the kubelet: for a while, its empty lists are not trusted."""
        self._listed.kubelet_started()

    def take_assignments(self, assignments: KubeletAssignments) -> None:
        """Process the kubelet's newest list."""
        self._listed.take(
            assignments,
            {session.record.pod.key for session in self._node.sessions.values() if session.record.pod is not None},
        )
        self.changed()

    async def close(self) -> None:
        """Stop. Patches that are in progress are cancelled."""
        self._reconciling.close()
        await self._writer.close()

    # -- pods and sessions --------------------------------------------------------------------------------------------

    def _reconcile(self) -> None:
        with log_failure(log, "what is gone"):
            self._end_gone_sessions()
        with self._node.registry.restoring():
            for key, devices in self._listed.pods():
                with log_failure(log, f"pod {key[0]}/{key[1]}"):
                    self._reconcile_pod(key, devices)
        for session in list(self._node.sessions.values()):
            with log_failure(log, f"session {session.id}"):
                self._follow(session)

    def _end_gone_sessions(self) -> None:
        for session in list(self._node.sessions.values()):
            owner = session.record.pod
            if owner is None:
                continue
            if owner.uid:
                # Before the first list of pods, no pod counts as deleted.
                if self._pods.listed_at is not None and self._pods.of(owner) is None:
                    self.end(session, f"pod {owner.namespace}/{owner.name} is gone")
            elif self._listed.has_ended(owner.key):
                self.end(session, f"the kubelet no longer lists pod {owner.namespace}/{owner.name}")

    def end(self, session: Session, reason: str) -> None:
        """End the session of a pod that no longer exists. The kubelet's last list does not reopen it."""
        owner = session.record.pod
        self._node.registry.end(session.id, reason)
        if owner is not None and self._listed.drop(owner.key):
            self._ask_kubelet()

    def _reconcile_pod(self, key: PodKey, devices: Mapping[str, DeviceIds]) -> None:
        pod = self._pods.named(*key)
        session = self._session_of(key)
        if session is not None:
            owner = session.record.pod
            assert owner is not None
            if pod is None or owner.uid == pod.uid:
                self._adopt_devices(session, owner, devices)
                return
            if owner.uid or sorted(owner.grants) != sorted(grants_of(devices)):
                self.end(session, f"another pod has the name {key[0]}/{key[1]}")
                return
            # The API server showed the pod late. It is the same pod, and its folders are mounted.
            self._node.registry.end(session.id, "its pod is now known", keep_folders=True)
        # Until a session holds these devices, the grants count as in use.
        grants = [self._allocated.listed_grant(gpu, ids) for gpu, given in devices.items() for ids in given]
        age = self._loop.time() - max(grant.made_at for grant in grants)
        if pod is None:
            listed_at = self._pods.listed_at
            if listed_at is None or age < STRANGER_AFTER:
                self._check_again(STRANGER_AFTER - age)
                return
            # A pod has its labels before the kubelet requests its devices, so a later list shows the pod.
            seen = listed_at > self._loop.time() - age
            if not seen:
                self._pods.list_again()
                if age < UNSEEN_AFTER:
                    self._check_again(1.0)
                    return
            record = foreign_record(key, devices, self._allocated.unit_size, self._node.wall_clock())
            self._warnings.about(
                f"pod {key[0]}/{key[1]} holds devices of this agent "
                + (
                    f"but lacks the label {SESSION_SELECTOR}, or is a static pod of the node"
                    if seen
                    else "and the API server has not shown it yet: it counts by its devices until then"
                )
            )
        else:
            annotated = self._annotated(pod)
            if annotated is not None and len(devices) < len(annotated.gpus) and age < ALL_GPUS_WITHIN:
                self._check_again(ALL_GPUS_WITHIN - age)
                return
            record = self._record(pod, annotated, devices)
        earlier = self._node.sessions.get(record.request.id)
        if earlier is not None and not self._is_older(earlier, pod):
            self._warnings.about(f"pod {key[0]}/{key[1]} claims session {record.request.id}, which a newer pod holds")
            return
        assert record.pod is not None
        record.pod.folders = self._allocated.folders_of(record.pod.grants)
        self._node.registry.add_and_listen(record)
        for gpu, given in devices.items():
            for ids in given:
                self._allocated.drop_pending(gpu, ids)
        indices = ", ".join(str(self._node.gpus[gpu].index) for gpu in record.request.gpus)
        log.info("session %s is pod %s/%s: %s on GPU %s", record.request.id, *key, record.request.share, indices)

    def _adopt_devices(self, session: Session, owner: PodOwner, devices: Mapping[str, DeviceIds]) -> None:
        """Adopt the devices that the kubelet lists for a session's pod."""
        if set(devices) != set(owner.devices):
            self._warnings.about(f"session {session.id} now holds devices of different GPUs: {', '.join(devices)}")
        listed = {gpu: given for gpu, given in devices.items() if gpu in owner.devices}
        if set(listed) == set(owner.devices):
            grants, ids = grants_of(listed), ids_by_gpu(listed)
            if (sorted(owner.grants), owner.devices) != (sorted(grants), ids):
                owner.devices, owner.given = ids, grants
                self._node.registry.save(session)
                self._node.registry.listen_again(session)
        for gpu, given in devices.items():
            for grant in given:
                if gpu in listed:
                    self._allocated.drop_pending(gpu, grant)
                else:
                    # These devices do not belong to the session, and they are not free.
                    self._allocated.listed_grant(gpu, grant)

    def _record(
        self, pod: Pod, annotated: SessionAnnotations | None, devices: Mapping[str, DeviceIds]
    ) -> SessionRecord:
        now = self._node.wall_clock()
        key = (pod.namespace, pod.name)
        if annotated is None:
            return foreign_record(key, devices, self._allocated.unit_size, now, pod.uid)
        if set(annotated.gpus) != set(devices):
            self._warnings.about(
                f"pod {pod.namespace}/{pod.name} is annotated with GPUs {', '.join(annotated.gpus)} and holds devices "
                f"of {', '.join(devices)}: the devices count"
            )
        for gpu, ids in ids_by_gpu(devices).items():
            placed = annotated.placed_units
            if placed is None:
                placed = units_on(gpu, annotated.gpus, annotated.share_units, annotated.last_units)
            elif gpu != annotated.gpus[0]:
                continue  # only the units on the first GPU before the change are known
            expected = devices_for(placed, self._allocated.unit_size)
            if len(ids) != expected:
                self._warnings.about(
                    f"pod {pod.namespace}/{pod.name} holds {len(ids)} devices of GPU {self._node.gpus[gpu].index}; a "
                    f"share of {placed} is {expected} of {self._allocated.unit_size} units each: hub and agent "
                    "must have the same unit size"
                )
        try:
            return pod_record(pod, annotated, devices, (tier_decision_key(pod.annotations),))
        except ValidationError as error:
            self._warnings.about(
                f"pod {pod.namespace}/{pod.name}: its annotations are not valid: {error.errors()[0]['msg']}"
            )
            return foreign_record(key, devices, self._allocated.unit_size, now, pod.uid)

    def _annotated(self, pod: Pod | None) -> SessionAnnotations | None:
        if pod is None:
            return None
        if isinstance(pod.session, AnnotationProblem):
            self._warnings.about(f"pod {pod.namespace}/{pod.name}: {pod.session}")
            return None
        return pod.session

    def _is_older(self, session: Session, pod: Pod | None) -> bool:
        """Return whether a session's pod must yield to this pod."""
        theirs = self._pod_of(session)
        return theirs is None or (pod is not None and theirs.created < pod.created)

    def _session_of(self, key: PodKey) -> Session | None:
        for session in self._node.sessions.values():
            if session.record.pod is not None and session.record.pod.key == key:
                return session
        return None

    # -- tiers and notices --------------------------------------------------------------------------------------

    def _follow(self, session: Session) -> None:
        pod = self._pod_of(session)
        annotated = self._annotated(pod)
        if pod is None or annotated is None:
            return
        session.lacks_requests = lacks_requests(pod.requests, annotated.tier)
        registry = self._node.registry
        follow_tier(session, annotated, pod.annotations, registry)
        registry.controls.follow(session, annotated.controls, annotated.messages, annotated.answers)
        follow_share(session, annotated, self._allocated, registry)
        if annotated.stop_processes != session.to_stop:
            self._node.enforcer.stop(session, annotated.stop_processes)
        self._writer.patch_if_needed(session)

    def _pod_of(self, session: Session) -> Pod | None:
        owner = session.record.pod
        return self._pods.of(owner) if owner is not None else None

    def _needed_patch(self, session: Session) -> dict[str, str | None]:
        annotated = self._annotated(self._pod_of(session))
        if annotated is None or self._node.sessions.get(session.id) is not session:
            return {}
        return needed_patch(annotated, session.record, self._node.wall_clock())

    def _written(self, session: Session, item: Json) -> None:
        """Process the pod from the API server's answer to a patch; its tier decision needs no further action."""
        self._pods.put(item)
        owner = session.record.pod
        if owner is not None:
            remember(owner, tier_decision_key(item["metadata"].get("annotations") or {}))
        self._node.registry.save(session)

    def _check_again(self, seconds: float) -> None:
        self._loop.call_later(max(0.1, seconds), self.changed)


class PodEndpoints:
    """Factory of sockets for sessions that are pods. A session without a pod gets a socket for processes."""

    def __init__(self, folder: StateFolder) -> None:
        self._pods = folder.pods
        self._processes = ProcessEndpoints(folder)

    def listen(self, record: SessionRecord, listener: FrameHandler) -> SessionEndpoint:
        """Create the sockets. Raises OSError, OverflowError or PathTooLong."""
        if record.pod is None:
            return self._processes.listen(record, listener)
        return PodSockets(self._pods, owners.folder_names(record.pod), listener)


class PodSockets:
    """Listener in the folders of all grants of a session; for the session, it is one endpoint."""

    def __init__(self, parent: Path, names: Iterable[str], listener: FrameHandler) -> None:
        """`names`: the names of the folders. Raises OSError or PathTooLong if a socket cannot be created."""
        self._folders = [parent / name for name in names]
        self._sockets: list[SessionSocket] = []
        traffic = Traffic()
        try:
            for folder in self._folders:
                owners.make(folder)
                below = SessionFolder(folder, owners.BELOW, owners.discarded(folder))
                self._sockets.append(SessionSocket(below, None, listener, traffic))
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> Path:
        """The path of the first socket."""
        return self._sockets[0].path

    def close(self, code: int | None = None) -> None:
        """Stop listening and end all connections; the folders stay."""
        for socket in self._sockets:
            socket.close(code)

    def remove(self) -> None:
        """Remove the folders."""
        for folder in self._folders:
            owners.remove(folder)
