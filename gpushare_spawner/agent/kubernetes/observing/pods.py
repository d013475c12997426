"""Sessions of pods with a share of another layer: observed, without units and without a lease.

The API server names these pods. The kubelet lists the pods that have a device of node.py, and with it the library and a
socket. `ObservedPods` compares both after each change; it relies on no order of events. Notices and controls in a pod's
annotations go to the session's processes. The agent writes nothing to the pod.

`DriverUse` counts the GPU work of processes that are not connected, by the driver's samples: processes of layers that
preload their own library, and processes without a library. The session of a process follows from its cgroup. A
connected process reports its own work more exactly, so its samples are left out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping

from gpushare_spawner.agent.gpus.arbitration import GpuArbitration
from gpushare_spawner.agent.gpus.samples import Delivery
from gpushare_spawner.agent.kubernetes.devices.owners import folder_names
from gpushare_spawner.agent.kubernetes.devices.pod_resources import Given, PodKey
from gpushare_spawner.agent.kubernetes.pods.pod_watch import Pod, Pods
from gpushare_spawner.agent.node import Node
from gpushare_spawner.agent.sessions.attribution import UnconnectedProcesses
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.agent.state.records import PodOwner, SessionRecord
from gpushare_spawner.background import Repeated
from gpushare_spawner.log_once import EachOnce, log_failure
from gpushare_spawner.model.control import NoticeRequest, OpenRequest
from gpushare_spawner.model.kubernetes.annotations import AnnotationProblem, LayerSession
from gpushare_spawner.model.share import split_session_id

log = logging.getLogger(__name__)


class ObservedPods:
    """Keeps the node's sessions equal to its pods with a share of another layer."""

    def __init__(self, node: Node, pods: Pods) -> None:
        self._node = node
        self._pods = pods
        self._given: Mapping[PodKey, Given] = {}
        self._loop = asyncio.get_running_loop()
        self._warnings = EachOnce(log)
        self._scheduled: asyncio.Handle | None = None
        self._closed = False

    def changed(self) -> None:
        """Reconcile all sessions soon."""
        if self._scheduled is None and not self._closed:
            self._scheduled = self._loop.call_soon(self._reconcile)

    def handed(self, given: Mapping[PodKey, Given]) -> None:
        """Take the kubelet's newest list of devices by pod."""
        self._given = given
        self.changed()

    def end_holders(self, devices: frozenset[str]) -> None:
        """End the sessions of pods that had any of these devices: the kubelet gives them to another pod."""
        for session in list(self._node.sessions.values()):
            hold = session.record.pod
            if hold is not None and any(not devices.isdisjoint(ids) for ids in hold.grants):
                self._node.registry.end(session.id, "the kubelet gave its devices to another pod")

    def folders(self) -> set[str]:
        """Return the names of the folders that sessions' pods have mounted."""
        holds = (session.record.pod for session in self._node.sessions.values())
        return {name for hold in holds if hold is not None for name in folder_names(hold)}

    def close(self) -> None:
        """Stop."""
        self._closed = True
        if self._scheduled is not None:
            self._scheduled.cancel()

    def _reconcile(self) -> None:
        self._scheduled = None
        if self._pods.listed_at is None:
            return  # before the first list of pods no pod counts as gone
        with log_failure(log, "what is gone"):
            self._end_gone_sessions()
        for pod, layer_session in self._youngest():
            with log_failure(log, f"pod {pod.namespace}/{pod.name}"):
                self._reconcile_pod(pod, layer_session)

    def _youngest(self) -> list[tuple[Pod, LayerSession]]:
        """Return the pods that state a session; of several pods of one session, the youngest."""
        by_session: dict[str, tuple[Pod, LayerSession]] = {}
        # creation times are whole seconds
        for pod in sorted(self._pods.objects.values(), key=lambda pod: (pod.created, pod.uid)):
            layer_session = pod.layer_session
            if isinstance(layer_session, AnnotationProblem):
                self._warnings.about(f"pod {pod.namespace}/{pod.name}: {layer_session}")
                continue
            older = by_session.get(layer_session.session.session)
            if older is not None:
                self._warnings.about(
                    f"pod {older[0].namespace}/{older[0].name} claims session {layer_session.session.session}, which "
                    f"the newer pod {pod.namespace}/{pod.name} holds"
                )
            by_session[layer_session.session.session] = pod, layer_session
        return list(by_session.values())

    def _end_gone_sessions(self) -> None:
        for session in list(self._node.sessions.values()):
            hold = session.record.pod
            if hold is None or self._pods.of(hold) is None:
                name = "its server" if hold is None else f"pod {hold.namespace}/{hold.name}"
                self._node.registry.end(session.id, f"{name} is gone")

    def _reconcile_pod(self, pod: Pod, layer_session: LayerSession) -> None:
        given = _grants(self._given.get((pod.namespace, pod.name), ()))
        session = self._node.sessions.get(layer_session.session.session)
        hold = session.record.pod if session is not None else None
        if session is None or hold is None or hold.uid != pod.uid:
            session = self._node.registry.hold(observed_record(pod, layer_session, given))
            how = "its library and the driver" if given else "the driver"
            log.info("session %s is pod %s/%s, observed by %s", session.id, pod.namespace, pod.name, how)
        elif given and hold.given != given:
            hold.given = given
            self._node.registry.save(session)
            self._node.registry.listen_again(session)
        self._follow(session, layer_session)

    def _follow(self, session: Session, layer_session: LayerSession) -> None:
        annotated, registry = layer_session.session, self._node.registry
        hold = session.record.pod
        notice = hold.notice_of_now(annotated.notice) if hold is not None else annotated.notice
        if notice != session.record.notice:
            registry.tiers.notify(session, NoticeRequest.of(session.id, notice))
        registry.controls.follow(session, annotated.controls, annotated.messages, annotated.answers)


def observed_record(pod: Pod, layer_session: LayerSession, given: tuple[tuple[str, ...], ...]) -> SessionRecord:
    """Return the record of a session from its pod. Raises pydantic.ValidationError.

    `given`: ids that its containers got together.
    """
    annotated = layer_session.session
    user, server = split_session_id(annotated.session)
    request = OpenRequest(
        id=annotated.session,
        user=user,
        server=server,
        uid=0,
        template=annotated.template,
        quota=annotated.quota,
        gpus=annotated.gpus,
        share_units=annotated.share_units,
        oversubscribe=False,
        layer=layer_session.layer,
    )
    record = SessionRecord.opened(request, pod.created)
    record.tier_since = annotated.tier_since
    record.pod = PodOwner(namespace=pod.namespace, name=pod.name, uid=pod.uid, devices={}, given=given)
    return record


def _grants(given: Iterable[frozenset[str]]) -> tuple[tuple[str, ...], ...]:
    return tuple(sorted(tuple(sorted(ids)) for ids in given))


EVERY = 1.0
"""Seconds between two reads. Our value: the culler counts minutes, and the driver keeps samples for some seconds."""


class DriverUse:
    """Reads the driver's samples of all GPUs of a node while there are sessions to observe."""

    def __init__(self, node: Node) -> None:
        self._node = node
        # each keeps its own state, for one thread at a time
        self._owners = UnconnectedProcesses(node.sessions)
        self._deliveries: dict[str, Delivery] = {}
        for uuid, arbitration in node.arbitrations.items():
            sessions_of = UnconnectedProcesses(node.sessions).sessions_of
            samples = Samples(arbitration, node.sessions)
            self._deliveries[uuid] = Delivery(arbitration.gpu, node.source, samples, sessions_of, EVERY)
        self._unknown: set[str] = set()
        """GPUs with work that cannot be assigned to a session."""
        self._reading = Repeated(EVERY, self._read, log, "cannot read the use of the GPUs")

    @property
    def tells(self) -> bool:
        """Whether GPU work is counted for every process on the node's GPUs."""
        return bool(self._deliveries) and not self._unknown

    def start(self) -> None:
        """Start reading."""
        self._reading.start()

    async def close(self) -> None:
        """Stop."""
        await self._reading.close()
        for delivery in self._deliveries.values():
            delivery.close()

    async def _read(self) -> None:
        if not self._node.sessions:
            return
        for uuid, delivery in self._deliveries.items():
            processes = self._node.rounds.states[uuid].processes
            owners = await asyncio.to_thread(self._owners.sessions_of, processes)
            self._memory(uuid, {pid: processes[pid] or 0 for pid in owners}, owners)
            if delivery.tells:
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
        """Count the work of a GPU without figures by process, if only one session uses it."""
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
            (EVERY, 0.0), {sessions.pop(): EVERY * state.utilisation}
        )


class Samples:
    """Takes the samples of one GPU; see `samples.Competition`."""

    def __init__(self, arbitration: GpuArbitration, sessions: Mapping[str, Session]) -> None:
        self._arbitration = arbitration
        self._sessions = sessions

    @property
    def contended(self) -> bool:
        """Whether samples are needed: while there is a session."""
        return bool(self._sessions)

    def delivered(
        self, seconds_ago: tuple[float, float], busy: Mapping[int, float], strangers: Mapping[int, str]
    ) -> None:
        """Take a sample: start and end in seconds before now, and the seconds of each process on the GPU by pid.

        `strangers`: the sessions of processes, by pid, whether or not they are connected.
        """
        seconds: dict[str, float] = {}
        for pid, name in strangers.items():
            session = self._sessions.get(name)
            if session is not None and pid not in _connected(session):
                seconds[name] = seconds.get(name, 0.0) + busy.get(pid, 0.0)
        self.add(seconds_ago, seconds)

    def add(self, seconds_ago: tuple[float, float], seconds: Mapping[str, float]) -> None:
        """Add seconds on the GPU, by session."""
        for name, amount in seconds.items():
            session = self._sessions.get(name)
            if session is not None and amount > 0:
                self._arbitration.sampled(name, seconds_ago, amount)
                session.moved = True


def _connected(session: Session) -> set[int]:
    return {connection.peer.pid for connection in session.cuda}
