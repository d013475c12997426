"""The allocation of one session, as placement counts it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.report import SessionReport
from gpushare_spawner.model.share import UNITS_PER_GPU
from gpushare_spawner.placement.node_resources import NOTHING, Requested


@dataclass(frozen=True)
class Allocation:
    """A session's units of 1 %, the same on each of its GPUs. Raises ValueError for contradictory numbers."""

    session: str
    gpus: tuple[str, ...]
    """UUIDs of the GPUs."""
    share_units: int
    """What the session is entitled to."""
    borrowed_units: int = 0
    """Those of ``share_units`` that idle neighbours have lent."""
    effective_units: int = 0
    """What its tier leaves it: all of ``share_units`` when active, 0 when released."""
    opened_at: float = 0.0
    """Seconds since the epoch; of two borrowers the older one is served first."""
    yields: bool = False
    """What its tier took is kept for spawns in quota: nobody else comes to own it."""
    uncounted: Requested = NOTHING
    """What it takes of its node that the node's free CPU, memory and pods do not count yet."""
    user: str = ""
    """Whose session it is; empty: unknown."""
    quota: str = ""
    """The account that it is charged to, see `quota.Account`; empty: none was chosen."""
    layer: LayerName = LayerName.NATIVE
    """The sharing layer of its GPUs; sessions of one GPU have the same."""

    def __post_init__(self) -> None:
        if not 1 <= self.share_units <= UNITS_PER_GPU:
            raise ValueError(f"{self.session}: a share has 1 to {UNITS_PER_GPU} units, not {self.share_units}")
        for name in ("borrowed_units", "effective_units"):
            if not 0 <= getattr(self, name) <= self.share_units:
                raise ValueError(f"{self.session}: {name} is {getattr(self, name)}, outside 0 to {self.share_units}")

    @classmethod
    def of(cls, report: SessionReport) -> Allocation | None:
        """The allocation that an agent reports; None for a session without a share.

        Numbers beyond the share are cut to it: one odd report must not keep the hub from placing anybody.
        """
        if not report.gpus or report.share_units < 1:
            return None
        return cls(
            session=report.id,
            gpus=tuple(dict.fromkeys(report.gpus)),
            share_units=report.share_units,
            borrowed_units=min(report.borrowed_units, report.share_units),
            effective_units=min(report.effective_units, report.share_units),
            opened_at=report.begun,
            yields=report.yields,
            user=report.user,
            quota=report.quota,
            layer=report.layer,
        )

    @property
    def owned_units(self) -> int:
        """Units per GPU that nobody can take away."""
        return self.share_units - self.borrowed_units

    @property
    def age(self) -> tuple[float, str]:
        """Sorts the oldest session first; the name decides between those opened at the same instant."""
        return (self.opened_at, self.session)

    def with_effective(self, units: int) -> Allocation:
        """The same allocation in another tier."""
        return replace(self, effective_units=units)

    def yielding(self, units: int) -> Allocation:
        """The same allocation after it gave up all but so many units: others can own these."""
        borrowed = max(self.borrowed_units, self.share_units - units)
        return replace(self, effective_units=units, borrowed_units=borrowed, yields=True)

    def with_borrowed(self, units: int) -> Allocation:
        """The same allocation with other borrowed units."""
        return replace(self, borrowed_units=units)
