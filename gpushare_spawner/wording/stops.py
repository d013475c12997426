"""Texts on the hub's pages about why a server was stopped, for its user.

The sentence for a stop by an admin is `wording.actions.stopped_by`.
"""

from __future__ import annotations

from gpushare_spawner.idle.policy import Decision
from gpushare_spawner.model.share import IdleCause
from gpushare_spawner.wording.amounts import duration, utc


def note(why: str, at: float) -> str:
    """Return when and why a server was stopped. ``why``: sentences; ``at``: seconds since the epoch."""
    return f"{utc(at)}: {why}"


def by_culler(decision: Decision) -> str:
    """Return why the idle culler stopped a session's server."""
    action = decision.upcoming
    after = duration(action.after) if action is not None else ""
    match action.cause if action is not None else None:
        case IdleCause.MAX_AGE:
            return overdue(f"servers run for at most {after} here")
        case IdleCause.RECLAIM:
            return overdue(f"somebody within their quota waited for its GPU; it was over quota and idle for {after}")
        case IdleCause.IDLE:
            return overdue(f"for {after} there was no GPU work, no busy kernel and no other activity")
        case _:
            return overdue("it was idle")


def overdue(why: str) -> str:
    """Return why the idle culler stopped a server. ``why``: a clause, see `idle_decisions.overdue`."""
    return f"The server was stopped: {why}. Files stay. Variables in kernels are lost."
