"""What a request asks of the history: the period, what sums are divided by, and whose. Pure.

Each function raises ValueError with a sentence for the client.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from enum import StrEnum

from gpushare_spawner.service.history.queries import By, Period
from gpushare_spawner.service.history.use import DAY, HOUR
from gpushare_spawner.service.web.viewer import Viewer
from gpushare_spawner.wording import history as words

DEFAULT_PERIOD = 30 * DAY
"""Seconds."""

_LAST = datetime(9999, 12, 31, tzinfo=UTC).timestamp()

Argument = Callable[[str], str]
"""Returns an argument of the request; empty: not given."""


class Preset(StrEnum):
    """Periods to choose from on the page. Days and months are those of UTC."""

    DAY = "day"
    WEEK = "week"
    MONTH = "month"
    THIS_MONTH = "this-month"
    LAST_MONTH = "last-month"


def preset_period(preset: Preset, now: float) -> tuple[float, float]:
    """Return when a period begins and ends. Instants are seconds since the epoch."""
    moment = datetime.fromtimestamp(now, UTC)
    this_month = moment.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    tomorrow = (now // DAY + 1) * DAY
    match preset:
        case Preset.DAY:
            end = (now // HOUR + 1) * HOUR
            return end - DAY, end
        case Preset.WEEK:
            return tomorrow - 7 * DAY, tomorrow
        case Preset.MONTH:
            return tomorrow - 30 * DAY, tomorrow
        case Preset.THIS_MONTH:
            return this_month.timestamp(), tomorrow
        case Preset.LAST_MONTH:
            before = (this_month - timedelta(days=1)).replace(day=1)
            return before.timestamp(), this_month.timestamp()


def period_of(argument: Argument, viewer: Viewer, now: float) -> Period:
    """Return the period that a request names, for the sessions that the viewer may see.

    Raises PermissionError if it asks for somebody else's.
    """
    until = _instant("until", argument("until"), now)
    since = _instant("since", argument("since"), until - DEFAULT_PERIOD)
    if until < since:
        raise ValueError(words.period_ends_first())
    user = argument("user") or None
    if user not in (None, viewer.name) and not viewer.sees_all:
        raise PermissionError(words.not_yours())
    return Period(since, until, user_of(viewer) or user, argument("group") or None, argument("template") or None)


def user_of(viewer: Viewer) -> str | None:
    """Return whose history the viewer may see; None: everybody's.

    Raises PermissionError for a program that is no user: an empty name stands for all whose names were deleted.
    """
    if viewer.sees_all:
        return None
    if not viewer.name:
        raise PermissionError(words.not_yours())
    return viewer.name


def division_of(text: str) -> tuple[By, ...]:
    """Return what sums are divided by: names with commas between them, each once."""
    found: list[By] = []
    for name in (part.strip() for part in text.split(",") if part.strip()):
        if name not in list(By):
            raise ValueError(words.not_a_key(name, ", ".join(By)))
        if By(name) not in found:
            found.append(By(name))
    return tuple(found)


def limit_of(text: str, default: int, most: int) -> int:
    """Return a number of entries."""
    if not text:
        return default
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise ValueError(words.not_a_limit(text, most))
    return int(text)


def _instant(name: str, text: str, default: float) -> float:
    if not text:
        return default
    try:
        instant = float(text) if text.replace(".", "", 1).isdecimal() else _moment(text)
    except (ValueError, OverflowError):
        raise ValueError(words.not_a_time(name, text)) from None
    if not 0 <= instant <= _LAST:
        raise ValueError(words.not_a_time(name, text[:40]))
    return instant


def _moment(text: str) -> float:
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
