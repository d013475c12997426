"""Idleness as the hub alone sees it: of servers without a GPU share, and of users."""

from __future__ import annotations

from gpushare_spawner.model.quantity import format_seconds


def overdue(
    last_activity: float | None, started: float | None, now: float, timeout: float, max_age: float
) -> str | None:
    """Why a server (or a user) is to go, as a sentence; None: it stays.

    It goes after ``timeout`` seconds without activity, and after ``max_age`` seconds in any case; 0: never. Where the
    hub knows no activity the start counts, and where it knows neither, nothing is done. Instants are seconds since the
    epoch.
    """
    seen = last_activity if last_activity is not None else started
    if timeout > 0 and seen is not None and now - seen >= timeout:
        return f"no activity for {format_seconds(now - seen)}"
    if max_age > 0 and started is not None and now - started >= max_age:
        return f"{format_seconds(now - started)} old"
    return None
