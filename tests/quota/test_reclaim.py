"""Which sessions over quota make way for spawns in quota."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare_spawner.model.quota import Quotas, ResourceAmounts
from gpushare_spawner.quota import reclaim
from gpushare_spawner.quota.accounts import QuotaAccounts
from gpushare_spawner.quota.entitlement import LEAST_EXCHANGED
from gpushare_spawner.quota.order import Asking
from gpushare_spawner.quota.reclaim import MissingUnits, OverQuota, in_excess, reclaimed

Spawn = tuple[int, int]

ACCOUNTS = QuotaAccounts(Quotas.model_validate({"groups": {"a": {"guarantee": 9}, "b": {"guarantee": 9}}}))


class Nodes:
    """Nodes with GPUs named n1, or n1/0 and n1/1. A spawn is the units that it needs of each GPU, and the GPUs."""

    def __init__(self, free: Mapping[str, int], sessions: list[OverQuota]) -> None:
        self.free = dict(free)
        self.held = {one.session: one for one in sessions}
        self.searched: list[str] = []

    def kind(self, spawn: Spawn) -> Spawn:
        return spawn

    def place(self, spawn: Spawn) -> str | None:
        units, count = spawn
        for node in dict.fromkeys(gpu.partition("/")[0] for gpu in self.free):
            fitting = [gpu for gpu, free in self.free.items() if gpu.partition("/")[0] == node and free >= units]
            if len(fitting) >= count:
                for gpu in fitting[:count]:
                    self.free[gpu] -= units
                return node
        return None

    def lacking(self, spawn: Spawn, node: str) -> list[MissingUnits]:
        self.searched.append(node)
        units, count = spawn
        of_node = {gpu: units - free for gpu, free in self.free.items() if gpu.partition("/")[0] == node}
        return [MissingUnits(count, of_node)]

    def make_way(self, spawn: Spawn, node: str, kept: Mapping[str, int]) -> None:
        for session, units in kept.items():
            one = self.held[session]
            assert one.node == node
            assert units in one.steps
            for gpu in one.gpus:
                most = one.last_units if one.last_units and gpu == one.gpus[-1] else 100
                self.free[gpu] += min(one.units, most) - min(units, most)
            self.held[session] = replace(one, units=units)
        assert self.place(spawn) == node, "enough has become free, and it fitted nowhere else"


def idle(name: str, since: float, units: int = 50, node: str = "n1", account: str = "b", smaller: int = 0) -> OverQuota:
    steps = [smaller, 0] if smaller else [0]
    return OverQuota(name, f"group:{account}", node.partition("/")[0], units, steps, since, name, (node,))


def active(
    name: str, opened: float = 0.0, units: int = 50, node: str = "n1", least: int = 0, told: bool = False
) -> OverQuota:
    steps = range(units - 1, least - 1, -1)
    return OverQuota(name, "group:b", node.partition("/")[0], units, steps, None, name, (node,), told, opened)


def partly(session: OverQuota, user: str = "") -> OverQuota:
    """A session that can keep any number of units."""
    return replace(session, steps=range(session.units - 1, -1, -1), user=user or session.user)


def made_way(
    spawns: list[int], sessions: list[OverQuota], free: Mapping[str, int] | None = None, count: int = 1
) -> dict[str, int]:
    nodes = {gpu: 0 for one in sessions for gpu in one.gpus} | dict(free or {})
    asking = [Asking((units, count), ACCOUNTS.find("group:a", ""), ResourceAmounts(units)) for units in spawns]
    return reclaimed(asking, sessions, Nodes(nodes, sessions))


def test_a_spawn_that_fits_takes_nothing() -> None:
    assert made_way([50], [idle("s", 1.0)], {"n2": 50}) == {}


def test_the_longest_idle_session_makes_way_whatever_its_node() -> None:
    assert made_way([50], [idle("new", 9.0), idle("old", 1.0, node="n2"), active("works")]) == {"old": 0}


def test_idle_sessions_make_way_before_active_ones() -> None:
    assert made_way([50], [active("works", opened=99.0), idle("s", 9.0)]) == {"s": 0}


def test_the_newest_active_session_makes_way_first_and_one_that_was_told_before_it() -> None:
    assert made_way([50], [active("old", 1.0), active("new", 9.0)]) == {"new": 0}
    assert made_way([50], [active("old", 1.0, told=True), active("new", 9.0)]) == {"old": 0}


def test_a_notice_is_not_passed_on_to_a_session_that_becomes_idle() -> None:
    assert made_way([50], [active("told", 1.0, told=True), idle("s", 1.0)]) == {"told": 0}


def test_a_session_with_a_notice_gives_before_one_that_is_idle_longer() -> None:
    sessions = [active("notified", 9.0, told=True), partly(idle("s", 1.0))]
    assert made_way([60], sessions) == {"notified": 0, "s": 40}


def test_on_one_gpu_too_two_idle_users_make_way_before_one_who_works() -> None:
    idle_users = [idle(f"s{number}", 1.0, units=30) for number in range(2)]
    assert made_way([60], [active("works", units=60), *idle_users]) == {"s0": 0, "s1": 0}


def test_on_one_gpu_too_two_users_with_a_notice_make_way_before_one_without() -> None:
    notified = [active(f"s{number}", units=30, told=True) for number in range(2)]
    assert made_way([60], [idle("without", 1.0, units=60), *notified]) == {"s0": 0, "s1": 0}


def test_a_session_that_makes_way_for_one_spawn_gives_to_the_next_before_one_that_is_idle_longer() -> None:
    sessions = [idle("s", 9.0, smaller=20), replace(idle("t", 1.0), steps=[30])]
    assert made_way([30, 20], sessions) == {"s": 0}


def test_spawns_that_need_the_same_in_vain_cost_one_search() -> None:
    sessions = [idle(f"s{number}", number, units=1, node=f"n{number}") for number in range(20)]
    nodes = Nodes({one.node: 0 for one in sessions}, sessions)
    asking = [Asking((50, 1), ACCOUNTS.find("group:a", ""), ResourceAmounts(50))] * 30
    assert reclaimed(asking, sessions, nodes) == {}
    assert len(nodes.searched) == 20


def test_only_the_node_of_a_plan_is_searched_again() -> None:
    sessions = [idle(f"s{number}", number, node=f"n{number}") for number in range(20)]
    nodes = Nodes({one.node: 0 for one in sessions}, sessions)
    asking = [Asking((50, 1), ACCOUNTS.find("group:a", ""), ResourceAmounts(50))] * 3
    assert reclaimed(asking, sessions, nodes) == {"s0": 0, "s1": 0, "s2": 0}
    assert len(nodes.searched) == 22


def test_one_idle_gpu_makes_way_rather_than_ten_sessions_that_are_idle_longer() -> None:
    tenths = [idle(f"tenth{number}", 1.0, units=10) for number in range(10)]
    assert made_way([100], [*tenths, idle("whole", 2.0, units=100, node="n2")]) == {"whole": 0}


def test_a_tenth_leaves_the_other_ninety_units_of_an_idle_gpu() -> None:
    assert made_way([10], [partly(idle("whole", 1.0, units=100))]) == {"whole": 90}


def test_several_tenths_are_taken_from_one_user() -> None:
    sessions = [partly(idle(f"s{number}", 1.0, units=100, node=f"n{number}")) for number in range(3)]
    assert made_way([10] * 3, sessions) == {"s0": 70}
    assert made_way([60] * 2, sessions) == {"s0": 40, "s1": 40}


def test_users_who_work_are_spared_even_for_more_idle_users() -> None:
    sessions = [active("works", units=100), *(idle(f"s{number}", 1.0, node="n2") for number in range(2))]
    assert made_way([100], sessions) == {"s0": 0, "s1": 0}


def test_two_sessions_of_one_user_disturb_fewer_than_two_users() -> None:
    mine = [partly(idle(f"mine{number}", 9.0, node="n2"), "me") for number in range(2)]
    others = [partly(idle(f"s{number}", 1.0)) for number in range(2)]
    assert made_way([80], [*others, *mine]) == {"mine0": 0, "mine1": 20}


def test_the_fewest_units_beyond_need_are_taken_and_then_those_that_are_idle_longest() -> None:
    assert made_way([30], [idle("large", 1.0), idle("small", 2.0, units=30)]) == {"small": 0}
    assert made_way([30], [partly(idle("new", 2.0)), partly(idle("old", 1.0))]) == {"old": 20}
    more_than_lacks = idle("lacks15", 1.0, units=20)
    assert made_way([30], [more_than_lacks, idle("lacks30", 2.0, 30, "n2")], {"n1": 15}) == {"lacks30": 0}


def test_a_request_for_two_gpus_takes_the_two_with_the_fewest_users() -> None:
    sessions = [idle(f"{gpu}{number}", 1.0, node=f"n1/{gpu}") for gpu in (0, 1) for number in range(2)]
    sessions += [idle(f"{gpu}", 9.0, units=100, node=f"n1/{gpu}") for gpu in (2, 3)]
    assert made_way([100], sessions, count=2) == {"2": 0, "3": 0}


def test_a_user_with_sessions_on_two_gpus_counts_once_for_a_request_for_two() -> None:
    both = [replace(idle(f"mine{gpu}", 9.0, units=100, node=f"n1/{gpu}"), user="me") for gpu in (1, 2)]
    sessions = [idle("other", 1.0, units=100, node="n1/0"), *both]
    assert made_way([100], sessions, count=2) == {"mine1": 0, "mine2": 0}


def shared_by_me(node: str) -> list[OverQuota]:
    """Sessions of whom mine would make way for two GPUs, but for each GPU by itself the other one is better."""
    mine = [replace(idle(f"mine{gpu}", 9.0, 1, f"{node}/{gpu}"), user="me") for gpu in (1, 2)]
    return [idle("other", 1.0, 1, f"{node}/0"), *mine]


@pytest.mark.parametrize(("better", "expected"), [(19, {"mine1", "mine2"}), (20, {"n0/0", "n0/1"})])
def test_sets_of_sessions_are_compared_on_the_twenty_best_nodes(better: int, expected: set[str]) -> None:
    sessions = [idle(f"n{node}/{gpu}", 0.5, 1, f"n{node}/{gpu}") for node in range(better) for gpu in (0, 1)]
    assert made_way([1], [*sessions, *shared_by_me("shared")], count=2).keys() == expected


@pytest.mark.parametrize(("crowded", "expected"), [(1, {"mine1", "mine2"}), (2, {"n0/0-0", "n0/1-0"})])
def test_sets_of_sessions_are_compared_until_there_were_four_thousand(crowded: int, expected: set[str]) -> None:
    """Of 6 sessions on each of two GPUs, 63 times 63 sets free both."""
    sessions = [
        replace(idle(f"n{node}/{gpu}-{number}", 20.0, 1, f"n{node}/{gpu}"), user=f"u{node}")
        for node in range(crowded)
        for gpu in (0, 1)
        for number in range(6)
    ]
    assert made_way([1], [*sessions, *shared_by_me("shared")], count=2).keys() == expected


def test_a_session_on_two_gpus_gives_what_the_gpu_that_lacks_more_needs() -> None:
    both = replace(partly(idle("both", 1.0, units=30)), gpus=("n1/0", "n1/1"))
    sessions = [both, partly(idle("more", 1.0, 40, "n1/0")), partly(idle("less", 1.0, 20, "n1/1"))]
    assert made_way([50], sessions, count=2) == {"both": 0, "more": 20, "less": 0}


@pytest.mark.parametrize(("nodes", "gpus", "count", "each"), [(1, 12, 6, 1), (1, 3, 2, 4), (3, 2, 2, 6)])
def test_a_search_for_several_gpus_tries_a_bounded_number_of_plans(
    monkeypatch: pytest.MonkeyPatch, nodes: int, gpus: int, count: int, each: int
) -> None:
    tried = 0
    plan = reclaim._plan

    def counted(*args: Any) -> Any:
        nonlocal tried
        tried += 1
        return plan(*args)

    monkeypatch.setattr(reclaim, "_plan", counted)
    places = [f"n{node}/{gpu}" for node in range(nodes) for gpu in range(gpus)]
    sessions = [
        replace(active(f"{place}-{number}", node=place, units=50), user=place.partition("/")[0])
        for place in places
        for number in range(each)
    ]
    found = made_way([50], sessions, count=count)
    assert len(found) == count
    assert len({name.partition("/")[0] for name in found}) == 1
    assert tried <= 2 * reclaim.MOST_TOGETHER + 2 * len(places)


def test_an_idle_session_keeps_its_smaller_share_where_that_is_enough() -> None:
    assert made_way([30], [idle("s", 1.0, smaller=20)]) == {"s": 20}
    assert made_way([31], [idle("s", 1.0, smaller=20)]) == {"s": 0}


def test_an_active_session_keeps_what_is_not_needed_and_at_least_its_minimum() -> None:
    assert made_way([20], [active("s")]) == {"s": 30}
    assert made_way([50], [active("s", least=1)]) == {}
    assert made_way([49], [active("s", least=1)]) == {"s": 1}


def test_a_session_that_is_not_needed_after_all_is_spared() -> None:
    sessions = [idle("small", 1.0, units=10), idle("large", 2.0, units=60)]
    assert made_way([60], sessions) == {"large": 0}


def test_two_spawns_do_not_take_the_same_units() -> None:
    sessions = [idle("s", 1.0), idle("t", 2.0)]
    assert made_way([50, 50], sessions) == {"s": 0, "t": 0}
    assert made_way([50, 50, 50], sessions) == {"s": 0, "t": 0}


def test_what_one_spawn_leaves_is_for_the_next_one() -> None:
    assert made_way([30, 20], [idle("s", 1.0), idle("t", 2.0)]) == {"s": 0}


def test_sessions_of_the_spawn_s_own_account_stay() -> None:
    assert made_way([50], [idle("s", 1.0, account="a")]) == {}


def test_on_ineligible_nodes_too_the_sessions_of_the_lowest_priority_make_way() -> None:
    class Ineligible(Nodes):
        def lacking(self, spawn: Spawn, node: str) -> list[MissingUnits]:
            return [replace(missing, last_resort=True) for missing in super().lacking(spawn, node)]

    # among the normal ones, the one that was told would be chosen
    sessions = [replace(active("low"), priority=0), active("normal", told=True, node="n2")]
    asking = [Asking((50, 1), ACCOUNTS.find("group:a", ""), ResourceAmounts(50))]
    assert reclaimed(asking, sessions, Ineligible({"n1": 0, "n2": 0}, sessions)) == {"low": 0}


def test_a_spawn_that_nobody_can_help_takes_nothing_from_anybody() -> None:
    assert made_way([80, 50], [idle("s", 1.0), idle("t", 2.0, node="n2")]) == {"s": 0}


KINDS = st.tuples(
    st.sampled_from(["n1/0", "n1/1", "n2/0", "n2/1"]),
    st.integers(1, 60),
    st.integers(0, 9),
    st.booleans(),
    st.sampled_from("uvwxyz"),
    st.booleans(),
)
"""GPU, units, since when, whether it is idle, user, whether it lies on both GPUs of its node."""


def least(spawn: Spawn, sessions: list[OverQuota], node: str) -> tuple[int, int] | None:
    """The fewest users who work, and users, whose sessions can free enough of a node: of all sets of sessions."""
    units, count = spawn
    found = []
    for size in range(len(sessions) + 1):
        for some in combinations([one for one in sessions if one.node == node], size):
            given = Counter[str]()
            for one in some:
                given.update(dict.fromkeys(one.gpus, one.most))
            if sum(given[f"{node}/{number}"] >= units for number in (0, 1)) >= count:
                found.append((len({one.user for one in some if one.works}), len({one.user for one in some})))
    return min(found, default=None)


@settings(max_examples=300)
@given(st.integers(1, 100), st.integers(1, 2), st.lists(KINDS, max_size=7))
def test_no_other_plan_disturbs_fewer_users_and_each_session_keeps_as_much_as_it_can(
    units: int, count: int, made: list[tuple[str, int, int, bool, str, bool]]
) -> None:
    sessions = []
    for number, (gpu, held, since, is_idle, user, both) in enumerate(made):
        name = f"s{number}"
        one = partly(idle(name, since, held, gpu)) if is_idle else active(name, since, held, gpu)
        gpus = (f"{one.node}/0", f"{one.node}/1") if both else one.gpus
        sessions.append(replace(one, user=user, gpus=gpus))
    nodes = Nodes(dict.fromkeys(("n1/0", "n1/1", "n2/0", "n2/1"), 0), sessions)
    spawn = (units, count)
    found = reclaimed([Asking(spawn, ACCOUNTS.find("group:a", ""), ResourceAmounts(units * count))], sessions, nodes)
    best = min(filter(None, (least(spawn, sessions, node) for node in ("n1", "n2"))), default=None)
    if best is None:
        assert found == {}
        return
    giving = [one for one in sessions if one.session in found]
    assert (len({one.user for one in giving if one.works}), len({one.user for one in giving})) == best
    for one in giving:
        given = Counter[str]()
        for other in giving:
            more = 1 if other is one else 0
            given.update(dict.fromkeys(other.gpus, other.units - found[other.session] - more))
        assert sum(given[f"{one.node}/{number}"] >= units for number in (0, 1)) < count, "a unit more would do"


@given(st.integers(1, 100), st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=13, max_size=30))
def test_a_gpu_with_many_sessions_is_planned_exactly(units: int, made: list[tuple[int, int]]) -> None:
    sessions = [partly(idle(f"s{number}", since, held)) for number, (held, since) in enumerate(made)]
    found = made_way([units], sessions)
    largest = sorted((one.units for one in sessions), reverse=True)
    fewest = next((count for count in range(len(largest) + 1) if sum(largest[:count]) >= units), 0)
    assert len(found) == fewest
    assert sum(one.units - found[one.session] for one in sessions if one.session in found) == (units if found else 0)


@pytest.mark.parametrize(("lacks", "kept"), [("n1/0", 60), ("n1/1", 10)])
def test_units_beyond_those_on_the_last_gpu_free_nothing_there(lacks: str, kept: int) -> None:
    """A share of 1.5 GPU, and a spawn that needs 0.4 of one of its GPUs."""
    session = OverQuota("x", "a", "n1", 100, range(99, 4, -1), None, "ann", ("n1/0", "n1/1"), last_units=50)
    nodes = Nodes({lacks: 0}, [session])
    asking = [Asking((40, 1), ACCOUNTS.find("group:a", ""), ResourceAmounts(40))]
    nodes.free |= {"n1/0": -100, "n1/1": -100, lacks: 0}
    assert reclaimed(asking, [session], nodes) == {"x": kept}


def test_on_the_last_gpu_too_the_session_that_is_idle_longest_makes_way() -> None:
    large = replace(partly(idle("large", 9.0, 100, "n1/1")), gpus=("n1/0", "n1/1"), last_units=50)
    assert made_way([40], [large, partly(idle("small", 1.0, 50, "n1/1"))], {"n1/0": -100}) == {"small": 10}


def gifts(
    sessions: list[OverQuota], excess: float, lacking: float = 50.0, units: int = 50
) -> dict[str, tuple[int, int]]:
    """The most and the fewest units that each session could keep."""
    able = in_excess(sessions, {"group:b": excess, "group:a": -lacking}, lacking, units)
    return {session.session: (session.steps[0], session.steps[-1]) for session in able}


def test_accounts_give_what_they_have_beyond_their_entitlement_and_what_the_spawn_gets_beyond_its_own() -> None:
    sessions = [partly(idle("s", 1.0))]
    assert gifts(sessions, 30.0) == {"s": (49, 20)}
    assert gifts(sessions, 30.0, lacking=40.0) == {"s": (49, 10)}
    assert gifts(sessions, 30.0, lacking=70.0) == {"s": (49, 20)}
    assert gifts(sessions, float(LEAST_EXCHANGED)) == {"s": (49, 46)}
    assert gifts(sessions, LEAST_EXCHANGED - 0.5) == {}
    assert gifts([partly(idle("s", 1.0, account="a"))], 30.0) == {}


def test_the_first_sessions_to_make_way_use_up_the_excess_of_their_account_on_each_node() -> None:
    old, new, elsewhere = idle("old", 1.0), partly(idle("new", 9.0)), partly(idle("elsewhere", 9.0, node="n2"))
    assert gifts([new, old, elsewhere], 60.0) == {"old": (0, 0), "new": (49, 40), "elsewhere": (49, 0)}
    assert gifts([new, old, elsewhere], 50.0) == {"old": (0, 0), "elsewhere": (49, 0)}
    assert gifts([new, replace(old, steps=[20])], 60.0) == {"old": (20, 20), "new": (49, 20)}
    assert gifts([new, old], 40.0) == {"new": (49, 10)}, "the older one gives all or nothing"


def test_a_session_that_was_reduced_a_short_time_ago_gives_nothing_to_accounts_over_quota() -> None:
    assert gifts([replace(partly(idle("s", 1.0)), had_minimum_run=False)], 30.0) == {}


def test_units_on_all_gpus_of_a_session_count_as_given() -> None:
    pair = replace(partly(idle("s", 1.0)), gpus=("n1/0", "n1/1"))
    assert gifts([pair], 30.0) == {"s": (49, 35)}
    one_and_a_half = replace(partly(idle("s", 1.0, units=100)), gpus=("n1/0", "n1/1"), last_units=50)
    assert gifts([one_and_a_half], 30.0) == {"s": (99, 70)}
    assert gifts([one_and_a_half], 70.0) == {"s": (99, 40)}


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_plans_free_enough_units_on_each_gpu(data: st.DataObject) -> None:
    gpus = ("n1/0", "n1/1", "n1/2")
    sessions = []
    for number in range(data.draw(st.integers(1, 4))):
        on = tuple(data.draw(st.permutations(gpus)))[: data.draw(st.integers(1, 3))]
        units = data.draw(st.integers(2, 60))
        last = data.draw(st.integers(0, 70)) if len(on) > 1 else 0
        least = data.draw(st.integers(0, units - 1))
        steps = data.draw(st.sampled_from([range(units - 1, least - 1, -1), [least]]))
        sessions.append(OverQuota(str(number), "b", "n1", units, steps, None, f"u{number % 2}", on, last_units=last))
    free = {gpu: data.draw(st.integers(0, 20)) for gpu in gpus}
    nodes, spawn = Nodes(free, sessions), (data.draw(st.integers(1, 60)), data.draw(st.integers(1, 2)))
    needs = ResourceAmounts(spawn[0] * spawn[1])
    reclaimed([Asking(spawn, ACCOUNTS.find("group:a", ""), needs)], sessions, nodes)  # `make_way` checks the plan
