"""What sessions would be if idle actions were carried out: the state of a dry run."""

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
    """When the session would have changed to the tier, or got the notice."""
    tier: Tier
    units: int
    notice: Notice | None


class DryRun:
    """The tiers and notices that sessions would have, by the session's id.

    A session whose GPU work counts as use is active, as if the agent had restored it: what it would be is forgotten.
    """

    def __init__(self) -> None:
        self._supposed: dict[str, _Supposed] = {}

    def observe(self, session: str, seen: Observation) -> Observation:
        """Return what is known of a session, with the tier and notice that it would have."""
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
        """Suppose that the session's user got this notice, or that it was withdrawn. ``seen``: by `observe`."""
        self._supposed[session] = _Supposed(seen.opened_at, now, seen.tier, seen.effective_units, notice)

    def act(self, session: str, seen: Observation, tier: Tier, units: int, now: float) -> None:
        """Suppose that the session changed to this tier, and holds so many units."""
        self._supposed[session] = _Supposed(seen.opened_at, now, tier, units, None)

    def keep(self, sessions: Collection[str]) -> None:
        """Forget all other sessions: they have ended."""
        for session in [one for one in self._supposed if one not in sessions]:
            del self._supposed[session]
