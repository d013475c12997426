"""All shares on all GPUs, as the hub knows them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from gpushare_spawner.model.placement import Placement
from gpushare_spawner.model.report import Report
from gpushare_spawner.model.share import Share
from gpushare_spawner.placement.allocation import Allocation
from gpushare_spawner.placement.free_capacity import FreeCapacity
from gpushare_spawner.placement.guaranteed import guaranteed_units, settle
from gpushare_spawner.placement.refusal import Refusal, explain
from gpushare_spawner.placement.strategy import BestFit, Strategy

BEST_FIT = BestFit()


class LedgerError(Exception):
    """The ledger contradicts itself, or a strategy chose GPUs that cannot take the share."""


def any_model(model: str) -> bool:
    """Accepts every GPU."""
    return True


class Ledger:
    """Sessions that run and reservations in flight, GPU by GPU, in units of 1 %.

    On each GPU: the owned units of all sessions fit into the capacity, and so do the guaranteed ones. A GPU that no
    report names can be held, but is offered to nobody.
    """

    def __init__(self, reports: Iterable[Report] = ()) -> None:
        self.capacity = FreeCapacity(reports)
        """The GPUs and what is left on them; strategies look at it, only the ledger changes it."""
        self._allocations: dict[str, Allocation] = {}
        self._on_gpu: dict[str, dict[str, Allocation]] = {}
        self._guaranteed: dict[str, dict[str, int]] = {}

    @classmethod
    def of(cls, reports: Iterable[Report], reservations: Iterable[Allocation] = ()) -> Ledger:
        """The ledger that the agents' reports make, with the reservations that they do not know of yet.

        Of two reports of a node the newer one counts. A reservation whose session is in a report has arrived: the
        report counts.
        """
        ledger = cls(reports)
        found = [Allocation.of(session) for report in ledger.capacity.reports for session in report.sessions]
        touched: set[str] = set()
        for allocation in [*filter(None, found), *reservations]:
            if allocation.session not in ledger._allocations:
                ledger._enter(allocation)
                touched.update(allocation.gpus)
        for gpu in touched:
            ledger._recount(gpu)
        return ledger

    @property
    def allocations(self) -> Mapping[str, Allocation]:
        """Every allocation by its session."""
        return MappingProxyType(self._allocations)

    def place(
        self, share: Share, accepts: Callable[[str], bool] = any_model, strategy: Strategy = BEST_FIT
    ) -> Placement | None:
        """Where this share could go, or None where no GPU can take it: then `refusal` says why. Changes nothing.

        ``accepts`` gets the model name of a GPU. Units that nobody owns are preferred to lent ones;
        ``Placement.borrowed`` tells how many (per GPU) are lent. Raises LedgerError if the strategy chose what it
        may not.
        """
        models = [model for model in self.capacity.models if accepts(model)]
        chosen = strategy.choose(self.capacity, share, models) if models else None
        if chosen is None:
            return None
        gpus = [self.capacity.gpus[uuid] for uuid in chosen]
        fits = all(gpu.healthy and gpu.model in models and gpu.free >= share.units for gpu in gpus)
        if (
            not fits
            or len(set(chosen)) != share.count
            or len(chosen) != share.count
            or len({gpu.node for gpu in gpus}) != 1
        ):
            raise LedgerError(f"{strategy!r} chose {', '.join(chosen)} for {share}: not possible")
        borrowed = max(0, *(share.units - gpu.unowned for gpu in gpus))
        return Placement(gpus[0].node, chosen, min(borrowed, share.units))

    def refusal(self, share: Share, accepts: Callable[[str], bool] = any_model) -> Refusal:
        """Why `place` found no GPU for this share."""
        return explain(self.capacity, share, accepts)

    def add(self, allocation: Allocation) -> None:
        """Enter an allocation. Raises ValueError if the session has one already."""
        if allocation.session in self._allocations:
            raise ValueError(f"session {allocation.session} has an allocation already")
        self._enter(allocation)
        for gpu in allocation.gpus:
            self._recount(gpu)

    def replace(self, allocation: Allocation) -> None:
        """Change a session's allocation, for instance after a change of its tier. Raises KeyError if it has none."""
        before = self._allocations[allocation.session]
        self._strike(before)
        self._enter(allocation)
        for gpu in {*before.gpus, *allocation.gpus}:
            self._recount(gpu)

    def remove(self, session: str) -> Allocation | None:
        """Remove a session's allocation; return it, or None if the session has none."""
        allocation = self._allocations.get(session)
        if allocation is not None:
            self._strike(allocation)
            for gpu in allocation.gpus:
                self._recount(gpu)
        return allocation

    def settle(self) -> dict[str, int]:
        """Turn borrowed units into owned ones where their owner is gone, oldest session first; what is borrowed now."""
        capacities = {uuid: gpu.capacity for uuid, gpu in self.capacity.gpus.items()}
        settled = settle(capacities, self._allocations.values())
        for session, borrowed in settled.items():
            self.replace(self._allocations[session].with_borrowed(borrowed))
        return settled

    def free_units(self, gpu: str) -> int:
        """Units that a newcomer can have now: unowned, or lent by idle owners. 0 for an unhealthy or unknown GPU."""
        found = self.capacity.gpus.get(gpu)
        return max(0, found.free) if found is not None and found.healthy else 0

    def unowned_units(self, gpu: str) -> int:
        """Capacity of a GPU less what sessions own, at least 0; 0 for an unknown GPU."""
        found = self.capacity.gpus.get(gpu)
        return max(0, found.unowned) if found is not None else 0

    def guaranteed(self, session: str) -> int:
        """What a session would get if everybody wanted its GPUs now: the least over them. KeyError if unknown."""
        held = self._allocations[session]
        known = [self._guaranteed[gpu][session] for gpu in held.gpus if gpu in self.capacity.gpus]
        return min(known, default=0)

    def check(self) -> None:
        """Raises LedgerError, naming the GPU, if owned or guaranteed units exceed its capacity, or counts disagree."""
        for uuid, gpu in self.capacity.gpus.items():
            held = self._on_gpu.get(uuid, {}).values()
            owned = sum(allocation.owned_units for allocation in held)
            guaranteed = sum(guaranteed_units(gpu.capacity, held).values())
            where = f"GPU {gpu.index} of {gpu.node} ({uuid})"
            if owned > gpu.capacity:
                raise LedgerError(f"{where}: {owned} units are owned, its capacity is {gpu.capacity}")
            if guaranteed > gpu.capacity:
                raise LedgerError(f"{where}: {guaranteed} units are guaranteed, its capacity is {gpu.capacity}")
            if (gpu.unowned, gpu.free) != (gpu.capacity - owned, gpu.capacity - guaranteed):
                raise LedgerError(
                    f"{where}: {gpu.unowned} unowned and {gpu.free} free units are out of step with its sessions"
                )

    def _enter(self, allocation: Allocation) -> None:
        self._allocations[allocation.session] = allocation
        for gpu in allocation.gpus:
            self._on_gpu.setdefault(gpu, {})[allocation.session] = allocation

    def _strike(self, allocation: Allocation) -> None:
        del self._allocations[allocation.session]
        for gpu in set(allocation.gpus):
            del self._on_gpu[gpu][allocation.session]

    def _recount(self, uuid: str) -> None:
        gpu = self.capacity.gpus.get(uuid)
        if gpu is None:
            return
        held = self._on_gpu[uuid].values()
        self._guaranteed[uuid] = guaranteed_units(gpu.capacity, held)
        owned = sum(allocation.owned_units for allocation in held)
        self.capacity.update(uuid, gpu.capacity - owned, gpu.capacity - sum(self._guaranteed[uuid].values()))
