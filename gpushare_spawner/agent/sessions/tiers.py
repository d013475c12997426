"""Changes the tier of a session: down on the service's request, up as soon as the session has GPU work."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from gpushare_spawner.agent.sessions.activity import Activity
from gpushare_spawner.agent.sessions.guaranteed_units import Shares
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.model.protocol.control import AnnounceRequest, ControlRefused, Failure, TierRequest
from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.tier import Tier

log = logging.getLogger(__name__)


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
        if request.if_idle_since is not None:
            now = self._activity(session)
            if now.busy or (now.last is not None and now.last > request.if_idle_since):
                raise ControlRefused(
                    Failure(code="busy", message=f"session {session.id} has worked on the GPU in the meantime")
                )
        self.move(session, request.tier, request.effective_units, request.reason, request.yields_until)

    def work_begins(self, session: Session) -> None:
        """Restore the full share before the lease request reaches the arbiter, and withdraw the notice.

        A share whose units are kept for spawns in quota is not restored, and a notice that work does not avert stays.
        So does one of a pod that the agent only observes: the service sees the work, and withdraws the notice.
        """
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
            self.move(session, tier, units, reason)

    def move(self, session: Session, tier: Tier, units: int, reason: str, yields_until: float | None = None) -> None:
        """Set a session's tier, and update the borrowed and guaranteed units of all sessions on its GPUs.

        `yields_until`: see `TierRequest`.
        """
        record = session.record
        record.yields_until = yields_until
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
        session.record.notice = notice
        if session.conversation is not None:
            session.conversation.tell_notice()
