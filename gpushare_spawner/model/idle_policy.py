"""Idle actions for all templates: defaults, limits, overrides of groups, and quiet hours. Pure data.

`idle.policy` computes a session's idle actions from it. Reference for admins: docs/reference/idle-policy.md
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from typing import Annotated, Literal
from zoneinfo import ZoneInfo

from pydantic import Field, model_validator

from gpushare_spawner.model.part import FilePart
from gpushare_spawner.model.quantity import Seconds, TimeOfDay, TimeZone
from gpushare_spawner.model.quota import Name
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.template import Fraction, KeepLimits, check_idle_order

PRESSURE_NOTICE = 60.0
"""Seconds. Maximum notice period while a spawn waits for the share of a session that has been idle for long enough.
Equals the default of the quotas' `reclaim.notice`: the session loses no data, and the spawn waits as long as the notice
period lasts."""

_EIGHT_DAYS = 8 * 86400.0
"""Seconds. Quiet hours repeat weekly, and the change to daylight saving time shifts them by an hour."""
_SOME_INSTANTS = (1_704_067_200.0, 1_719_792_000.0)
"""A Monday in winter and one in summer. Any others would do."""

Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
DAYS: tuple[Day, ...] = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
"""Days in the order of Python's weekday numbers."""
QuietAction = Literal["downgrade", "release", "stop"]
_TIERS: dict[QuietAction, Tier] = {"downgrade": Tier.DOWNGRADED, "release": Tier.RELEASED, "stop": Tier.STOPPED}


class IdleTimes(FilePart):
    """The fields of a template's `idle` that `defaults` and groups can set. A time of `null` means never."""

    downgrade_after: Seconds | None = None
    """The share is downgraded to `downgrade_to` after this long without GPU work. There is no downgrade if
    `downgrade_to` is no less than the share, or if the release comes no later."""
    downgrade_to: Fraction | None = None
    """The smaller share, a fraction of one GPU."""
    release_after: Seconds | None = None
    """The share is released after this long without GPU work. There is no release if the stop comes no later."""
    stop_after: Seconds | None = None
    """The server is stopped after this long without GPU work, busy kernels or other activity."""
    warn_before: Seconds | None = None
    """The notice period."""
    when: Literal["always", "pressure"] | None = None
    """Whether idle shares are always taken, or only while a spawn that can use the units waits."""
    min_use: Seconds | None = None
    """GPU time that counts as use of the share."""
    keep: KeepLimits | None = None
    """Limits on users' keeps. Fields that are not given keep the value that they would override."""

    @model_validator(mode="after")
    def _in_order(self) -> IdleTimes:
        check_idle_order(self.downgrade_after, self.release_after, self.stop_after)
        return self


class IdleLimits(FilePart):
    """Limits for all templates and groups. They do not change the service's options."""

    release_after: Seconds | None = None
    """Every share is released after at most this idle time, even if the template never releases it. Not given: no
    limit."""
    stop_after: Seconds | None = None
    """Every server is stopped after at most this idle time, even if the template never stops it. Not given: no
    limit."""
    warn_before: Seconds | None = None
    """The longest notice period. Not given: no limit."""
    keep: KeepLimits | None = None
    """The maximum that `idle.keep` of a template or a group can allow. Fields that are not given: no limit."""

    @model_validator(mode="after")
    def _in_order(self) -> IdleLimits:
        check_idle_order(None, self.release_after, self.stop_after)
        return self


class QuietHours(FilePart):
    """A time of day during which some idle actions are postponed. They follow when it ends."""

    days: Annotated[tuple[Day, ...], Field(min_length=1)] = DAYS
    """The days on which the quiet hours begin: mon, tue, wed, thu, fri, sat, sun. Not given: every day."""
    start: TimeOfDay
    """The beginning, like `"22:00"`."""
    end: TimeOfDay
    """The end, like `"06:00"`. If it is not later than `start`, it is on the next day."""
    time_zone: TimeZone
    """A time zone of the IANA database, like `Europe/Berlin`. Daylight saving time applies."""
    actions: Annotated[tuple[QuietAction, ...], Field(min_length=1)] = ("stop",)
    """The idle actions that are postponed: downgrade, release, stop."""

    def until(self, instant: float) -> float | None:
        """Return the end of the quiet hours that cover an instant, in seconds since the epoch.

        Return None if no quiet hours cover it.
        """
        today = datetime.fromtimestamp(instant, ZoneInfo(self.time_zone)).date()
        ends = [end for begin, end in self._periods_near(today) if begin <= instant < end]
        return max(ends, default=None)

    def _periods_near(self, today: date) -> Iterator[tuple[float, float]]:
        """Yield the start and end of each quiet period that can cover an instant of this day."""
        overnight = timedelta(days=0 if self.end > self.start else 1)
        for day in (today - timedelta(days=1), today):
            if DAYS[day.weekday()] in self.days:
                # when daylight saving time begins or ends, quiet hours become longer, not shorter
                yield min(self._instants(day, self.start)), max(self._instants(day + overnight, self.end))

    def _instants(self, day: date, at: time) -> tuple[float, float]:
        """Return both instants of a time that occurs twice or never on that day; otherwise the same instant twice."""
        shown = datetime.combine(day, at, ZoneInfo(self.time_zone))
        return shown.timestamp(), shown.replace(fold=1).timestamp()


class IdlePolicy(FilePart):
    """Idle actions for all templates. Raises pydantic.ValidationError, which names each invalid field."""

    defaults: IdleTimes = IdleTimes()
    """Values for fields that a template's `idle` does not set."""
    groups: dict[Name, IdleTimes] = {}
    """Values that override those of templates, by the user's JupyterHub group. For a user in several groups, the first
    one in this file applies."""
    limits: IdleLimits = IdleLimits()
    """Limits for all templates and groups."""
    quiet_hours: tuple[QuietHours, ...] = ()
    """Times of day during which some idle actions are postponed. Quotas always apply: units of a session over quota are
    reclaimed for a spawn in quota at any time."""

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
        """Return the first instant, not before this one, at which an idle action into the tier is allowed.

        The result is at most eight days later, because quiet hours without a gap between them are rejected.
        """
        windows = [hour for hour in self.quiet_hours if any(_TIERS[action] is tier for action in hour.actions)]
        start = instant
        while start < instant + _EIGHT_DAYS:
            later = max((window.until(start) or start for window in windows), default=start)
            if later == start:
                break
            start = later
        return start
