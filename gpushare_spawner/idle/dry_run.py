"""State of a dry run: the tiers and notices that sessions would have after idle actions."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from gpushare_spawner.idle.use import Observation
from gpushare_spawner.model.report import Notice
from gpushare_spawner.model.share import Tier


@dataclass(frozen=True)
class _Supposed:
    opened_at: float
    since: float
    """Time of the simulated tier change or notice."""
    tier: Tier
    units: int
    notice: Notice | None


class DryRun:
    """Simulated tiers and notices, by the session's id.

    GPU work that counts as use removes a session's entry, as if the agent had restored the session.
    """

    def __init__(self) -> None:
        self._supposed: dict[str, _Supposed] = {}

    def observe(self, session: str, seen: Observation) -> Observation:
        """Return the observation with the simulated tier and notice."""
        supposed = self._supposed.get(session)
        if supposed is None:
            return seen
        busy = seen.gpu_busy and seen.use_rule is None
        worked = busy or seen.gpu_idle_since > supposed.since
        if worked or supposed.opened_at != seen.opened_at or supposed.tier.depth < seen.tier.depth:
            del self._supposed[session]
            return seen
        if supposed.tier is seen.tier:
            return replace(seen, notice=supposed.notice)
        return replace(
            seen,
            tier=supposed.tier,
            tier_since=supposed.since,
            effective_units=supposed.units,
            notice=supposed.notice,
        )

    def notify(self, session: str, seen: Observation, notice: Notice | None, now: float) -> None:
        """Simulate a notice to the session's user, or its withdrawal. ``seen``: from `observe`."""
        self._supposed[session] = _Supposed(seen.opened_at, now, seen.tier, seen.effective_units, notice)

    def act(self, session: str, seen: Observation, tier: Tier, units: int, now: float) -> None:
        """Simulate a change of the session to this tier and so many units."""
        self._supposed[session] = _Supposed(seen.opened_at, now, tier, units, None)

    def keep(self, sessions: Collection[str]) -> None:
        """Remove all other sessions, which have ended."""
        for session in [name for name in self._supposed if name not in sessions]:
            del self._supposed[session]
