"""Pods become sessions: what the kubelet and the API server say of pods, brought together.

Three things are known, each with a delay of its own: what the kubelet was given leave to hand out (Allocate), who it
says holds what (sessions.py), and the pods with their annotations (pod_watch.py). They are brought together again
and again, whenever one of them changes, until they agree; no order of events is relied upon. Which tier:
annotations.py.

A session's record, from its pod.

What the kubelet says that pods hold: devices by pod and GPU, and which pods it no longer lists.

For about a second after its start the kubelet lists nothing, so an empty list frees nothing then. Which session a pod
is: pod_sessions.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping

from pydantic import ValidationError

from gpushare_spawner.agent.kubernetes.api import ClusterApi, Json
from gpushare_spawner.agent.kubernetes.devices.owners import HeldDevices, devices_for
from gpushare_spawner.agent.kubernetes.devices.pod_resources import Given, Handed, PodKey
from gpushare_spawner.agent.kubernetes.pods.annotations import (
    AnnotationWriter,
    ShareAnnotations,
    TierAnnotations,
    decisions,
    patch_wanted,
    remember,
)
from gpushare_spawner.agent.kubernetes.pods.pod_watch import Pod, Pods
from gpushare_spawner.agent.node import Node
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.agent.state.records import PodOwner, SessionRecord
from gpushare_spawner.log_once import EachOnce, one_by_one
from gpushare_spawner.model import kubernetes
from gpushare_spawner.model.control import OpenRequest
from gpushare_spawner.model.kubernetes import AnnotationProblem, PodSession
from gpushare_spawner.model.share import UNITS_PER_GPU, split_session_id

log = logging.getLogger(__name__)


FOREIGN_TEMPLATE = "none"
"""Of a pod that nobody made from a template."""
MAX_SESSION_ID = 200
"""Characters."""


def pod_record(pod: Pod, said: PodSession, devices: Mapping[str, Given], seen: tuple[str, ...]) -> SessionRecord:
    """A session as its pod's annotations have it, tier and all. Raises pydantic.ValidationError.

    `devices`: ids by GPU and container; they, not the annotations, say which GPUs it is on. `seen`: see
    `PodOwner.seen`.
    """
    user, server = split_session_id(said.session)
    return SessionRecord(
        request=OpenRequest(
            id=said.session,
            user=user,
            server=server,
            uid=0,
            template=said.template,
            quota=said.quota,
            user_units=said.user_units,
            gpus=_in_order(said, devices),
            share_units=said.share_units,
            borrowed_units=said.borrowed_units,
            memory_limit=said.memory_limit,
            oversubscribe=said.oversubscribe,
            engine=said.engine,
        ),
        opened_at=pod.created,
        borrowed_units=said.borrowed_units,
        effective_units=said.effective_units,
        tier=said.tier,
        tier_since=said.tier_since,
        use=said.use,
        notice=said.notice,
        yields_until=said.yields_until,
        controls=said.controls,
        messages=said.messages,
        pod=PodOwner(
            namespace=pod.namespace,
            name=pod.name,
            uid=pod.uid,
            devices=ids_by_gpu(devices),
            given=grants_of(devices),
            seen=seen,
            placed_units=said.placed_units,
            resized=said.resized,
        ),
    )


def foreign_record(
    key: PodKey, devices: Mapping[str, Given], unit_size: int, now: float, uid: str = ""
) -> SessionRecord:
    """A pod that holds devices without being the hub's: it has what it holds, and stays active.

    `now`: seconds since the epoch.
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


def ids_by_gpu(devices: Mapping[str, Given]) -> dict[str, tuple[str, ...]]:
    """All ids of each GPU, whichever container has them."""
    return {gpu: tuple(sorted(frozenset().union(*given))) for gpu, given in devices.items()}


def grants_of(devices: Mapping[str, Given]) -> tuple[tuple[str, ...], ...]:
    """The ids that were given together, for `PodOwner.given`."""
    return tuple(sorted(tuple(sorted(ids)) for given in devices.values() for ids in given))


def _in_order(said: PodSession, devices: Mapping[str, Given]) -> tuple[str, ...]:
    return said.gpus if set(said.gpus) == set(devices) else tuple(devices)


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


ALL_GPUS_WITHIN = 10.0
"""Seconds in which the kubelet asks for all of a pod's GPUs, one after the other."""
STRANGER_AFTER = 5.0
"""Seconds after which pods are listed anew for a pod that holds devices and that the watch has not shown. If the list
does not show it either, it is not of the hub."""
UNSEEN_AFTER = 20.0
"""Seconds after which such a pod gets a session of its own name even if the API server answers no list: its GPU time
must be shared out. Ours: an API server that is restarted answers within that time."""


class PodSessions:
    """Keeps the node's sessions what its pods are."""

    def __init__(
        self, node: Node, pods: Pods, api: ClusterApi, held: HeldDevices, ask_kubelet: Callable[[], None]
    ) -> None:
        """`ask_kubelet` has `handed` called soon with the kubelet's newest word."""
        self._node = node
        self._ask_kubelet = ask_kubelet
        self._pods = pods
        self._held = held
        self._loop = asyncio.get_running_loop()
        self._warnings = EachOnce(log)
        self._listed = KubeletList(held, self._warnings, self._loop.time)
        registry = node.registry
        self._tiers = TierAnnotations(registry.tiers, registry.activity, registry.save)
        self._changes = ShareAnnotations(registry.share_changes, held, registry.save)
        self._writer = AnnotationWriter(api, self._pod_of, self._patch_wanted, self._written, self.changed)
        self._scheduled: asyncio.Handle | None = None
        self._closed = False

    def changed(self) -> None:
        """Something is new: look at everything soon."""
        if self._scheduled is None and not self._closed:
            self._scheduled = self._loop.call_soon(self._look)

    def kubelet_started(self) -> None:
        """For a while its lists are not to be believed where they are empty."""
        self._listed.kubelet_started()

    def handed(self, handed: Handed) -> None:
        """The kubelet's newest word."""
        self._listed.take(
            handed,
            {session.record.pod.key for session in self._node.sessions.values() if session.record.pod is not None},
        )
        self.changed()

    async def close(self) -> None:
        """Stop; patches that are on their way are given up."""
        self._closed = True
        if self._scheduled is not None:
            self._scheduled.cancel()
        await self._writer.close()

    # -- pods and sessions --------------------------------------------------------------------------------------------

    def _look(self) -> None:
        self._scheduled = None
        with one_by_one(log, "what is gone"):
            self._end_what_is_gone()
        for key, devices in self._listed.pods():
            with one_by_one(log, f"pod {key[0]}/{key[1]}"):
                self._bring_together(key, devices)
        for session in list(self._node.sessions.values()):
            with one_by_one(log, f"session {session.id}"):
                self._follow(session)

    def _end_what_is_gone(self) -> None:
        for session in list(self._node.sessions.values()):
            hold = session.record.pod
            if hold is None:
                continue
            if hold.uid:
                # while the pods have not been listed nobody is known to be gone
                if self._pods.known and self._pods.get(hold.uid) is None:
                    self.end(session, f"pod {hold.namespace}/{hold.name} is gone")
            elif self._listed.has_ended(hold.key):
                self.end(session, f"the kubelet no longer lists pod {hold.namespace}/{hold.name}")

    def end(self, session: Session, reason: str) -> None:
        """Its pod is gone. What the kubelet said before is no reason to take it up again."""
        hold = session.record.pod
        self._node.registry.end(session.id, reason)
        if hold is not None and self._listed.drop(hold.key):
            self._ask_kubelet()

    def _bring_together(self, key: PodKey, devices: Mapping[str, Given]) -> None:
        pod = self._pods.named(*key)
        session = self._session_of(key)
        if session is not None:
            hold = session.record.pod
            assert hold is not None
            if pod is None or hold.uid == pod.uid:
                self._settle(session, hold, devices)
                return
            if hold.uid or sorted(hold.grants) != sorted(grants_of(devices)):
                self.end(session, f"another pod has the name {key[0]}/{key[1]}")
                return
            # the API server's word came late: it is the same pod, which has its folders mounted
            self._node.registry.end(session.id, "its pod is known now", keep_folders=True)
        # nothing is freed by these grants until they are a session's
        grants = [self._held.found(gpu, ids) for gpu, given in devices.items() for ids in given]
        age = self._loop.time() - max(grant.made_at for grant in grants)
        if pod is None:
            if not self._pods.known or age < STRANGER_AFTER:
                self._look_again(STRANGER_AFTER - age)
                return
            # a pod has its labels before the kubelet asks for its devices: a list that began later shows it
            seen = self._pods.listed_at > self._loop.time() - age
            if not seen:
                self._pods.list_again()
                if age < UNSEEN_AFTER:
                    self._look_again(1.0)
                    return
            record = foreign_record(key, devices, self._held.unit_size, self._node.wall_clock())
            self._warnings.about(
                f"pod {key[0]}/{key[1]} holds devices of this agent "
                + (
                    f"but lacks the label {kubernetes.SESSION_SELECTOR}, or is a static pod of the node"
                    if seen
                    else "and the API server has not shown it yet: it counts by its devices until then"
                )
            )
        else:
            said = self._said_by(pod)
            if said is not None and len(devices) < len(said.gpus) and age < ALL_GPUS_WITHIN:
                self._look_again(ALL_GPUS_WITHIN - age)
                return
            record = self._record(pod, said, devices)
        other = self._node.sessions.get(record.request.id)
        if other is not None and not self._is_older(other, pod):
            self._warnings.about(f"pod {key[0]}/{key[1]} claims session {record.request.id}, which a newer pod holds")
            return
        assert record.pod is not None
        record.pod.folders = self._held.folders_of(record.pod.grants)
        self._node.registry.hold(record)
        for gpu, given in devices.items():
            for ids in given:
                self._held.settled(gpu, ids)
        indices = ", ".join(str(self._node.gpus[gpu].index) for gpu in record.request.gpus)
        log.info(
            "session %s is pod %s/%s: %d units on GPU %s", record.request.id, *key, record.request.share_units, indices
        )

    def _settle(self, session: Session, hold: PodOwner, devices: Mapping[str, Given]) -> None:
        """The kubelet's word on which devices a session's pod holds."""
        if set(devices) != set(hold.devices):
            self._warnings.about(f"session {session.id} holds devices of other GPUs than before: {', '.join(devices)}")
        listed = {gpu: given for gpu, given in devices.items() if gpu in hold.devices}
        if set(listed) == set(hold.devices):
            grants, ids = grants_of(listed), ids_by_gpu(listed)
            if (sorted(hold.grants), hold.devices) != (sorted(grants), ids):
                hold.devices, hold.given = ids, grants
                self._node.registry.save(session)
                self._node.registry.listen_again(session)
        for gpu, given in devices.items():
            for grant in given:
                if gpu in listed:
                    self._held.settled(gpu, grant)
                else:
                    # not the session's, and not free
                    self._held.found(gpu, grant)

    def _record(self, pod: Pod, said: PodSession | None, devices: Mapping[str, Given]) -> SessionRecord:
        now = self._node.wall_clock()
        key = (pod.namespace, pod.name)
        if said is None:
            return foreign_record(key, devices, self._held.unit_size, now, pod.uid)
        if set(said.gpus) != set(devices):
            self._warnings.about(
                f"pod {pod.namespace}/{pod.name} is annotated with GPUs {', '.join(said.gpus)} and holds devices of "
                f"{', '.join(devices)}: the devices count"
            )
        placed = said.placed_units or said.share_units
        wanted = devices_for(placed, self._held.unit_size)
        for gpu, ids in ids_by_gpu(devices).items():
            if len(ids) != wanted:
                self._warnings.about(
                    f"pod {pod.namespace}/{pod.name} holds {len(ids)} devices of GPU {self._node.gpus[gpu].index}; a "
                    f"share of {placed} is {wanted} of {self._held.unit_size} units each: hub and agent "
                    "must have the same unit size"
                )
        try:
            return pod_record(pod, said, devices, decisions(pod.annotations))
        except ValidationError as error:
            self._warnings.about(
                f"pod {pod.namespace}/{pod.name}: its annotations are not valid: {error.errors()[0]['msg']}"
            )
            return foreign_record(key, devices, self._held.unit_size, now, pod.uid)

    def _said_by(self, pod: Pod) -> PodSession | None:
        if isinstance(pod.said, AnnotationProblem):
            self._warnings.about(f"pod {pod.namespace}/{pod.name}: {pod.said}")
            return None
        return pod.said

    def _is_older(self, session: Session, pod: Pod | None) -> bool:
        """Whether a session's pod has to make way for this one."""
        hold = session.record.pod
        theirs = self._pods.get(hold.uid) if hold is not None and hold.uid else None
        return theirs is None or (pod is not None and theirs.created < pod.created)

    def _session_of(self, key: PodKey) -> Session | None:
        for session in self._node.sessions.values():
            if session.record.pod is not None and session.record.pod.key == key:
                return session
        return None

    # -- tiers and notices --------------------------------------------------------------------------------------

    def _follow(self, session: Session) -> None:
        pod = self._pod_of(session)
        said = self._said_by(pod) if pod is not None else None
        if pod is None or said is None:
            return
        session.lacks_requests = kubernetes.lacks_requests(pod.requests, said.tier)
        self._tiers.follow(session, said, pod.annotations)
        self._node.registry.controls.follow(session, said.controls, said.messages, said.answers)
        self._changes.follow(session, said)
        self._writer.look(session)

    def _pod_of(self, session: Session) -> Pod | None:
        hold = session.record.pod
        return self._pods.get(hold.uid) if hold is not None and hold.uid else None

    def _patch_wanted(self, session: Session) -> dict[str, str | None]:
        pod = self._pod_of(session)
        said = self._said_by(pod) if pod is not None else None
        if said is None or self._node.sessions.get(session.id) is not session:
            return {}
        return patch_wanted(said, session.record, self._node.wall_clock())

    def _written(self, session: Session, item: Json) -> None:
        """The API server has patched the session's pod; what it says now needs no more action."""
        self._pods.put(item)
        hold = session.record.pod
        if hold is not None:
            remember(hold, decisions(item["metadata"].get("annotations") or {}))
        self._node.registry.save(session)

    def _look_again(self, seconds: float) -> None:
        self._loop.call_later(max(0.1, seconds), self.changed)
