"""What the expected workload could not use of a node, held against the definition."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpushare_spawner.placement.request import Demand, Workload, workload_of
from gpushare_spawner.placement.strategy import Fragmentation, Place, StrandingAwareFgd
from tests.placement.reports import gpu, ledger_of, report

MODELS = ("A100", "T4")
CPUS = (0, 1000, 4000)


def by_definition(workload: Workload, stranding: float, left: dict[str, list[int]], cpu: int | None) -> float:
    """Of each kind of request: all that is left where the node cannot run it, else what is left on GPUs too small."""
    wasted = 0.0
    total = sum(kind.popularity for kind in workload.kinds)
    for kind in workload.kinds:
        demand = kind.demand
        for model, gpus in left.items():
            able = demand.count > 0 and demand.accepts(model) and (cpu is None or cpu >= demand.cpu)
            most_first = sorted(gpus, reverse=True)
            able = able and len(gpus) >= demand.count
            able = able and all(units >= needed for units, needed in zip(most_first, demand.each, strict=False))
            unusable = sum(units for units in gpus if units < demand.least_units) if able else sum(gpus)
            wasted += kind.popularity / total * unusable
    if cpu is None or not workload.cpu_per_gpu:
        return wasted
    whole = sum(map(sum, left.values())) / 100
    ratios = (0.6, 0.8, 1.0)
    stranded = sum(max(0.0, whole - max(cpu, 0) / (ratio * workload.cpu_per_gpu)) for ratio in ratios) / len(ratios)
    return wasted + stranding * 100 * stranded


demands = st.builds(
    lambda share, cpu, models: Demand(share[0], share[1], cpu=cpu, models=models, last_units=(*share, 0)[2]),
    st.sampled_from(
        [(10, 1), (25, 1), (47, 1), (100, 1), (100, 2), (100, 4), (0, 0), (50, 2), (24, 3), (100, 2, 50), (100, 3, 9)]
    ),
    st.sampled_from(CPUS),
    st.sampled_from([None, frozenset({"A100"}), frozenset({"T4"}), frozenset({"H100"})]),
)
workloads = st.lists(st.tuples(demands, st.integers(1, 9)), min_size=1, max_size=6).map(workload_of)
units = st.sampled_from([0, 1, 9, 10, 24, 25, 50, 99, 100])
lefts = st.dictionaries(st.sampled_from(MODELS), st.lists(units, min_size=1, max_size=5), min_size=1)
cpus = st.sampled_from([None, -500, 0, 999, 1000, 3999, 4000, 20000])


@settings(max_examples=300, deadline=None)
@given(workload=workloads, left=lefts, cpu=cpus, stranding=st.sampled_from([0.0, 1.0, 0.5]))
def test_the_tables_give_what_the_definition_gives(
    workload: Workload, left: dict[str, list[int]], cpu: int | None, stranding: float
) -> None:
    value = Fragmentation(workload, stranding).value(tuple(left.items()), cpu)
    assert value == pytest.approx(by_definition(workload, stranding, left, cpu), abs=1e-6)


@settings(max_examples=300, deadline=None)
@given(workload=workloads, left=lefts, cpu=cpus, taken=st.sampled_from([1, 10, 25, 100]))
def test_a_node_that_loses_units_on_one_gpu_is_worth_what_the_node_with_less_is_worth(
    workload: Workload, left: dict[str, list[int]], cpu: int | None, taken: int
) -> None:
    fragmentation = Fragmentation(workload, 1.0)
    for model, gpus in left.items():
        places = [Place(0, 0, 0, model, (position,)) for position in range(len(gpus))]
        values = fragmentation.values_after(tuple(left.items()), cpu, places, taken)
        for now, value in zip(gpus, values, strict=True):
            after = {**left, model: list(gpus)}
            after[model][gpus.index(now)] -= min(now, taken)
            assert value == pytest.approx(fragmentation.value(tuple(after.items()), cpu), abs=1e-6)


@settings(max_examples=300, deadline=None)
@given(workload=workloads, left=lefts, cpu=cpus, taken=st.sampled_from([50, 100]), data=st.data())
def test_a_node_that_loses_units_on_several_gpus_is_worth_what_the_node_with_less_is_worth(
    workload: Workload, left: dict[str, list[int]], cpu: int | None, taken: int, data: st.DataObject
) -> None:
    fragmentation = Fragmentation(workload, 1.0)
    model, gpus = next(iter(left.items()))
    positions = tuple(data.draw(st.sets(st.sampled_from(range(len(gpus))))))
    last = data.draw(st.sampled_from([0, 0, 1, 30]))
    lost = {at: last if last and at == positions[-1] else taken for at in positions}
    after = {**left, model: [max(0, units - lost.get(at, 0)) for at, units in enumerate(gpus)]}
    [value] = fragmentation.values_after(tuple(left.items()), cpu, [Place(0, 0, 0, model, positions)], taken, last)
    assert value == pytest.approx(fragmentation.value(tuple(after.items()), cpu), abs=1e-6)


UNEVEN = Demand(100, 2, last_units=40)


def fitting(demand: Demand, free: tuple[int, ...]) -> int:
    """The requests that fit, by trying every choice of different GPUs."""
    return max(
        (
            1 + fitting(demand, tuple(units - taken.get(at, 0) for at, units in enumerate(free)))
            for chosen in permutations(range(len(free)), demand.count)
            if all(free[at] >= units for at, units in zip(chosen, demand.each, strict=True))
            and (taken := dict(zip(chosen, demand.each, strict=True)))
        ),
        default=0,
    )


@settings(max_examples=200, deadline=None)
@given(
    demand=st.sampled_from([Demand(34, 1), Demand(50, 2), Demand(40, 3), Demand(100, 2), UNEVEN]),
    free=st.lists(st.sampled_from([0, 39, 40, 50, 80, 100]), min_size=1, max_size=4),
)
@example(demand=Demand(100, 3, last_units=25), free=[100, 100, 100, 50])
def test_the_requests_that_fit_on_the_gpus_of_a_node_are_counted_exactly(demand: Demand, free: list[int]) -> None:
    assert demand.most_requests(free) == fitting(demand, tuple(free))


def test_the_loss_of_a_place_counts_requests_for_parts_of_several_gpus() -> None:
    strategy = StrandingAwareFgd(workload_of([(Demand(50, 2), 1), (Demand(100, 2, last_units=50), 1)]))
    ledger = ledger_of([report("node", [gpu("a", 0), gpu("b", 1)])])
    [node] = ledger.capacity.nodes.values()
    more_units, fewer_units = 0, 1  # kinds, by the part of the demand
    assert [dict(rated.loss) for rated in strategy.rate_all(Demand(25, 1), node)] == [{fewer_units: 1}]
    [rated] = strategy.rate_all(Demand(100, 2, last_units=50), node)
    assert dict(rated.loss) == {more_units: 1, fewer_units: 2}


def test_without_a_workload_nothing_is_wasted_but_what_is_left() -> None:
    """No kind of request can use it: all places cost the same, and the best fit decides."""
    assert Fragmentation(Workload(), 1.0).value([("A100", [30, 100])], 1000) == pytest.approx(130)


def test_units_that_are_too_few_for_a_popular_request_are_wasted() -> None:
    fragmentation = Fragmentation(workload_of([(Demand(50, 1), 3), (Demand(20, 1), 1)]), 1.0)
    assert fragmentation.value([("A100", [40])], None) == pytest.approx(40 * 0.75)
    assert fragmentation.value([("A100", [50])], None) == 0
    assert fragmentation.value([("A100", [10])], None) == 10


def test_a_gpu_without_cpu_is_stranded() -> None:
    """The workload asks for 8 cores with a GPU; 4 of them serve between half a GPU and 0.83 GPU."""
    fragmentation = Fragmentation(workload_of([(Demand(100, 1, cpu=8000), 1), (Demand(100, 1, cpu=8000), 1)]), 1.0)
    served = sum(min(1.0, 4000 / (ratio * 8000)) for ratio in (0.6, 0.8, 1.0)) / 3
    # no request fits either, so that all of the GPU is a fragment too
    assert fragmentation.value([("A100", [100])], 4000) == pytest.approx(100 + 100 * (1 - served))
    assert fragmentation.value([("A100", [100])], 8000) == 0


def test_stranding_counts_however_little_cpu_the_workload_asks_for() -> None:
    fragmentation = Fragmentation(workload_of([(Demand(100, 1, cpu=1), 1)]), 1.0)
    assert fragmentation.value([("A100", [100])], 0) == pytest.approx(100 + 100)
    assert fragmentation.value([("A100", [100])], 1) == 0


def test_a_node_that_owes_cpu_can_run_nothing_not_even_what_asks_for_none() -> None:
    fragmentation = Fragmentation(workload_of([(Demand(50, 1, cpu=0), 1)]), 1.0)
    assert fragmentation.value([("A100", [100])], -500) == 100
    assert fragmentation.value([("A100", [100])], 0) == 0


@pytest.mark.parametrize(("count", "wasted"), [(64, 0.0), (63, 0.0)])
def test_a_node_of_as_many_whole_gpus_as_a_template_can_ask_for_is_valued(count: int, wasted: float) -> None:
    fragmentation = Fragmentation(workload_of([(Demand(100, count), 1)]), 1.0)
    assert fragmentation.value([("A100", [100] * 64)], None) == wasted
    assert fragmentation.value([("A100", [100] * (count - 1))], None) == 100 * (count - 1)


def test_one_unit_less_makes_a_whole_gpu_useless_to_a_request_for_whole_ones() -> None:
    fragmentation = Fragmentation(workload_of([(Demand(100, 2), 1)]), 0.0)
    left = [("A100", [100, 100])]
    assert fragmentation.values_after(left, None, [Place(0, 0, 0, "A100", (0,))], 1) == [pytest.approx(199)]
