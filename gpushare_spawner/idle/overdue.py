"""Idleness as the hub alone sees it: of servers without a GPU share, and of users."""

from __future__ import annotations

from dataclasses import dataclass

from gpushare_spawner.model.idle_cause import IdleCause


@dataclass(frozen=True)
class Overdue:
    """Why a server, or a user, is to go."""

    cause: IdleCause
    seconds: float
    """Time without activity, or age."""


def overdue(
    last_activity: float | None, started: float | None, now: float, timeout: float, max_age: float
) -> Overdue | None:
    """Return why a server (or a user) is to go; None: it stays.

    It goes after ``timeout`` seconds without activity, and after ``max_age`` seconds in any case; 0: never. Where the
    hub knows no activity the start counts, and where it knows neither, nothing is done. Instants are seconds since the
    epoch.
    """
    seen = last_activity if last_activity is not None else started
    if timeout > 0 and seen is not None and now - seen >= timeout:
        return Overdue(IdleCause.IDLE, now - seen)
    if max_age > 0 and started is not None and now - started >= max_age:
        return Overdue(IdleCause.MAX_AGE, now - started)
    return None
