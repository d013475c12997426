"""Shows the answers of a plan: as a table in the terminal, and as one HTML page with plots as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpushare_spawner.plan.answers import CULLER, SHARES, STATIC, STATIC_PARTS, WHOLE, Answers, Goal, WayAnswer
from gpushare_spawner.plan.servers import Trace
from gpushare_spawner.wording.amounts import duration, latency, memory, plural

WIDTH, HEIGHT, LEFT, BOTTOM = 900, 260, 48, 28
"""Pixels of a plot, and of the space for its axes."""
MOST_POINTS = 400
"""Points of a line."""


def title(way: str, goal: Goal) -> str:
    """Return the name of a way to offer GPUs, for people."""
    return {
        WHOLE: "A whole GPU for each notebook",
        STATIC: f"Static parts, {STATIC_PARTS} of each GPU",
        SHARES: "Shares",
        CULLER: "Shares and idle actions",
    }[way]


def summary(found: Answers, goal: Goal) -> list[str]:
    """Return the most important answers as sentences."""
    by_way = {answer.way: answer for answer in found.ways}
    whole, best = by_way[WHOLE], by_way[CULLER]
    lines = [
        f"{plural(found.users, 'user')}, {plural(found.servers, 'server')} with a GPU, {found.days:.1f} days from "
        f"{_date(found.began)}.",
        f"Goal: 95 % of the spawns wait at most {duration(goal.wait_p95)}, and GPU work starts at most "
        f"{latency(goal.start_delay)} late in 95 % of the cases.",
    ]
    if whole.gpus is not None and best.gpus is not None:
        fewer = whole.gpus - best.gpus
        lines.append(
            f"A whole GPU for each notebook needs {plural(whole.gpus, 'GPU')}; "
            f"shares with idle actions need {best.gpus}"
            + (f": the same people could do without {fewer}." if fewer > 0 else ".")
        )
    if best.people is not None:
        more = best.people - found.users
        lines.append(
            f"{plural(best.on_gpus, 'GPU')} serve about {plural(best.people, 'person', 'people')} with shares and idle "
            f"actions" + (f": {more} more than now." if more > 0 else ".")
        )
    if found.busy_range:
        parts = ", ".join(f"{gpus if gpus is not None else 'none'} at {busy:.0%}" for busy, gpus in found.busy_range)
        lines.append(
            f"GPUs needed with shares and idle actions, by the assumed part of the time with GPU work: {parts}."
        )
    return lines


_COLUMNS = (
    "GPUs needed", "start delay p95", "GPU work takes", "mean wait", "p95 wait", "not started",
    "GPU-hours held", "people",
)  # fmt: skip


def _cells(answer: WayAnswer) -> list[str]:
    delay = answer.start_delay_p95
    return [
        "more than there are servers" if answer.gpus is None else str(answer.gpus),
        "unknown" if delay is None else latency(delay) if delay >= 0.001 else "0",
        f"{answer.slowdown:.2f} times",
        _wait(answer.mean_wait),
        _wait(answer.p95_wait),
        str(answer.never + answer.refused),
        f"{answer.held:,.0f}",
        "unknown" if answer.people is None else str(answer.people),
    ]


def _rows(found: Answers) -> Iterable[Sequence[str]]:
    """Return a row for each figure, with the figures of all ways."""
    return zip(_COLUMNS, *map(_cells, found.ways), strict=True)


def _of_which(there: int, goal: Goal) -> str:
    return (
        f"From the mean wait on, the figures are with {plural(there, 'GPU')} of {memory(goal.memory)}; before, with "
        "the GPUs needed"
    )


def _wait(seconds: float) -> str:
    return "0" if seconds < 0.5 else "for ever" if math.isinf(seconds) else duration(seconds)


def show(found: Answers, trace: Trace, goal: Goal) -> None:
    """Print the answers."""
    console = Console()
    for line in summary(found, goal):
        console.print(line, highlight=False, soft_wrap=True)
    there = found.ways[0].on_gpus
    table = Table(title=_of_which(there, goal), title_justify="left")
    table.add_column("")
    for answer in found.ways:
        table.add_column(title(answer.way, goal), justify="right")
    for row in _rows(found):
        table.add_row(*row)
    console.print(table)
    if len(found.groups) > 1 or any(group.name for group in found.groups):
        groups = Table(title="GPU-hours by group", title_justify="left")
        for column in _GROUP_COLUMNS:
            groups.add_column(column, justify="left" if column == "group" else "right")
        for row in _group_rows(found):
            groups.add_row(*map(Text, row))  # a name like [/b] is no markup
        console.print(groups)
    for note in found.notes:
        console.print(f"- {note}.", highlight=False, markup=False, soft_wrap=True)
    if trace.problem_count:
        console.print(
            f"- {plural(trace.problem_count, 'row or file', 'rows or files')} could not be used.", soft_wrap=True
        )


_GROUP_COLUMNS = ("group", "servers", "held today", "used", "part used", "held with shares", "mean wait")


def _group_rows(found: Answers) -> Iterable[list[str]]:
    for group in found.groups:
        part = group.worked / group.today if group.today else 0.0
        yield [
            group.name or "no group", str(group.servers), f"{group.today:,.0f}", f"{group.worked:,.0f}", f"{part:.0%}",
            f"{group.held:,.0f}", _wait(group.mean_wait),
        ]  # fmt: skip


def _date(instant: float) -> str:
    return datetime.fromtimestamp(instant, UTC).strftime("%Y-%m-%d")


# -- the page --------------------------------------------------------------------------------------------------------

_STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --dim: #59636e; --back: #ffffff; --line: #d1d9e0; --whole: #9a3412;
  --static: #8a6d00; --shares: #1d4ed8; --culler: #15803d; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --dim: #9aa4af; --back: #0f1419; --line: #30363d;
  --whole: #fb923c; --static: #eab308; --shares: #7aa2ff; --culler: #4ade80; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; } th { color: var(--dim); font-weight: 600; font-size: .85rem; }
svg { width: 100%; height: auto; } svg text { fill: var(--dim); font-size: 12px; } svg .axis { stroke: var(--line); }
.whole { --series: var(--whole); } .static { --series: var(--static); } .shares { --series: var(--shares); }
.culler { --series: var(--culler); } rect { fill: var(--series); } path { stroke: var(--series); fill: none;
  stroke-width: 1.5; } .key::before { content: "■ "; color: var(--series); } .key { margin-right: 1rem; }
.dim, li { color: var(--dim); }
"""


def html(found: Answers, trace: Trace, goal: Goal) -> str:
    """Return the page: one file without scripts and without links to others."""
    there = found.ways[0].on_gpus
    parts = [
        "<!DOCTYPE html><html lang=en><head><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width, initial-scale=1'>",
        f"<title>GPUs that this hub needs</title><style>{_STYLE}</style></head><body>",
        "<h1>GPUs that this hub needs</h1>",
        *(f"<p>{escape(line)}</p>" for line in summary(found, goal)),
        "<h2>GPUs needed for the goal</h2>",
        _bars(found, goal),
        f"<h2>GPUs held over time, with {escape(plural(there, 'GPU'))}</h2>",
        f"<p>{''.join(_key(answer, goal) for answer in found.ways)}</p>",
        "<p class=dim>A whole GPU for each notebook and static parts: as if nobody waited.</p>",
        _lines(found, there),
        f"<h2>All figures</h2><p class=dim>{escape(_of_which(there, goal))}.</p>",
        _table(("", *(title(answer.way, goal) for answer in found.ways)), _rows(found)),
    ]
    if len(found.groups) > 1 or any(group.name for group in found.groups):
        parts += ["<h2>GPU-hours by group</h2>", _table(_GROUP_COLUMNS, _group_rows(found))]
    notes = (f"<li>{escape(note)}.</li>" for note in found.notes)
    parts += ["<h2>What is missing or assumed</h2><ul>", *notes, "</ul>"]
    if trace.problem_count:
        count = plural(trace.problem_count, "row or file", "rows or files")
        parts += [
            f"<h2>{count} could not be used</h2><ul>",
            *(f"<li>{escape(text)}</li>" for text in trace.problems),
            "</ul>",
        ]
    return "\n".join([*parts, "</body></html>\n"])


def _key(answer: WayAnswer, goal: Goal) -> str:
    return f"<span class='key {answer.way}'>{escape(title(answer.way, goal))}</span>"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class=wide><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _bars(found: Answers, goal: Goal) -> str:
    """Return a plot with one bar for each way."""
    most = max((answer.gpus or 0 for answer in found.ways), default=0) or 1
    bars, height = [], 34
    for number, answer in enumerate(found.ways):
        y, needed = number * height, "unknown" if answer.gpus is None else str(answer.gpus)
        length = (WIDTH - 330) * (answer.gpus or 0) / most
        bars.append(
            f"<g class={answer.way}><text x=0 y={y + 20}>{escape(title(answer.way, goal))}</text>"
            f"<rect x=240 y={y + 5} width={length:.1f} height=20 rx=2><title>{escape(needed)}</title></rect>"
            f"<text x={248 + length:.1f} y={y + 20}>{escape(needed)}</text></g>"
        )
    return _svg(WIDTH, height * len(found.ways), "GPUs needed by each way", bars)


def _lines(found: Answers, there: int) -> str:
    """Return a plot of the GPUs held in each hour."""
    hours = max((len(answer.series) for answer in found.ways), default=0)
    if hours < 2:
        return "<p class=dim>The sources are too short for a plot.</p>"
    most = max([float(there), *(value for answer in found.ways for value in answer.series)]) or 1.0
    step = _round_step(most / 5)
    marks: list[str] = []
    for number in range(int(most / step) + 1):
        y = _y(number * step, most)
        line = f"<line class=axis x1={LEFT} x2={WIDTH} y1={y:.1f} y2={y:.1f} />"
        marks.append(f"{line}<text x=4 y={y + 4:.1f}>{number * step:g}</text>")
    days = max(1, hours // 24)
    for day in range(0, days + 1, max(1, days // 8)):
        x = LEFT + (WIDTH - LEFT) * min(1.0, day * 24 / hours)
        if x <= WIDTH - 80:
            marks.append(f"<text x={x:.1f} y={HEIGHT - 6}>{_date(found.began + day * 86400)}</text>")
    y = _y(there, most)
    marks.append(
        f"<line x1={LEFT} x2={WIDTH} y1={y:.1f} y2={y:.1f} stroke='var(--text)' stroke-dasharray='4 4'>"
        f"<title>{there}</title></line>"
    )
    for answer in found.ways:
        width = math.ceil(len(answer.series) / MOST_POINTS) or 1
        # the largest hour of each piece: peaks decide how many GPUs are needed
        points = [max(answer.series[begin : begin + width]) for begin in range(0, len(answer.series), width)]
        path = " ".join(
            f"{'ML'[number > 0]}{LEFT + (WIDTH - LEFT) * number * width / hours:.1f} {_y(value, most):.1f}"
            for number, value in enumerate(points)
        )
        if path:
            marks.append(f"<path class={answer.way} d='{path}' />")
    return _svg(WIDTH, HEIGHT, "GPUs held in each hour", marks)


def _y(value: float, most: float) -> float:
    return 10 + (HEIGHT - BOTTOM - 10) * (1 - value / most)


def _round_step(least: float) -> float:
    power = 10.0 ** math.floor(math.log10(max(least, 0.1)))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)


def _svg(width: int, height: int, label: str, parts: Iterable[str]) -> str:
    return f"<svg viewBox='0 0 {width} {height}' role=img aria-label='{escape(label)}'>{''.join(parts)}</svg>"
