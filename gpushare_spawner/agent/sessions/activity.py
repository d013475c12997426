"""When a session last worked on its GPUs, over restarts of the agent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from gpushare_spawner.agent.gpus.arbitration import GpuArbitration
from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.arbiter import SessionView
from gpushare_spawner.model.delivered import NOTHING, Delivered

SAME_INSTANT = 0.05
"""Seconds: two readings of one instant differ, as they are made with two clocks."""


@dataclass(frozen=True)
class Activity:
    """What a session does on its GPUs and has there, all of them together."""

    busy: bool
    """A burst runs or waits."""
    waiting: bool
    last: float | None
    """End of the last burst, seconds since the epoch; None: none yet."""
    gpu_seconds: float
    memory_bytes: int
    resident_bytes: int
    delivered: Delivered
    """Over all its GPUs and all runs of the agent, since the session was opened."""


def activity(session: Session, arbitrations: Mapping[str, GpuArbitration], clock: Callable[[], float]) -> Activity:
    """Add up a session's GPUs. `clock` gives seconds since the epoch."""
    views: list[tuple[GpuArbitration, SessionView]] = [
        (arbitrations[gpu.uuid], arbitrations[gpu.uuid].view(session.id)) for gpu in session.gpus
    ]
    # the arbiter's instants are of a clock that starts with the machine; only their age has a meaning here
    ages = [shell.now() - view.last_activity for shell, view in views if view.last_activity is not None]
    # read after the ages: a pause of this process between the two makes an end later, and never hides work from a
    # service that asks for work after an instant
    wall = clock()
    ends = [wall - age for age in ages]
    # a session that was opened again begins anew
    ends = [end for end in ends if end >= session.record.begun]
    last = _latest([*ends, session.past.last])
    if last is not None and session.last_end is not None and abs(last - session.last_end) < SAME_INSTANT:
        last = session.last_end
    session.last_end = last
    return Activity(
        busy=any(view.running or view.waiting for _, view in views),
        waiting=any(view.waiting for _, view in views),
        last=last,
        gpu_seconds=max(0.0, session.past.gpu_seconds + sum(view.gpu_seconds for _, view in views)),
        memory_bytes=sum(view.memory_bytes for _, view in views),
        resident_bytes=sum(view.resident_bytes for _, view in views),
        delivered=session.past.delivered.plus(counted(view for _, view in views).minus(session.past.delivered_before)),
    )


def counted(views: Iterable[SessionView]) -> Delivered:
    """What the arbiters of a session's GPUs have counted since they began."""
    total = NOTHING
    for view in views:
        total = total.plus(view.delivered)
    return total


def _latest(instants: Iterable[float | None]) -> float | None:
    known = [max(0.0, instant) for instant in instants if instant is not None]
    return max(known, default=None)
