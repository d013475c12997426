"""An agent that only observes: another sharing layer allocates the node's GPUs, and the agent offers none.

Its report contains the GPU work of pods with a share of that layer. It does not write to pods: the service changes
tiers and notices, and a server can only be stopped. For an agent that shares its node's GPUs, see cluster_agent.py.

The API server names these pods. A container gets the library and its session's socket through an observer device; each
pod has one, and all are alike. The kubelet requests a device without naming the pod, and later lists the pods that have
one. `ObservedPods` compares the two lists after each change, does not rely on the order of events, and listens in the
folder of the device. Notices and controls in a pod's annotations are sent to the session's processes.

`DriverUse` counts the GPU work of processes that are not connected, based on the driver's samples: processes of layers
that preload their own library, and processes without a library. A process's cgroup determines its session. A connected
process reports its own work more precisely, so its samples are ignored. `ObservingNode` composes the parts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from gpushare_spawner.agent.gpus.arbitration import GpuArbitration
from gpushare_spawner.agent.gpus.samples import Delivery
from gpushare_spawner.agent.kubernetes.devices import owners
from gpushare_spawner.agent.kubernetes.devices.container import ContainerResponses
from gpushare_spawner.agent.kubernetes.devices.owners import DevicesRefused, folder_names, grant_name
from gpushare_spawner.agent.kubernetes.devices.plugin import DevicePlugin, PluginSocket
from gpushare_spawner.agent.kubernetes.devices.pod_resources import DeviceIds, KubeletAssignments, PodKey, PodResources
from gpushare_spawner.agent.kubernetes.kubelet import deviceplugin_pb2 as messages
from gpushare_spawner.agent.kubernetes.pods.pod_watch import Pod, Pods, open_request
from gpushare_spawner.agent.kubernetes.report_publisher import PublishedReport
from gpushare_spawner.agent.kubernetes.settings import ClusterSettings
from gpushare_spawner.agent.node import Node
from gpushare_spawner.agent.session_records import PodOwner, SessionRecord
from gpushare_spawner.agent.sessions.attribution import UnconnectedProcesses
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.background import Repeated, Soon
from gpushare_spawner.clients.api import ClusterApi
from gpushare_spawner.log_once import EachOnce, log_failure
from gpushare_spawner.model.control import NoticeRequest
from gpushare_spawner.model.kubernetes.annotations import LAYER_SELECTOR, AnnotationProblem, SessionAnnotations
from gpushare_spawner.model.kubernetes.objects import OBSERVER
from gpushare_spawner.model.report import Report

log = logging.getLogger(__name__)


class ObservedPods:
    """Keeps the node's sessions in sync with its pods that have a share of another layer."""

    def __init__(self, node: Node, pods: Pods) -> None:
        self._node = node
        self._pods = pods
        self._given: Mapping[PodKey, DeviceIds] = {}
        self._warnings = EachOnce(log)
        self._reconciling = Soon(self._reconcile)

    def changed(self) -> None:
        """Reconcile all sessions soon."""
        self._reconciling.request()

    def take_assignments(self, given: Mapping[PodKey, DeviceIds]) -> None:
        """Process the kubelet's newest list of devices by pod."""
        self._given = given
        self.changed()

    def end_holders(self, devices: frozenset[str]) -> None:
        """End the sessions of pods that had any of these devices: the kubelet is assigning them to another pod."""
        for session in list(self._node.sessions.values()):
            owner = session.record.pod
            if owner is not None and any(not devices.isdisjoint(ids) for ids in owner.grants):
                self._node.registry.end(session.id, "the kubelet gave its devices to another pod")

    def folders(self) -> set[str]:
        """Return the names of the folders mounted by sessions' pods."""
        pods = (session.record.pod for session in self._node.sessions.values())
        return {name for owner in pods if owner is not None for name in folder_names(owner)}

    def close(self) -> None:
        """Stop."""
        self._reconciling.close()

    def _reconcile(self) -> None:
        if self._pods.listed_at is None:
            return  # before the first list of pods, no pod counts as deleted
        with log_failure(log, "what is gone"):
            self._end_gone_sessions()
        for pod, annotated in self._youngest():
            with log_failure(log, f"pod {pod.namespace}/{pod.name}"):
                self._reconcile_pod(pod, annotated)

    def _youngest(self) -> list[tuple[Pod, SessionAnnotations]]:
        """Return the pods that state a session; if several pods state one session, the youngest of them."""
        by_session: dict[str, tuple[Pod, SessionAnnotations]] = {}
        # creation times are whole seconds
        for pod in sorted(self._pods.objects.values(), key=lambda pod: (pod.created, pod.uid)):
            annotated = pod.session
            if isinstance(annotated, AnnotationProblem):
                self._warnings.about(f"pod {pod.namespace}/{pod.name}: {annotated}")
                continue
            older = by_session.get(annotated.session)
            if older is not None:
                self._warnings.about(
                    f"pod {older[0].namespace}/{older[0].name} claims session {annotated.session}, which "
                    f"the newer pod {pod.namespace}/{pod.name} holds"
                )
            by_session[annotated.session] = pod, annotated
        return list(by_session.values())

    def _end_gone_sessions(self) -> None:
        for session in list(self._node.sessions.values()):
            owner = session.record.pod
            if owner is None or self._pods.of(owner) is None:
                name = "its server" if owner is None else f"pod {owner.namespace}/{owner.name}"
                self._node.registry.end(session.id, f"{name} is gone")

    def _reconcile_pod(self, pod: Pod, annotated: SessionAnnotations) -> None:
        given = _grants(self._given.get((pod.namespace, pod.name), ()))
        session = self._node.sessions.get(annotated.session)
        owner = session.record.pod if session is not None else None
        if session is None or owner is None or owner.uid != pod.uid:
            session = self._node.registry.add_and_listen(observed_record(pod, annotated, given))
            how = "its library and the driver" if given else "the driver"
            log.info("session %s is pod %s/%s, observed by %s", session.id, pod.namespace, pod.name, how)
        elif given and owner.given != given:
            owner.given = given
            self._node.registry.save(session)
            self._node.registry.listen_again(session)
        self._follow(session, annotated)

    def _follow(self, session: Session, annotated: SessionAnnotations) -> None:
        registry = self._node.registry
        owner = session.record.pod
        notice = owner.notice_of_now(annotated.notice) if owner is not None else annotated.notice
        if notice != session.record.notice:
            registry.tiers.notify(session, NoticeRequest.of(session.id, notice))
        registry.controls.follow(session, annotated.controls, annotated.messages, annotated.answers)


def observed_record(pod: Pod, annotated: SessionAnnotations, given: tuple[tuple[str, ...], ...]) -> SessionRecord:
    """Return the record of a session from its pod. Raises pydantic.ValidationError.

    `given`: IDs that its containers got together.
    """
    request = open_request(annotated, annotated.gpus)
    request = request.model_copy(update={"layer": annotated.layer, "oversubscribe": False})
    record = SessionRecord.opened(request, pod.created)
    record.tier_since = annotated.tier_since
    record.pod = PodOwner(namespace=pod.namespace, name=pod.name, uid=pod.uid, devices={}, given=given)
    return record


def _grants(given: Iterable[frozenset[str]]) -> tuple[tuple[str, ...], ...]:
    return tuple(sorted(tuple(sorted(ids)) for ids in given))


READ_EVERY = 1.0
"""Seconds between two reads.

Our choice: the culler counts minutes, and the driver retains samples for a few seconds.
"""


class DriverUse(Repeated):
    """Reads the driver's samples of all the node's GPUs while there are sessions to observe."""

    def __init__(self, node: Node) -> None:
        super().__init__(READ_EVERY, self._read, log, "cannot read the GPUs' use")
        self._node = node
        # each object has its own state, used by one thread at a time
        self._owners = UnconnectedProcesses(node.sessions)
        self._deliveries: dict[str, Delivery] = {}
        for uuid, arbitration in node.arbitrations.items():
            sessions_of = UnconnectedProcesses(node.sessions).sessions_of
            samples = Samples(arbitration, node.sessions)
            self._deliveries[uuid] = Delivery(arbitration.gpu, node.source, samples, sessions_of, READ_EVERY)
        self._unknown: set[str] = set()
        """GPUs with work that cannot be attributed to a session."""

    @property
    def tells(self) -> bool:
        """Whether the GPU work of every process on the node's GPUs is counted."""
        return bool(self._deliveries) and not self._unknown

    async def close(self) -> None:
        """Stop."""
        await super().close()
        for delivery in self._deliveries.values():
            delivery.close()

    async def _read(self) -> None:
        if not self._node.sessions:
            return
        for uuid, delivery in self._deliveries.items():
            processes = self._node.rounds.states[uuid].processes
            owners = await asyncio.to_thread(self._owners.sessions_of, processes)
            self._memory(uuid, {pid: processes[pid] or 0 for pid in owners}, owners)
            if delivery.has_samples:
                delivery.request()
            else:
                self._by_whole_gpu(uuid, set(owners.values()))

    def _memory(self, uuid: str, shown: Mapping[int, int], owners: Mapping[int, str]) -> None:
        """Count the GPU memory of processes that are not connected. `shown`: bytes by pid."""
        for name, session in self._node.sessions.items():
            connected = _connected(session)
            amount = sum(shown[pid] for pid, owner in owners.items() if owner == name and pid not in connected)
            self._node.arbitrations[uuid].driver_memory(name, amount)

    def _by_whole_gpu(self, uuid: str, sessions: set[str]) -> None:
        """Count the work on a GPU without per-process figures, if only one session uses the GPU."""
        state = self._node.rounds.states[uuid]
        if state.utilisation == 0.0:
            return
        if state.utilisation is None or len(sessions) != 1:
            if uuid not in self._unknown:
                log.warning(
                    "GPU %s: the driver does not count GPU work by process; only kernels show which sessions are idle",
                    uuid,
                )
            self._unknown.add(uuid)
            return
        Samples(self._node.arbitrations[uuid], self._node.sessions).add(
            (READ_EVERY, 0.0), {sessions.pop(): READ_EVERY * state.utilisation}
        )


class Samples:
    """Processes the samples of one GPU; see `samples.Competition`."""

    def __init__(self, arbitration: GpuArbitration, sessions: Mapping[str, Session]) -> None:
        self._arbitration = arbitration
        self._sessions = sessions

    @property
    def contended(self) -> bool:
        """Whether samples are needed, that is, whether there is a session."""
        return bool(self._sessions)

    def delivered(
        self, seconds_ago: tuple[float, float], busy: Mapping[int, float], strangers: Mapping[int, str]
    ) -> None:
        """Process a sample: start and end in seconds before now, and each process's GPU seconds, by pid.

        `strangers`: the sessions of processes, by pid, whether or not they are connected.
        """
        seconds: dict[str, float] = {}
        for pid, name in strangers.items():
            session = self._sessions.get(name)
            if session is not None and pid not in _connected(session):
                seconds[name] = seconds.get(name, 0.0) + busy.get(pid, 0.0)
        self.add(seconds_ago, seconds)

    def add(self, seconds_ago: tuple[float, float], seconds: Mapping[str, float]) -> None:
        """Add GPU seconds, by session."""
        for name, amount in seconds.items():
            session = self._sessions.get(name)
            if session is not None and amount > 0:
                self._arbitration.sampled(name, seconds_ago, amount)
                session.has_new_frames = True


def _connected(session: Session) -> set[int]:
    return {connection.peer.pid for connection in session.cuda}


IDS = [f"observer-{number:04}" for number in range(512)]
"""IDs of the observer devices. They exceed a node's pods: the kubelet's default limit is 110; clouds often use 250."""
GONE_AFTER = 30.0
"""Seconds.

A device is free when the kubelet has not listed it for this long: for about a second after its start, the kubelet lists
none.
"""


class ObserverDevices:
    """The devices offered to the kubelet, and the folders of granted devices."""

    def __init__(
        self,
        allocation: ContainerResponses,
        folder: Path,
        end_holders: Callable[[frozenset[str]], None],
        changed: Callable[[], None],
    ) -> None:
        """`folder`: the parent folder of the grants' folders. `changed` is called after each grant.

        `end_holders` ends the sessions that had any of these devices: the kubelet is assigning them to another
        container.
        """
        self._allocation = allocation
        self._folder = folder
        self._end_holders = end_holders
        self._changed = changed
        self._pending: dict[frozenset[str], float] = {}
        """Event loop times of the grants that the kubelet has not listed yet."""
        self._unknown_since: dict[str, float] = {}
        """Folder names without a session or grant, each with the time since when this has been so."""
        self.plugin = DevicePlugin(OBSERVER, offered=lambda: IDS, healthy=lambda: True, grant=self._grant)

    @property
    def all_listed(self) -> bool:
        """Whether the kubelet has listed all grants."""
        return not self._pending

    def listed(self, given: DeviceIds, current: Collection[str]) -> None:
        """Process the kubelet's list of these devices. `current`: names of the folders used by sessions."""
        now = asyncio.get_running_loop().time()
        self._pending = {
            ids: made_at for ids, made_at in self._pending.items() if ids not in given and now - made_at < GONE_AFTER
        }
        names = {grant_name(ids) for ids in (*given, *self._pending)} | set(current)
        there = {path.name for path in self._folder.iterdir()} if self._folder.is_dir() else set()
        self._unknown_since = {name: self._unknown_since.get(name, now) for name in there - names}
        for name, since in self._unknown_since.items():
            if now - since >= GONE_AFTER:
                log.info("removing %s, whose pod no longer exists", self._folder / name)
                owners.remove(self._folder / name)

    async def _grant(self, devices: list[str]) -> messages.ContainerAllocateResponse:
        requested = frozenset(devices)
        if not requested or not requested <= set(IDS):
            raise DevicesRefused(f"{', '.join(sorted(requested)) or 'nothing'} was requested, but is not offered")
        self._end_holders(requested)
        folder = self._folder / grant_name(requested)
        try:
            owners.make_fresh(folder)
        except OSError as error:
            raise DevicesRefused(f"the folder of the session's socket cannot be created: {error}") from None
        self._pending[requested] = asyncio.get_running_loop().time()
        self._changed()
        return self._allocation.to_observe(folder)


SOCKET = "gpushare-observer.sock"
"""Name of the socket in the kubelet's folder for device plugins."""


class ObservingNode:
    """A started node as part of the cluster."""

    def __init__(self, node: Node, api: ClusterApi, allocation: ContainerResponses, settings: ClusterSettings) -> None:
        self._node = node
        self.pods = Pods(api, settings.pods_namespace, node.settings.name, self._changed, LAYER_SELECTOR)
        self.sessions = ObservedPods(node, self.pods)
        self._kubelet = PodResources(settings.pod_resources, self._take, lambda: self.devices.all_listed)
        self.devices = ObserverDevices(
            allocation, node.state_folder.pods, self.sessions.end_holders, self._kubelet.soon
        )
        self._socket = PluginSocket(self.devices.plugin, Path(settings.device_plugins_dir), SOCKET, self._kubelet.soon)
        self.use = DriverUse(node)
        self.published = PublishedReport(api, settings, self.report)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run as part of the cluster while the context is open."""
        async with AsyncExitStack() as stack:
            stack.callback(self.sessions.close)
            self._node.changed = self._changed
            stack.callback(self._forget)
            await self._kubelet.once()
            for part in (self.pods, self._socket, self._kubelet, self.use, self.published):
                await stack.enter_async_context(part.running())
            yield

    def report(self) -> Report:
        """Return the node's current report: sessions but no GPUs, because the agent allocates none."""
        report = self._node.report()
        sessions = tuple(
            session.model_copy(update={"gpu_use_known": self._is_observed(session.id)}) for session in report.sessions
        )
        return report.model_copy(update={"gpus": (), "host_memory": None, "sessions": sessions})

    def _is_observed(self, session: str) -> bool:
        owner = self._node.sessions[session].record.pod
        return self.use.tells or (owner is not None and bool(owner.given))

    def _changed(self) -> None:
        self.sessions.changed()
        self.published.changed()

    def _forget(self) -> None:
        self._node.changed = lambda: None

    def _take(self, assignments: KubeletAssignments | None) -> None:
        """Take the kubelet's list of devices by pod; None: the kubelet does not answer."""
        if assignments is None:
            return
        given = {key: held[OBSERVER] for key, held in assignments.by_pod.items() if OBSERVER in held}
        every = tuple(ids for grants in given.values() for ids in grants)
        self.sessions.take_assignments(given)
        self.devices.listed(every, self.sessions.folders())
