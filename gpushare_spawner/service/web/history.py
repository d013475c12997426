"""The history's page and its REST API. Viewers see their own GPU time; admins and SEE_ALL everybody's."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from tornado.web import HTTPError, authenticated

from gpushare_spawner.service.history.events import OF_NODES
from gpushare_spawner.service.history.queries import By, Period, Sum, actions, gpu_time, waits
from gpushare_spawner.service.history.recorder import History
from gpushare_spawner.service.history.store import HistoryFailed
from gpushare_spawner.service.history.use import HOUR, Amounts
from gpushare_spawner.service.web.history_answers import CSV_HEADERS, CSV_TYPE, actions_text, gpu_time_text
from gpushare_spawner.service.web.history_plot import HEIGHT, WIDTH, plot, step_of
from gpushare_spawner.service.web.history_request import (
    Preset,
    division_of,
    limit_of,
    period_of,
    preset_period,
    user_of,
)
from gpushare_spawner.service.web.page import Page
from gpushare_spawner.wording import history as words

MOST_ROWS = 200
"""In a table of the page; the CSV has all."""
MOST_ACTIONS = 1000
"""On one page of the API."""
_TABLES = {
    "group": (By.GROUP,),
    "user": (By.USER,),
    "template": (By.TEMPLATE,),
    "gpu": (By.NODE, By.MODEL, By.GPU),
}
"""The tables of the page."""


class HistoryRequests(Page):
    """A page that asks the history. 404 where the service keeps none, 503 where its database does not answer."""

    @property
    def history(self) -> History:
        history: History | None = self.settings["history"]
        if history is None:
            raise HTTPError(404, words.NO_HISTORY)
        return history

    def argument(self, name: str) -> str:
        """Return an argument of the request; empty: not given."""
        return str(self.get_query_argument(name, ""))

    def period(self, now: float) -> Period:
        """Return the period that is asked for. Raises HTTPError 400 and 403."""
        try:
            return period_of(self.argument, self.viewer, now)
        except PermissionError as error:
            raise HTTPError(403, str(error)) from None
        except ValueError as error:
            raise HTTPError(400, str(error)) from None

    async def asked(self, query: Any) -> Any:
        """Return a query's result. Raises HTTPError 503."""
        try:
            return await self.history.ask(query)
        except HistoryFailed as error:
            # the database's address is for admins
            why = str(error) if self.viewer.sees_all else words.UNAVAILABLE
            raise HTTPError(503, why) from None


class HistoryJson(HistoryRequests):
    """GPU time as JSON, or as CSV with ``format=csv``. 403 without a login.

    `since`, `until`: instants (ISO 8601, UTC where no zone is given, or seconds since the epoch); the last 30 days.
    `by`: what sums are divided by, several with commas: user, group, template, model, node, gpu, hour, day.
    `user`, `group`, `template`: only this one's. Amounts are GPU-hours: `reserved`, `idle`, `recovered`, `borrowed`,
    `used`, `entitled`, `delivered`; `waits` is a number.
    """

    async def get(self) -> None:
        self.require_login()
        period = self.period(time.time())
        try:
            by = division_of(self.argument("by"))
        except ValueError as error:
            raise HTTPError(400, str(error)) from None
        as_csv = self.argument("format") == "csv"
        text = await self.asked(lambda connection: gpu_time_text(connection, period, by, as_csv))
        self.set_header("Content-Type", CSV_TYPE if as_csv else "application/json")
        for name, value in (CSV_HEADERS if as_csv else {}).items():
            self.set_header(name, value)
        self.finish(text)


class ActionsJson(HistoryRequests):
    """The newest actions as JSON: idle actions, restored shares, and what users and admins did. 403 without a login.

    `since`, `until`, `user`, `group`, `template` as in the history; `limit`: at most so many; `before`: only those
    with a smaller `id`, for the next page.
    """

    async def get(self) -> None:
        self.require_login()
        period = self.period(time.time())
        try:
            limit = limit_of(self.argument("limit"), 100, MOST_ACTIONS)
            before = limit_of(self.argument("before"), 0, 2**62) or None
        except ValueError as error:
            raise HTTPError(400, str(error)) from None
        text = await self.asked(lambda connection: actions_text(connection, period, limit, before))
        self.set_header("Content-Type", "application/json")
        self.finish(text)


class HistoryPage(HistoryRequests):
    """GPU time in a period, divided by group, user, template or GPU; waits and actions beside it."""

    @authenticated
    async def get(self) -> None:
        now = time.time()
        try:
            preset = Preset(self.argument("period") or Preset.MONTH)
        except ValueError:
            preset = Preset.MONTH
        table = self.argument("by") if self.argument("by") in _TABLES else next(iter(_TABLES))
        since, until = preset_period(preset, now)
        viewer = self.viewer
        try:
            period = Period(since, until, user_of(viewer))
        except PermissionError as error:
            raise HTTPError(403, str(error)) from None
        steps = By.HOUR if step_of(since, until) == HOUR else By.DAY
        by = _TABLES[table]
        sums, over_time, waited, newest = await self.asked(
            lambda connection: (
                gpu_time(connection, period, by),
                gpu_time(connection, period, [steps]),
                waits(connection, period),
                actions(connection, period, 50),
            )
        )
        rows = sorted((_shown(one) for one in sums), key=lambda row: -row["amounts"].reserved)
        self.finish_page(
            "history.html",
            viewer={"name": viewer.name, "sees_all": viewer.sees_all},
            presets=[one.value for one in Preset],
            preset=preset.value,
            tables=list(_TABLES),
            table=table,
            since=since,
            until=until,
            rows=rows[:MOST_ROWS],
            more=max(0, len(rows) - MOST_ROWS),
            total=_total(sums),
            plot=plot(over_time, since, until),
            size=(WIDTH, HEIGHT),
            waits=waited,
            actions=[action for _, action in newest],
            of_nodes=OF_NODES,
            csv=f"api/history?since={since:.0f}&until={until:.0f}&by={','.join(by)}&format=csv",
            problem=self.history.problem if viewer.sees_all else "",
        )


def _shown(one: Sum) -> dict[str, Any]:
    return {"names": [str(part) for part in one.key], "amounts": one.amounts}


def _total(sums: Sequence[Sum]) -> Amounts:
    total = Amounts()
    for one in sums:
        total = total.plus(one.amounts)
    return total
