"""The check that a ledger is consistent."""

from __future__ import annotations

from gpushare_spawner.placement.ledger import Ledger, LedgerError, taken_units
from gpushare_spawner.placement.node import guaranteed_units


def check_ledger(ledger: Ledger) -> None:
    """Raise LedgerError if owned or guaranteed units exceed a GPU's capacity, or if counts disagree."""
    for uuid, gpu in ledger.capacity.gpus.items():
        held = ledger._on_gpu.get(uuid, {}).values()
        where = f"GPU {gpu.index} of {gpu.node} ({uuid})"
        if gpu.mig is not None and len(held) > 1:
            raise LedgerError(f"{where}: {len(held)} sessions are on this MIG instance, which is for one")
        owned, guaranteed = taken_units(gpu, held, guaranteed_units(gpu.capacity, held))
        if owned > gpu.capacity:
            raise LedgerError(f"{where}: {owned} units are owned, its capacity is {gpu.capacity}")
        if guaranteed > gpu.capacity:
            raise LedgerError(f"{where}: {guaranteed} units are guaranteed, its capacity is {gpu.capacity}")
        kept = ledger.held_units(uuid)
        if (gpu.unowned, gpu.free) != (gpu.capacity - owned - kept, gpu.capacity - guaranteed - kept):
            raise LedgerError(
                f"{where}: {gpu.unowned} unowned and {gpu.free} free units are out of step with its sessions"
            )
