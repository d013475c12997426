"""Pods with a share of another layer become sessions of the agent: observed, without units and without a lease.

The API server says which pods these are, and the kubelet which of them have a device of node.py, and so the
library and a socket. Both are brought together whenever one of them changes; no order of events is relied upon. What
the service writes to a pod's annotations is passed on to the session's processes. Nothing is written to the pod.

GPU work of observed sessions as the driver counts it: the GPU time of each process, and its session by cgroup.

For processes that are not connected: those of layers that preload a library of their own, and those without any. What a
connected process reports itself is more exact, and its samples are left out.
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
from gpushare_spawner.agent.periodic import GpuSource
from gpushare_spawner.agent.sessions.processes import UnconnectedProcesses
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.agent.state.records import PodOwner, SessionRecord
from gpushare_spawner.log_once import EachOnce, one_by_one
from gpushare_spawner.model.control import AnnounceRequest, OpenRequest
from gpushare_spawner.model.kubernetes import AnnotationProblem, LayerSession
from gpushare_spawner.model.share import split_session_id

log = logging.getLogger(__name__)


class ObservedPods:
    """Keeps the node's sessions what its pods with a share of another layer are."""

    def __init__(self, node: Node, pods: Pods) -> None:
        self._node = node
        self._pods = pods
        self._given: Mapping[PodKey, Given] = {}
        self._loop = asyncio.get_running_loop()
        self._warnings = EachOnce(log)
        self._scheduled: asyncio.Handle | None = None
        self._closed = False

    def changed(self) -> None:
        """Something is new: look at everything soon."""
        if self._scheduled is None and not self._closed:
            self._scheduled = self._loop.call_soon(self._look)

    def handed(self, given: Mapping[PodKey, Given]) -> None:
        """Take the kubelet's newest word on who has devices."""
        self._given = given
        self.changed()

    def end_holders(self, devices: frozenset[str]) -> None:
        """End the sessions whose pods had any of these devices: the kubelet gives them to another one."""
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

    def _look(self) -> None:
        self._scheduled = None
        if not self._pods.known:
            return  # nobody is known to be gone
        with one_by_one(log, "what is gone"):
            self._end_what_is_gone()
        for pod, found in self._youngest():
            with one_by_one(log, f"pod {pod.namespace}/{pod.name}"):
                self._bring_together(pod, found)

    def _youngest(self) -> list[tuple[Pod, LayerSession]]:
        """Return the pods that say their session; of several pods of one session, the youngest."""
        by_session: dict[str, tuple[Pod, LayerSession]] = {}
        # creation times are whole seconds
        for pod in sorted(self._pods.all(), key=lambda pod: (pod.created, pod.uid)):
            found = pod.layer_session
            if isinstance(found, AnnotationProblem):
                self._warnings.about(f"pod {pod.namespace}/{pod.name}: {found}")
                continue
            older = by_session.get(found.session.session)
            if older is not None:
                self._warnings.about(
                    f"pod {older[0].namespace}/{older[0].name} claims session {found.session.session}, which the newer "
                    f"pod {pod.namespace}/{pod.name} holds"
                )
            by_session[found.session.session] = pod, found
        return list(by_session.values())

    def _end_what_is_gone(self) -> None:
        for session in list(self._node.sessions.values()):
            hold = session.record.pod
            if hold is None or self._pods.get(hold.uid) is None:
                name = "its server" if hold is None else f"pod {hold.namespace}/{hold.name}"
                self._node.registry.end(session.id, f"{name} is gone")

    def _bring_together(self, pod: Pod, found: LayerSession) -> None:
        given = _grants(self._given.get((pod.namespace, pod.name), ()))
        session = self._node.sessions.get(found.session.session)
        hold = session.record.pod if session is not None else None
        if session is None or hold is None or hold.uid != pod.uid:
            session = self._node.registry.hold(observed_record(pod, found, given))
            how = "its library and the driver" if given else "the driver"
            log.info("session %s is pod %s/%s, observed by %s", session.id, pod.namespace, pod.name, how)
        elif given and hold.given != given:
            hold.given = given
            self._node.registry.save(session)
            self._node.registry.listen_again(session)
        self._follow(session, found)

    def _follow(self, session: Session, found: LayerSession) -> None:
        said, registry = found.session, self._node.registry
        hold = session.record.pod
        notice = hold.notice_of_now(said.notice) if hold is not None else said.notice
        if notice != session.record.notice:
            registry.tiers.announce(session, AnnounceRequest.of(session.id, notice))
        registry.controls.follow(session, said.controls, said.messages, said.answers)


def observed_record(pod: Pod, found: LayerSession, given: tuple[tuple[str, ...], ...]) -> SessionRecord:
    """Return a session as its pod has it. Raises pydantic.ValidationError.

    `given`: ids that its containers got together.
    """
    said = found.session
    user, server = split_session_id(said.session)
    request = OpenRequest(
        id=said.session,
        user=user,
        server=server,
        uid=0,
        template=said.template,
        quota=said.quota,
        gpus=said.gpus,
        share_units=said.share_units,
        oversubscribe=False,
        layer=found.layer,
    )
    record = SessionRecord.opened(request, pod.created)
    record.tier_since = said.tier_since
    record.pod = PodOwner(namespace=pod.namespace, name=pod.name, uid=pod.uid, devices={}, given=given)
    return record


def _grants(given: Iterable[frozenset[str]]) -> tuple[tuple[str, ...], ...]:
    return tuple(sorted(tuple(sorted(ids)) for ids in given))


EVERY = 1.0
"""Seconds between two readings. Ours: the culler thinks in minutes, and the driver remembers some seconds."""


class DriverUse:
    """Reads the driver's samples of all GPUs of a node while there are sessions to observe."""

    def __init__(self, node: Node, source: GpuSource) -> None:
        self._node = node
        # each has a memory of its own, for one thread at a time
        self._owners = UnconnectedProcesses(node.sessions)
        self._deliveries: dict[str, Delivery] = {}
        for uuid, arbitration in node.arbitrations.items():
            delivery = Delivery(arbitration.gpu, source, Samples(arbitration, node.sessions), every=EVERY)
            delivery.sessions_of = UnconnectedProcesses(node.sessions).sessions_of
            self._deliveries[uuid] = delivery
        self._unknown: set[str] = set()
        """GPUs that worked without being known for whom."""
        self._task: asyncio.Task[None] | None = None

    @property
    def tells(self) -> bool:
        """Whether GPU work is seen of every process on the node's GPUs."""
        return bool(self._deliveries) and not self._unknown

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for delivery in self._deliveries.values():
            delivery.close()

    async def _run(self) -> None:
        while True:
            try:
                await self._look()
            except Exception:
                log.exception("cannot read the use of the GPUs; retrying")
            await asyncio.sleep(EVERY)

    async def _look(self) -> None:
        if not self._node.sessions:
            return
        for uuid, delivery in self._deliveries.items():
            processes = self._node.rounds.states[uuid].processes
            owners = await asyncio.to_thread(self._owners.sessions_of, processes)
            self._memory(uuid, {pid: processes[pid].memory_bytes or 0 for pid in owners}, owners)
            if delivery.tells:
                delivery.wanted()
            else:
                self._by_whole_gpu(uuid, set(owners.values()))

    def _memory(self, uuid: str, shown: Mapping[int, int], owners: Mapping[int, str]) -> None:
        """Count the GPU memory of processes that are not connected. `shown`: bytes by pid."""
        for name, session in self._node.sessions.items():
            connected = _connected(session)
            amount = sum(shown[pid] for pid, owner in owners.items() if owner == name and pid not in connected)
            self._node.arbitrations[uuid].driver_memory(name, amount)

    def _by_whole_gpu(self, uuid: str, sessions: set[str]) -> None:
        """Count the work of a GPU whose driver does not count by process, if one session alone is there."""
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
    """Takes the samples of one GPU; see `gpu_time_samples.Competition`."""

    def __init__(self, arbitration: GpuArbitration, sessions: Mapping[str, Session]) -> None:
        self._arbitration = arbitration
        self._sessions = sessions

    @property
    def contended(self) -> bool:
        """Whether samples are wanted: while there is a session."""
        return bool(self._sessions)

    def delivered(
        self, seconds_ago: tuple[float, float], busy: Mapping[int, float], strangers: Mapping[int, str]
    ) -> None:
        """Beginning and end of the sample in seconds before now, and each process's seconds on the GPU by pid.

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
