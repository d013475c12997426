"""GPUs that sessions share by different layers: each GPU has sessions of one layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ledger_check import check_ledger
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.placement.capacity import Best, FreeCapacity
from gpushare_spawner.placement.ledger import Ledger, LedgerError, NodeHold, able_nodes, cheapest_hold
from gpushare_spawner.placement.node import Allocation
from gpushare_spawner.placement.request import PlacementRequest
from gpushare_spawner.placement.strategy import BestFit, StrandingAwareFgd
from tests.placement.reports import active, gpu, ledger_of, report, request, session
from tests.present import present


def by_mps(allocation: Allocation) -> Allocation:
    return replace(allocation, layer=LayerName.MPS)


def asks(units: int, layer: LayerName = LayerName.MPS) -> PlacementRequest:
    return replace(request(units), layer=layer)


def two_gpus(*allocations: Allocation) -> Ledger:
    """A node with the GPUs a and b."""
    ledger = ledger_of([report("n", [gpu("a", 0), gpu("b", 1)])])
    ledger.change(allocations)
    return ledger


@pytest.mark.parametrize("strategy", [BestFit(), StrandingAwareFgd()])
def test_share_goes_to_a_gpu_of_its_layer_or_an_empty_one(strategy: BestFit | StrandingAwareFgd) -> None:
    ledger = two_gpus(active("ada", "a", 50))
    assert present(ledger.place(asks(25), strategy)).gpus == ("b",)
    ledger.add(by_mps(active("bob", "b", 25)))
    assert present(ledger.place(asks(25), strategy)).gpus == ("b",)
    assert present(ledger.place(request(50), strategy)).gpus == ("a",)
    assert ledger.place(request(60), strategy) is None
    assert ledger.place(asks(80), strategy) is None


def test_gpu_without_sessions_can_have_any_layer_again() -> None:
    ledger = two_gpus(by_mps(active("ada", "a", 50)), active("bob", "b", 100))
    assert ledger.place(request(25)) is None
    ledger.remove("ada")
    assert present(ledger.place(request(25))).gpus == ("a",)


def test_refusal_says_that_others_have_the_gpus() -> None:
    ledger = two_gpus(active("ada", "a", 10), active("bob", "b", 10))
    unplaceable = ledger.why_unplaceable(asks(25))
    assert unplaceable.may_pass


def test_spawn_that_waits_keeps_a_gpu_of_another_layer_until_it_is_empty() -> None:
    ledger = two_gpus(active("ada", "a", 50), active("bob", "b", 10))
    assert able_nodes(ledger.capacity, asks(25)) == {"n"}
    hold = present(cheapest_hold(ledger.capacity, asks(25)))
    ledger.hold("eve", hold)
    kept = hold.gpus[0]
    other = {"a": "b", "b": "a"}[kept]
    assert present(ledger.place(request(10))).gpus == (other,)
    check_ledger(ledger)
    assert not ledger.fits_without(asks(25), ["eve"])
    ledger.remove({"a": "ada", "b": "bob"}[kept])
    assert ledger.fits_without(asks(25), ["eve"])
    assert ledger.fits_without(request(100), ["eve"])
    check_ledger(ledger)


def test_strategy_that_mixes_layers_is_refused() -> None:
    class Mixes(BestFit):
        def choose(self, request: PlacementRequest, capacity: FreeCapacity) -> Best | None:
            return Best("n", ("a",))

    with pytest.raises(LedgerError, match="not all have so much free"):
        two_gpus(active("ada", "a", 50)).place(asks(25), Mixes())


def test_reported_session_has_its_layer_in_the_ledger() -> None:
    told = session(active("ada", "a", 50)).model_copy(update={"layer": LayerName.MPS})
    assert present(Allocation.of(told)).layer is LayerName.MPS


def test_hold_on_a_gpu_of_its_own_layer_keeps_its_units() -> None:
    ledger = two_gpus(by_mps(active("ada", "a", 50)))
    ledger.hold("eve", NodeHold("n", ("a",), asks(25).demand))
    assert present(ledger.place(asks(25))).gpus == ("a",)
    ledger.add(by_mps(active("bob", "a", 25)))
    assert present(ledger.place(asks(10))).gpus == ("b",)


@given(st.lists(st.tuples(st.integers(1, 100), st.booleans(), st.booleans()), max_size=30))
def test_no_gpu_ever_has_sessions_of_two_layers(steps: list[tuple[int, bool, bool]]) -> None:
    ledger = two_gpus()
    for number, (units, mps, ends) in enumerate(steps):
        asked = asks(units, LayerName.MPS if mps else LayerName.NATIVE)
        placement = ledger.place(asked)
        if placement is not None:
            made = active(f"s{number}", placement.gpus, units)
            ledger.add(replace(made, layer=asked.layer))
        if ends and ledger.allocations:
            ledger.remove(next(iter(ledger.allocations)))
        for uuid in ("a", "b"):
            assert len({one.layer for one in ledger.allocations.values() if uuid in one.gpus}) <= 1
        check_ledger(ledger)
