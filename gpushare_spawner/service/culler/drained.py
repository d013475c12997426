"""Sessions on GPUs that are drained: each user is told once, and servers that stay too long are stopped.

A server is stopped at the earliest its template's notice period after its user was told, as with idle actions.

A session that an admin has exempted from idle actions is told, and not stopped.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from gpushare_spawner.idle import exempts
from gpushare_spawner.model.cordon import Cordon
from gpushare_spawner.model.report import Report, SessionReport
from gpushare_spawner.model.template import Idle
from gpushare_spawner.service.actions.outcome import Actor
from gpushare_spawner.service.actions.session_actions import SessionActions
from gpushare_spawner.service.actions.texts import harmless
from gpushare_spawner.service.culler.decisions import SessionDecision
from gpushare_spawner.service.reports import NodeSnapshot
from gpushare_spawner.wording.controls import drains as words

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


@dataclass(frozen=True)
class _Told:
    """That a session's user was told of a drain."""

    drain: Cordon
    opened_at: float
    """Of the session: the user's next one has the same id."""
    at: float

    def of(self, one: Drained) -> bool:
        """Return whether it was this session, and the drain as it is now."""
        return (self.drain, self.opened_at) == (one.cordon, one.decision.session.opened_at)


class Drains:
    """Remembers who was told of which drain, and which stops were asked for.

    After a restart of the service the session's message says whether its user was told. Where another message has
    replaced it, the user is told again.
    """

    def __init__(self, actions: SessionActions) -> None:
        self._actions = actions
        self._told: dict[str, _Told] = {}
        self._stopped: dict[str, float] = {}

    def due(
        self, snapshots: Sequence[NodeSnapshot], decisions: Sequence[SessionDecision], now: float
    ) -> Iterator[tuple[str, Callable[[], Awaitable[bool]]]]:
        """Yield what is to be done now, by the session's name."""
        self._stopped = {name: at for name, at in self._stopped.items() if 0 <= now - at < STOP_AGAIN}
        if all(one.report is not None for one in snapshots):
            # sessions of an agent that is silent have not ended
            known = {one.session.id for one in decisions}
            self._told = {name: told for name, told in self._told.items() if name in known}
        for one in drained(snapshots, decisions):
            session, told = one.decision.session, self._notice(one, now)
            if told is None:
                yield one.decision.name, partial(self._tell, one, now)
                continue
            self._told[session.id] = told
            stop_at = _stop_at(one, told.at)
            if (
                stop_at is not None
                and now >= stop_at
                and not exempts(session.exemption, now)
                and session.id not in self._stopped
            ):
                self._stopped[session.id] = now
                yield one.decision.name, partial(self._stop, one)

    def clock_was_set(self, by: float) -> None:
        """Move when users were told by a step of the clock: their notice periods stay as long as they are."""
        self._told = {name: replace(told, at=told.at + by) for name, told in self._told.items()}

    def next_stop(
        self, snapshots: Sequence[NodeSnapshot], decisions: Sequence[SessionDecision], now: float
    ) -> float | None:
        """Return when the next stop is due; None: there is none."""
        told = ((one, self._notice(one, now)) for one in drained(snapshots, decisions))
        ends = (_stop_at(one, notice.at if notice is not None else now) for one, notice in told)
        return min((at for at in ends if at is not None and at > now), default=None)

    def _notice(self, one: Drained, now: float) -> _Told | None:
        told, message = self._told.get(one.decision.session.id), one.decision.session.message
        if told is not None and told.of(one):
            # a later instant: the clock was set back
            return replace(told, at=min(told.at, now))
        if (
            message is not None
            and message.by == one.cordon.by
            and one.cordon.since <= message.at <= now
            and message.text.startswith(harmless(words.taken_out(_beginning(one), one.cordon.reason)))
        ):
            return _Told(one.cordon, one.decision.session.opened_at, message.at)
        return None

    async def _tell(self, one: Drained, now: float) -> bool:
        stop_at = _stop_at(one, now)
        text = words.told(_beginning(one), one.cordon.reason, None if stop_at is None else stop_at - now)
        outcome = await self._actions.message(one.decision, _admin(one.cordon), text)
        session = one.decision.session
        self._told[session.id] = _Told(one.cordon, session.opened_at, now)
        return outcome.changed

    async def _stop(self, one: Drained) -> bool:
        return (await self._actions.stop(one.decision, _admin(one.cordon))).changed


def _stop_at(one: Drained, told_at: float) -> float | None:
    """Return when the server is stopped whose user was told at that instant; None: never."""
    if one.cordon.stop_at is None:
        return None
    template = one.decision.template
    idle = template.idle if template is not None else Idle()
    return max(one.cordon.stop_at, told_at + idle.warn_before)


def _beginning(one: Drained) -> str:
    """Return where the session is, as a sentence begins."""
    return f"{one.where[0].upper()}{one.where[1:]}"


def _admin(cordon: Cordon) -> Actor:
    return Actor(cordon.by, is_admin=True)
