"""The plot of GPU time, as bars of hours or days. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from gpushare_spawner.service.history.queries import Sum
from gpushare_spawner.service.history.use import DAY, HOUR, Amounts
from gpushare_spawner.wording.amounts import gpu_hours, utc

WIDTH, HEIGHT = 720.0, 180.0
"""Of the bars, in the units of the drawing."""
_MOST_LABELS = 8


@dataclass(frozen=True)
class Bar:
    """One hour or day. Heights and places are in the units of the drawing, from the top left."""

    x: float
    width: float
    working: float
    """Height of the time in which sessions did GPU work."""
    idle: float
    """Height of the idle time that was not recovered."""
    recovered: float
    label: str
    """For the axis; empty: too many bars for a label at each."""
    label_at: str
    """The instant that the label shows, in ISO 8601."""
    title: str
    gpu_hours: Mapping[str, float]


@dataclass(frozen=True)
class Plot:
    """Bars and the axis beside them."""

    bars: tuple[Bar, ...]
    lines: tuple[tuple[float, str], ...]
    """Heights of lines, from the top, with their GPU-hours."""
    step: int
    """Seconds of a bar."""


def plot(sums: Iterable[Sum], since: float, until: float) -> Plot:
    """Return the plot of sums by one step of time. Hours where the period has at most three days, else days."""
    step = step_of(since, until)
    by_start = {int(one.key[0]): one.amounts for one in sums}
    starts = range(int(since // step) * step, math.ceil(until), step)
    highest = _round_up(max((amounts.reserved / HOUR for amounts in by_start.values()), default=0.0))
    every = math.ceil(len(starts) / _MOST_LABELS)
    slot = WIDTH / max(1, len(starts))
    bars = tuple(
        _bar(by_start.get(start, Amounts()), start, step, number * slot, slot, highest, number % every == 0)
        for number, start in enumerate(starts)
    )
    lines = tuple((HEIGHT * (1 - part), _number(highest * part)) for part in (0.0, 0.5, 1.0))
    return Plot(bars, lines, step)


def step_of(since: float, until: float) -> int:
    """Return the length of a bar in seconds."""
    return HOUR if until - since <= 3 * DAY else DAY


def _bar(amounts: Amounts, start: int, step: int, x: float, slot: float, highest: float, labelled: bool) -> Bar:
    recovered = min(amounts.recovered, amounts.idle)
    hours = {
        "working": (amounts.reserved - amounts.idle) / HOUR,
        "idle": (amounts.idle - recovered) / HOUR,
        "recovered": recovered / HOUR,
    }
    scale = HEIGHT / highest
    # amounts are kept by days of UTC: the reader's day is the one that has most of it
    moment = datetime.fromtimestamp(start if step == HOUR else start + DAY // 2, UTC)
    label = f"{moment:%H:%M} UTC" if step == HOUR else f"{moment.day} {moment:%b}"
    return Bar(
        x=x + slot * 0.1,
        width=slot * 0.8,
        working=hours["working"] * scale,
        idle=hours["idle"] * scale,
        recovered=hours["recovered"] * scale,
        label=label if labelled else "",
        label_at=moment.isoformat(),
        title=f"{utc(start)} to {utc(start + step)}: {gpu_hours(amounts.reserved / HOUR)} GPU-hours reserved, "
        f"{gpu_hours(hours['working'])} working, {gpu_hours(amounts.idle / HOUR)} idle, "
        f"{gpu_hours(hours['recovered'])} of them recovered",
        gpu_hours=hours,
    )


def _round_up(value: float) -> float:
    """Return the next round number, at least 0.01: its half is round too."""
    if value <= 0.01:
        return 0.01
    power = 10.0 ** math.floor(math.log10(value))
    return next(
        (factor * power for factor in (1, 2, 3, 4, 5, 6, 8) if value <= factor * power * (1 + 1e-9)), 10 * power
    )


def _number(hours: float) -> str:
    return f"{hours:.3g}" if hours < 100 else f"{hours:,.0f}"
