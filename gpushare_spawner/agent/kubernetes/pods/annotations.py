"""A session's tier and notice against those in its pod's annotations: which of the two follows the other.

The service patches a tier down, and the agent follows, unless the session worked in the meantime; the agent restores a
tier when work counts as use, and the pod's annotations follow. Which of two that differ is the newer is told by what
has been seen: annotations that were dealt with already are no new decision. The instant in them makes each decision
unique.

A notice goes one way: the annotations say which one stands, and the agent shows it or none. The agent never writes one.
It removes the one that it has withdrawn itself, see `PodOwner.averted`. Does not patch: annotations.py.

A session's share against its pod's annotations: the service asks for another share there, the agent decides.

The agent's record is the truth of the share: annotations that say another one are patched. Does not patch itself:
annotations.py.

Writes what sessions are to their pods' annotations, and tries again while the API server does not answer.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from gpushare_spawner.agent.kubernetes.api import ApiFailure, Json
from gpushare_spawner.agent.kubernetes.devices.owners import HeldDevices
from gpushare_spawner.agent.kubernetes.pods.pod_watch import Pod
from gpushare_spawner.agent.sessions.session import Activity, Session
from gpushare_spawner.agent.state.records import PodOwner, SessionRecord
from gpushare_spawner.log_once import LogOnce
from gpushare_spawner.model import kubernetes
from gpushare_spawner.model.control import AnnounceRequest, ControlRefused, Failure, ResizeRequest
from gpushare_spawner.model.kubernetes import PodSession, ShareChangeAnswer
from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.share import Tier, UseRule, voids_idle_action

log = logging.getLogger(__name__)


class Changes(Protocol):
    """What changes shares: sessions.share_changes.ShareChanges."""

    def resize(self, session: Session, request: ResizeRequest) -> None:
        """Change a session's share. Raises ControlRefused."""


class ShareAnnotations:
    """Carries out the changes of shares that the service wrote to pods' annotations."""

    def __init__(self, changes: Changes, held: HeldDevices, save: Callable[[Session], None]) -> None:
        """`held`: the kubelet may have given units away of which no session knows yet. `save` writes a record."""
        self._changes = changes
        self._held = held
        self._save = save

    def follow(self, session: Session, said: PodSession) -> None:
        """Decide on what is asked; an ask that was answered is none."""
        hold, change = session.record.pod, said.resize
        if hold is None or change is None or (hold.resized is not None and hold.resized.number == change.number):
            return
        before = session.record.request.share_units
        refused: Failure | None = None
        try:
            self._check(session, change.share_units)
            self._changes.resize(session, change.request(session.id))
        except ControlRefused as error:
            refused = Failure(code=error.code, message=error.message)
        else:
            if hold.placed_units is None:
                hold.placed_units = before
        hold.resized = ShareChangeAnswer(number=change.number, refused=refused)
        self._save(session)

    def _check(self, session: Session, units: int) -> None:
        free = self._held.free_for(session)
        if units > session.record.request.share_units and units > free:
            raise ControlRefused(
                Failure(
                    code="no-capacity",
                    message=f"session {session.id} can have {free} units on its GPUs now, and not {units}: others use "
                    "the devices",
                )
            )


def share_patch_wanted(said: PodSession, record: SessionRecord) -> dict[str, str | None]:
    """Return the part of a pod's patch that makes its annotations say the record's share; empty: none is needed."""
    patch: dict[str, str | None] = {}
    hold, request = record.pod, record.request
    if hold is None or hold.resized is None:
        return patch
    placed = hold.placed_units or request.share_units
    have = (said.share_units, said.placed_units or said.share_units, said.memory_limit)
    if have != (request.share_units, placed, str(request.memory_limit)):
        patch |= kubernetes.share_patch(request.share_units, placed, str(request.memory_limit))
        # all of them at once: units beyond the share would make the annotations invalid
        patch |= kubernetes.tier_patch(
            record.tier, record.tier_since, record.effective_units, yields_until=record.yields_until, use=record.use
        )
        patch |= kubernetes.borrowed_patch(record.borrowed_units)
    if said.resized != hold.resized:
        patch |= kubernetes.resized_patch(hold.resized)
        if said.resize is not None and said.resize.number != hold.resized.number:
            del patch[kubernetes.RESIZE]  # a newer one
    return patch


MAX_SEEN = 16
"""Decisions that a record remembers."""


class Moves(Protocol):
    """What changes tiers: sessions.tiers.Tiers."""

    def move(
        self,
        session: Session,
        tier: Tier,
        units: int,
        reason: str,
        yields_until: float | None = None,
        use: UseRule | None = None,
    ) -> None:
        """Set a session's tier."""

    def announce(self, session: Session, request: AnnounceRequest) -> None:
        """Send the user a notice, or withdraw it."""


class TierAnnotations:
    """Carries out the decisions that the service wrote to pods' annotations."""

    def __init__(self, tiers: Moves, activity: Callable[[Session], Activity], save: Callable[[Session], None]) -> None:
        """`activity`: what a session does on its GPUs now. `save` writes its record."""
        self._tiers = tiers
        self._activity = activity
        self._save = save

    def follow(self, session: Session, said: PodSession, annotations: Mapping[str, str]) -> None:
        """Carry out what is new in the annotations of the session's pod. `said`: the same, parsed."""
        hold = session.record.pod
        assert hold is not None
        fresh = [decision for decision in decisions(annotations) if decision not in hold.seen]
        if fresh:
            # before it is carried out: that saves the record, and the record is looked at again
            remember(hold, fresh)
            self._follow_tier(session, said)
            self._save(session)
        self._follow_notice(session, hold, hold.notice_of_now(said.notice))

    def _follow_tier(self, session: Session, said: PodSession) -> None:
        record = session.record
        if _tier_of(said) == _tier_of(record):
            return
        doing = self._activity(session)
        down = said.effective_units < record.effective_units or said.tier.depth > record.tier.depth
        # without a guard work that runs now counts
        since = said.idle_since if said.idle_since is not None else math.inf
        worked = voids_idle_action(doing.busy, doing.last, doing.gpu_seconds, since, said.if_gpu_seconds)
        # work does not avert what a session gives up for spawns in quota
        if down and said.yields_until is None and worked:
            log.info(
                "session %s does not change to tier %s: it has worked on the GPU in the meantime", session.id, said.tier
            )
            return
        units = min(said.effective_units, record.request.share_units)
        self._tiers.move(session, said.tier, units, "set in the annotations of its pod", said.yields_until, said.use)

    def _follow_notice(self, session: Session, hold: PodOwner, notice: Notice | None) -> None:
        """Show the notice that the annotations have, unless it is the one that was averted."""
        if notice is not None and notice == hold.averted:
            return
        all_work_counts = notice is not None and notice.averted_by_work and notice.use is None
        averted = all_work_counts and self._activity(session).busy
        shown, withdrawn = (None, notice) if averted else (notice, None)
        if (shown, withdrawn) == (session.record.notice, hold.averted):
            return
        hold.averted = withdrawn
        if shown == session.record.notice:
            self._save(session)
        else:
            self._tiers.announce(session, AnnounceRequest.of(session.id, shown))


def patch_wanted(said: PodSession, record: SessionRecord, now: float) -> dict[str, str | None]:
    """Return the patch of a pod's annotations that makes them say what the session's record says; empty: none.

    `said`: the annotations as they are. `now`: seconds since the epoch.
    """
    patch: dict[str, str | None] = {}
    hold = record.pod
    averted = said.notice is not None and hold is not None and hold.notice_of_now(said.notice) == hold.averted
    if _tier_of(said) != _tier_of(record):
        since, units = record.tier_since, record.effective_units
        patch |= kubernetes.tier_patch(record.tier, since, units, yields_until=record.yields_until, use=record.use)
    elif averted and record.tier is Tier.ACTIVE:
        # work began, and the hub hears of it before the report says so: idleness counts from now on
        patch |= kubernetes.tier_patch(Tier.ACTIVE, now, record.effective_units)
    patch |= share_patch_wanted(said, record)
    if averted:
        patch |= kubernetes.notice_patch(None)
    elif said.notice is not None:
        patch.pop(kubernetes.NOTICE, None)  # the patch of a tier withdraws it
    if said.borrowed_units != record.borrowed_units:
        patch |= kubernetes.borrowed_patch(record.borrowed_units)
    return patch


def decisions(annotations: Mapping[str, str]) -> tuple[str, ...]:
    """Return what tells one decision on the tier from another."""
    tier = (kubernetes.TIER, kubernetes.EFFECTIVE_SHARE, kubernetes.TIER_SINCE)
    kept = annotations.get(kubernetes.YIELDS_UNTIL)
    return (f"tier {' '.join(annotations.get(name, '') for name in tier)}" + (f" yields {kept}" if kept else ""),)


def _tier_of(session: PodSession | SessionRecord) -> tuple[Tier, int, float | None]:
    return session.tier, session.effective_units, session.yields_until


def remember(hold: PodOwner, dealt_with: Iterable[str]) -> None:
    """Remember decisions that need no more action, the last `MAX_SEEN`."""
    hold.seen = (*hold.seen, *(one for one in dealt_with if one not in hold.seen))[-MAX_SEEN:]


FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0
"""Seconds between tries of a patch."""


class Api(Protocol):
    """What is needed of the API server: cluster_api.ClusterApi."""

    async def patch(self, path: str, patch: Json) -> Json:
        """Apply a merge patch and return the object. Raises ApiFailure."""


class AnnotationWriter:
    """Patches pods, one patch of each session at a time."""

    def __init__(
        self,
        api: Api,
        pod_of: Callable[[Session], Pod | None],
        wanted: Callable[[Session], Mapping[str, str | None]],
        written: Callable[[Session, Json], None],
        ended: Callable[[], None],
    ) -> None:
        """`wanted` gives the patch that a session's pod needs now; empty: none. `written` is given the pod that the API
        server answered with; `ended` is called when a session needs no more patches, or cannot be patched."""
        self._api = api
        self._pod_of = pod_of
        self._wanted = wanted
        self._written = written
        self._ended = ended
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._trouble = LogOnce(
            log,
            "cannot write tiers to the annotations of pods; retrying",
            "tiers are written to the annotations of pods again",
        )

    def look(self, session: Session) -> None:
        """Patch the session's pod if it needs a patch, and none is on its way."""
        if session.id not in self._tasks and self._wanted(session):
            self._tasks[session.id] = asyncio.get_running_loop().create_task(self._patch(session))

    async def close(self) -> None:
        """Give up patches that are on their way."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _patch(self, session: Session) -> None:
        pause = FIRST_PAUSE
        try:
            while (patch := self._wanted(session)) and (pod := self._pod_of(session)) is not None:
                try:
                    # the uid: never into another pod of the same name
                    body = {"metadata": {"uid": pod.uid, "annotations": dict(patch)}}
                    item = await self._api.patch(pod.path, body)
                except ApiFailure as failure:
                    if not _is_of_another_pod(failure):
                        self._trouble.about(failure)
                else:
                    self._trouble.settled()
                    self._written(session, item)
                    if not self._wanted(session):
                        break
                    # it moved on in the meantime; or somebody undoes what is written, whom this must not race
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        except Exception:
            log.exception("the pod of session %s cannot be patched", session.id)
            await asyncio.sleep(LONGEST_PAUSE)
        finally:
            del self._tasks[session.id]
            self._ended()


def _is_of_another_pod(failure: ApiFailure) -> bool:
    """Return whether the pod is gone, or another one has its name; the watch will say so."""
    return failure.status in (404, 409) or (failure.status == 422 and "metadata.uid" in str(failure))
