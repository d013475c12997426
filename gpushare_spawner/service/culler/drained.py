"""Sessions on GPUs that are drained: each user is told once, and servers that stay too long are stopped.

A session that an admin has exempted from idle actions is told, and not stopped.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from gpushare_spawner.idle import exempts
from gpushare_spawner.model.cordon import Cordon
from gpushare_spawner.model.report import Report, SessionReport
from gpushare_spawner.service.actions.outcome import Actor
from gpushare_spawner.service.actions.session_actions import SessionActions
from gpushare_spawner.service.culler.decisions import SessionDecision
from gpushare_spawner.service.reports import NodeSnapshot
from gpushare_spawner.wording import drains as words

STOP_AGAIN = 60.0
"""Seconds before a stop is asked for again: the hub takes some time to stop a server."""


@dataclass(frozen=True)
class Drained:
    """A session on a drained GPU."""

    decision: SessionDecision
    cordon: Cordon
    where: str


def drained(snapshots: Sequence[NodeSnapshot], decisions: Sequence[SessionDecision]) -> Iterator[Drained]:
    """Yield the sessions on drained GPUs, with the drain that ends first."""
    reports = {one.report.node: one.report for one in snapshots if one.report is not None and one.report.cordons}
    for one in decisions:
        report = reports.get(one.node)
        found = _drain_of(one.session, report) if report is not None else None
        if report is not None and found is not None and one.session.confirmed:
            index = next((gpu.index for gpu in report.gpus if gpu.uuid == found.gpu), None)
            where = f"node {report.node}" if index is None else f"GPU {index} of node {report.node}"
            yield Drained(one, found, where)


def _drain_of(session: SessionReport, report: Report) -> Cordon | None:
    drains = [one for one in report.cordons if one.drain and (not one.gpu or one.gpu in session.gpus)]
    return min(drains, key=lambda one: one.stop_at if one.stop_at is not None else float("inf"), default=None)


class Drains:
    """Remembers which stops were asked for."""

    def __init__(self, actions: SessionActions) -> None:
        self._actions = actions
        self._stopped: dict[str, float] = {}

    def due(
        self, snapshots: Sequence[NodeSnapshot], decisions: Sequence[SessionDecision], now: float
    ) -> Iterator[tuple[str, Callable[[], Awaitable[bool]]]]:
        """Yield what is to be done now, by the session's name."""
        self._stopped = {name: at for name, at in self._stopped.items() if 0 <= now - at < STOP_AGAIN}
        for one in drained(snapshots, decisions):
            session, message, stop_at = one.decision.session, one.decision.session.message, one.cordon.stop_at
            if message is None or message.at < one.cordon.since:
                yield one.decision.name, partial(self._tell, one, now)
            elif (
                stop_at is not None
                and now >= stop_at
                and not exempts(session.exemption, now)
                and session.id not in self._stopped
            ):
                self._stopped[session.id] = now
                yield one.decision.name, partial(self._stop, one)

    def next_stop(
        self, snapshots: Sequence[NodeSnapshot], decisions: Sequence[SessionDecision], now: float
    ) -> float | None:
        """Return when the next stop is due; None: there is none."""
        ends = [one.cordon.stop_at for one in drained(snapshots, decisions) if one.cordon.stop_at is not None]
        return min((at for at in ends if at > now), default=None)

    async def _tell(self, one: Drained, now: float) -> bool:
        left = None if one.cordon.stop_at is None else one.cordon.stop_at - now
        where = f"{one.where[0].upper()}{one.where[1:]}"
        text = words.told(where, one.cordon.reason, left)
        return (await self._actions.message(one.decision, _admin(one.cordon), text)).changed

    async def _stop(self, one: Drained) -> bool:
        return (await self._actions.stop(one.decision, _admin(one.cordon))).changed


def _admin(cordon: Cordon) -> Actor:
    return Actor(cordon.by, is_admin=True)
