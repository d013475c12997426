"""Use over quota recently: decayed, measured in the whole cluster, with an entry penalty."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_spawner.model.quota import ResourceAmounts
from gpushare_spawner.quota.order import FairShare, rank

A, B = "group:a", "group:b"
DAY = 86400.0
ALL, HALF = ResourceAmounts(400), ResourceAmounts(50)


def test_use_counts_half_after_the_half_life() -> None:
    fair = FairShare(DAY)
    fair.advance(0.0, {}, ALL)
    fair.advance(DAY, {A: ResourceAmounts(100)}, ALL)
    assert fair.used(A) == pytest.approx(0.25 * 0.5)
    fair.advance(2 * DAY, {}, ALL)
    assert fair.used(A) == pytest.approx(0.25 * 0.25)
    assert fair.used(B) == 0


def test_lasting_use_counts_as_its_part_of_the_cluster() -> None:
    fair = FairShare(DAY)
    fair.advance(0.0, {}, ALL)
    fair.advance(40 * DAY, {A: ResourceAmounts(100)}, ALL)
    assert fair.used(A) == pytest.approx(0.25)


def test_use_before_the_first_update_does_not_count() -> None:
    fair = FairShare(DAY)
    fair.advance(DAY, {A: ALL}, ALL)
    assert fair.used(A) == 0


def test_less_than_a_billionth_of_the_cluster_is_forgotten() -> None:
    fair = FairShare.restored(DAY, {A: 3e-9, B: 1.5e-9}, 0.0)
    fair.advance(DAY, {}, ALL)
    assert fair.all_used == {A: pytest.approx(1.5e-9)}


def test_an_account_without_use_is_forgotten() -> None:
    fair = FairShare(DAY)
    fair.advance(0.0, {}, ALL)
    fair.advance(DAY, {A: ResourceAmounts(100)}, ALL)
    fair.advance(60 * DAY, {}, ALL)
    assert fair.used(A) == 0


@given(st.lists(st.tuples(st.floats(0, 5 * DAY), st.integers(0, 400)), max_size=8), st.integers(1, 6))
def test_the_average_does_not_depend_on_how_often_it_is_brought_up_to_date(
    spans: list[tuple[float, int]], pieces: int
) -> None:
    whole, often = FairShare(DAY), FairShare(DAY)
    whole.advance(0.0, {}, ALL)
    often.advance(0.0, {}, ALL)
    now = 0.0
    for seconds, units in spans:
        for piece in range(1, pieces + 1):
            often.advance(now + seconds * piece / pieces, {A: ResourceAmounts(units)}, ALL)
        now += seconds
        whole.advance(now, {A: ResourceAmounts(units)}, ALL)
    assert often.used(A) == pytest.approx(whole.used(A), abs=1e-6)
    assert 0 <= whole.used(A) <= 1


def test_a_clock_that_was_set_back_counts_nothing_twice() -> None:
    fair = FairShare(DAY)
    fair.advance(DAY, {}, ALL)
    fair.advance(0.0, {A: ResourceAmounts(400)}, ALL)
    assert fair.used(A) == 0
    fair.advance(DAY, {A: ResourceAmounts(400)}, ALL)
    assert fair.used(A) == 0


def test_use_that_began_before_the_hub_started_counts_as_if_it_had_been_watched() -> None:
    watched, restarted = FairShare(DAY), FairShare(DAY)
    watched.advance(0.0, {}, ALL)
    watched.advance(7200.0, {A: ResourceAmounts(50)}, ALL)
    restarted.past(A, HALF, ALL, 7200.0)
    assert restarted.used(A) == pytest.approx(watched.used(A))


def test_an_admitted_spawn_pays_five_minutes_at_once() -> None:
    paid, used = FairShare(DAY), FairShare(DAY)
    paid.admitted(A, HALF, ALL)
    used.past(A, HALF, ALL, 300.0)
    assert paid.used(A) == pytest.approx(used.used(A)) == paid.penalty(HALF, ALL)


def test_without_known_gpus_nothing_counts() -> None:
    fair = FairShare(DAY)
    fair.admitted(A, HALF, ResourceAmounts())
    assert fair.used(A) == 0


def test_weights_divide_use_and_weight_0_comes_last() -> None:
    assert rank(2.0, 0.5) == rank(1.0, 0.25) == 0.25
    assert rank(0.0, 0.0) == math.inf


def test_of_several_resources_the_dominant_share_counts() -> None:
    fair, cluster = FairShare(DAY), ResourceAmounts(400, 64_000, 2**38)
    fair.advance(0.0, {}, cluster)
    fair.advance(40 * DAY, {A: ResourceAmounts(100, 48_000, 2**36), B: ResourceAmounts(100, 1_000)}, cluster)
    assert fair.used(A) == pytest.approx(0.75)
    assert fair.used(B) == pytest.approx(0.25)
