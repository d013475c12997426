"""Tiers, notices and shares in pods' annotations: carries out the service's decisions and writes back the agent's.

Tiers: the service patches a tier down and the agent follows, unless the session has worked in the meantime. The agent
restores a tier when work counts as use, and the annotations follow. `PodOwner.seen` lists the decisions that were
already carried out, so the agent can tell which of two tiers is newer. The time in a decision makes it unique.

Notices: the annotations decide. The agent never writes a notice; it only removes a notice that it has averted
(`PodOwner.averted`).

Shares: the service requests another share and the agent decides. The agent's record is authoritative; annotations that
differ are patched.

`AnnotationWriter` sends the patches. sessions.py handles the sessions of pods.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from gpushare_spawner.agent.kubernetes.devices.owners import HeldDevices
from gpushare_spawner.agent.kubernetes.pods.pod_watch import Pod
from gpushare_spawner.agent.sessions.session import Activity, Session
from gpushare_spawner.agent.state.records import PodOwner, SessionRecord
from gpushare_spawner.background import cancel
from gpushare_spawner.clients.api import ApiFailure, Json
from gpushare_spawner.log_once import LogOnce
from gpushare_spawner.model.control import ControlRefused, Failure, NoticeRequest, ResizeRequest
from gpushare_spawner.model.kubernetes.annotations import (
    EFFECTIVE_SHARE,
    NOTICE,
    RESIZE,
    TIER,
    TIER_SINCE,
    YIELDS_UNTIL,
    PodSession,
    ShareChangeAnswer,
    borrowed_patch,
    notice_patch,
    resized_patch,
    share_patch,
    tier_patch,
)
from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.share import Tier, UseRule, voids_idle_action

log = logging.getLogger(__name__)


class Changes(Protocol):
    """The part that changes shares: `sessions.tiers.Tiers`."""

    def resize(self, session: Session, request: ResizeRequest) -> None:
        """Change a session's share. Raises ControlRefused."""


class ShareAnnotations:
    """Carries out the share changes that the service writes to pods' annotations."""

    def __init__(self, changes: Changes, held: HeldDevices, save: Callable[[Session], None]) -> None:
        """`held` also has grants that no session has yet. `save` writes a record."""
        self._changes = changes
        self._held = held
        self._save = save

    def follow(self, session: Session, annotated: PodSession) -> None:
        """Decide on a requested share. A request that was answered needs no action."""
        hold, change = session.record.pod, annotated.resize
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
                "no-capacity",
                f"session {session.id} can have {free} units on its GPUs now, and not {units}: others use the devices",
            )


def needed_share_patch(annotated: PodSession, record: SessionRecord) -> dict[str, str | None]:
    """Return the patch that writes the record's share to the annotations; empty: none is needed."""
    patch: dict[str, str | None] = {}
    hold, request = record.pod, record.request
    if hold is None or hold.resized is None:
        return patch
    placed = hold.placed_units or request.share_units
    have = (annotated.share_units, annotated.placed_units or annotated.share_units, annotated.memory_limit)
    if have != (request.share_units, placed, str(request.memory_limit)):
        patch |= share_patch(request.share_units, placed, str(request.memory_limit))
        # Patch both together, because units beyond the share would make the annotations invalid.
        patch |= tier_patch(
            record.tier, record.tier_since, record.effective_units, yields_until=record.yields_until, use=record.use
        )
        patch |= borrowed_patch(record.borrowed_units)
    if annotated.resized != hold.resized:
        patch |= resized_patch(hold.resized)
        if annotated.resize is not None and annotated.resize.number != hold.resized.number:
            del patch[RESIZE]  # a newer request
    return patch


MAX_SEEN = 16
"""Maximum decisions per record."""


class Moves(Protocol):
    """The part that changes tiers: `sessions.tiers.Tiers`."""

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

    def notify(self, session: Session, request: NoticeRequest) -> None:
        """Send the user a notice, or withdraw it."""


class TierAnnotations:
    """Carries out the tiers and notices that the service writes to pods' annotations."""

    def __init__(self, tiers: Moves, activity: Callable[[Session], Activity], save: Callable[[Session], None]) -> None:
        """`activity` returns the session's GPU work now. `save` writes its record."""
        self._tiers = tiers
        self._activity = activity
        self._save = save

    def follow(self, session: Session, annotated: PodSession, annotations: Mapping[str, str]) -> None:
        """Carry out new decisions in the annotations of the session's pod. `annotated`: the parsed annotations."""
        hold = session.record.pod
        assert hold is not None
        fresh = [decision for decision in decisions(annotations) if decision not in hold.seen]
        if fresh:
            # Remember the decisions first: carrying one out saves the record, which triggers another comparison.
            remember(hold, fresh)
            self._follow_tier(session, annotated)
            self._save(session)
        self._follow_notice(session, hold, hold.notice_of_now(annotated.notice))

    def _follow_tier(self, session: Session, annotated: PodSession) -> None:
        record = session.record
        if _tier_of(annotated) == _tier_of(record):
            return
        doing = self._activity(session)
        down = annotated.effective_units < record.effective_units or annotated.tier.depth > record.tier.depth
        # Without `idle_since`, only running work counts.
        since = annotated.idle_since if annotated.idle_since is not None else math.inf
        worked = voids_idle_action(doing.busy, doing.last, doing.gpu_seconds, since, annotated.if_gpu_seconds)
        # Work does not avert a downgrade for spawns in quota.
        if down and annotated.yields_until is None and worked:
            log.info(
                "session %s does not change to tier %s: it has worked on the GPU in the meantime",
                session.id,
                annotated.tier,
            )
            return
        units = min(annotated.effective_units, record.request.share_units)
        self._tiers.move(
            session, annotated.tier, units, "set in the annotations of its pod", annotated.yields_until, annotated.use
        )

    def _follow_notice(self, session: Session, hold: PodOwner, notice: Notice | None) -> None:
        """Show the notice of the annotations, unless it was averted."""
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
            self._tiers.notify(session, NoticeRequest.of(session.id, shown))


def needed_patch(annotated: PodSession, record: SessionRecord, now: float) -> dict[str, str | None]:
    """Return the patch that writes the session's record to its pod's annotations; empty: none is needed.

    `annotated`: the annotations as they are. `now`: seconds since the epoch.
    """
    patch: dict[str, str | None] = {}
    hold = record.pod
    averted = annotated.notice is not None and hold is not None and hold.notice_of_now(annotated.notice) == hold.averted
    if _tier_of(annotated) != _tier_of(record):
        since, units = record.tier_since, record.effective_units
        patch |= tier_patch(record.tier, since, units, yields_until=record.yields_until, use=record.use)
    elif averted and record.tier is Tier.ACTIVE:
        # Work began. The annotation reaches the hub before the report, and idle time starts again.
        patch |= tier_patch(Tier.ACTIVE, now, record.effective_units)
    patch |= needed_share_patch(annotated, record)
    if averted:
        patch |= notice_patch(None)
    elif annotated.notice is not None:
        patch.pop(NOTICE, None)  # the patch of a tier withdraws it
    if annotated.borrowed_units != record.borrowed_units:
        patch |= borrowed_patch(record.borrowed_units)
    return patch


def decisions(annotations: Mapping[str, str]) -> tuple[str, ...]:
    """Return the keys of the decisions on the tier. Each decision has a key of its own."""
    tier = (TIER, EFFECTIVE_SHARE, TIER_SINCE)
    kept = annotations.get(YIELDS_UNTIL)
    return (f"tier {' '.join(annotations.get(name, '') for name in tier)}" + (f" yields {kept}" if kept else ""),)


def _tier_of(session: PodSession | SessionRecord) -> tuple[Tier, int, float | None]:
    return session.tier, session.effective_units, session.yields_until


def remember(hold: PodOwner, dealt_with: Iterable[str]) -> None:
    """Add decisions that need no more action to the record, and keep the last `MAX_SEEN`."""
    hold.seen = (*hold.seen, *(decision for decision in dealt_with if decision not in hold.seen))[-MAX_SEEN:]


FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0
"""Seconds between patch attempts."""


class Api(Protocol):
    """The call that the writer needs: `api.ClusterApi.patch`."""

    async def patch(self, path: str, patch: Json) -> Json:
        """Apply a merge patch and return the object. Raises ApiFailure."""


class AnnotationWriter:
    """Patches pods, with one patch at a time for each session."""

    def __init__(
        self,
        api: Api,
        pod_of: Callable[[Session], Pod | None],
        patch_of: Callable[[Session], Mapping[str, str | None]],
        written: Callable[[Session, Json], None],
        ended: Callable[[], None],
    ) -> None:
        """`patch_of` returns the patch that a session's pod needs now; empty: none.

        `written` gets the pod from the API server's answer. `ended` is called when a session needs no more patches, or
        cannot be patched.
        """
        self._api = api
        self._pod_of = pod_of
        self._patch_of = patch_of
        self._written = written
        self._ended = ended
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._trouble = LogOnce(
            log,
            "cannot write tiers to the annotations of pods; retrying",
            "tiers are written to the annotations of pods again",
        )

    def patch_if_needed(self, session: Session) -> None:
        """Patch the session's pod if it needs a patch and none is under way."""
        if session.id not in self._tasks and self._patch_of(session):
            self._tasks[session.id] = asyncio.get_running_loop().create_task(self._patch(session))

    async def close(self) -> None:
        """Cancel patches that are under way."""
        await cancel(*self._tasks.values())

    async def _patch(self, session: Session) -> None:
        pause = FIRST_PAUSE
        try:
            while (patch := self._patch_of(session)) and (pod := self._pod_of(session)) is not None:
                try:
                    # Include the uid so that the patch cannot reach a different pod with the same name.
                    body = {"metadata": {"uid": pod.uid, "annotations": dict(patch)}}
                    item = await self._api.patch(pod.path, body)
                except ApiFailure as failure:
                    if not _is_of_another_pod(failure):
                        self._trouble.about(failure)
                else:
                    self._trouble.settled()
                    self._written(session, item)
                    if not self._patch_of(session):
                        break
                    # The record has changed meanwhile, or another writer undoes patches. Do not race with it.
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        except Exception:
            log.exception("the pod of session %s cannot be patched", session.id)
            await asyncio.sleep(LONGEST_PAUSE)
        finally:
            del self._tasks[session.id]
            self._ended()


def _is_of_another_pod(failure: ApiFailure) -> bool:
    """Return whether the pod is gone, or another pod has its name; the watch will show it."""
    return failure.status in (404, 409) or (failure.status == 422 and "metadata.uid" in str(failure))
