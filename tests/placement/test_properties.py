"""Any interleaving of starts, failures, cancellations, stops, tier changes and hub restarts."""

from __future__ import annotations

from itertools import count
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from benchmarks.ledger_check import check_ledger
from gpushare_spawner.model.report import Report
from gpushare_spawner.model.share import Share
from gpushare_spawner.placement.node import Allocation, convert_borrowed
from gpushare_spawner.placement.request import PlacementRequest
from tests.placement.reports import gpu, ledger_of, report

GPUS = {
    "n1": [gpu("a", 0), gpu("b", 1), gpu("sick", 2, healthy=False)],
    "n2": [gpu("c", 0, capacity=150), gpu("d", 1, model="T4", capacity=40)],
}
CAPACITY = {one.uuid: one.capacity_units for gpus in GPUS.values() for one in gpus}
NODE = {one.uuid: node for node, gpus in GPUS.items() for one in gpus}

SHARES = st.one_of(
    st.integers(1, 100).map(Share),
    st.sampled_from(
        [Share(count=1), Share(count=2), Share(50), Share(50, 2), Share(30, 2), Share(100, 2, 50), Share(100, 2, 1)]
    ),
)


class Hub(RuleBasedStateMachine):
    """``running`` is what the agents hold, ``reserved`` what the hub has in flight, ``ledger`` what it believes."""

    reservations = Bundle("reservations")
    sessions = Bundle("sessions")

    def __init__(self) -> None:
        super().__init__()
        self.running: dict[str, Allocation] = {}
        self.reserved: dict[str, Allocation] = {}
        self.numbers = count()
        self.ledger = ledger_of(self.reports())

    def reports(self) -> list[Report]:
        """What really runs, through JSON as the hub gets it."""
        on = {node: [held for held in self.running.values() if NODE[held.gpus[0]] == node] for node in GPUS}
        return [Report.model_validate_json(report(node, GPUS[node], on[node]).model_dump_json()) for node in GPUS]

    @rule(target=reservations, share=SHARES, t4=st.booleans())
    def reserve(self, share: Share, t4: bool) -> Any:
        wanted = PlacementRequest(share, models=None if t4 else frozenset({"A100"}))
        placement = self.ledger.place(wanted)
        if placement is None:
            why = self.ledger.why_unplaceable(wanted)
            assert why.best_units < share.units or share.count > why.best_count
            return multiple()
        assert "sick" not in placement.gpus
        assert t4 or "d" not in placement.gpus
        assert len(set(placement.gpus)) == share.count
        assert {NODE[uuid] for uuid in placement.gpus} == {placement.node}
        number = next(self.numbers)
        name, opened_at = f"s{number}", float(number // 2)
        allocation = Allocation(
            name,
            placement.gpus,
            share.units,
            placement.borrowed,
            share.units,
            opened_at,
            user=name,
            last_units=share.last_units,
        )
        assert allocation.total_units == share.total_units
        for uuid, units in zip(placement.gpus, share.each, strict=True):
            assert self.ledger.free_units(uuid) >= units == allocation.on(uuid).share_units
            assert allocation.on(uuid).owned_units <= self.ledger.unowned_units(uuid)
        self.ledger.add(allocation)
        assert self.ledger.guaranteed(allocation.session) == share.units
        self.reserved[allocation.session] = allocation
        return allocation.session

    @rule(target=sessions, name=consumes(reservations))
    def starts(self, name: str) -> Any:
        if name not in self.reserved:  # the hub that reserved it is gone
            return multiple()
        self.running[name] = self.reserved.pop(name)
        return name

    @rule(name=consumes(reservations))
    def fails_or_is_cancelled(self, name: str) -> None:
        if self.reserved.pop(name, None) is not None:
            self.ledger.remove(name)

    @rule(name=consumes(sessions))
    def stops(self, name: str) -> None:
        del self.running[name]
        self.ledger.remove(name)
        # the agent settles among the sessions it holds; the hub's reservations own what they were promised
        everything = [*self.running.values(), *self.reserved.values()]
        for other, later in convert_borrowed(CAPACITY, everything).items():
            holder = self.running if other in self.running else self.reserved
            owned = [here.owned_units for here in holder[other].each]
            assert all(after.owned_units >= before for after, before in zip(later.each, owned, strict=True))
            assert sum(after.owned_units for after in later.each) > sum(owned)
            holder[other] = later
            self.ledger.replace(holder[other])
        assert self.ledger.convert_borrowed() == {}

    @rule(name=sessions, part=st.integers(0, 100))
    def goes_down(self, name: str, part: int) -> None:
        held = self.running[name]
        self.running[name] = held.with_effective(min(held.effective_units, held.share_units * part // 100))
        self.ledger.replace(self.running[name])

    @rule(name=sessions)
    def works_again(self, name: str) -> None:
        held = self.running[name]
        self.running[name] = held.with_effective(held.share_units)
        self.ledger.replace(self.running[name])
        assert self.ledger.guaranteed(name) >= held.owned_units

    @rule()
    def hub_restarts(self) -> None:
        self.reserved.clear()
        self.ledger = ledger_of(self.reports())

    @rule()
    def hub_reads_reports(self) -> None:
        self.ledger = ledger_of(self.reports(), self.reserved.values())

    @invariant()
    def nothing_is_promised_twice(self) -> None:
        check_ledger(self.ledger)
        held = [*self.running.values(), *self.reserved.values()]
        for uuid, capacity in CAPACITY.items():
            here = [allocation.on(uuid) for allocation in held if uuid in allocation.gpus]
            assert sum(allocation.share_units - allocation.borrowed_units for allocation in here) <= capacity
            assert sum(self.ledger._guaranteed.get(uuid, {}).values()) <= capacity
            for allocation in here:
                promised = self.ledger._guaranteed[uuid][allocation.session]
                assert min(allocation.owned_units, allocation.effective_units) <= promised <= allocation.effective_units

    @invariant()
    def the_ledger_is_what_a_new_one_would_be(self) -> None:
        fresh = ledger_of(self.reports(), self.reserved.values())
        assert dict(fresh.allocations) == dict(self.ledger.allocations)
        for uuid in CAPACITY:
            assert fresh.free_units(uuid) == self.ledger.free_units(uuid)
            assert fresh.unowned_units(uuid) == self.ledger.unowned_units(uuid)

    def teardown(self) -> None:
        for name in [*self.running, *self.reserved]:
            self.ledger.remove(name)
        assert not self.ledger.allocations
        for uuid, capacity in CAPACITY.items():
            assert self.ledger.unowned_units(uuid) == capacity
            assert self.ledger.free_units(uuid) == (0 if uuid == "sick" else capacity)


Hub.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestHub = Hub.TestCase
