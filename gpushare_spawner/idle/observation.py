"""What is known about a session when the policy decides on its tier."""

from __future__ import annotations

from dataclasses import dataclass

from gpushare_spawner.idle.short_work import ShortWork
from gpushare_spawner.model.controls import Exemption, Keep
from gpushare_spawner.model.report import Notice, SessionReport
from gpushare_spawner.model.share import Share
from gpushare_spawner.model.tier import Tier, UseRule


@dataclass(frozen=True)
class Observation:
    """One session, by the reports of its agent and the hub. Instants are seconds since the epoch."""

    share: Share
    """What the session is entitled to."""
    tier: Tier
    tier_since: float
    effective_units: int
    """Units that the tier leaves the session now, on each of its GPUs."""
    opened_at: float
    gpu_busy: bool = False
    """A burst runs, or waits for a lease."""
    last_gpu_activity: float | None = None
    """End of the last burst; None: none yet."""
    gpu_seconds: float = 0.0
    """Time with a burst on the GPU since the opening."""
    used_at: float | None = None
    """End of the last GPU work that counted as use. None: that is `last_gpu_activity`."""
    short_work: ShortWork | None = None
    """GPU work since then, which did not count. None: there was none."""
    use_rule: UseRule | None = None
    """How much GPU work counts as use. None: all does."""
    use_from_gpu_seconds: float | None = None
    """GPU seconds from which the session's work counts as use again. None: all work counts."""
    kernels_busy: int = 0
    """Kernels that run a cell; 0 also if the notebook server has not reported them."""
    last_kernel_activity: float | None = None
    hub_last_activity: float | None = None
    """The server's last activity by the hub. None: unknown; then the server is not stopped."""
    yields: bool = False
    """What its tier took is kept for spawns in quota."""
    notice: Notice | None = None
    """The notice that the session's user has."""
    keep: Keep | None = None
    """What its user gave last; it can be over."""
    exemption: Exemption | None = None
    """What an admin gave last; it can be over."""

    @classmethod
    def of(cls, session: SessionReport, hub_last_activity: float | None = None) -> Observation:
        """Return what the agent's report says, with the hub's last activity of the server if it is known."""
        return cls(
            share=session.share,
            tier=session.tier,
            tier_since=session.tier_since,
            effective_units=session.effective_units,
            opened_at=session.begun,
            gpu_busy=session.gpu_busy or session.waiting,
            last_gpu_activity=session.last_gpu_activity,
            gpu_seconds=session.gpu_seconds,
            kernels_busy=session.kernels_busy or 0,
            last_kernel_activity=session.last_kernel_activity,
            hub_last_activity=hub_last_activity,
            yields=session.yields,
            notice=session.notice,
            keep=session.keep,
            exemption=session.exemption,
        )

    @property
    def has_worked(self) -> bool:
        """Return whether the session has done GPU work. A share that was restored has: a restarted agent forgets it."""
        restored = self.tier is Tier.ACTIVE and self.tier_since > self.opened_at
        return restored or self.last_gpu_activity is not None or self.gpu_seconds > 0

    @property
    def gpu_idle_since(self) -> float:
        """Return when the session's last GPU work that counts as use ended (the GPU can be busy now, see `gpu_busy`).

        A session without GPU work counts from its opening.
        """
        return self.gpu_quiet_since if self.used_at is None else max(self.opened_at, self.used_at)

    @property
    def gpu_quiet_since(self) -> float:
        """Return when the session's last GPU work of any length ended.

        An active session counts at least from when it became active: GPU work restored it, even if a restarted agent
        no longer knows that work.
        """
        since = self.opened_at if self.last_gpu_activity is None else max(self.opened_at, self.last_gpu_activity)
        return max(since, self.tier_since) if self.tier is Tier.ACTIVE else since

    @property
    def quiet_since(self) -> float | None:
        """Return the last activity of GPU, kernels and notebook. None: the hub has not reported the notebook's."""
        if self.hub_last_activity is None:
            return None
        return max(self.gpu_quiet_since, self.hub_last_activity, self.last_kernel_activity or 0.0)
