"""Tiers, notices and shares in pods' annotations: carries out the service's decisions and writes the agent's.

Tiers: the service lowers a tier with a patch and the agent applies it, unless the session has worked in the meantime.
The agent restores a tier when work counts as use, and then updates the annotations. `PodOwner.seen` lists the decisions
that were already carried out, so the agent can determine which of two tiers is newer. The time in a decision makes it
unique.

Notices: the annotations are authoritative. The agent never writes a notice; it only removes a notice that it has
averted (`PodOwner.averted`).

Shares: the service requests a different share and the agent decides. The agent's record is authoritative; the agent
patches annotations that differ.

`AnnotationWriter` sends the patches. sessions.py handles the sessions of pods.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping

from gpushare_spawner.agent.kubernetes.devices.owners import AllocatedDevices
from gpushare_spawner.agent.kubernetes.pods.pod_watch import Pod
from gpushare_spawner.agent.session_records import PodOwner, SessionRecord
from gpushare_spawner.agent.sessions.registry import SessionRegistry
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.background import cancel, pauses
from gpushare_spawner.clients.api import ApiFailure, ClusterApi, Json
from gpushare_spawner.log_once import LogOnce
from gpushare_spawner.model.control import ControlRefused, Failure, NoticeRequest
from gpushare_spawner.model.kubernetes.annotations import (
    BACKGROUND,
    EFFECTIVE_SHARE,
    NOTICE,
    RESIZE,
    TIER,
    TIER_SINCE,
    YIELDS_UNTIL,
    SessionAnnotations,
    ShareChangeAnswer,
    borrowed_patch,
    notice_patch,
    resized_patch,
    share_patch,
    tier_patch,
)
from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.share import Tier, units_on, voids_idle_action

log = logging.getLogger(__name__)


def follow_share(
    session: Session, annotated: SessionAnnotations, allocated: AllocatedDevices, registry: SessionRegistry
) -> None:
    """Decide on a share change that the service wrote to a pod's annotations. An answered request needs no action.

    `held` also contains grants without a session.
    """
    owner, change, request = session.record.pod, annotated.resize, session.record.request
    if owner is None or change is None or (owner.resized is not None and owner.resized.number == change.number):
        return
    before = request.share_units
    refused: Failure | None = None
    try:
        for gpu in session.gpus:
            units, free = (
                units_on(gpu.uuid, request.gpus, change.share_units, change.last_units),
                allocated.free_for(session, gpu),
            )
            if units > max(request.on(gpu.uuid, before), free):
                message = (
                    f"session {session.id} can have {free} units on GPU {gpu.index} now, and not {units}: others use "
                    "the devices"
                )
                raise ControlRefused("no-capacity", message)
        registry.tiers.resize(session, change.request(session.id))
    except ControlRefused as error:
        refused = Failure(code=error.code, message=error.message)
    else:
        if owner.placed_units is None:
            owner.placed_units = before
    owner.resized = ShareChangeAnswer(number=change.number, refused=refused)
    registry.save(session)


def needed_share_patch(annotated: SessionAnnotations, record: SessionRecord) -> dict[str, str | None]:
    """Return the patch that writes the record's share to the annotations; empty if no patch is needed."""
    patch: dict[str, str | None] = {}
    owner, request = record.pod, record.request
    if owner is None or owner.resized is None:
        return patch
    placed = owner.placed_units or request.share_units
    had = annotated.placed_units or annotated.share_units
    have = (annotated.share_units, annotated.last_units, had, annotated.memory_limit)
    if have != (request.share_units, request.last_units, placed, str(request.memory_limit)):
        patch |= share_patch(request.share_units, placed, str(request.memory_limit), request.last_units)
        # Patch both together, because units beyond the share would make the annotations invalid.
        patch |= _tier_patch(record)
        patch |= borrowed_patch(record.borrowed_units)
    if annotated.resized != owner.resized:
        patch |= resized_patch(owner.resized)
        if annotated.resize is not None and annotated.resize.number != owner.resized.number:
            del patch[RESIZE]  # a newer request
    return patch


MAX_SEEN = 16
"""Maximum number of decisions per record."""


def follow_tier(
    session: Session, annotated: SessionAnnotations, annotations: Mapping[str, str], registry: SessionRegistry
) -> None:
    """Carry out new tiers and notices that the service wrote to a pod's annotations.

    `annotated`: the parsed `annotations`.
    """
    owner = session.record.pod
    assert owner is not None
    decision = tier_decision_key(annotations)
    if decision not in owner.seen:
        # Remember the decision first: carrying it out saves the record, which triggers another comparison.
        remember(owner, decision)
        _change_tier(session, annotated, registry)
        registry.save(session)
    _show_notice(session, owner, owner.notice_of_now(annotated.notice), registry)


def _change_tier(session: Session, annotated: SessionAnnotations, registry: SessionRegistry) -> None:
    record = session.record
    if _tier_of(annotated) == _tier_of(record):
        return
    doing = registry.activity(session)
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
    registry.tiers.change_tier(
        session,
        annotated.tier,
        units,
        "set in the annotations of its pod",
        annotated.yields_until,
        annotated.use,
        annotated.background,
    )


def _show_notice(session: Session, owner: PodOwner, notice: Notice | None, registry: SessionRegistry) -> None:
    """Show the notice in the annotations, unless it was averted."""
    if notice is not None and notice == owner.averted:
        return
    all_work_counts = notice is not None and notice.averted_by_work and notice.use is None
    averted = all_work_counts and registry.activity(session).busy
    shown, withdrawn = (None, notice) if averted else (notice, None)
    if (shown, withdrawn) == (session.record.notice, owner.averted):
        return
    owner.averted = withdrawn
    if shown == session.record.notice:
        registry.save(session)
    else:
        registry.tiers.notify(session, NoticeRequest.of(session.id, shown))


def needed_patch(annotated: SessionAnnotations, record: SessionRecord, now: float) -> dict[str, str | None]:
    """Return the patch that writes the session's record to its pod's annotations; empty if no patch is needed.

    `annotated`: the current annotations. `now`: seconds since the epoch.
    """
    patch: dict[str, str | None] = {}
    owner = record.pod
    averted = (
        annotated.notice is not None and owner is not None and owner.notice_of_now(annotated.notice) == owner.averted
    )
    if _tier_of(annotated) != _tier_of(record):
        patch |= _tier_patch(record)
    elif averted and record.tier is Tier.ACTIVE:
        # Work began. The annotation reaches the hub before the report does, and idle time restarts.
        patch |= tier_patch(Tier.ACTIVE, now, record.effective_units)
    patch |= needed_share_patch(annotated, record)
    if averted:
        patch |= notice_patch(None)
    elif annotated.notice is not None:
        patch.pop(NOTICE, None)  # the patch of a tier withdraws it
    if annotated.borrowed_units != record.borrowed_units:
        patch |= borrowed_patch(record.borrowed_units)
    return patch


def tier_decision_key(annotations: Mapping[str, str]) -> str:
    """Return the key that identifies the tier decision in a pod's annotations."""
    tier = (TIER, EFFECTIVE_SHARE, TIER_SINCE)
    kept, background = annotations.get(YIELDS_UNTIL), annotations.get(BACKGROUND)
    more = (f" yields {kept}" if kept else "") + (" background" if background else "")
    return f"tier {' '.join(annotations.get(name, '') for name in tier)}{more}"


def _tier_of(session: SessionAnnotations | SessionRecord) -> tuple[Tier, int, float | None, bool]:
    return session.tier, session.effective_units, session.yields_until, session.background


def _tier_patch(record: SessionRecord) -> dict[str, str | None]:
    """Return the patch that writes the record's tier to the annotations."""
    return tier_patch(
        record.tier,
        record.tier_since,
        record.effective_units,
        yields_until=record.yields_until,
        use=record.use,
        background=record.background,
    )


def remember(owner: PodOwner, decision: str) -> None:
    """Add a decision that needs no further action to the record, which retains the last `MAX_SEEN`."""
    if decision not in owner.seen:
        owner.seen = (*owner.seen, decision)[-MAX_SEEN:]


FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0
"""Seconds between patch attempts."""


class AnnotationWriter:
    """Patches pods, with one patch at a time per session."""

    def __init__(
        self,
        api: ClusterApi,
        pod_of: Callable[[Session], Pod | None],
        patch_of: Callable[[Session], Mapping[str, str | None]],
        written: Callable[[Session, Json], None],
        ended: Callable[[], None],
    ) -> None:
        """`patch_of` returns the patch that a session's pod needs now; empty: none needed.

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
            log, "cannot write tiers to pods' annotations; retrying", "tiers can be written to pods' annotations again"
        )

    def patch_if_needed(self, session: Session) -> None:
        """Patch the session's pod if it needs a patch and none is in progress."""
        if session.id not in self._tasks and self._patch_of(session):
            self._tasks[session.id] = asyncio.get_running_loop().create_task(self._patch(session))

    async def close(self) -> None:
        """Cancel patches that are in progress."""
        await cancel(*self._tasks.values())

    async def _patch(self, session: Session) -> None:
        try:
            for pause in pauses(FIRST_PAUSE, LONGEST_PAUSE):
                patch, pod = self._patch_of(session), self._pod_of(session)
                if not patch or pod is None:
                    break
                try:
                    # Include the uid so that the patch cannot reach a different pod with the same name.
                    body = {"metadata": {"uid": pod.uid, "annotations": dict(patch)}}
                    item = await self._api.patch(pod.path, body)
                except ApiFailure as failure:
                    if not _is_of_another_pod(failure):
                        self._trouble.about(failure)
                else:
                    self._trouble.resolved()
                    self._written(session, item)
                    if not self._patch_of(session):
                        break
                    # The record has changed meanwhile, or another writer undoes patches. Do not race with that writer.
                await asyncio.sleep(pause)
        except Exception:
            log.exception("the pod of session %s cannot be patched", session.id)
            await asyncio.sleep(LONGEST_PAUSE)
        finally:
            del self._tasks[session.id]
            self._ended()


def _is_of_another_pod(failure: ApiFailure) -> bool:
    """Return whether the pod no longer exists, or another pod has its name; the watch will show which."""
    return failure.status in (404, 409) or (failure.status == 422 and "metadata.uid" in str(failure))
