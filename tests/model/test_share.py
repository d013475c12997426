import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_spawner.model.share import Share, units_from_fraction, units_on


@pytest.mark.parametrize(
    ("written", "units"), [(0.25, 25), ("0.25", 25), (1, 100), ("1.0", 100), (0.29, 29), (0.01, 1), (" 0.5 ", 50)]
)
def test_fractions_as_admins_write_them(written: float | str, units: int) -> None:
    assert units_from_fraction(written) == units


@pytest.mark.parametrize(
    "written", [0, -0.25, 1.5, "0.25x", math.nan, math.inf, "NaN", "inf", 0.255, "", None, True, [0.25], "1e400", "1/4"]
)
def test_what_is_no_fraction_says_what_would_be_right(written: object) -> None:
    with pytest.raises(ValueError, match=r"like 0\.25"):
        units_from_fraction(written)


@given(st.integers(1, 100))
def test_every_unit_survives_the_way_through_a_float(units: int) -> None:
    assert units_from_fraction(units / 100) == units
    assert Share(units=units).fraction == pytest.approx(units / 100)


@pytest.mark.parametrize(
    "wrong",
    [
        {"units": 0},
        {"units": 101},
        {"units": 25.0},
        {"units": True},
        {"count": 0},
        {"count": 2, "last_units": 100},
        {"count": 2, "last_units": -1},
        {"last_units": 50},
    ],
)
def test_impossible_shares_are_refused(wrong: dict[str, bool | float]) -> None:
    with pytest.raises(ValueError, match=r"share is on|share has|last GPU"):
        Share(**wrong)  # type: ignore[arg-type]


def test_shares_read_as_people_say_them() -> None:
    assert str(Share(units=25)) == "0.25 GPU"
    assert str(Share()) == "1 GPU"
    assert str(Share(count=2)) == "2 GPUs"
    assert str(Share(50, 2)) == "2 × 0.50 GPU"
    assert str(Share(100, 3, 50)) == "2.50 GPU"
    assert str(Share(70, 2, 40)) == "0.70 + 0.40 GPU"
    assert str(Share(70, 3, 40)) == "2 × 0.70 + 0.40 GPU"


@given(st.integers(1, 6400))
def test_a_fraction_above_1_is_whole_gpus_and_a_part_of_the_last(units: int) -> None:
    share = Share.from_fraction(units / 100)
    assert share.total_units == units
    assert share.count == -(-units // 100)
    assert all(each == 100 for each in share.each[:-1])


@pytest.mark.parametrize(("written", "count"), [(64.01, 1), (1.5, 2), (0, 1), ("1.505", 1)])
def test_a_fraction_that_is_no_share_is_refused(written: object, count: int) -> None:
    with pytest.raises(ValueError, match=r"like 0\.25"):
        Share.from_fraction(written, count)


def test_units_on_the_last_gpu_are_at_most_those_of_the_share_there() -> None:
    assert [units_on(gpu, ("a", "b"), units, 50) for units in (100, 30) for gpu in ("a", "b")] == [100, 50, 30, 30]
    assert units_on("b", ("a", "b"), 100, 0) == 100


def test_each_gpu_of_a_share_has_its_units() -> None:
    assert (Share(50, 2).each, Share(50, 2).total_units) == ((50, 50), 100)
    assert (Share(100, 3, 20).each, Share(100, 3, 20).fraction) == ((100, 100, 20), 2.2)
