"""Which GPU a share goes to: the ledger and the strategies. Pure functions."""

from gpushare_spawner.placement.allocation import Allocation
from gpushare_spawner.placement.capacity_index import Best, Rated, Rating
from gpushare_spawner.placement.claim import Claim, able_nodes, cheapest_claim, looking_for_claim
from gpushare_spawner.placement.free_capacity import FreeCapacity
from gpushare_spawner.placement.guaranteed import guaranteed_units, settle
from gpushare_spawner.placement.ledger import Ledger, LedgerError
from gpushare_spawner.placement.ledger_feed import LedgerFeed, Source
from gpushare_spawner.placement.node_capacity import GpuCapacity, NodeCapacity
from gpushare_spawner.placement.node_resources import NodeResources, Requested
from gpushare_spawner.placement.obstacle import Lacking
from gpushare_spawner.placement.request import ByLayer, Demand, PlacementRequest, suitable_models, suits
from gpushare_spawner.placement.stranding_aware_fgd import StrandingAwareFgd
from gpushare_spawner.placement.strategy import (
    BestFit,
    PreparedStrategy,
    Spread,
    Strategy,
    WorkloadStrategy,
    check_strategy,
)
from gpushare_spawner.placement.supposed_ledger import SupposedLedger, first_to_fit, helpful_actions
from gpushare_spawner.placement.unplaceable import Reason, Shortage, Unplaceable
from gpushare_spawner.placement.workload import RecentSpawns, Workload, workload_of

__all__ = [
    "Allocation",
    "Best",
    "BestFit",
    "ByLayer",
    "Claim",
    "Demand",
    "FreeCapacity",
    "GpuCapacity",
    "Lacking",
    "Ledger",
    "LedgerError",
    "LedgerFeed",
    "NodeCapacity",
    "NodeResources",
    "PlacementRequest",
    "PreparedStrategy",
    "Rated",
    "Rating",
    "Reason",
    "RecentSpawns",
    "Requested",
    "Shortage",
    "Source",
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
