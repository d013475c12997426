"""Pods become sessions: devices and annotations in, tiers both ways.

Three things are known, each with a delay of its own: what the kubelet was given leave to hand out (Allocate), who it
says holds what (PodResources), and the pods with their annotations (the API). They are brought together again and
again, whenever one of them changes, until they agree; no order of events is relied upon.

A session's tier is in its pod's annotations. The service patches it down, and the agent follows, unless the session
worked in the meantime; the agent puts it up when work begins, and patches the pod then. Which of two that differ is the
newer is told by what has been seen: annotations that were dealt with already are not a new decision.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping

from pydantic import ValidationError

from gpushare_spawner.agent.kubernetes.cluster_api import ApiFailure, ClusterApi
from gpushare_spawner.agent.kubernetes.devices.device_ids import devices_for
from gpushare_spawner.agent.kubernetes.devices.device_owners import HeldDevices
from gpushare_spawner.agent.kubernetes.devices.pod_resources import Given, Handed, PodKey
from gpushare_spawner.agent.kubernetes.pods.pod_record import foreign_record, grants_of, ids_by_gpu, pod_record
from gpushare_spawner.agent.kubernetes.pods.pod_watch import Pod, Pods
from gpushare_spawner.agent.log_once import LogOnce
from gpushare_spawner.agent.node import Node
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.agent.state.session_record import PodOwner, SessionRecord
from gpushare_spawner.model import kubernetes
from gpushare_spawner.model.control import AnnounceRequest
from gpushare_spawner.model.kubernetes import AnnotationProblem, PodSession
from gpushare_spawner.model.tier import Tier

log = logging.getLogger(__name__)

ALL_GPUS_WITHIN = 10.0
"""Seconds in which the kubelet asks for all of a pod's GPUs, one after the other."""
STRANGER_AFTER = 5.0
"""Seconds after which a pod that holds devices, and that the API does not show, counts as not of the hub."""
GONE_AFTER = 30.0
"""Seconds for which the kubelet must not have listed a pod that the API does not show, to be sure that it has ended."""
TRUST_KUBELET_AFTER = 10.0
"""Seconds from a start of the kubelet until a pod that it does not list is one that is not there: for about one second
it lists none."""
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0
"""Seconds between tries of a patch."""
MAX_SEEN = 16


class PodSessions:
    """Keeps the node's sessions what its pods are."""

    def __init__(
        self, node: Node, pods: Pods, api: ClusterApi, held: HeldDevices, ask_kubelet: Callable[[], None]
    ) -> None:
        """`ask_kubelet` has `handed` called soon with the kubelet's newest word."""
        self._node = node
        self._ask_kubelet = ask_kubelet
        self._pods = pods
        self._api = api
        self._held = held
        self._loop = asyncio.get_running_loop()
        self._listed: dict[PodKey, dict[str, Given]] = {}
        """The kubelet's last word: devices by pod, GPU and container, of pods that have not ended since."""
        self._absent: dict[PodKey, float] = {}
        self._patches: dict[str, asyncio.Task[None]] = {}
        self._said: set[str] = set()
        self._trouble = LogOnce(
            log,
            "cannot write tiers to the annotations of pods; retrying",
            "tiers are written to the annotations of pods again",
        )
        self._scheduled: asyncio.Handle | None = None
        self._kubelet_since = self._loop.time()
        self._kubelet_start: float | None = None
        self._closed = False

    def changed(self) -> None:
        """Something is new: look at everything soon."""
        if self._scheduled is None and not self._closed:
            self._scheduled = self._loop.call_soon(self._look)

    def kubelet_started(self) -> None:
        """For a while its lists are not to be believed where they are empty."""
        self._kubelet_since = self._loop.time()

    def handed(self, handed: Handed) -> None:
        """The kubelet's newest word."""
        if handed.started != self._kubelet_start:
            self._kubelet_start = handed.started
            self.kubelet_started()
        self._listed = {
            key: devices for key, resources in handed.by_pod.items() if (devices := self._by_gpu(resources))
        }
        self._forget_what_never_came()
        self.changed()

    async def close(self) -> None:
        """Stop; patches that are on their way are given up."""
        self._closed = True
        if self._scheduled is not None:
            self._scheduled.cancel()
        for task in self._patches.values():
            task.cancel()
        await asyncio.gather(*self._patches.values(), return_exceptions=True)

    # -- pods and sessions --------------------------------------------------------------------------------------------

    def _look(self) -> None:
        self._scheduled = None
        with self._one_by_one("what is gone"):
            self._end_what_is_gone()
        for key, devices in list(self._listed.items()):
            with self._one_by_one(f"pod {key[0]}/{key[1]}"):
                self._bring_together(key, devices)
        for session in list(self._node.sessions.values()):
            with self._one_by_one(f"session {session.id}"):
                self._follow(session)

    @contextlib.contextmanager
    def _one_by_one(self, what: str) -> Iterator[None]:
        """What is wrong with one of them is none of the others' trouble."""
        try:
            yield
        except Exception:
            log.exception("cannot process %s; retrying", what)

    def _end_what_is_gone(self) -> None:
        for session in list(self._node.sessions.values()):
            hold = session.record.pod
            if hold is None:
                continue
            if hold.uid:
                # while the pods have not been listed nobody is known to be gone
                if self._pods.known and self._pods.get(hold.uid) is None:
                    self.end(session, f"pod {hold.namespace}/{hold.name} is gone")
            elif self._long_absent(hold.key):
                self.end(session, f"the kubelet no longer lists pod {hold.namespace}/{hold.name}")

    def end(self, session: Session, reason: str) -> None:
        """Its pod is gone. What the kubelet said before is no reason to take it up again."""
        hold = session.record.pod
        self._node.registry.end(session.id, reason)
        if hold is not None and self._listed.pop(hold.key, None) is not None:
            self._ask_kubelet()

    def _bring_together(self, key: PodKey, devices: dict[str, Given]) -> None:
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
            record = foreign_record(key, devices, self._held.unit_size, self._node.wall_clock())
            self._say(
                f"pod {key[0]}/{key[1]} holds devices of this agent but lacks the label {kubernetes.SESSION_SELECTOR}"
            )
        else:
            said = self._said_by(pod)
            if said is not None and len(devices) < len(said.gpus) and age < ALL_GPUS_WITHIN:
                self._look_again(ALL_GPUS_WITHIN - age)
                return
            record = self._record(pod, said, devices)
        other = self._node.sessions.get(record.request.id)
        if other is not None and not self._is_older(other, pod):
            self._say(f"pod {key[0]}/{key[1]} claims session {record.request.id}, which a newer pod holds")
            return
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
            self._say(f"session {session.id} holds devices of other GPUs than before: {', '.join(devices)}")
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
            self._say(
                f"pod {pod.namespace}/{pod.name} is annotated with GPUs {', '.join(said.gpus)} and holds devices of "
                f"{', '.join(devices)}: the devices count"
            )
        wanted = devices_for(said.share_units, self._held.unit_size)
        for gpu, ids in ids_by_gpu(devices).items():
            if len(ids) != wanted:
                self._say(
                    f"pod {pod.namespace}/{pod.name} holds {len(ids)} devices of GPU {self._node.gpus[gpu].index}; a "
                    f"share of {said.share_units} is {wanted} of {self._held.unit_size} units each: hub and agent "
                    "must have the same unit size"
                )
        try:
            return pod_record(pod, said, devices, _marks(pod.annotations))
        except ValidationError as error:
            self._say(f"pod {pod.namespace}/{pod.name}: its annotations are not valid: {error.errors()[0]['msg']}")
            return foreign_record(key, devices, self._held.unit_size, now, pod.uid)

    def _said_by(self, pod: Pod) -> PodSession | None:
        if isinstance(pod.said, AnnotationProblem):
            self._say(f"pod {pod.namespace}/{pod.name}: {pod.said}")
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

    def _by_gpu(self, resources: Mapping[str, Given]) -> dict[str, Given]:
        """A pod's devices that are ours."""
        found: dict[str, Given] = {}
        for resource, given in resources.items():
            if kubernetes.gpu_index_of(resource) is None:
                continue
            for ids in given:
                parts: dict[str, set[str]] = {}
                for device in ids:
                    gpu = self._held.gpu_of(device)
                    if gpu is None:
                        self._say(f"device {device} of {resource} is of a GPU that this agent does not have (any more)")
                    else:
                        parts.setdefault(gpu, set()).add(device)
                for gpu, ours in parts.items():
                    found[gpu] = (*found.get(gpu, ()), frozenset(ours))
        return found

    # -- what the kubelet no longer lists -----------------------------------------------------------------------------

    def _forget_what_never_came(self) -> None:
        listed = {ids for devices in self._listed.values() for given in devices.values() for ids in given}
        now = self._loop.time()
        keys = {one.record.pod.key for one in self._node.sessions.values() if one.record.pod is not None}
        self._absent = {key: self._absent.get(key, now) for key in keys if key not in self._listed}
        if not self._kubelet_is_up():
            return
        for grant in list(self._held.pending.values()):
            age = now - grant.made_at
            if grant.devices not in listed and (age > GONE_AFTER or not grant.asked_for):
                log.info(
                    "%d devices of GPU %s were allocated and no pod holds them; they are free again",
                    len(grant.devices),
                    grant.gpu,
                )
                self._held.forget(grant)
        self._held.remove_unknown_folders(listed)

    def _long_absent(self, key: PodKey) -> bool:
        since = self._absent.get(key)
        return since is not None and self._loop.time() - since >= GONE_AFTER and self._kubelet_is_up()

    def _kubelet_is_up(self) -> bool:
        return self._loop.time() - self._kubelet_since >= TRUST_KUBELET_AFTER

    # -- tiers and announcements --------------------------------------------------------------------------------------

    def _follow(self, session: Session) -> None:
        hold = session.record.pod
        pod = self._pods.get(hold.uid) if hold is not None and hold.uid else None
        said = self._said_by(pod) if pod is not None else None
        if hold is None or pod is None or said is None:
            return
        fresh = [mark for mark in _marks(pod.annotations) if mark not in hold.seen]
        if fresh:
            # first: what follows from it is saved, and looked at again
            hold.seen = (*hold.seen, *fresh)[-MAX_SEEN:]
            for mark in fresh:
                if mark.startswith("tier"):
                    self._follow_tier(session, said)
                else:
                    self._follow_announcement(session, said)
            self._node.registry.save(session)
        if self._wanted(session) and session.id not in self._patches:
            self._patches[session.id] = self._loop.create_task(self._patch(session))

    def _follow_tier(self, session: Session, said: PodSession) -> None:
        record = session.record
        if (said.tier, said.effective_units) == (record.tier, record.effective_units):
            return
        doing = self._node.registry.activity(session)
        down = said.effective_units < record.effective_units or said.tier.depth > record.tier.depth
        worked = said.idle_since is not None and doing.last is not None and doing.last > said.idle_since
        if down and (doing.busy or worked):
            log.info("session %s stays out of tier %s: it has worked on the GPU in the meantime", session.id, said.tier)
            return
        self._node.registry.tiers.move(
            session,
            said.tier,
            min(said.effective_units, record.request.share_units),
            "set in the annotations of its pod",
        )

    def _follow_announcement(self, session: Session, said: PodSession) -> None:
        step = said.announcement
        if step == session.record.announcement or (step is not None and self._node.registry.activity(session).busy):
            return
        self._node.requests.announce(AnnounceRequest.of(session.id, step))

    def _wanted(self, session: Session) -> dict[str, str | None]:
        """What the pod's annotations have to be changed to, so that they say what is."""
        record, hold = session.record, session.record.pod
        pod = self._pods.get(hold.uid) if hold is not None else None
        said = self._said_by(pod) if pod is not None else None
        if said is None or self._node.sessions.get(session.id) is not session:
            return {}
        patch: dict[str, str | None] = {}
        if (said.tier, said.effective_units) != (record.tier, record.effective_units):
            patch |= kubernetes.tier_patch(record.tier, record.tier_since, record.effective_units)
        if said.announcement != record.announcement:
            if record.announcement is None and record.tier is Tier.ACTIVE:
                # work began, and the hub hears of it before the report says so: idleness counts from now on
                patch |= kubernetes.tier_patch(Tier.ACTIVE, self._node.wall_clock(), record.effective_units)
            patch |= kubernetes.announcement_patch(record.announcement)
        if said.borrowed_units != record.borrowed_units:
            patch |= kubernetes.borrowed_patch(record.borrowed_units)
        return patch

    async def _patch(self, session: Session) -> None:
        hold = session.record.pod
        pause = FIRST_PAUSE
        try:
            while hold is not None and (patch := self._wanted(session)):
                pod = self._pods.get(hold.uid)
                if pod is None:
                    return
                try:
                    # the uid: never into another pod of the same name
                    item = await self._api.patch(pod.path, {"metadata": {"uid": pod.uid, "annotations": patch}})
                except ApiFailure as failure:
                    # the pod is gone, or another has its name; the watch will say so
                    another = failure.status == 422 and "metadata.uid" in str(failure)
                    if failure.status not in (404, 409) and not another:
                        self._trouble.about(failure)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE)
                    continue
                self._trouble.settled()
                self._pods.put(item)
                marks = _marks(item["metadata"].get("annotations") or {})
                hold.seen = (*hold.seen, *(mark for mark in marks if mark not in hold.seen))[-MAX_SEEN:]
                self._node.registry.save(session)
                if self._wanted(session):
                    # it moved on in the meantime; or somebody undoes what is written, whom this must not race
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, LONGEST_PAUSE)
        except Exception:
            log.exception("the pod of session %s cannot be patched", session.id)
            await asyncio.sleep(LONGEST_PAUSE)
        finally:
            del self._patches[session.id]
            self.changed()

    # -- saying things once -------------------------------------------------------------------------------------------

    def _say(self, sentence: str) -> None:
        if sentence not in self._said:
            if len(self._said) >= 1000:
                self._said.clear()
            self._said.add(sentence)
            log.warning("%s", sentence)

    def _look_again(self, seconds: float) -> None:
        self._loop.call_later(max(0.1, seconds), self.changed)


def _marks(annotations: Mapping[str, str]) -> tuple[str, ...]:
    """What tells one decision from another: the annotations of a tier, and those of an announcement."""
    tier = (kubernetes.TIER, kubernetes.EFFECTIVE_SHARE, kubernetes.TIER_SINCE)
    return (
        f"tier {' '.join(annotations.get(name, '') for name in tier)}",
        f"announcement {annotations.get(kubernetes.ANNOUNCEMENT, '')}",
    )
