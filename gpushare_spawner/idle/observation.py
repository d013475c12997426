"""What is known about a session when a decision is due."""

from __future__ import annotations

from dataclasses import dataclass

from gpushare_spawner.model.report import Announcement, SessionReport
from gpushare_spawner.model.share import Share
from gpushare_spawner.model.tier import Tier


@dataclass(frozen=True)
class Observation:
    """One session as its agent and the hub see it. Instants are seconds since the epoch."""

    share: Share
    """What it is entitled to."""
    tier: Tier
    tier_since: float
    effective_units: int
    """Units that its tier leaves it now, on each of its GPUs."""
    opened_at: float
    gpu_busy: bool = False
    """A burst runs, or waits for the GPU."""
    last_gpu_activity: float | None = None
    """End of the last burst; None: none yet."""
    kernels_busy: int = 0
    """Kernels that run a cell; 0 also where the notebook server has not said."""
    last_kernel_activity: float | None = None
    hub_last_activity: float | None = None
    """What the hub knows of the server's activity. None: the hub has not said; then the server is not stopped."""
    announcement: Announcement | None = None
    """What the session's user has been told."""

    @classmethod
    def of(cls, session: SessionReport, hub_last_activity: float | None = None) -> Observation:
        """From the agent's report and what the hub said, if it did."""
        return cls(
            share=session.share,
            tier=session.tier,
            tier_since=session.tier_since,
            effective_units=session.effective_units,
            opened_at=session.opened_at,
            gpu_busy=session.gpu_busy or session.waiting,
            last_gpu_activity=session.last_gpu_activity,
            kernels_busy=session.kernels_busy or 0,
            last_kernel_activity=session.last_kernel_activity,
            hub_last_activity=hub_last_activity,
            announcement=session.announcement,
        )

    @property
    def gpu_idle_since(self) -> float:
        """Since when the GPU does nothing for this session (it may be busy now, see `gpu_busy`).

        A session that never worked counts from its opening. An active one counts at least from when it became active:
        whatever brought it up again was a sign of life, even if an agent that was restarted no longer knows of it.
        """
        since = self.opened_at if self.last_gpu_activity is None else max(self.opened_at, self.last_gpu_activity)
        return max(since, self.tier_since) if self.tier is Tier.ACTIVE else since

    @property
    def quiet_since(self) -> float | None:
        """Since when nothing at all happened on the GPU, in kernels or in the notebook. None: the hub has not said."""
        if self.hub_last_activity is None:
            return None
        return max(self.gpu_idle_since, self.hub_last_activity, self.last_kernel_activity or 0.0)
