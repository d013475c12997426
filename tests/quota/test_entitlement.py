"""Entitlements of competing accounts, and the exchange of units between sessions that run beside each other."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.quota.accounts import QuotaAccounts
from gpushare_spawner.quota.entitlement import LEAST_EXCHANGED, Entitlements, Entry, Exchanging, divide, exchanged

ACCOUNTS = QuotaAccounts(
    Quotas.model_validate(
        {
            "groups": {
                "a": {"guarantee": 1},
                "b": {"weight": 3},
                "physics": {
                    "guarantee": 2,
                    "weight": 2,
                    "teams": {"optics": {"guarantee": 1}, "theory": {"weight": 3}},
                },
            }
        }
    )
)


@pytest.mark.parametrize(
    ("capacity", "entries", "expected"),
    [
        (100, [Entry(60, 1, 90), Entry(40, 1, 90)], [60, 40]),
        (100, [Entry(60, 1, 20), Entry(40, 1, 90)], [20, 80]),
        (100, [Entry(60, 1, 20), Entry(40, 1, 30)], [20, 30]),
        (120, [Entry(60, 1, 90), Entry(40, 3, 90)], [65, 55]),
        (120, [Entry(60, 0, 90), Entry(40, 3, 50)], [70, 50]),
        (50, [Entry(60, 1, 90), Entry(40, 1, 90)], [30, 20]),
        (100, [], []),
    ],
)
def test_guarantees_come_first_and_the_rest_follows_the_weights(
    capacity: int, entries: list[Entry], expected: list[float]
) -> None:
    assert divide(capacity, entries) == pytest.approx(expected)


def test_teams_divide_what_their_department_is_entitled_to() -> None:
    entitlements = Entitlements()
    for group, has, wanted in (("a", 200, 200), ("b", 100, 400), ("optics", 300, 300), ("theory", 0, 300)):
        entitlements.add(ACCOUNTS.find(f"group:{group}", ""), has, wanted)
    # 100 for a, 200 for physics, the other 300 as 1 : 3 : 2
    found = entitlements.excess(600)
    assert found["group:a"] == pytest.approx(200 - 150)
    assert found["group:b"] == pytest.approx(100 - 150)
    assert found["group:optics"] == pytest.approx(300 - 150)
    assert found["group:theory"] == pytest.approx(0 - 150)


def test_a_session_counts_until_it_is_removed() -> None:
    entitlements = Entitlements()
    a, b = (ACCOUNTS.find(f"group:{group}", "") for group in "ab")
    entitlements.add(a, 100, 100)
    added = entitlements.add(b, 130, 150)
    assert added == (b, 130, 150)
    assert entitlements.excess(200) == pytest.approx({"group:a": 0, "group:b": 130 - 100})
    entitlements.remove(entitlements.add(b, 80, 120))
    waiting = entitlements.copy()
    waiting.add(b, 0, 100)
    assert waiting.excess(400) == pytest.approx({"group:a": 0, "group:b": 130 - 250})
    assert entitlements.excess(400) == pytest.approx({"group:a": 0, "group:b": 130 - 150})
    entitlements.remove(added)
    assert entitlements.excess(200) == {"group:a": 0}


def session(name: str, account: str, gpu: str, units: int, most: int = 100, least: int = 0) -> Exchanging:
    return Exchanging(name, account, (gpu,), units, most, least, (1, name))


def test_the_account_with_the_most_gives_to_the_one_that_lacks_most() -> None:
    here = [session("x", "a", "g", 60), session("y", "b", "g", 10), session("z", "c", "g", 30)]
    assert exchanged(here, {"a": 30, "b": -20, "c": -10}, {}) == {"x": 30, "y": 30, "z": 40}


def test_units_pass_through_an_account_between_two_without_a_common_gpu() -> None:
    sessions = [session("x", "a", "g1", 80), session("y", "b", "g1", 20), session("z", "b", "g2", 50)]
    found = exchanged([*sessions, session("w", "c", "g2", 50)], {"a": 30, "b": 0, "c": -30}, {})
    assert found == {"x": 50, "y": 50, "z": 20, "w": 80}


def test_small_differences_and_sessions_in_quota_are_left_alone() -> None:
    sessions = [session("x", "a", "g", 60), session("y", "b", "g", 40)]
    assert exchanged(sessions, {"a": LEAST_EXCHANGED - 1, "b": 1 - LEAST_EXCHANGED}, {}) == {}
    sessions = [session("x", "a", "g", 60, least=60), session("y", "b", "g", 40)]
    assert exchanged(sessions, {"a": 30, "b": -30}, {}) == {}


def test_units_that_no_spawn_needs_are_given_first() -> None:
    sessions = [session("x", "a", "g", 60), session("y", "b", "g", 20)]
    assert exchanged(sessions, {"a": 10, "b": -30}, {"g": 20}) == {"x": 50, "y": 50}


def test_a_session_in_quota_gives_only_to_one_in_quota_and_only_if_none_over_quota_can() -> None:
    def beside(*over_quota: str) -> list[Exchanging]:
        here = [session("x", "a", "g", 60), session("y", "b", "g", 10), session("z", "a", "g", 30)]
        return [replace(each, in_quota=each.session not in over_quota) for each in here]

    assert exchanged(beside(), {"a": 40, "b": -40}, {}) == {"x": 20, "y": 50}
    assert exchanged(beside("y"), {"a": 40, "b": -40}, {}) == {}
    mixed = [replace(session("x", "a", "g", 60), in_quota=True), session("y", "b", "g", 10)]
    assert exchanged(mixed, {"a": 40, "b": -40}, {}) == {}, "without a word a session is over quota"
    assert exchanged(beside("z"), {"a": 40, "b": -40}, {}) == {"x": 50, "y": 50, "z": 0}
    assert exchanged(beside("y", "z"), {"a": 40, "b": -40}, {}) == {"y": 40, "z": 0}


def of_accounts(sessions: Sequence[Exchanging]) -> Counter[str]:
    has = Counter[str]()
    for session in sessions:
        has[session.account] += sum(map(session.on, session.gpus))
    return has


def on_gpus(sessions: Sequence[Exchanging]) -> Counter[str]:
    has = Counter[str]()
    for session in sessions:
        has.update({gpu: session.on(gpu) for gpu in session.gpus})
    return has


def pair(name: str, account: str, units: int, gpus: str = "g h", last_units: int = 0) -> Exchanging:
    return Exchanging(name, account, gpus.split(), units, 100, 0, (1, name), last_units)


def test_a_session_on_two_gpus_gives_to_one_on_each() -> None:
    here = [pair("x", "a", 60), session("y", "b", "g", 40), session("z", "c", "h", 40)]
    assert exchanged(here, {"a": 40, "b": -20, "c": -20}, {"g": 0, "h": 0}) == {"x": 40, "y": 60, "z": 60}


def test_a_session_on_two_gpus_gets_units_of_two_accounts_or_of_one_and_those_that_are_free() -> None:
    here = [pair("x", "a", 40), session("y", "b", "g", 60), session("z", "c", "h", 60)]
    assert exchanged(here, {"a": -40, "b": 20, "c": 20}, {}) == {"x": 60, "y": 40, "z": 40}
    here = [pair("x", "a", 40), session("y", "b", "g", 60), session("z", "c", "h", 40, most=40)]
    assert exchanged(here, {"a": -40, "b": 20, "c": 0}, {"h": 20}) == {"x": 60, "y": 40}
    # one that has both GPUs gives, rather than two of which one has another GPU
    here = [pair("x", "a", 40), pair("v", "b", 40, "g i"), pair("w", "b", 20)]
    assert exchanged(here, {"a": -40, "b": 40}, {}) == {"x": 60, "w": 0}


def test_units_that_nobody_lacks_on_the_other_gpu_are_for_those_who_can_use_them() -> None:
    here = [pair("x", "a", 60), session("y", "b", "g", 40), session("z", "c", "h", 40)]
    assert exchanged(here, {"a": 40, "b": -20, "c": 0}, {"g": 0, "h": 0}) == {"x": 40, "y": 60, "z": 60}
    assert exchanged([pair("x", "a", 60), session("y", "b", "g", 40)], {"a": 20, "b": -20}, {}) == {"x": 50, "y": 50}


def test_a_session_of_one_and_a_half_gpus_exchanges_what_it_has_on_both() -> None:
    # below its half it would give 50 units of the whole GPU, where nobody else is
    here = [pair("x", "a", 100, last_units=50), session("y", "b", "h", 50)]
    assert exchanged(here, {"a": 100, "b": -30}, {}) == {}
    here = [pair("x", "a", 20, last_units=50), session("y", "b", "h", 80)]
    assert exchanged(here, {"a": -200, "b": 20}, {"g": 80, "h": 0}) == {"x": 40, "y": 60}
    assert exchanged([pair("x", "a", 20, last_units=50)], {}, {"g": 80, "h": 70}) == {"x": 100}


def test_a_session_of_one_and_a_half_gpus_gives_and_gets_no_more_than_it_can_on_each() -> None:
    # both GPUs of one below its half; the first GPU of one above it, down to its half
    here = [pair("x", "a", 20), pair("v", "b", 45, last_units=50)]
    assert exchanged(here, {"a": -30, "b": 30}, {}) == {"x": 35, "v": 30}
    here = [replace(pair("v", "b", 50 + LEAST_EXCHANGED, last_units=50), least=30), session("y", "a", "g", 20, most=24)]
    assert exchanged(here, {"a": -30, "b": 30}, {}) == {"v": 50, "y": 24}
    here = [pair("v", "b", 49 + LEAST_EXCHANGED, last_units=50), session("y", "a", "g", 20)]
    assert exchanged(here, {"a": -30, "b": 30}, {}) == {}
    here = [replace(pair("v", "b", 20, last_units=50), most=30)]
    assert exchanged(here, {}, {"g": 80, "h": 80}) == {"v": 30}
    here = [replace(pair("v", "b", 80, last_units=50), least=60), session("y", "a", "g", 20)]
    assert exchanged(here, {"a": -50, "b": 50}, {}) == {"v": 60, "y": 40}


def test_a_session_that_gives_to_two_on_one_path_keeps_its_least_units() -> None:
    # c gives to a on h, and to b on k for what b gives to a on g
    rich = replace(pair("rich", "c", 55, "h k"), least=40)
    here = [pair("x", "a", 20), session("y", "b", "g", 50), session("z", "b", "k", 20), rich]
    found = exchanged(here, {"a": -60, "b": 0, "c": 60}, {})
    assert found == {"x": 27, "y": 43, "z": 27, "rich": 41}


def test_two_sessions_on_one_path_share_the_free_units_of_a_gpu() -> None:
    here = [pair("x", "a", 20), session("y", "b", "g", 50), pair("z", "b", 20, "k h"), session("rich", "c", "k", 50)]
    found = exchanged(here, {"a": -60, "b": -30, "c": 60}, {"h": 20})
    assert found == {"x": 30, "y": 40, "z": 30, "rich": 40}


def test_an_account_that_can_get_no_whole_unit_does_not_hold_up_the_others() -> None:
    five = "g1 g2 g3 g4 g5"
    here = [pair("x", "a", 20, five), pair("y", "b", 50, five), session("v", "d", "k", 20), session("w", "e", "k", 50)]
    assert exchanged(here, {"a": -4, "b": 4, "d": -4, "e": 4}, {}) == {"v": 24, "w": 46}


@pytest.mark.parametrize(("pairs", "in_quota"), [(False, 0), (True, 0), (False, 2), (True, 2)])
def test_no_unit_is_made_or_lost_and_repeated_rounds_change_nothing(pairs: bool, in_quota: int) -> None:
    chance = random.Random(6)
    for _ in range(200):
        gpus = [f"g{number}" for number in range(6)]
        sessions, shared = [], dict.fromkeys(gpus, 0)
        for number in range(3 * pairs):
            two = chance.sample(gpus, 2)
            units = chance.randint(0, 100 - max(shared[gpu] for gpu in two))
            shared |= {gpu: shared[gpu] + units for gpu in two}
            sessions.append(pair(f"pair{number}", chance.choice("abc"), units, " ".join(two)))
        for gpu in gpus:
            left = 100 - shared[gpu]
            for number in range(chance.randint(2, 4)):
                units = chance.randint(0, left)
                left -= units
                least = units if chance.random() < 0.3 else 0
                name = f"{gpu}-{number}"
                made = session(name, chance.choice("abc"), gpu, units, max(units, 50), least)
                sessions.append(replace(made, in_quota=number < in_quota))
        has = of_accounts(sessions)
        total = has.total()
        excess = {account: has[account] - total / 3 for account in "abc"}
        before = on_gpus(sessions)
        changed = exchanged(sessions, excess, {})
        after = on_gpus(sessions)
        assert all(after[gpu] == units or (pairs and after[gpu] < units) for gpu, units in before.items())
        assert all(one.least <= one.units <= one.most for one in sessions)
        now = of_accounts(sessions)
        worse = [account for account in "abc" if abs(now[account] - total / 3) > abs(excess[account]) + 1]
        assert not worse, changed
        assert exchanged(sessions, {account: now[account] - total / 3 for account in "abc"}, {}) == {}
