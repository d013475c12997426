"""Changes the share of a session that runs: units, and the memory that goes with them. Its processes run on.

Whether the units are free is decided here, in one step with the change: the event loop runs nothing in between. The
hub's placement learns of it by the report.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from gpushare_spawner.agent.sessions.guaranteed_units import Shares
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.agent.sessions.tiers import Tiers
from gpushare_spawner.model.protocol.control import ControlRefused, Failure, ResizeRequest
from gpushare_spawner.model.quantity import resolve_bytes
from gpushare_spawner.model.share import UNITS_PER_GPU, Share
from gpushare_spawner.model.tier import Tier

log = logging.getLogger(__name__)


class ShareChanges:
    """Checks and carries out changes of shares. Methods raise ControlRefused."""

    def __init__(self, shares: Shares, tiers: Tiers, clock: Callable[[], float]) -> None:
        """`clock` gives seconds since the epoch."""
        self._shares = shares
        self._tiers = tiers
        self._clock = clock

    def resize(self, session: Session, request: ResizeRequest) -> None:
        """Change the share; the memory limit of all its processes follows at once.

        A session that is downgraded or released stays so. Of a smaller share the borrowed units go first; of a larger
        one only those are borrowed that idle sessions lend.
        """
        record = session.record
        before, units = record.request, request.share_units
        limit = before.memory_limit if request.memory_limit is None else request.memory_limit
        if (units, limit) == (before.share_units, before.memory_limit):
            return
        self._check(session, units, limit)
        borrowed = self._shares.borrowed_after(session, units)
        effective = units if record.tier is Tier.ACTIVE else min(record.effective_units, units)
        tier = Tier.ACTIVE if effective == units else record.tier
        log.info("session %s: share %d -> %d units: %s", session.id, before.share_units, units, request.reason)
        record.request = before.model_copy(update={"share_units": units, "memory_limit": limit})
        record.borrowed_units, record.effective_units = borrowed, effective
        if tier is not record.tier:
            record.tier, record.tier_since = tier, self._clock()
        if record.notice is not None and record.notice.effective_units >= units:
            self._tiers.withdraw_notice(session)
        # any other notice stays: a change of the share is no use of it
        others = self._shares.change(session)
        self._tiers.changed([session, *(other for other in others if other is not session)])
        self._tell_memory(session)

    def largest(self, session: Session) -> int:
        """Return the largest share that a session can have now, in units; 0: its share cannot be changed.

        Which shares its user may have is for the service to say.
        """
        record = session.record
        if len(session.gpus) != 1 or record.yields_until is not None:
            return 0
        most = record.request.share_units + max(0, self._shares.most_more(session, session.gpus[0]))
        return min(most, UNITS_PER_GPU)

    def _check(self, session: Session, units: int, limit: str) -> None:
        try:
            Share(units, len(session.record.request.gpus))
            for gpu in session.gpus:
                if resolve_bytes(limit, gpu.memory_bytes) <= 0:
                    raise ValueError(f"memory_limit: {limit} leaves no memory")
        except ValueError as error:
            raise ControlRefused(Failure(code="bad-request", message=str(error))) from None
        if session.record.yields_until is not None:
            raise ControlRefused(
                Failure(
                    code="no-capacity",
                    message=f"session {session.id} gives up units for spawns in quota, and its share cannot change now",
                )
            )

    def _tell_memory(self, session: Session) -> None:
        session.budget_checked = False
        if session.memory is not None:
            session.memory.set_limits({gpu.uuid: session.memory_limit(gpu) for gpu in session.gpus})
        if session.conversation is not None:
            session.conversation.tell_memory()
