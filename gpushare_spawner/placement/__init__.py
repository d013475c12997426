"""Placement of shares on GPUs: the ledger and the strategies. Pure, without I/O."""

from gpushare_spawner.placement.capacity import Best, FreeCapacity, Lacking, Rated, Rating
from gpushare_spawner.placement.feed import EntrySource, LedgerFeed, SupposedLedger, first_to_fit, helpful_actions
from gpushare_spawner.placement.hold import NodeHold, able_nodes, cheapest_claim, looking_for_claim
from gpushare_spawner.placement.ledger import Ledger, LedgerError
from gpushare_spawner.placement.node import (
    Allocation,
    GpuCapacity,
    NodeCapacity,
    NodeResources,
    Requested,
    guaranteed_units,
    settle,
)
from gpushare_spawner.placement.request import (
    ByLayer,
    Demand,
    PlacementRequest,
    RecentSpawns,
    Workload,
    suitable_models,
    suits,
    workload_of,
)
from gpushare_spawner.placement.strategy import (
    BestFit,
    PreparedStrategy,
    Spread,
    StrandingAwareFgd,
    Strategy,
    WorkloadStrategy,
    check_strategy,
)
from gpushare_spawner.placement.unplaceable import Reason, Shortage, Unplaceable

__all__ = [
    "Allocation",
    "Best",
    "BestFit",
    "ByLayer",
    "Demand",
    "EntrySource",
    "FreeCapacity",
    "GpuCapacity",
    "Lacking",
    "Ledger",
    "LedgerError",
    "LedgerFeed",
    "NodeCapacity",
    "NodeHold",
    "NodeResources",
    "PlacementRequest",
    "PreparedStrategy",
    "Rated",
    "Rating",
    "Reason",
    "RecentSpawns",
    "Requested",
    "Shortage",
    "Spread",
    "StrandingAwareFgd",
    "Strategy",
    "SupposedLedger",
    "Unplaceable",
    "Workload",
    "WorkloadStrategy",
    "able_nodes",
    "cheapest_claim",
    "check_strategy",
    "first_to_fit",
    "guaranteed_units",
    "helpful_actions",
    "looking_for_claim",
    "settle",
    "suitable_models",
    "suits",
    "workload_of",
]
