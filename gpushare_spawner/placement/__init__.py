"""Which GPU a share goes to: the ledger and the strategies. Pure functions."""

from gpushare_spawner.placement.allocation import Allocation
from gpushare_spawner.placement.free_capacity import FreeCapacity, GpuCapacity, NodeCapacity
from gpushare_spawner.placement.guaranteed import guaranteed_units, settle
from gpushare_spawner.placement.ledger import Ledger, LedgerError, any_model
from gpushare_spawner.placement.refusal import Reason, Refusal
from gpushare_spawner.placement.strategy import BestFit, Strategy

__all__ = [
    "Allocation",
    "BestFit",
    "FreeCapacity",
    "GpuCapacity",
    "Ledger",
    "LedgerError",
    "NodeCapacity",
    "Reason",
    "Refusal",
    "Strategy",
    "any_model",
    "guaranteed_units",
    "settle",
]
