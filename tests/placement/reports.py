"""Reports and requests made up for the tests of placement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from gpushare_spawner.model.report import GpuReport, Report, SessionReport
from gpushare_spawner.model.share import Share, Tier
from gpushare_spawner.placement.node import Allocation
from gpushare_spawner.placement.request import PlacementRequest


def gpu(
    uuid: str,
    index: int = 0,
    model: str = "A100",
    capacity: int = 100,
    healthy: bool = True,
    cordoned: bool = False,
) -> GpuReport:
    """One GPU of 16 GiB."""
    return GpuReport(
        index=index,
        uuid=uuid,
        model=model,
        memory_bytes=16 * 2**30,
        capacity_units=capacity,
        healthy=healthy,
        cordoned=cordoned,
    )


def session(allocation: Allocation) -> SessionReport:
    """What an agent would say of a session with this allocation."""
    return SessionReport(
        id=allocation.session,
        user=allocation.session,
        template="any",
        gpus=allocation.gpus,
        share_units=allocation.share_units,
        borrowed_units=allocation.borrowed_units,
        tier=Tier.ACTIVE if allocation.effective_units == allocation.share_units else Tier.DOWNGRADED,
        tier_since=allocation.opened_at,
        effective_units=allocation.effective_units,
        guaranteed_units=0,
        opened_at=allocation.opened_at,
    )


def report(node: str, gpus: Sequence[GpuReport], allocations: Iterable[Allocation] = (), at: float = 0.0) -> Report:
    """A node's report."""
    return Report(node=node, published_at=at, gpus=tuple(gpus), sessions=tuple(session(held) for held in allocations))


def active(name: str, gpus: str | tuple[str, ...], units: int, borrowed: int = 0, opened_at: float = 0.0) -> Allocation:
    """A session that holds its full share."""
    return Allocation(name, (gpus,) if isinstance(gpus, str) else gpus, units, borrowed, units, opened_at, user=name)


def request(units: int = 100, *models: str, count: int = 1, **other: Any) -> PlacementRequest:
    """A request for a share; no models: any will do."""
    return PlacementRequest(Share(units, count), models=frozenset(models) or None, **other)
