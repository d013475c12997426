"""A session's tier and notice against those in its pod's annotations: which of the two follows the other.

The service patches a tier down, and the agent follows, unless the session worked in the meantime; the agent restores a
tier when work counts as use, and the pod's annotations follow. Which of two that differ is the newer is told by what
has been seen: annotations that were dealt with already are no new decision. The instant in them makes each decision
unique.

A notice goes one way: the annotations say which one stands, and the agent shows it or none. The agent never writes one.
It removes the one that it has withdrawn itself, see `PodOwner.averted`. Does not patch: annotation_writer.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from gpushare_spawner.agent.kubernetes.pods.share_annotations import share_patch_wanted
from gpushare_spawner.agent.sessions.activity import Activity
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.agent.state.session_record import PodOwner, SessionRecord
from gpushare_spawner.model import kubernetes
from gpushare_spawner.model.kubernetes import PodSession
from gpushare_spawner.model.protocol.control import AnnounceRequest
from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.tier import Tier, UseRule, voids_idle_action

log = logging.getLogger(__name__)

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
        fresh = [one for one in decisions(annotations) if one not in hold.seen]
        if fresh:
            # before it is carried out: that saves the record, and the record is looked at again
            remember(hold, fresh)
            self._follow_tier(session, said)
            self._save(session)
        self._follow_notice(session, hold, said.notice)

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
    averted = said.notice is not None and record.pod is not None and said.notice == record.pod.averted
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


def _tier_of(one: PodSession | SessionRecord) -> tuple[Tier, int, float | None]:
    return one.tier, one.effective_units, one.yields_until


def remember(hold: PodOwner, dealt_with: Iterable[str]) -> None:
    """Remember decisions that need no more action, the last `MAX_SEEN`."""
    hold.seen = (*hold.seen, *(one for one in dealt_with if one not in hold.seen))[-MAX_SEEN:]
