"""The operations that ask the history."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from gpushare_spawner.service.api import answers
from gpushare_spawner.service.api.operation import AnyOperation, ApiError, Arguments, Call, Nothing, Operation, Raw
from gpushare_spawner.service.history.queries import Period
from gpushare_spawner.service.history.store import HistoryFailed
from gpushare_spawner.service.web.history_answers import CSV_HEADERS, CSV_TYPE, actions_text, gpu_time_text
from gpushare_spawner.service.web.history_request import division_of, period_of
from gpushare_spawner.wording import history as words

MOST_ACTIONS = 1000


class PeriodQuery(Arguments):
    """Which time, and whose."""

    since: str = ""
    """An instant: ISO 8601 (UTC where no zone is given), or seconds since the epoch. Not given: 30 days before
    `until`."""
    until: str = ""
    """Not given: now."""
    user: str = ""
    """Only this user's. Those of others are for callers who may see all sessions."""
    group: str = ""
    """Only this group's."""
    template: str = ""
    """Only of this template."""


class HistoryQuery(PeriodQuery):
    """What sums are divided by."""

    by: str = ""
    """What sums are divided by, several with commas: user, group, template, model, node, gpu, hour, day."""
    format: Literal["json", "csv"] = "json"
    """`csv`: for a spreadsheet."""


class ActionsQuery(PeriodQuery):
    """Which page."""

    limit: Annotated[int, Field(ge=1, le=MOST_ACTIONS)] = 100
    """How many to return at most."""
    before: Annotated[int, Field(ge=1, le=2**62)] | None = None
    """Only those with a smaller `id`: the next page."""


async def history(call: Call[HistoryQuery, Nothing]) -> Raw:
    """Return sums of GPU time in GPU-hours: `reserved`, `idle`, `recovered`, `borrowed`, `used`, `entitled`,
    `delivered`; `waits` is a number."""
    period = _period(call)
    try:
        by = division_of(call.query.by)
    except ValueError as error:
        raise ApiError(400, "bad-request", str(error)) from None
    as_csv = call.query.format == "csv"
    text = await _asked(call, lambda connection: gpu_time_text(connection, period, by, as_csv))
    return Raw(text, CSV_TYPE, CSV_HEADERS) if as_csv else Raw(text)


async def actions(call: Call[ActionsQuery, Nothing]) -> Raw:
    """Return the newest actions: idle actions, restored shares, and what users and admins did."""
    period, query = _period(call), call.query
    return Raw(await _asked(call, lambda connection: actions_text(connection, period, query.limit, query.before)))


def _period(call: Call[Any, Any]) -> Period:
    query = call.query.model_dump()
    try:
        return period_of(lambda name: str(query[name]), call.caller.viewer, call.services.clock())
    except PermissionError as error:
        raise ApiError(403, "forbidden", str(error)) from None
    except ValueError as error:
        raise ApiError(400, "bad-request", str(error)) from None


async def _asked(call: Call[Any, Any], query: Any) -> str:
    if call.services.history is None:
        raise ApiError(404, "no-history", words.NO_HISTORY)
    try:
        return str(await call.services.history.ask(query))
    except HistoryFailed as error:
        raise ApiError(503, "unavailable", str(error)) from None


_ERRORS = {404: "The service keeps no history.", 503: "The database does not answer."}

OPERATIONS: list[AnyOperation] = [
    Operation(
        "GET",
        "history",
        history,
        "GPU time by user, group, template, GPU and time",
        answers.HistoryAnswer,
        HistoryQuery,
        Nothing,
        errors=_ERRORS,
        other_content=("text/csv",),
    ),
    Operation(
        "GET",
        "actions",
        actions,
        "The log of actions",
        answers.ActionsAnswer,
        ActionsQuery,
        Nothing,
        errors=_ERRORS,
    ),
]
