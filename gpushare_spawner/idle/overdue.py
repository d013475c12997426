"""When servers without a GPU share, and users, are idle for too long, by the hub's list."""

from __future__ import annotations

from dataclasses import dataclass

from gpushare_spawner.model.idle_cause import IdleCause


@dataclass(frozen=True)
class Overdue:
    """Why a server is stopped, or a user is deleted."""

    cause: IdleCause
    seconds: float
    """Time without activity, or age."""


def overdue(
    last_activity: float | None, started: float | None, now: float, timeout: float, max_age: float
) -> Overdue | None:
    """Return why a server is stopped (or a user is deleted); None: no reason.

    The limits are ``timeout`` seconds without activity, and an age of ``max_age`` seconds; 0: no limit. Without a
    known activity the start counts; without either, the result is None. Instants are seconds since the epoch.
    """
    seen = last_activity if last_activity is not None else started
    if timeout > 0 and seen is not None and now - seen >= timeout:
        return Overdue(IdleCause.IDLE, now - seen)
    if max_age > 0 and started is not None and now - started >= max_age:
        return Overdue(IdleCause.MAX_AGE, now - started)
    return None
