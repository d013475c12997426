"""Sessions on drained GPUs: each user gets a message, and remaining servers are stopped at the drain's time.

The message states when the server will be stopped, which is not before the template's notice period after the message
has ended, as with idle actions. The message is withdrawn when the drain ends. The user of an exempt session gets the
message, but the server is not stopped.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from gpushare_spawner.idle.keep import exempts
from gpushare_spawner.model.controls import Cordon, Message, MessageCause
from gpushare_spawner.model.report import Report, SessionReport
from gpushare_spawner.model.template import Idle
from gpushare_spawner.service.actions import keeps, restart
from gpushare_spawner.service.actions.context import ActionContext, Actor, harmless
from gpushare_spawner.service.culler.decisions import SessionDecision
from gpushare_spawner.service.reports import NodeSnapshot
from gpushare_spawner.wording import actions as words

STOP_AGAIN = 60.0
"""Seconds before a stop is requested again, because the hub takes some time to stop a server."""


@dataclass(frozen=True)
class DrainedSession:
    """A session on a drained GPU."""

    decision: SessionDecision
    cordon: Cordon
    where: str

    def text(self, notified_at: float) -> str:
        """Return the message for the session's user at an instant (seconds since the epoch)."""
        return harmless(words.drain_notice(self._beginning, self.cordon.reason, self.stop_at(notified_at)))

    def matches(self, message: Message) -> bool:
        """Return whether a message is about this drain. Its time may have moved with the clock."""
        beginning = harmless(words.taken_out(self._beginning, self.cordon.reason))
        return self.cordon.since <= message.at and message.text.startswith(beginning)

    @property
    def _beginning(self) -> str:
        return f"{self.where[0].upper()}{self.where[1:]}"

    def stop_at(self, notified_at: float) -> float | None:
        """Return the time at which the server is stopped; None: never. ``notified_at``: when its user was notified."""
        if self.cordon.stop_at is None:
            return None
        template = self.decision.template
        idle = template.idle if template is not None else Idle()
        return max(self.cordon.stop_at, notified_at + idle.warn_before)


def drained(snapshots: Sequence[NodeSnapshot], decisions: Sequence[SessionDecision]) -> Iterator[DrainedSession]:
    """Yield the sessions on drained GPUs, each with the drain that ends first."""
    reports = {
        snapshot.report.node: snapshot.report
        for snapshot in snapshots
        if snapshot.report is not None and snapshot.report.cordons
    }
    for decision in decisions:
        report = reports.get(decision.node)
        drain = _drain_of(decision.session, report) if report is not None else None
        if report is not None and drain is not None and decision.session.confirmed:
            index = next((gpu.index for gpu in report.gpus if gpu.uuid == drain.gpu), None)
            where = f"node {report.node}" if index is None else f"GPU {index} of node {report.node}"
            yield DrainedSession(decision, drain, where)


def _drain_of(session: SessionReport, report: Report) -> Cordon | None:
    drains = [cordon for cordon in report.cordons if cordon.drain and (not cordon.gpu or cordon.gpu in session.gpus)]
    return min(drains, key=lambda drain: drain.stop_at if drain.stop_at is not None else float("inf"), default=None)


class Drains:
    """The drains in force. Sends messages to users, withdraws them after a drain, and stops servers.

    After a restart of the service, the sessions' messages show when users were notified. This object also records it,
    because an older agent does not store the cause of a message.
    """

    def __init__(self, actions: ActionContext) -> None:
        self._actions = actions
        self._notified: dict[str, tuple[Cordon, float, float]] = {}
        """The drain, the opening time and the time of the user's notification, by session."""
        self._stopped: dict[str, float] = {}

    def due(
        self, snapshots: Sequence[NodeSnapshot], decisions: Sequence[SessionDecision], now: float
    ) -> Iterator[tuple[str, Callable[[], Awaitable[bool]]]]:
        """Yield the actions that are due now, each with the session's name."""
        self._stopped = {name: at for name, at in self._stopped.items() if 0 <= now - at < STOP_AGAIN}
        affected = {entry.decision.session.id: entry for entry in drained(snapshots, decisions)}
        if all(snapshot.report is not None for snapshot in snapshots):
            # sessions of an unavailable agent have not ended
            self._notified = {name: entry for name, entry in self._notified.items() if name in affected}
        for decision in decisions:
            session = decision.session
            if session.id not in affected and session.confirmed and session.message_of(MessageCause.DRAIN) is not None:
                yield decision.name, partial(self._withdraw, decision)
        for name, drained_session in affected.items():
            notified_at = self._notified_at(drained_session, now)
            if notified_at is None:
                yield drained_session.decision.name, partial(self._notify, drained_session, now)
                continue
            self._notified[name] = (drained_session.cordon, drained_session.decision.session.opened_at, notified_at)
            stop_at = drained_session.stop_at(notified_at)
            exempt = exempts(drained_session.decision.session.exemption, now)
            if stop_at is not None and now >= stop_at and not exempt and name not in self._stopped:
                self._stopped[name] = now
                yield drained_session.decision.name, partial(self._stop, drained_session)

    def clock_was_set(self, by: float) -> None:
        """Adjust the times of notifications by a step of the clock, so that notice periods keep their length."""
        self._notified = {name: (drain, opened_at, at + by) for name, (drain, opened_at, at) in self._notified.items()}

    def next_stop(
        self, snapshots: Sequence[NodeSnapshot], decisions: Sequence[SessionDecision], now: float
    ) -> float | None:
        """Return the time at which the next stop is due; None if there is none."""
        notified = ((entry, self._notified_at(entry, now)) for entry in drained(snapshots, decisions))
        ends = (entry.stop_at(at if at is not None else now) for entry, at in notified)
        return min((at for at in ends if at is not None and at > now), default=None)

    def _notified_at(self, drained_session: DrainedSession, now: float) -> float | None:
        """Return the time at which the session's user was notified of the current drain; None: not yet."""
        session = drained_session.decision.session
        cordon, opened_at, at = self._notified.get(session.id, _NOT_NOTIFIED)
        # a time after now: the clock was set back
        if (cordon, opened_at) == (drained_session.cordon, session.opened_at):
            return min(at, now)
        message = session.message_of(MessageCause.DRAIN)
        return min(message.at, now) if message is not None and drained_session.matches(message) else None

    async def _notify(self, drained_session: DrainedSession, now: float) -> bool:
        session, admin = drained_session.decision.session, _admin(drained_session.cordon)
        outcome = await keeps.message(
            self._actions, drained_session.decision, admin, drained_session.text(now), MessageCause.DRAIN
        )
        self._notified[session.id] = (drained_session.cordon, session.opened_at, now)
        return outcome.changed

    async def _withdraw(self, decision: SessionDecision) -> bool:
        message = decision.session.message_of(MessageCause.DRAIN)
        admin = Actor(message.by if message is not None else "", is_admin=True)
        return (await keeps.withdraw_messages(self._actions, decision, admin, MessageCause.DRAIN)).changed

    async def _stop(self, drained_session: DrainedSession) -> bool:
        why = words.taken_out(drained_session.where, drained_session.cordon.reason)
        return (
            await restart.stop(self._actions, drained_session.decision, _admin(drained_session.cordon), why)
        ).changed


_NOT_NOTIFIED: tuple[Cordon | None, float, float] = (None, 0.0, 0.0)


def _admin(cordon: Cordon) -> Actor:
    return Actor(cordon.by, is_admin=True)
