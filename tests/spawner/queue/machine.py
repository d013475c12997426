"""GPUs of two nodes, a queue and a ledger, without an agent, a clock or a hub."""

from __future__ import annotations

from gpushare_spawner.model.report import GpuReport, Notice, Report
from gpushare_spawner.model.template import Template
from gpushare_spawner.model.tier import Tier
from gpushare_spawner.placement import Allocation, BestFit, LedgerFeed
from gpushare_spawner.sharing.base import Tenant
from gpushare_spawner.spawner.queue.inventory import GpuInventory
from gpushare_spawner.spawner.queue.placement_check import PlacementCheck
from gpushare_spawner.spawner.queue.placer import Placer
from gpushare_spawner.spawner.queue.queue import SpawnQueue, SpawnRequest, Ticket
from gpushare_spawner.spawner.queue.snapshot import GpuSnapshot


class Machine:
    """GPUs of two nodes, one each, and a queue. ``models``: those of the two GPUs."""

    def __init__(
        self, length: int = 5, overtakes: int = 2, awaited: str = "", models: tuple[str, str] = ("A100", "A100")
    ) -> None:
        self.queue = SpawnQueue(length, overtakes)
        self.reports = tuple(
            Report(
                node=node,
                published_at=0.0,
                gpus=(GpuReport(index=0, uuid=f"GPU-{node}", model=model, memory_bytes=2**30),),
            )
            for node, model in zip(("a", "b"), models, strict=True)
        )
        self.awaited = awaited
        self.feed = LedgerFeed()
        self.held: list[Allocation] = []
        self.announced: list[tuple[str, Notice]] = []

    def join(self, name: str, fraction: float = 0.0, node: str = "", **gpu: object) -> Ticket:
        wanted = {"fraction": fraction, **gpu} if fraction else gpu
        template = Template.model_validate({"name": "t", "display_name": "T", "gpu": wanted})
        return self.queue.join(SpawnRequest(Tenant(name), template, node), 0.0)

    def hold(self, gpu: str, units: int, name: str = "there") -> Allocation:
        allocation = Allocation(f"{name}-{gpu}", (f"GPU-{gpu}",), units, 0, units, 0.0)
        self.held.append(allocation)
        return allocation

    def announce(self, gpu: str, tier: Tier, at: float, units: int = 0, name: str = "there") -> None:
        """An idle action of the session that `hold` made."""
        announced = Notice(tier=tier, at=at, reason="idle", effective_units=units)
        self.announced.append((f"{name}-{gpu}", announced))

    def check(self) -> PlacementCheck:
        inventory = GpuInventory()
        for report in self.reports:
            inventory.put(report.node, report.gpus)
        snapshot = GpuSnapshot(inventory, awaited=self.awaited, announced=tuple(self.announced))
        return PlacementCheck(snapshot, self.feed.follow(self.reports, self.held), BestFit())

    def placer(self) -> Placer:
        return Placer(self.check(), self.feed, self.queue, "this place")
