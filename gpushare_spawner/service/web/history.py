"""The history's page, and the answers of the REST API about the history.

Viewers see their own GPU time; admins and viewers with the scope SEE_ALL see that of all users. The functions parse a
request's arguments (and raise ValueError with a sentence for the client), and generate JSON, CSV and the plot of GPU
time. JSON and CSV are generated in the history's thread, because a hundred thousand rows take seconds. The queries are
in `service.history.queries`.
"""

from __future__ import annotations

import csv
import io
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import reduce
from typing import Any

from sqlalchemy import Connection
from tornado.web import HTTPError, authenticated

from gpushare_spawner.service.history.queries import By, Period, Sum, actions, gpu_time, waits
from gpushare_spawner.service.history.recorder import JOULES_PER_KWH, History
from gpushare_spawner.service.history.store import DAY, HOUR, OF_NODES, GpuTimeAmounts, HistoryFailed
from gpushare_spawner.service.hub.caller import Caller
from gpushare_spawner.service.right_size import advice_of, sums_of
from gpushare_spawner.service.web.app import Page
from gpushare_spawner.wording import service as words
from gpushare_spawner.wording.amounts import gpu_hours, utc

CSV_TYPE = "text/csv; charset=utf-8"
CSV_HEADERS = {"Content-Disposition": 'attachment; filename="gpu-hours.csv"'}


def gpu_time_text(connection: Connection, period: Period, by: Sequence[By], as_csv: bool) -> str:
    """Return sums of GPU time as JSON or CSV."""
    rows = [_row(by, entry) for entry in gpu_time(connection, period, by)]
    if as_csv:
        return _csv([*by, *asdict(GpuTimeAmounts())], rows)
    values = [division.value for division in by]
    return json.dumps({"since": period.since, "until": period.until, "by": values, "rows": rows})


def actions_text(connection: Connection, period: Period, limit: int, before: int | None) -> str:
    """Return the latest actions as JSON."""
    entries = actions(connection, period, limit, before)
    return json.dumps({"actions": [{"id": number} | asdict(action) for number, action in entries]})


def _row(by: Sequence[By], entry: Sum) -> dict[str, Any]:
    key = dict(zip((part.value for part in by), entry.key, strict=True))
    amounts = {name: value / _UNITS.get(name, HOUR) for name, value in asdict(entry.amounts).items()}
    return key | {name: round(value, 6) for name, value in amounts.items()}


_UNITS = {"waits": 1.0, "energy": JOULES_PER_KWH, "co2": 1000.0, "cost": 1.0, "saved": 1.0}
"""Divisors of the stored amounts that are no GPU time: energy is shown in kWh, and CO2 in kg."""


def _csv(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as CSV, with times in ISO 8601."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(columns)
    for row in rows:
        writer.writerow(_cell(column, row[column]) for column in columns)
    return out.getvalue()


def _cell(column: str, value: Any) -> Any:
    if column in (By.HOUR, By.DAY):
        return datetime.fromtimestamp(value, UTC).isoformat()
    # a spreadsheet interprets these as formulas, and users choose names
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


WIDTH, HEIGHT = 720.0, 180.0
"""Size of the plot, in drawing units."""
_MOST_LABELS = 8


@dataclass(frozen=True)
class Bar:
    """The bar of one hour or day. Heights and positions are in drawing units, from the top left."""

    x: float
    width: float
    working: float
    """Height for the time in which sessions did GPU work."""
    idle: float
    """Height for the idle time that was not recovered."""
    recovered: float
    label: str
    """Label on the axis; empty if there are too many bars to label each."""
    label_at: str
    """The instant that the label shows, in ISO 8601."""
    title: str
    gpu_hours: Mapping[str, float]


@dataclass(frozen=True)
class Plot:
    """The bars of the plot and its axis."""

    bars: tuple[Bar, ...]
    lines: tuple[tuple[float, str], ...]
    """Positions of the grid lines from the top, with their GPU-hours."""
    step: int
    """Length of a bar in seconds."""


def plot(sums: Iterable[Sum], since: float, until: float) -> Plot:
    """Return the plot of sums by hours, or by days if the period is longer than three days."""
    step = step_of(since, until)
    by_start = {int(entry.key[0]): entry.amounts for entry in sums}
    starts = range(int(since // step) * step, math.ceil(until), step)
    highest = _round_up(max((amounts.reserved / HOUR for amounts in by_start.values()), default=0.0))
    every = math.ceil(len(starts) / _MOST_LABELS)
    slot = WIDTH / max(1, len(starts))
    bars = tuple(
        _bar(by_start.get(start, GpuTimeAmounts()), start, step, number * slot, slot, highest, number % every == 0)
        for number, start in enumerate(starts)
    )
    lines = tuple((HEIGHT * (1 - part), _number(highest * part)) for part in (0.0, 0.5, 1.0))
    return Plot(bars, lines, step)


def step_of(since: float, until: float) -> int:
    """Return the length of a bar in seconds."""
    return HOUR if until - since <= 3 * DAY else DAY


def _bar(amounts: GpuTimeAmounts, start: int, step: int, x: float, slot: float, highest: float, labelled: bool) -> Bar:
    recovered = min(amounts.recovered, amounts.idle)
    hours = {
        "working": (amounts.reserved - amounts.idle) / HOUR,
        "idle": (amounts.idle - recovered) / HOUR,
        "recovered": recovered / HOUR,
    }
    scale = HEIGHT / highest
    # amounts are stored by UTC day; the label is the day with the larger part in the reader's time zone
    moment = datetime.fromtimestamp(start if step == HOUR else start + DAY // 2, UTC)
    label = f"{moment:%H:%M} UTC" if step == HOUR else f"{moment.day} {moment:%b}"
    return Bar(
        x=x + slot * 0.1,
        width=slot * 0.8,
        **{name: amount * scale for name, amount in hours.items()},
        label=label if labelled else "",
        label_at=moment.isoformat(),
        title=f"{utc(start)} to {utc(start + step)}: {gpu_hours(amounts.reserved / HOUR)} GPU-hours reserved, "
        f"{gpu_hours(hours['working'])} working, {gpu_hours(amounts.idle / HOUR)} idle, "
        f"{gpu_hours(hours['recovered'])} of them recovered",
        gpu_hours=hours,
    )


def _round_up(value: float) -> float:
    """Return the next larger round number that is round when halved, at least 0.01."""
    if value <= 0.01:
        return 0.01
    power = 10.0 ** math.floor(math.log10(value))
    return next(
        (factor * power for factor in (1, 2, 3, 4, 5, 6, 8) if value <= factor * power * (1 + 1e-9)), 10 * power
    )


def _number(hours: float) -> str:
    return f"{hours:.3g}" if hours < 100 else f"{hours:,.0f}"


DEFAULT_PERIOD = 30 * DAY
"""Length of the default period, in seconds."""

_LAST = datetime(9999, 12, 31, tzinfo=UTC).timestamp()

Argument = Callable[[str], str]
"""Function that returns an argument of the request; empty: not given."""


class Preset(StrEnum):
    """Periods offered on the page. Days and months are in UTC."""

    DAY = "day"
    WEEK = "week"
    MONTH = "month"
    THIS_MONTH = "this-month"
    LAST_MONTH = "last-month"


def preset_period(preset: Preset, now: float) -> tuple[float, float]:
    """Return the start and end of a period, in seconds since the epoch."""
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


def period_of(argument: Argument, viewer: Caller, now: float) -> Period:
    """Return the period in a request, limited to the sessions that the viewer may see.

    Raises PermissionError if it names a user that the viewer may not see.
    """
    until = _instant("until", argument("until"), now)
    since = _instant("since", argument("since"), until - DEFAULT_PERIOD)
    if until < since:
        raise ValueError(words.PERIOD_ENDS_FIRST)
    user = argument("user") or None
    if user not in (None, viewer.name) and not viewer.sees_all:
        raise PermissionError(words.NOT_YOURS)
    return Period(since, until, user_of(viewer) or user, argument("group") or None, argument("template") or None)


def user_of(viewer: Caller) -> str | None:
    """Return the user whose history the viewer may see; None: all users.

    Raises PermissionError for a program that is not a user, because an empty name stands for all users with deleted
    names.
    """
    if viewer.sees_all:
        return None
    if not viewer.name:
        raise PermissionError(words.NOT_YOURS)
    return viewer.name


def division_of(text: str) -> tuple[By, ...]:
    """Return the keys to group sums by, from names separated by commas, without duplicates."""
    divisions: list[By] = []
    for name in (part.strip() for part in text.split(",") if part.strip()):
        if name not in list(By):
            raise ValueError(words.not_a_key(name, ", ".join(By)))
        if By(name) not in divisions:
            divisions.append(By(name))
    return tuple(divisions)


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


MOST_ROWS = 200
"""Maximum rows in a table of the page. The CSV contains all rows."""
_TABLES = {"group": (By.GROUP,), "user": (By.USER,), "template": (By.TEMPLATE,), "gpu": (By.NODE, By.MODEL, By.GPU)}
"""The page's tables, with their keys."""


class HistoryPage(Page):
    """GPU time in a period by group, user, template or GPU, with waits and actions.

    The status is 404 if there is no history, and 503 if its database does not answer.
    """

    @authenticated
    async def get(self) -> None:
        history: History | None = self.settings["history"]
        if history is None:
            raise HTTPError(404, words.NO_HISTORY)
        chosen, table = self.get_query_argument("period", ""), self.get_query_argument("by", "")
        preset = Preset(chosen) if chosen in list(Preset) else Preset.MONTH
        table = table if table in _TABLES else next(iter(_TABLES))
        since, until = preset_period(preset, time.time())
        viewer = self.caller
        try:
            period = Period(since, until, user_of(viewer))
        except PermissionError as error:
            raise HTTPError(403, str(error)) from None
        steps = By.HOUR if step_of(since, until) == HOUR else By.DAY
        by = _TABLES[table]
        try:
            sums, over_time, waited, newest, advised = await history.ask(
                lambda connection: (
                    gpu_time(connection, period, by),
                    gpu_time(connection, period, [steps]),
                    waits(connection, period),
                    actions(connection, period, 50),
                    advice_of(connection, period.user),
                )
            )
        except HistoryFailed as error:
            # only admins may see the database's address
            raise HTTPError(503, str(error) if viewer.sees_all else words.UNAVAILABLE) from None
        rows = sorted(sums, key=lambda entry: -entry.amounts.reserved)
        self.finish_page(
            "history.html",
            viewer={"name": viewer.name, "sees_all": viewer.sees_all},
            presets=[choice.value for choice in Preset],
            preset=preset.value,
            tables=list(_TABLES),
            table=table,
            since=since,
            until=until,
            rows=[{"names": list(map(str, entry.key)), "amounts": entry.amounts} for entry in rows[:MOST_ROWS]],
            more=max(0, len(rows) - MOST_ROWS),
            total=reduce(GpuTimeAmounts.plus, (entry.amounts for entry in sums), GpuTimeAmounts()),
            plot=plot(over_time, since, until),
            size=(WIDTH, HEIGHT),
            waits=waited,
            actions=[action for _, action in newest],
            of_nodes=OF_NODES,
            advice_sums=sums_of(advised, time.time())[:MOST_ROWS],
            # admins see the sums
            advice=[
                (record.template, text)
                for record in (() if viewer.sees_all else advised)
                if (text := words.advice(record))
            ],
            csv=f"api/v1/history?since={since:.0f}&until={until:.0f}&by={','.join(by)}&format=csv",
            problem=history.problem if viewer.sees_all else "",
            currency=history.currency if any(entry.amounts.cost or entry.amounts.saved for entry in sums) else "",
        )
