"""Idle actions for all templates: defaults, limits, what groups have instead, and quiet hours.

Pure data. What comes of it for a session: idle/schedule.py. Reference for admins: docs/reference/idle-policy.md
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from typing import Annotated, Any, Literal
from zoneinfo import ZoneInfo

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from gpushare_spawner.model.quantity import Seconds
from gpushare_spawner.model.quota import Name
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.template import Fraction, KeepLimits, check_idle_order

_TIME_WRITTEN = r"([01]?\d|2[0-3]):[0-5]\d"
_EIGHT_DAYS = 8 * 86400.0
"""Seconds. Quiet hours repeat by the week, and a change to summer time shifts them by an hour."""
_SOME_INSTANTS = (1_704_067_200.0, 1_719_792_000.0)
"""Mondays of a winter and a summer; any would do."""

Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
DAYS: tuple[Day, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
"""In the order of Python's weekdays."""
QuietAction = Literal["downgrade", "release", "stop"]
_TIERS: dict[QuietAction, Tier] = {
    "downgrade": Tier.DOWNGRADED,
    "release": Tier.RELEASED,
    "stop": Tier.STOPPED,
}


class _Part(BaseModel):
    # A misspelt field must be an error, not a setting without effect.
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class IdleTimes(_Part):
    """The fields of a template's `idle` that `defaults` and groups can give. A time that is `null` means never."""

    downgrade_after: Seconds | None = None
    """The share is downgraded to `downgrade_to` after this long without GPU work. It is not where `downgrade_to` is no
    less than the share, or where the release comes no later."""
    downgrade_to: Fraction | None = None
    """The smaller share, a fraction of one GPU."""
    release_after: Seconds | None = None
    """The share is released after this long without GPU work. It is not where the stop comes no later."""
    stop_after: Seconds | None = None
    """The server is stopped after this long without GPU work, busy kernels or other activity."""
    warn_before: Seconds | None = None
    """The notice period."""
    when: Literal["always", "pressure"] | None = None
    """Whether idle shares are taken always, or only while a spawn waits that can use the units."""
    min_use: Seconds | None = None
    """GPU time that counts as use of the share."""
    keep: KeepLimits | None = None
    """How users may keep their share. Fields that are not given come from what this overrides."""

    @model_validator(mode="after")
    def _in_order(self) -> IdleTimes:
        check_idle_order(self.downgrade_after, self.release_after, self.stop_after)
        return self


class IdleLimits(_Part):
    """What neither a template nor a group goes beyond. The options of the service stand for themselves."""

    release_after: Seconds | None = None
    """A share with a GPU is released at the latest after this long, also where the template never releases it. Not
    given: no limit."""
    stop_after: Seconds | None = None
    """A server is stopped at the latest after this long, also where the template never stops it. Not given: no
    limit."""
    warn_before: Seconds | None = None
    """The longest notice period. Not given: no limit."""
    keep: KeepLimits | None = None
    """The most that `idle.keep` of a template or a group allows. Fields that are not given: no limit."""

    @model_validator(mode="after")
    def _in_order(self) -> IdleLimits:
        check_idle_order(None, self.release_after, self.stop_after)
        return self


def _time_of_day(value: Any) -> time:
    if isinstance(value, time):
        return value
    text = str(value).strip()
    if isinstance(value, bool) or not re.fullmatch(_TIME_WRITTEN, text):
        raise ValueError(f"{value!r} is not a time of day: write hours and minutes in quotes, like '22:00'")
    hour, minute = text.split(":")
    return time(int(hour), int(minute))


def _time_zone(name: str) -> str:
    try:
        ZoneInfo(name)
    except (ValueError, KeyError, OSError):
        raise ValueError(
            f"{name!r} is not a time zone: write a name of the IANA database, like Europe/Berlin"
        ) from None
    return name


TimeOfDay = Annotated[
    time,
    BeforeValidator(
        _time_of_day,
        json_schema_input_type=Annotated[str, Field(pattern=f"^{_TIME_WRITTEN}$", title="time like 22:00")],
    ),
]


class QuietHours(_Part):
    """A time of the day in which some idle actions do not come. They come when it is over."""

    days: Annotated[tuple[Day, ...], Field(min_length=1)] = DAYS
    """The days on which it begins: mon, tue, wed, thu, fri, sat, sun. Not given: every day."""
    start: TimeOfDay
    """When it begins, like `"22:00"`."""
    end: TimeOfDay
    """When it ends, like `"06:00"`. A time that is not later than `start` is on the next day."""
    time_zone: Annotated[str, AfterValidator(_time_zone)]
    """A name of the IANA database, like `Europe/Berlin`. Summer time counts."""
    actions: Annotated[tuple[QuietAction, ...], Field(min_length=1)] = ("stop",)
    """The idle actions that do not come: downgrade, release, stop."""

    def until(self, instant: float) -> float | None:
        """Return when the quiet hours end that cover an instant; None: none do. Seconds since the epoch."""
        today = datetime.fromtimestamp(instant, ZoneInfo(self.time_zone)).date()
        ends = [end for begin, end in self._around(today) if begin <= instant < end]
        return max(ends, default=None)

    def _around(self, today: date) -> Iterator[tuple[float, float]]:
        """Yield when quiet hours begin and end that can cover an instant of this day."""
        overnight = timedelta(days=0 if self.end > self.start else 1)
        for day in (today - timedelta(days=1), today):
            if DAYS[day.weekday()] in self.days:
                # where the clock is set forward or back, quiet hours are longer and not shorter
                yield min(self._instants(day, self.start)), max(self._instants(day + overnight, self.end))

    def _instants(self, day: date, at: time) -> tuple[float, float]:
        """Return both meanings of a time that the clock shows twice, or never; else the instant twice."""
        shown = datetime.combine(day, at, ZoneInfo(self.time_zone))
        return shown.timestamp(), shown.replace(fold=1).timestamp()


class IdlePolicy(_Part):
    """Idle actions for all templates. Raises pydantic.ValidationError, which names each wrong field."""

    defaults: IdleTimes = IdleTimes()
    """For what a template's `idle` does not give."""
    groups: dict[Name, IdleTimes] = {}
    """What sessions have instead, by the JupyterHub group of their user. Of several groups of a user the first in this
    file counts."""
    limits: IdleLimits = IdleLimits()
    """What neither a template nor a group goes beyond."""
    quiet_hours: tuple[QuietHours, ...] = ()
    """Times of the day in which some idle actions do not come. Quotas apply at any time: a session over quota
    makes way for a spawn in quota."""

    @model_validator(mode="after")
    def _some_time_left(self) -> IdlePolicy:
        for action, tier in _TIERS.items():
            if any(self.quiet_until(tier, instant) - instant >= _EIGHT_DAYS for instant in _SOME_INSTANTS):
                raise ValueError(
                    f"quiet_hours: leave no time of the week for {action}: shorten them, or write "
                    f"{action}_after: null in defaults"
                )
        return self

    def quiet_until(self, tier: Tier, instant: float) -> float:
        """Return the first instant from this one on at which an idle action into the tier can come.

        At most eight days later: quiet hours that follow each other without a pause are refused.
        """
        windows = [hour for hour in self.quiet_hours if any(_TIERS[action] is tier for action in hour.actions)]
        found = instant
        while found < instant + _EIGHT_DAYS:
            later = max((window.until(found) or found for window in windows), default=found)
            if later == found:
                break
            found = later
        return found
