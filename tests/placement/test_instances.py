"""MIG instances in the ledger: each is for one session, and the smallest that holds a share is taken."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ledger_check import check_ledger
from gpushare_spawner.model.layers import LayerName, Placement
from gpushare_spawner.model.report import GpuReport
from gpushare_spawner.placement.feed import SupposedLedger
from gpushare_spawner.placement.ledger import LedgerError, able_nodes, cheapest_hold
from gpushare_spawner.placement.node import Allocation
from gpushare_spawner.placement.request import PlacementRequest
from gpushare_spawner.placement.strategy import BestFit, Spread, StrandingAwareFgd, Strategy
from tests.placement.instances import PROFILES, instance
from tests.placement.reports import active, gpu, ledger_of, report, request
from tests.present import present

STRATEGIES = [BestFit(), Spread(), StrandingAwareFgd()]
names = st.sampled_from(sorted(PROFILES))


def of_models(gpus: list[GpuReport], units: int) -> frozenset[str]:
    """The models of the instances that hold a share, as the hub's snapshot finds them."""
    return frozenset(one.model for one in gpus if one.mig is not None and one.mig.profile.covers(units))


def asks(gpus: list[GpuReport], units: int) -> PlacementRequest:
    return replace(request(units), layer=LayerName.MIG, models=of_models(gpus, units))


def by_mig(name: str, uuid: str, units: int) -> Allocation:
    return replace(active(name, uuid, units), layer=LayerName.MIG)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_smallest_free_instance_that_holds_the_share_is_taken_whatever_the_strategy(strategy: Strategy) -> None:
    gpus = [instance("MIG-7", "7g.80gb"), instance("MIG-12", "1g.20gb"), instance("MIG-1", "1g.10gb"),
            instance("MIG-2", "2g.20gb"), gpu("a", 1)]  # fmt: skip
    ledger = ledger_of([report("n", gpus)])
    taken = []
    for number in range(4):
        place = present(ledger.place(asks(gpus, 10), strategy))
        assert place.layer is LayerName.MIG
        taken.append(place.gpus[0])
        ledger.add(by_mig(f"s{number}", place.gpus[0], 10))
    assert taken == ["MIG-1", "MIG-12", "MIG-2", "MIG-7"]
    assert ledger.place(asks(gpus, 10), strategy) is None
    assert ledger.why_unplaceable(asks(gpus, 10)).may_pass
    # and no instance is taken by a session of another layer
    assert present(ledger.place(request(10), strategy)).gpus == ("a",)
    ledger.add(active("native", "a", 100))
    assert ledger.place(request(1), strategy) is None


def test_session_has_all_of_its_instance() -> None:
    gpus = [instance("MIG-3", "3g.40gb")]
    ledger = ledger_of([report("n", gpus)])
    ledger.add(by_mig("ada", "MIG-3", 10))
    assert (ledger.free_units("MIG-3"), ledger.unowned_units("MIG-3")) == (0, 0)
    check_ledger(ledger)
    ledger.add(by_mig("bob", "MIG-3", 10))
    with pytest.raises(LedgerError, match="2 sessions are on this MIG instance"):
        check_ledger(ledger)


def test_several_gpus_are_never_instances() -> None:
    gpus = [instance("MIG-1", "7g.80gb"), instance("MIG-2", "7g.80gb", "GPU-b", 1)]
    ledger = ledger_of([report("n", gpus)])
    assert ledger.place(replace(request(100, count=2), layer=LayerName.MIG)) is None


def test_spawn_that_waits_keeps_the_smallest_instance_that_will_do() -> None:
    gpus = [instance("MIG-7", "7g.80gb"), instance("MIG-2", "2g.20gb", "GPU-b"), instance("MIG-1", "1g.10gb", "GPU-b")]
    ledger = ledger_of([report("n", gpus)])
    ledger.change([by_mig("ada", "MIG-7", 100), by_mig("bob", "MIG-2", 25), by_mig("cem", "MIG-1", 5)])
    wanted = asks(gpus, 25)
    assert able_nodes(ledger.capacity, wanted) == {"n"}
    hold = present(cheapest_hold(ledger.capacity, wanted))
    assert hold.gpus == ("MIG-2",)
    ledger.hold("eve", hold)
    ledger.remove("bob")
    check_ledger(ledger)
    assert ledger.place(asks(gpus, 5)) is None
    assert ledger.fits_without(wanted, ["eve"])
    ledger.hold("eve", None)
    assert present(ledger.place(wanted)).gpus == ("MIG-2",)


def test_sick_instance_is_offered_to_nobody() -> None:
    gpus = [instance("MIG-1", "1g.10gb", healthy=False)]
    assert ledger_of([report("n", gpus)]).place(asks(gpus, 10)) is None


def several_layers(gpus: list[GpuReport], units: int) -> PlacementRequest:
    native = frozenset(one.model for one in gpus if one.mig is None)
    layers = ((LayerName.MIG, of_models(gpus, units)), (LayerName.NATIVE, native))
    return replace(request(units), layer=LayerName.MIG, models=native | of_models(gpus, units), by_layer=layers)


def test_request_that_several_layers_can_serve_takes_the_first_with_a_place() -> None:
    gpus = [instance("MIG-1", "1g.10gb"), gpu("a", 1)]
    ledger = ledger_of([report("n", gpus)])
    wanted = several_layers(gpus, 10)
    assert ledger.place(wanted) == Placement("n", ("MIG-1",), 0, LayerName.MIG)
    ledger.add(by_mig("ada", "MIG-1", 10))
    assert ledger.place(wanted) == Placement("n", ("a",))
    # sessions of a third layer have the GPU
    ledger.add(replace(active("bob", "a", 10), layer=LayerName.MPS))
    assert ledger.place(wanted) is None
    assert ledger.why_unplaceable(wanted).may_pass
    hold = present(cheapest_hold(ledger.capacity, wanted))
    ledger.hold("eve", hold)
    ledger.remove("ada")
    ledger.remove("bob")
    check_ledger(ledger)
    assert ledger.fits_without(wanted, ["eve"])


def test_supposed_end_of_a_session_frees_its_instance() -> None:
    gpus = [instance("MIG-1", "1g.10gb")]
    ledger = ledger_of([report("n", gpus)])
    ledger.add(by_mig("ada", "MIG-1", 10))
    supposed = SupposedLedger(ledger)
    assert supposed.place("eve", asks(gpus, 10), "n") is None
    ledger.remove("ada")
    assert SupposedLedger(ledger).place("eve", asks(gpus, 10), "n") is not None


@given(
    st.lists(names, min_size=1, max_size=8), st.lists(st.tuples(st.integers(1, 100), st.booleans()), max_size=20),
    st.sampled_from(STRATEGIES),
)  # fmt: skip
def test_no_instance_ever_has_two_sessions_or_too_large_a_share(
    profiles: list[str], steps: list[tuple[int, bool]], strategy: Strategy
) -> None:
    gpus = [instance(f"MIG-{number}", name, f"GPU-{number}", number) for number, name in enumerate(profiles)]
    by_uuid = {one.uuid: present(one.mig).profile for one in gpus}
    ledger = ledger_of([report("n", gpus)])
    for number, (units, ends) in enumerate(steps):
        free = [uuid for uuid in by_uuid if not any(uuid in one.gpus for one in ledger.allocations.values())]
        holding = [by_uuid[uuid] for uuid in free if by_uuid[uuid].covers(units)]
        place = ledger.place(asks(gpus, units), strategy)
        assert (place is not None) == bool(holding)
        if place is not None:
            (uuid,) = place.gpus
            profile = by_uuid[uuid]
            assert Fraction(profile.slices, 7) >= Fraction(units, 100) <= Fraction(profile.memory_slices, 8)
            assert profile.size == min(one.size for one in holding)
            ledger.add(by_mig(f"s{number}", uuid, units))
        if ends and ledger.allocations:
            ledger.remove(next(iter(ledger.allocations)))
        check_ledger(ledger)
