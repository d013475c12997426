"""Which sessions over quota make way for spawns in quota."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.quota.accounts import QuotaAccounts
from gpushare_spawner.quota.order import Asking
from gpushare_spawner.quota.reclaim import OverQuota, reclaimed

ACCOUNTS = QuotaAccounts(Quotas.model_validate({"groups": {"a": {"guarantee": 9}, "b": {"guarantee": 9}}}))


class Nodes:
    """Nodes of one GPU each. A spawn is the number of units that it needs."""

    def __init__(self, free: Mapping[str, int], sessions: list[OverQuota]) -> None:
        self.free = dict(free)
        self.held = {one.session: one.units for one in sessions}

    def kind(self, spawn: int) -> int:
        return spawn

    def place(self, spawn: int) -> bool:
        for node, free in self.free.items():
            if free >= spawn:
                self.free[node] -= spawn
                return True
        return False

    def fits(self, spawn: int, node: str, kept: Mapping[str, int]) -> bool:
        return self.free[node] + sum(self.held[one] - units for one, units in kept.items()) >= spawn

    def make_way(self, spawn: int, node: str, kept: Mapping[str, int]) -> None:
        assert self.fits(spawn, node, kept)
        self.free[node] += sum(self.held[one] - units for one, units in kept.items()) - spawn
        self.held |= kept


def idle(name: str, since: float, units: int = 50, node: str = "n1", account: str = "b", smaller: int = 0) -> OverQuota:
    steps = [smaller, 0] if smaller else [0]
    return OverQuota(name, f"group:{account}", node, units, steps, since)


def active(
    name: str, opened: float = 0.0, units: int = 50, node: str = "n1", least: int = 0, told: bool = False
) -> OverQuota:
    return OverQuota(name, "group:b", node, units, range(units - 1, least - 1, -1), None, told, opened)


def made_way(spawns: list[int], sessions: list[OverQuota], free: Mapping[str, int] | None = None) -> dict[str, int]:
    nodes = {one.node: 0 for one in sessions} | dict(free or {})
    asking = [Asking(units, ACCOUNTS.find("group:a", ""), units) for units in spawns]
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


def test_spawns_that_need_the_same_in_vain_cost_one_search() -> None:
    sessions = [idle(f"s{number}", number, units=1, node=f"n{number}") for number in range(20)]
    nodes, asked = Nodes({one.node: 0 for one in sessions}, sessions), []
    fits = nodes.fits
    nodes.fits = lambda *given: asked.append(given) or fits(*given)  # type: ignore[method-assign, func-returns-value]
    asking = [Asking(50, ACCOUNTS.find("group:a", ""), 50)] * 30
    assert reclaimed(asking, sessions, nodes) == {}
    assert len(asked) == 20


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


def test_a_spawn_that_nobody_can_help_takes_nothing_from_anybody() -> None:
    assert made_way([80, 50], [idle("s", 1.0), idle("t", 2.0, node="n2")]) == {"s": 0}


@given(
    st.lists(st.integers(1, 100), max_size=4),
    st.lists(
        st.tuples(st.sampled_from(["n1", "n2"]), st.integers(1, 60), st.integers(0, 9), st.booleans()), max_size=7
    ),
)
def test_each_session_that_makes_way_is_needed_and_keeps_as_much_as_it_can(
    spawns: list[int], made: list[tuple[str, int, int, bool]]
) -> None:
    sessions = [
        idle(f"s{n}", float(since), units, node) if is_idle else active(f"s{n}", float(since), units, node)
        for n, (node, units, since, is_idle) in enumerate(made)
    ]
    steps = {one.session: one.steps for one in sessions}
    nodes = Nodes({"n1": 0, "n2": 0}, sessions)
    for spawn in spawns:
        before = dict(nodes.free)
        left = [one for one in sessions if nodes.held[one.session] == one.units]
        held = dict(nodes.held)
        found = reclaimed([Asking(spawn, ACCOUNTS.find("group:a", ""), spawn)], left, nodes)
        assert set(found) <= {one.session for one in left}
        assert sum(before.values()) - sum(nodes.free.values()) + sum(held[s] - u for s, u in found.items()) in (
            0,
            spawn,
        )
        node = {one.session: one.node for one in sessions}
        for session, units in found.items():
            freed = before[node[session]] + sum(held[s] - u for s, u in found.items())
            better = [step for step in steps[session] if step > units]
            assert freed - (held[session] - units) < spawn
            assert all(freed - (step - units) < spawn for step in better)
