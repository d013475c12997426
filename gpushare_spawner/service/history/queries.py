"""Queries of the history: sums of GPU time by user, group, template, GPU and time; actions; waits.

Functions with a connection are for `HistoryStore.read`. The other functions choose the group to which GPU time is
charged, because a user can be in several groups and the time counts only once. `store` writes the history.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, Table, func, select

from gpushare_spawner.model.report import SessionReport
from gpushare_spawner.quota.accounts import AccountKind
from gpushare_spawner.quota.budgets import GpuTimeUse
from gpushare_spawner.service.history.store import (
    ACTION,
    AMOUNTS,
    DAY,
    HOUR,
    SUBJECT,
    USE,
    WAIT,
    Action,
    GpuTimeAmounts,
    WaitOutcome,
)


class By(StrEnum):
    """A key to group sums by."""

    USER = "user"
    GROUP = "group"
    TEMPLATE = "template"
    ACCOUNT = "account"
    """The account of the quota, like `group:optics`."""
    MODEL = "model"
    NODE = "node"
    GPU = "gpu"
    """The node and the GPU's UUID."""
    HOUR = "hour"
    """Hours in UTC. Amounts that are stored by day are in the first hour of the day."""
    DAY = "day"
    """Days in UTC."""


_STEPS = {By.HOUR: HOUR, By.DAY: DAY}


@dataclass(frozen=True)
class Period:
    """A period from ``since`` to before ``until`` in seconds since the epoch, with filters."""

    since: float
    until: float
    user: str | None = None
    """Only this user; None: all users."""
    group: str | None = None
    template: str | None = None


@dataclass(frozen=True)
class Sum:
    """One row of sums."""

    key: tuple[str | int, ...]
    """The values of the keys, in the query's order. An hour or a day is given by its start, in seconds since the
    epoch."""
    amounts: GpuTimeAmounts


def gpu_time(connection: Connection, period: Period, by: Sequence[By]) -> list[Sum]:
    """Return the amounts of GPU time in the period, ordered by key.

    An hour, or a day of older data, counts entirely if it begins in the period.
    """
    keys = [column for division in by for column in _columns(division)]
    sums = [func.sum(USE.c[name]) for name in AMOUNTS]
    question = select(*keys, *sums).join_from(USE, SUBJECT).where(*_within(period, USE.c.start, SUBJECT))
    if keys:
        question = question.group_by(*keys).order_by(*keys)
    rows = connection.execute(question).all()
    return [
        Sum(_key(by, tuple(row)[: len(keys)]), GpuTimeAmounts(*(value or 0.0 for value in tuple(row)[len(keys) :])))
        for row in rows
        if row[-1] is not None
    ]


def budget_uses(connection: Connection, since: float) -> Iterator[GpuTimeUse]:
    """Yield the GPU time of each account and user from an instant on, by the stored hours and days."""
    keys = (SUBJECT.c.account, SUBJECT.c.user, USE.c.start, USE.c.length)
    amounts = (func.sum(USE.c.reserved - USE.c.recovered), func.sum(USE.c.used))
    question = select(*keys, *amounts).join_from(USE, SUBJECT).where(USE.c.start + USE.c.length > since)
    # of old time the names are gone, and groups' budgets still count it
    question = (
        question.where((SUBJECT.c.user != "") | SUBJECT.c.account.like("group:%")).group_by(*keys).order_by(USE.c.start)
    )
    # a month of thousands of users does not fit in memory well
    yield from (GpuTimeUse(*row) for row in connection.execution_options(yield_per=1000).execute(question))


@dataclass(frozen=True)
class WaitSummary:
    """Summary of spawns' waits in a period."""

    started: int
    """Number of spawns that got a GPU."""
    gave_up: int
    """Number of spawns that were cancelled or failed."""
    mean_seconds: float
    """Mean wait of the spawns that got a GPU."""
    longest_seconds: float


def waits(connection: Connection, period: Period) -> WaitSummary:
    """Return the waits of the spawns that began in the period."""
    rows = connection.execute(
        select(WAIT.c.outcome, func.count(), func.avg(WAIT.c.seconds), func.max(WAIT.c.seconds))
        .where(*_within(period, WAIT.c.began_at, WAIT))
        .group_by(WAIT.c.outcome)
    ).all()
    by_outcome = {outcome: (number, mean, longest) for outcome, number, mean, longest in rows}
    number, mean, longest = by_outcome.get(WaitOutcome.STARTED, (0, 0.0, 0.0))
    return WaitSummary(number, by_outcome.get(WaitOutcome.GAVE_UP, (0, 0.0, 0.0))[0], float(mean), float(longest))


def actions(connection: Connection, period: Period, limit: int, before: int | None = None) -> list[tuple[int, Action]]:
    """Return the latest actions in the period, with their numbers. ``before``: only actions with a smaller number."""
    question: Select[Any] = select(ACTION).where(*_within(period, ACTION.c.at, ACTION))
    if before is not None:
        question = question.where(ACTION.c.id < before)
    rows = connection.execute(question.order_by(ACTION.c.id.desc()).limit(limit))
    return [(row.id, Action(**{key: value for key, value in row._mapping.items() if key != "id"})) for row in rows]


def _columns(by: By) -> list[ColumnElement[Any]]:
    if by in _STEPS:
        step = _STEPS[by]
        # % of integers is the same in all databases, unlike their division
        return [USE.c.start - USE.c.start % step]
    if by is By.GPU:
        return [SUBJECT.c.node, SUBJECT.c.gpu]
    return [SUBJECT.c[by.value]]


def _key(by: Sequence[By], values: tuple[Any, ...]) -> tuple[str | int, ...]:
    key: list[str | int] = []
    given = iter(values)
    for division in by:
        value = next(given)
        key.append(f"{value} {next(given)}" if division is By.GPU else value)
    return tuple(key)


def _within(period: Period, instant: ColumnElement[Any], table: Table) -> list[ColumnElement[bool]]:
    filters = {"user": period.user, "group": period.group, "template": period.template}
    return [
        instant >= period.since,
        instant < period.until,
        *(table.c[name] == value for name, value in filters.items() if value is not None),
    ]


def group_of_session(session: SessionReport, groups_of: Mapping[str, Collection[str]]) -> str:
    """Return the group to which the session is charged or, without one, its user's group; empty: none.

    ``groups_of``: each user's groups on the hub.
    """
    kind, _, name = session.quota.partition(":")
    return name if kind == AccountKind.GROUP else group_of_user(session.user, groups_of)


def group_of_user(user: str, groups_of: Mapping[str, Collection[str]]) -> str:
    """Return the first of a user's groups by name; empty: none."""
    return min(groups_of.get(user, ()), default="")
