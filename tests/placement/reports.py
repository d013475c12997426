"""Reports and requests made up for the tests of placement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from gpushare_spawner.model.report import GpuReport, Report, SessionReport
from gpushare_spawner.model.share import Share, Tier
from gpushare_spawner.placement.ledger import Ledger
from gpushare_spawner.placement.node import Allocation
from gpushare_spawner.placement.request import PlacementRequest


def gpu(
    uuid: str, index: int = 0, model: str = "A100", capacity: int = 100, healthy: bool = True, cordoned: bool = False
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
        template=allocation.template,
        gpus=allocation.gpus,
        share_units=allocation.share_units,
        last_units=allocation.last_units,
        borrowed_units=allocation.borrowed_units,
        borrowed_each=allocation.borrowed_each,
        tier=Tier.ACTIVE if allocation.effective_units == allocation.share_units else Tier.DOWNGRADED,
        tier_since=allocation.opened_at,
        effective_units=allocation.effective_units,
        guaranteed_units=0,
        opened_at=allocation.opened_at,
        neighbours=allocation.neighbours,
    )


def report(node: str, gpus: Sequence[GpuReport], allocations: Iterable[Allocation] = (), at: float = 0.0) -> Report:
    """A node's report."""
    return Report(node=node, published_at=at, gpus=tuple(gpus), sessions=tuple(session(held) for held in allocations))


def active(
    name: str, gpus: str | tuple[str, ...], units: int, borrowed: int = 0, opened_at: float = 0.0, **other: Any
) -> Allocation:
    """A session that holds its full share."""
    uuids = (gpus,) if isinstance(gpus, str) else gpus
    return Allocation(name, uuids, units, borrowed, units, opened_at, user=name, **other)


def request(units: int = 100, *models: str, count: int = 1, **other: Any) -> PlacementRequest:
    """A request for a share; no models: any will do."""
    return PlacementRequest(Share(units, count), models=frozenset(models) or None, **other)


def ledger_of(reports: Iterable[Report], reservations: Iterable[Allocation] = ()) -> Ledger:
    """Return the ledger of the agents' reports, with the reservations that these do not include yet.

    The newer of two reports of a node counts. A report of a session replaces its reservation.
    """
    ledger = Ledger()
    newest = sorted(newest_reports(reports).values(), key=lambda report: report.node)
    for report in newest:
        ledger.put_node(report.node, report.gpus)
    reported = [Allocation.of(session) for report in newest for session in report.allocated_to]
    first: dict[str, Allocation] = {}
    for allocation in [*filter(None, reported), *reservations]:
        first.setdefault(allocation.session, allocation)
    ledger.change(first.values())
    return ledger


def newest_reports(reports: Iterable[Report]) -> dict[str, Report]:
    """Return the newest report of each node; at equal instants the last in order."""
    newest: dict[str, Report] = {}
    for report in reports:
        current = newest.get(report.node)
        if current is None or report.published_at >= current.published_at:
            newest[report.node] = report
    return newest
