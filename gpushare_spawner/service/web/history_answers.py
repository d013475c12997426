"""What the history's REST addresses answer, as text: JSON or CSV. Made in the history's thread: a hundred thousand
rows take seconds."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Connection

from gpushare_spawner.service.history.queries import By, Period, Sum, actions, gpu_time
from gpushare_spawner.service.history.use import HOUR, Amounts

CSV_TYPE = "text/csv; charset=utf-8"
CSV_HEADERS = {"Content-Disposition": 'attachment; filename="gpu-hours.csv"'}


def gpu_time_text(connection: Connection, period: Period, by: Sequence[By], as_csv: bool) -> str:
    """Return sums of GPU time."""
    rows = [_row(by, one) for one in gpu_time(connection, period, by)]
    if as_csv:
        return _csv([*by, *asdict(Amounts())], rows)
    values = [one.value for one in by]
    return json.dumps({"since": period.since, "until": period.until, "by": values, "rows": rows})


def actions_text(connection: Connection, period: Period, limit: int, before: int | None) -> str:
    """Return the newest actions."""
    found = actions(connection, period, limit, before)
    return json.dumps({"actions": [{"id": number} | asdict(action) for number, action in found]})


def _row(by: Sequence[By], one: Sum) -> dict[str, Any]:
    key = dict(zip((part.value for part in by), one.key, strict=True))
    hours = {name: value if name == "waits" else value / HOUR for name, value in asdict(one.amounts).items()}
    return key | {name: round(value, 6) for name, value in hours.items()}


def _csv(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as CSV; times in ISO 8601."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(columns)
    for row in rows:
        writer.writerow(_cell(column, row[column]) for column in columns)
    return out.getvalue()


def _cell(column: str, value: Any) -> Any:
    if column in (By.HOUR, By.DAY):
        return datetime.fromtimestamp(value, UTC).isoformat()
    # a spreadsheet takes these for formulas, and users choose names
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r") else value
