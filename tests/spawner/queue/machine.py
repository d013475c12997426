"""GPUs of two nodes, a queue and a ledger, without an agent, a clock or a hub."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gpushare_spawner.model.report import GpuReport, Notice, Report
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.template import Template
from gpushare_spawner.placement.departures import FEWEST_LENGTHS, Departures
from gpushare_spawner.placement.feed import LedgerFeed
from gpushare_spawner.placement.node import Allocation, NodeResources
from gpushare_spawner.placement.strategy import BestFit
from gpushare_spawner.sharing.base import Tenant
from gpushare_spawner.spawner.queue.queue import PlacementCheck, Placer, SpawnQueue, Ticket
from gpushare_spawner.spawner.queue.snapshot import GpuInventory, GpuSnapshot, SpawnRequest

TWO_NODES = {"a": ("A100",), "b": ("A100",)}


class Machine:
    """Nodes with GPUs, and a queue. ``nodes``: the models of the GPUs of each; GPU-a and GPU-a-1 are on node a."""

    def __init__(self, length: int = 5, awaited: str = "", nodes: Mapping[str, Sequence[str]] = TWO_NODES) -> None:
        self.queue = SpawnQueue(length)
        self.reports = tuple(
            Report(
                node=node,
                published_at=0.0,
                gpus=tuple(
                    GpuReport(
                        index=index, uuid=f"GPU-{node}" + f"-{index}" * (index > 0), model=model, memory_bytes=2**30
                    )
                    for index, model in enumerate(models)
                ),
            )
            for node, models in nodes.items()
        )
        self.awaited = awaited
        self.feed = LedgerFeed()
        self.held: list[Allocation] = []
        self.notices: list[tuple[str, Notice]] = []
        self.departures: Departures | None = None
        """`expect` sets it."""
        self.now = 0.0
        """Seconds since the epoch."""

    def join(
        self,
        name: str,
        fraction: float = 0.0,
        node: str = "",
        ineligible: Iterable[str] = (),
        cpu: float = 0.0,
        template: str = "t",
        **gpu: object,
    ) -> Ticket:
        wanted = {"fraction": fraction, **gpu} if fraction else gpu
        resources = {"cpu": {"guarantee": cpu}} if cpu else {}
        made = Template.model_validate({"name": template, "display_name": "T", "gpu": wanted, "resources": resources})
        ruled_out = frozenset(ineligible)
        return self.queue.join(SpawnRequest(Tenant(name), made, node, ineligible=lambda: ruled_out), 0.0)

    def expect(self, now: float, **lengths: float) -> None:
        """Let sessions of these templates last so many seconds. ``now``: seconds since the epoch."""
        self.now, self.departures = now, Departures(self.feed.ledger)
        for template, seconds in lengths.items():
            for _ in range(FEWEST_LENGTHS):
                self.departures.lengths.ended(template, seconds)

    def hold(self, gpu: str, units: int, name: str = "there", opened_at: float = 0.0, template: str = "") -> Allocation:
        allocation = Allocation(
            f"{name}-{gpu}", (f"GPU-{gpu}",), units, 0, units, opened_at=opened_at, template=template
        )
        self.held.append(allocation)
        return allocation

    def cpu(self, node: str, free: int) -> None:
        """What the node has free, in millicores."""
        self.feed.resources(node, NodeResources(free))

    def notify(self, gpu: str, tier: Tier, at: float, units: int = 0, name: str = "there") -> None:
        """An idle action of the session that `hold` made."""
        notice = Notice(tier=tier, at=at, reason="idle", effective_units=units)
        self.notices.append((f"{name}-{gpu}", notice))

    def check(self) -> PlacementCheck:
        inventory = GpuInventory()
        for report in self.reports:
            inventory.put(report.node, report.gpus)
        snapshot = GpuSnapshot(inventory, awaited=self.awaited, notices=tuple(self.notices))
        ledger = self.feed.follow(self.reports, self.held)
        return PlacementCheck(snapshot, ledger, BestFit(), departures=self.departures, now=self.now, monotonic=self.now)

    def placer(self) -> Placer:
        return Placer(self.check(), self.feed, self.queue, "this place")
