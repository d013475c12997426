"""Quiet hours over midnight and over a change of the clock, and what an idle policy refuses."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gpushare_spawner.model.idle_policy import DAYS, IdlePolicy, QuietHours
from gpushare_spawner.model.share import Tier

BERLIN = "Europe/Berlin"
NIGHT = {"start": "22:00", "end": "06:00", "time_zone": BERLIN}


def berlin(text: str, fold: int = 0) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(BERLIN), fold=fold).timestamp()


def quiet(**changes: Any) -> QuietHours:
    return QuietHours.model_validate(NIGHT | changes)


@pytest.mark.parametrize(
    ("instant", "until"),
    [
        ("2026-11-23 21:59:59", None),
        ("2026-11-23 22:00", "2026-11-24 06:00"),
        ("2026-11-24 00:00", "2026-11-24 06:00"),
        ("2026-11-24 05:59:59", "2026-11-24 06:00"),
        ("2026-11-24 06:00", None),
        ("2026-11-24 12:00", None),
    ],
)
def test_a_night_ends_on_the_next_day(instant: str, until: str | None) -> None:
    assert quiet().until(berlin(instant)) == (berlin(until) if until else None)


def test_days_are_those_on_which_quiet_hours_begin() -> None:
    friday = quiet(days=["fri"])
    assert friday.until(berlin("2026-11-27 23:00")) == berlin("2026-11-28 06:00")  # Friday evening
    assert friday.until(berlin("2026-11-28 05:00")) == berlin("2026-11-28 06:00")  # the same night on Saturday
    assert friday.until(berlin("2026-11-27 05:00")) is None
    assert friday.until(berlin("2026-11-28 23:00")) is None


def test_equal_times_are_a_whole_day() -> None:
    sunday = quiet(days=["sun"], start="00:00", end="00:00")
    assert sunday.until(berlin("2026-11-29 00:00")) == berlin("2026-11-30 00:00")
    assert sunday.until(berlin("2026-11-30 00:00")) is None


def test_a_night_is_an_hour_shorter_or_longer_where_the_clock_is_set() -> None:
    for evening, hours in (("2026-03-28 22:00", 7), ("2026-10-24 22:00", 9), ("2026-11-23 22:00", 8)):
        begin = berlin(evening)
        assert (quiet().until(begin) or 0) - begin == hours * 3600


@pytest.mark.parametrize("day", ["2026-03-29", "2026-10-25"])
def test_times_that_the_clock_shows_twice_or_never_make_quiet_hours_longer(day: str) -> None:
    short = quiet(start="02:30", end="02:45")
    begin = min(berlin(f"{day} 02:30"), berlin(f"{day} 02:30", fold=1))
    end = max(berlin(f"{day} 02:45"), berlin(f"{day} 02:45", fold=1))
    assert short.until(begin) == end
    assert short.until(begin - 1) is None
    assert short.until(end) is None


@given(
    instant=st.floats(1.7e9, 1.9e9),
    start=st.times(),
    end=st.times(),
    days=st.sets(st.sampled_from(DAYS), min_size=1),
    zone=st.sampled_from([BERLIN, "UTC", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata"]),
)
def test_quiet_hours_cover_the_local_times_between_their_ends(
    instant: float, start: Any, end: Any, days: set[Any], zone: str
) -> None:
    start, end = start.replace(second=0, microsecond=0, fold=0), end.replace(second=0, microsecond=0, fold=0)
    found = QuietHours(days=tuple(days), start=start, end=end, time_zone=zone).until(instant)
    local = datetime.fromtimestamp(instant, ZoneInfo(zone))
    shown = local.time().replace(fold=0)
    began = local.date() if start < end or shown >= start else local.date() - timedelta(days=1)
    covered = (start <= shown < end if start < end else shown >= start or shown < end) and DAYS[began.weekday()] in days
    if covered:
        assert found is not None
        assert instant < found <= instant + 26 * 3600
    elif found is not None:
        # only an hour around a change of the clock can be covered beside
        offsets = {datetime.fromtimestamp(instant + hours * 3600, ZoneInfo(zone)).utcoffset() for hours in (-26, 0, 26)}
        assert len(offsets) > 1


def policy(*windows: dict[str, Any]) -> IdlePolicy:
    return IdlePolicy.model_validate({"quiet_hours": windows})


def test_quiet_hours_that_follow_each_other_are_one() -> None:
    both = policy(NIGHT, {"start": "06:00", "end": "08:00", "time_zone": BERLIN})
    assert both.quiet_until(Tier.STOPPED, berlin("2026-11-23 23:00")) == berlin("2026-11-24 08:00")


def test_quiet_hours_hold_only_for_their_actions() -> None:
    night = policy(NIGHT | {"actions": ["stop", "release"]})
    midnight, morning = berlin("2026-11-24 00:00"), berlin("2026-11-24 06:00")
    assert night.quiet_until(Tier.RELEASED, midnight) == morning
    assert night.quiet_until(Tier.STOPPED, midnight) == morning
    assert night.quiet_until(Tier.DOWNGRADED, midnight) == midnight


def test_only_at_night_is_quiet_by_day() -> None:
    day = policy({"start": "06:00", "end": "22:00", "time_zone": BERLIN})
    assert day.quiet_until(Tier.STOPPED, berlin("2026-11-23 12:00")) == berlin("2026-11-23 22:00")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"start": "25:00"}, "not a time of day"),
        ({"start": 22}, "not a time of day"),
        ({"end": "6 am"}, "not a time of day"),
        ({"time_zone": "Europe/Berln"}, "not a time zone"),
        ({"time_zone": "../etc/passwd"}, "not a time zone"),
        ({"time_zone": "Europe"}, "not a time zone"),
        ({"days": []}, "at least 1 item"),
        ({"days": ["monday"]}, "mon"),
        ({"actions": ["stopp"]}, "stop"),
        ({"start": "00:00", "end": "00:00"}, "leave no time of the week for stop"),
    ],
)
def test_quiet_hours_that_cannot_be_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        policy(NIGHT | change)


def test_windows_that_together_leave_no_time_are_refused() -> None:
    with pytest.raises(ValidationError, match="leave no time of the week for release"):
        policy(
            NIGHT | {"actions": ["release"]},
            {"start": "05:00", "end": "23:00", "time_zone": "Europe/Paris", "actions": ["release"]},
        )
