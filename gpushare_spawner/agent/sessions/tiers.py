"""Changes the tier of a session: down on the service's request, up as soon as its GPU work counts as use of the share.

Work that is too short for that runs at once all the same, on the units that the tier has lent."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from gpushare_spawner.agent.sessions.activity import Activity
from gpushare_spawner.agent.sessions.guaranteed_units import Shares
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.idle import UseCount
from gpushare_spawner.model.protocol.control import AnnounceRequest, ControlRefused, Failure, TierRequest
from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.tier import Tier, UseRule, voids_idle_action

log = logging.getLogger(__name__)

LENT_FOR = 10.0
"""Seconds without GPU work after which a session no longer works on lent units. Ours: cells come in rows, and each
change of weights costs a decision of the arbiters."""


class Tiers:
    """Changes the tier of a session and notifies its processes."""

    def __init__(
        self,
        shares: Shares,
        activity: Callable[[Session], Activity],
        save: Callable[[Session], None],
        clock: Callable[[], float],
    ) -> None:
        """`save` keeps a session's record; `clock` gives seconds since the epoch."""
        self._shares = shares
        self._activity = activity
        self._save = save
        self._clock = clock

    def decide(self, session: Session, request: TierRequest) -> None:
        """The service's decision.

        Raises ControlRefused: `busy` if the session worked after what the service had seen, `bad-request` for units
        that do not go with the tier.
        """
        share = session.record.request.share_units
        right = {Tier.ACTIVE: share, Tier.RELEASED: 0}.get(request.tier)
        if request.effective_units > share or right not in (None, request.effective_units):
            raise ControlRefused(
                Failure(
                    code="bad-request",
                    message=f"effective_units: {request.effective_units} does not go with tier {request.tier} "
                    f"of a share of {share} units",
                )
            )
        now = self._activity(session)
        if voids_idle_action(now.busy, now.last, now.gpu_seconds, request.if_idle_since, request.if_gpu_seconds):
            raise ControlRefused(
                Failure(code="busy", message=f"session {session.id} has worked on the GPU in the meantime")
            )
        self.move(session, request.tier, request.effective_units, request.reason, request.yields_until, request.use)

    def work_begins(self, session: Session) -> None:
        """Give a downgraded or released session the weight of its share before the lease request reaches the arbiter.

        Where all work counts as use, restore the share and withdraw the notice. A share whose units are kept for spawns
        in quota is not restored, and a notice that work does not avert stays. So does one of a pod that the agent only
        observes: the service sees the work, and withdraws the notice.
        """
        if _use_rule(session) is None:
            self._used(session)
        elif session.record.tier is not Tier.ACTIVE and not session.lent_units and session.record.yields_until is None:
            self._shares.work_on_lent_units(session, works=True)

    def check_use(self, session: Session) -> None:
        """Restore the share, or withdraw the notice, of a session whose GPU work counts as use by now."""
        rule = _use_rule(session)
        if rule is None:
            session.use_count = None
            return
        now, doing = self._clock(), self._activity(session)
        if session.use_count is None:
            session.use_count = UseCount(now, doing.gpu_seconds, doing.last)
        if session.use_count.add(now, doing.gpu_seconds, doing.busy, doing.last, rule):
            self._used(session)
        elif session.lent_units and not doing.busy and now - (doing.last or 0.0) >= LENT_FOR:
            self._shares.work_on_lent_units(session, works=False)

    def _used(self, session: Session) -> None:
        record = session.record
        if record.tier is not Tier.ACTIVE and record.yields_until is None:
            self.move(session, Tier.ACTIVE, record.request.share_units, "it has GPU work again")
        elif record.notice is not None and record.notice.averted_by_work and not record.gpus_unknown:
            self.withdraw_notice(session)
            self._save(session)

    def announce(self, session: Session, request: AnnounceRequest) -> None:
        """Send the user a notice, or withdraw it, as the service says."""
        self._announce(session, request.notice)
        self._save(session)

    def withdraw_notice(self, session: Session) -> None:
        """Withdraw the notice by the agent's own decision. On Kubernetes the pod's annotations have it until they are
        patched."""
        if session.record.pod is not None and session.record.notice is not None:
            session.record.pod.averted = session.record.notice
        self._announce(session, None)

    def stop_yielding(self, sessions: Iterable[Session], reason: str) -> None:
        """Keep nothing for spawns in quota any longer: a session that works gets its share back, as far as the units
        are free."""
        for session in list(sessions):
            record = session.record
            active = record.tier is Tier.ACTIVE or self._activity(session).busy
            tier, units = (Tier.ACTIVE, record.request.share_units) if active else (record.tier, record.effective_units)
            self.move(session, tier, units, reason, use=record.use)

    def move(
        self,
        session: Session,
        tier: Tier,
        units: int,
        reason: str,
        yields_until: float | None = None,
        use: UseRule | None = None,
    ) -> None:
        """Set a session's tier, and update the borrowed and guaranteed units of all sessions on its GPUs.

        `yields_until`, `use`: see `TierRequest`.
        """
        record, doing = session.record, self._activity(session)
        record.yields_until = yields_until
        record.use = None if tier is Tier.ACTIVE else use
        session.lent_units = record.use is not None and doing.busy and yields_until is None
        if tier is not record.tier:
            session.use_count = UseCount(self._clock(), doing.gpu_seconds, doing.last)
        if yields_until is not None:
            record.borrowed_units = max(record.borrowed_units, record.request.share_units - units)
        if (record.tier, record.effective_units) != (tier, units):
            share = record.request.share_units
            log.info("session %s: %s -> %s, %d of %d units: %s", session.id, record.tier, tier, units, share, reason)
            record.tier, record.effective_units, record.tier_since = tier, units, self._clock()
        restored = tier is Tier.ACTIVE and (record.notice is None or record.notice.averted_by_work)
        if record.notice is not None and (restored or record.notice.tier.depth <= tier.depth):
            self.withdraw_notice(session)
        self.changed([session, *(other for other in self._shares.change(session) if other is not session)])

    def changed(self, sessions: Iterable[Session]) -> None:
        """Save sessions whose units changed, and notify their processes."""
        for session in sessions:
            if session.conversation is not None:
                session.conversation.tell_tier()
            self._save(session)

    def _announce(self, session: Session, notice: Notice | None) -> None:
        if notice is not None and session.record.notice is None and session.record.tier is Tier.ACTIVE:
            doing = self._activity(session)
            session.use_count = UseCount(self._clock(), doing.gpu_seconds, doing.last)
        session.record.notice = notice
        if session.conversation is not None:
            session.conversation.tell_notice()


def _use_rule(session: Session) -> UseRule | None:
    """Return how much GPU work restores the share, or withdraws the notice of an active session; None: all does."""
    record = session.record
    if record.tier is not Tier.ACTIVE:
        return record.use
    return record.notice.use if record.notice is not None else None
