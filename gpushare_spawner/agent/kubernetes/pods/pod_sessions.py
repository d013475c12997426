"""Pods become sessions: what the kubelet and the API server say of pods, brought together.

Three things are known, each with a delay of its own: what the kubelet was given leave to hand out (Allocate), who it
says holds what (kubelet_list.py), and the pods with their annotations (pod_watch.py). They are brought together again
and again, whenever one of them changes, until they agree; no order of events is relied upon. Which tier:
tier_annotations.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from pydantic import ValidationError

from gpushare_spawner.agent.kubernetes.cluster_api import ClusterApi, Json
from gpushare_spawner.agent.kubernetes.devices.device_ids import devices_for
from gpushare_spawner.agent.kubernetes.devices.device_owners import HeldDevices
from gpushare_spawner.agent.kubernetes.devices.pod_resources import Given, Handed, PodKey
from gpushare_spawner.agent.kubernetes.pods.annotation_writer import AnnotationWriter
from gpushare_spawner.agent.kubernetes.pods.kubelet_list import KubeletList
from gpushare_spawner.agent.kubernetes.pods.pod_record import foreign_record, grants_of, ids_by_gpu, pod_record
from gpushare_spawner.agent.kubernetes.pods.pod_watch import Pod, Pods
from gpushare_spawner.agent.kubernetes.pods.share_annotations import ShareAnnotations
from gpushare_spawner.agent.kubernetes.pods.tier_annotations import TierAnnotations, decisions, patch_wanted, remember
from gpushare_spawner.agent.node import Node
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.agent.state.session_record import PodOwner, SessionRecord
from gpushare_spawner.log_once import EachOnce, one_by_one
from gpushare_spawner.model import kubernetes
from gpushare_spawner.model.kubernetes import AnnotationProblem, PodSession

log = logging.getLogger(__name__)

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
            handed, {one.record.pod.key for one in self._node.sessions.values() if one.record.pod is not None}
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
