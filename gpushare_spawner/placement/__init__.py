"""Which GPU a share goes to: the ledger and the strategies. Pure functions."""

from gpushare_spawner.placement.guaranteed import guaranteed_units, settle
from gpushare_spawner.placement.holding import Holding
from gpushare_spawner.placement.ledger import Ledger, LedgerError, any_model
from gpushare_spawner.placement.refusal import Reason, Refusal
from gpushare_spawner.placement.room import GpuRoom, NodeRoom, Room
from gpushare_spawner.placement.strategy import BestFit, Strategy

__all__ = [
    "BestFit",
    "GpuRoom",
    "Holding",
    "Ledger",
    "LedgerError",
    "NodeRoom",
    "Reason",
    "Refusal",
    "Room",
    "Strategy",
    "any_model",
    "guaranteed_units",
    "settle",
]
