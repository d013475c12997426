"""Which place a strategy takes, held against a look at every place."""

from __future__ import annotations

import gc
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpushare_spawner.model.share import Share
from gpushare_spawner.placement import strategy as stranding_aware_fgd
from gpushare_spawner.placement.capacity import Best, FreeCapacity, Rated
from gpushare_spawner.placement.ledger import Ledger
from gpushare_spawner.placement.node import Allocation, NodeCapacity, NodeResources
from gpushare_spawner.placement.obstacles import fits
from gpushare_spawner.placement.request import Conditions, Demand, PlacementRequest, workload_of
from gpushare_spawner.placement.strategy import (
    BestFit,
    Fragmentation,
    Spread,
    StrandingAwareFgd,
    Strategy,
    check_strategy,
    places,
)
from tests.placement.reports import active, gpu, ledger_of, report, request
from tests.present import present

SHARES = [Share(10), Share(25), Share(50), Share(100), Share(count=2), Share(count=3)]
WORKLOAD = workload_of(
    [
        (request(25, cpu=2000).demand, 5.0),
        (request(40, "A100", cpu=3000).demand, 2.0),
        (request(100, cpu=8000).demand, 2.0),
        (request(count=2, cpu=9000).demand, 1.0),
    ]
)


def crowded(seed: int) -> Ledger:
    """Nodes of two models with sessions on them, some idle, some on lent units; some nodes are short of CPU."""
    chance = random.Random(seed)
    nodes = []
    for number in range(6):
        model = chance.choice(["A100", "T4"])
        nodes.append(report(f"n{number}", [gpu(f"g{number}{index}", index, model) for index in range(3)]))
    ledger = ledger_of(nodes)
    strategies: list[Strategy] = [BestFit(), Spread()]
    for number in range(chance.randrange(30)):
        wanted = PlacementRequest(chance.choice(SHARES))
        place = ledger.place(wanted, chance.choice(strategies))
        if place is not None:
            ledger.add(active(f"s{number}", place.gpus, wanted.share.units, place.borrowed, float(number)))
        if ledger.allocations and chance.random() < 0.4:
            idle = ledger.allocations[chance.choice(sorted(ledger.allocations))]
            ledger.replace(idle.with_effective(chance.choice([0, idle.share_units // 2])))
    for number in range(6):
        ledger.put_resources(f"n{number}", NodeResources(cpu=chance.choice([None, 500, 4000, 9000, 40000])))
    return ledger


def all_places(ledger: Ledger, demand: Demand) -> list[tuple[str, tuple[str, ...]]]:
    """Every node with every GPU, or every node with its whole GPUs of which least is lent, fullest first."""
    found: list[tuple[str, tuple[str, ...]]] = []
    for node in ledger.capacity.nodes.values():
        gpus = [one for one in node.gpus if one.healthy and demand.accepts(one.model) and one.free >= demand.units]
        if not fits(demand, node):
            continue
        if demand.count == 1:
            found += [(node.name, (one.uuid,)) for one in gpus]
        else:
            gpus.sort(key=lambda one: (max(0, 100 - one.unowned), one.unowned, one.rank))
            found.append((node.name, tuple(one.uuid for one in gpus[: demand.count])))
    return found


def lent_unowned_free(ledger: Ledger, demand: Demand, node: str, uuids: tuple[str, ...]) -> tuple[int, int, int]:
    """In units of a GPU; for several GPUs in whole GPUs of the node."""
    if demand.count == 1:
        one = ledger.capacity.gpus[uuids[0]]
        return max(0, demand.units - one.unowned), one.unowned, one.free
    whole = [one for one in ledger.capacity.nodes[node].gpus if one.free >= 100]
    unowned = sum(one.unowned >= 100 for one in whole)
    return max(0, demand.count - unowned), unowned, len(whole)


requests = st.builds(
    lambda share, cpu, model: PlacementRequest(share, cpu=cpu, models=frozenset({model}) if model else None),
    st.sampled_from(SHARES),
    st.sampled_from([0, 1000, 5000]),
    st.sampled_from(["", "A100", "H100"]),
)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), wanted=requests)
def test_best_fit_takes_the_place_with_the_least_lent_then_the_fullest_then_the_first(
    seed: int, wanted: PlacementRequest
) -> None:
    ledger = crowded(seed)
    places = all_places(ledger, wanted.demand)
    chosen = BestFit().choose(wanted, ledger.capacity)
    rank = {uuid: one.rank for uuid, one in ledger.capacity.gpus.items()}
    best = min(
        places, key=lambda place: (*lent_unowned_free(ledger, wanted.demand, *place), rank[place[1][0]]), default=None
    )
    assert chosen == (Best(*best) if best else None)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), wanted=requests)
def test_spread_takes_the_emptiest_gpu_of_the_emptiest_node(seed: int, wanted: PlacementRequest) -> None:
    ledger = crowded(seed)
    rank = {uuid: one.rank for uuid, one in ledger.capacity.gpus.items()}

    def worth(place: tuple[str, tuple[str, ...]]) -> tuple[object, ...]:
        lent, unowned, _ = lent_unowned_free(ledger, wanted.demand, *place)
        return lent, -unowned, -sum(one.ownable for one in ledger.capacity.nodes[place[0]].gpus), rank[place[1][0]]

    best = min(all_places(ledger, wanted.demand), key=worth, default=None)
    assert Spread().choose(wanted, ledger.capacity) == (Best(*best) if best else None)


def scarce_fitting(
    ledger: Ledger, changed: str = "", left: Mapping[str, Sequence[int]] | None = None, cpu: int | None = 0
) -> list[int]:
    """How many requests of the two scarce kinds of `WORKLOAD` fit, one node being changed to these units and CPU."""
    totals = [0, 0]
    for node in ledger.capacity.nodes.values():
        free: Mapping[str, Sequence[int]]
        free = {model: [one.ownable for one in gpus] for model, gpus in node.healthy.items()}
        free, free_cpu = (left, cpu) if left is not None and node.name == changed else (free, node.resources.cpu)
        of_gpus = [
            sum(units // 40 for units in free.get("A100", ())),
            sum(sum(units == 100 for units in gpus) // 2 for gpus in free.values()),
        ]
        for kind, needed in enumerate((3000, 9000)):
            totals[kind] += of_gpus[kind] if free_cpu is None else min(of_gpus[kind], max(0, free_cpu) // needed)
    return totals


def scarcity_price(ledger: Ledger, node: str, left: Mapping[str, Sequence[int]], cpu: int | None) -> float:
    """Units of 1 % of a GPU that are lost with the scarce requests, by the definition of the price."""
    root = math.sqrt(sum(len(gpus) for node in ledger.capacity.nodes.values() for gpus in node.healthy.values()))
    now, later = scarce_fitting(ledger), scarce_fitting(ledger, node, left, cpu)
    prices = [
        11.5 * root * 100 * gpus_of_all * math.exp(-max(0, now[kind] - 1) / (0.2 * root))
        for kind, gpus_of_all in enumerate((2.0 * 0.4 / 10, 1.0 * 2 / 10))
    ]
    if max(prices) < 1e-3:
        return 0.0
    return sum(price * (fit_now - fit_later) for price, fit_now, fit_later in zip(prices, now, later, strict=True))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), wanted=requests, stranding=st.sampled_from([0.0, 1.0]))
@example(seed=45, wanted=request(50), stranding=1.0)
@example(seed=176543, wanted=request(10), stranding=0.0)
def test_the_default_takes_the_place_with_the_least_waste_and_the_least_loss_of_scarce_requests(
    seed: int, wanted: PlacementRequest, stranding: float
) -> None:
    """In steps of 0.04 GPU; lent units come first, the best fit decides between equals."""
    ledger = crowded(seed)
    rank = {uuid: one.rank for uuid, one in ledger.capacity.gpus.items()}
    fragmentation = Fragmentation(WORKLOAD, stranding)

    def worth(place: tuple[str, tuple[str, ...]]) -> tuple[object, ...]:
        node = ledger.capacity.nodes[place[0]]
        cpu = node.resources.cpu
        lent, unowned, free = lent_unowned_free(ledger, wanted.demand, *place)
        now = {model: [one.ownable for one in gpus] for model, gpus in node.healthy.items()}
        then = {
            model: [max(0, one.ownable - wanted.share.units) if one.uuid in place[1] else one.ownable for one in gpus]
            for model, gpus in node.healthy.items()
        }
        left = None if cpu is None else cpu - wanted.cpu
        more = fragmentation.value(tuple(then.items()), left) - fragmentation.value(tuple(now.items()), cpu)
        price = scarcity_price(ledger, node.name, then, left)
        # what is equal but for the last bits must not be a step apart
        steps = -((-round(more, 9)) // 4) - (-round(price, 9) // 4)
        return lent, steps, unowned, free, rank[place[1][0]]

    chosen = StrandingAwareFgd(WORKLOAD, stranding).choose(wanted, ledger.capacity)
    best = min(all_places(ledger, wanted.demand), key=worth, default=None)
    assert (chosen is None) == (best is None)
    if chosen is not None:
        assert worth((chosen.node, chosen.gpus))[:4] == worth(present(best))[:4]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), data=st.data())
def test_an_index_with_prices_gives_what_a_new_one_gives_while_sessions_come_and_go(
    seed: int, data: st.DataObject
) -> None:
    """The counts of scarce requests and the heaps for each loss are updated by changes, nodes that go included."""
    ledger, strategy = crowded(seed), StrandingAwareFgd(WORKLOAD)
    for number in range(12):
        wanted = data.draw(requests)
        totals = ledger.capacity._totals_of(strategy)
        place = ledger.place(wanted, strategy)
        updated = list(totals.read())
        anew = StrandingAwareFgd(WORKLOAD)
        assert place == ledger.place(wanted, anew)
        assert updated == ledger.capacity._totals_of(anew).read()
        assert [*ledger.capacity.forgetting(anew)]
        ledger.capacity._totals = totals
        if place is not None:
            ledger.add(active(f"new{number}", place.gpus, wanted.share.units, place.borrowed, 100.0 + number))
        if data.draw(st.booleans()) and ledger.allocations:
            ledger.remove(data.draw(st.sampled_from(sorted(ledger.allocations))))
        if data.draw(st.integers(0, 5)) == 0:
            ledger.put_node(f"n{number % 6}", [gpu(f"g{number % 6}0", 0, "A100")] if number % 2 else [])


def test_the_last_places_for_a_request_of_several_gpus_are_kept_while_others_are_free() -> None:
    """Without CPU for it on the other node, the whole node is the last that can take two GPUs."""
    workload = workload_of([(request(50, cpu=2000).demand, 9), (request(count=2, cpu=9000).demand, 1)])
    ledger = ledger_of([report("small", [gpu("s0", 0), gpu("s1", 1)]), report("whole", [gpu("w0", 0), gpu("w1", 1)])])
    ledger.put_resources("small", NodeResources(cpu=4000))
    ledger.put_resources("whole", NodeResources(cpu=10000))
    strategy = StrandingAwareFgd(workload)
    for number in range(2):
        place = present(ledger.place(request(50, cpu=2000), strategy))
        assert place.node == "small"
        ledger.add(active(f"s{number}", place.gpus, 50))
        ledger.put_resources("small", NodeResources(cpu=2000 - 2000 * number))
    assert present(ledger.place(request(count=2, cpu=9000), strategy)).node == "whole"


def test_gpus_closed_to_a_request_still_count_for_scarce_requests() -> None:
    """A request for one GPU of a whole node breaks the node, also if the others are closed to the request."""
    four = request(count=4).demand
    strategy = StrandingAwareFgd(workload_of([(request(50).demand, 9), (four, 1)]))
    ledger = ledger_of([report("n", [gpu(f"g{index}", index) for index in range(8)])])
    node = ledger.capacity.nodes["n"]
    pinned = Demand(50, 1, conditions=Conditions(gpu="g0"))
    (place,) = strategy.rate_all(pinned, node.left_for(pinned))
    assert place.loss == ((0, 1),)
    assert strategy.count(node) == (8, 2)


def test_kinds_with_conditions_change_no_price_of_others() -> None:
    pinned = Demand(100, 8, conditions=Conditions(nodes=frozenset({"elsewhere"})))
    strategy = StrandingAwareFgd(workload_of([(pinned, 1), (request(50).demand, 5), (request(count=2).demand, 1)]))
    ledger = ledger_of([report("n", [gpu(f"g{index}", index) for index in range(4)])])
    assert strategy.count(ledger.capacity.nodes["n"]) == (4, 2)


def test_a_strategy_that_is_no_longer_used_leaves_nothing_behind() -> None:
    ledger = ledger_of([report("n", [gpu("a", 0), gpu("b", 1)])])
    pinned = replace(request(25), conditions=Conditions(gpu="a"))
    for number in range(1, 6):
        strategy = StrandingAwareFgd(workload_of([(request(25).demand, number), (request(count=2).demand, 1)]))
        ledger.place(pinned, strategy)
        assert [*ledger.capacity.forgetting(strategy)]
    (node,) = ledger.capacity.nodes.values()
    cached = [*node.derived, *(key for copy in node.derived.values() for key in getattr(copy, "derived", ()))]
    assert not any(isinstance(key, StrandingAwareFgd) for key in cached)


def test_a_workload_that_has_hardly_changed_keeps_the_strategy() -> None:
    """Another strategy rates all nodes again."""
    tenth, whole = request(10).demand, request(100).demand
    strategy = StrandingAwareFgd(workload_of([(tenth, 50), (whole, 50)]))
    assert strategy.for_workload(workload_of([(tenth, 54), (whole, 46)])) is strategy
    assert strategy.for_workload(workload_of([(tenth, 56), (whole, 44)])) is not strategy
    assert strategy.for_workload(workload_of([(tenth, 50)])) is not strategy


def test_a_fraction_goes_where_no_whole_gpu_is_broken_for_it() -> None:
    ledger = ledger_of([report("n", [gpu("a", 0), gpu("b", 1)], [active("s", "b", 50)])])
    assert present(ledger.place(request(25), StrandingAwareFgd(WORKLOAD))).gpus == ("b",)


def test_a_gap_that_fits_what_comes_often_is_left_open() -> None:
    """a has 75 left and b 65: 25 units leave 50 on a, which a half can use, and 40 on b, which none can use."""
    ledger = ledger_of([report("n", [gpu("a", 0), gpu("b", 1)], [active("s", "a", 25), active("t", "b", 35)])])
    often = workload_of([(Demand(50, 1), 1.0)])
    assert present(ledger.place(request(25), StrandingAwareFgd(often))).gpus == ("a",)
    assert present(ledger.place(request(25), BestFit())).gpus == ("b",)


def test_a_node_whose_cpu_its_gpus_need_is_spared() -> None:
    """n1 has CPU for its GPUs and nothing to spare; n2 has more than its GPU can use."""
    ledger = ledger_of([report("n1", [gpu("a", 0), gpu("b", 1)]), report("n2", [gpu("c", 0), gpu("d", 1)])])
    ledger.put_resources("n1", NodeResources(cpu=16000))
    ledger.put_resources("n2", NodeResources(cpu=64000))
    hungry = request(25, cpu=8000)
    assert present(ledger.place(hungry, BestFit())).node == "n1"
    assert present(ledger.place(hungry, StrandingAwareFgd(WORKLOAD))).node == "n2"


def test_without_a_workload_the_default_is_best_fit() -> None:
    for seed in range(20):
        ledger = crowded(seed)
        for share in SHARES[:4]:
            wanted = PlacementRequest(share)
            assert StrandingAwareFgd().choose(wanted, ledger.capacity) == BestFit().choose(wanted, ledger.capacity)


def test_an_equal_workload_keeps_what_has_been_computed() -> None:
    strategy = StrandingAwareFgd(WORKLOAD, stranding=0.5)
    assert strategy.for_workload(workload_of([(kind.demand, kind.popularity) for kind in WORKLOAD.kinds])) is strategy
    other = strategy.for_workload(workload_of([(Demand(10, 1), 1.0)]))
    assert (other.workload.kinds[0].demand, other.stranding) == (Demand(10, 1), 0.5)
    assert repr(strategy) == "StrandingAwareFgd(4 kinds of requests)"


class _Old:
    def choose(self, room, share, models):  # type: ignore[no-untyped-def]
        return ("a",)


@dataclass
class _Fitting:
    def choose(self, request: PlacementRequest, capacity: FreeCapacity) -> Best | None:
        return None


class _Fullest:
    """An admin's own strategy that extends nothing: it rates nodes and lets the capacity find the best."""

    def rate(self, demand: Demand, node: NodeCapacity) -> Rated:
        return BestFit().rate(demand, node)

    def choose(self, request: PlacementRequest, capacity: FreeCapacity) -> Best | None:
        return capacity.best(request.demand, self, request.left_out, request.node)  # type: ignore[arg-type]


def test_a_strategy_needs_no_base_to_use_the_index() -> None:
    ledger = ledger_of([report("node", [gpu("a", 0), gpu("b", 1)])])
    placement = ledger.place(request(25), _Fullest())
    assert placement is not None
    assert placement == ledger.place(request(25), BestFit())
    too_many = request(count=3)
    assert ledger.place(too_many, _Fullest()) is None
    assert ledger.capacity.obstacles(too_many.demand)[1] == 0


def test_a_gpu_without_cpu_weighs_as_much_as_a_fragment_that_nobody_wants() -> None:
    value = StrandingAwareFgd(workload_of([(Demand(100, 1, cpu=8000), 1)]))._fragmentation.value
    fragment = value([("A100", [50])], 8000)
    assert value([("A100", [50])], 0) == pytest.approx(2 * fragment)


@pytest.mark.parametrize(("more", "steps"), [(-4.0, -1), (-3.9, 0), (0.0, 0), (0.1, 1), (4.0, 1), (4.1, 2)])
def test_differences_below_four_units_count_as_none(more: float, steps: int) -> None:
    assert StrandingAwareFgd().steps(more) == steps


def test_what_was_computed_of_states_is_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stranding_aware_fgd, "MOST_PLACES", 2)
    strategy, kept = StrandingAwareFgd(workload_of([(Demand(25, 1), 1)])), []
    for number in range(1, 4):
        ledger = ledger_of([report("node", [gpu(str(index), index) for index in range(number)])])
        assert ledger.place(request(25), strategy) is not None
        kept.append(sum(map(len, strategy._best_places.values())))
    assert kept == [1, 2, 1]


@pytest.mark.parametrize("demanded", [request(25), request(count=2)])
def test_what_is_kept_of_many_nodes_is_no_work_for_the_garbage_collector(demanded: PlacementRequest) -> None:
    """A collection of a cluster's nodes would block the event loop of the hub."""
    strategy = StrandingAwareFgd(workload_of([(Demand(25, 1), 1)]))
    ledger = ledger_of([report("node", [gpu("a", 0), gpu("b", 1)])])
    ledger.place(demanded, strategy)
    gc.collect()
    [node] = ledger.capacity.nodes.values()
    [(signature, best)] = [item for known in strategy._best_places.values() for item in known.items()]
    [entry] = ledger.capacity._index(demanded.demand, strategy)._entries.values()
    for _ in range(3):  # a tuple of tuples follows those inside
        gc.collect()
    assert not any(map(gc.is_tracked, (signature, best, entry, node.derived[strategy], node.most_free)))


def test_of_the_places_of_a_node_only_those_with_the_least_lent_units_count() -> None:
    ledger = ledger_of([report("node", [gpu("a", 0), gpu("b", 1), gpu("c", 2)])])
    ledger.add(Allocation("idle", ("a",), 90, effective_units=0))
    ledger.add(Allocation("works", ("b",), 50, effective_units=50))
    [node] = ledger.capacity.nodes.values()
    assert [place.positions for place in places(request(25).demand, node)] == [(1,), (2,)]
    ledger.add(Allocation("others", ("b", "c"), 50, effective_units=50))
    ledger.add(Allocation("more", ("c",), 40, effective_units=40))
    assert [(place.lent, place.positions) for place in places(request(25).demand, node)] == [(15, (0,))]


def test_a_strategy_is_told_what_is_wrong_with_it() -> None:
    for fitting in (BestFit(), Spread(), StrandingAwareFgd(), _Fitting()):
        check_strategy(fitting)
    with pytest.raises(
        TypeError, match=r"^placement_strategy _Old has choose\(room, share, models\), for another version"
    ):
        check_strategy(_Old())
    with pytest.raises(TypeError, match=r"^placement_strategy int has no method choose\(request, capacity\)$"):
        check_strategy(5)
