"""Sessions on GPUs that are drained: each user has a message of it, and servers that stay too long are stopped.

The message ends with the drain, and says when the server is stopped: at the earliest its template's notice period after
its user was told, as with idle actions. A session that an admin has exempted from idle actions is told, and not
stopped.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from gpushare_spawner.idle import exempts
from gpushare_spawner.model.controls import Cordon, Message, MessageCause
from gpushare_spawner.model.report import Report, SessionReport
from gpushare_spawner.model.template import Idle
from gpushare_spawner.service.actions.outcome import Actor, harmless
from gpushare_spawner.service.actions.session_actions import SessionActions
from gpushare_spawner.service.culler.decisions import SessionDecision
from gpushare_spawner.service.reports import NodeSnapshot
from gpushare_spawner.wording import actions as words

STOP_AGAIN = 60.0
"""Seconds before a stop is asked for again: the hub takes some time to stop a server."""


@dataclass(frozen=True)
class Drained:
    """A session on a drained GPU."""

    decision: SessionDecision
    cordon: Cordon
    where: str

    def text(self, told_at: float) -> str:
        """Return what its user is told at that instant (seconds since the epoch)."""
        return harmless(words.told(self._beginning, self.cordon.reason, self.stop_at(told_at)))

    def is_told_by(self, message: Message) -> bool:
        """Return whether a message tells of this drain. Its instant can have moved with the clock."""
        beginning = harmless(words.taken_out(self._beginning, self.cordon.reason))
        return self.cordon.since <= message.at and message.text.startswith(beginning)

    @property
    def _beginning(self) -> str:
        return f"{self.where[0].upper()}{self.where[1:]}"

    def stop_at(self, told_at: float) -> float | None:
        """Return when the server is stopped whose user was told at that instant; None: never."""
        if self.cordon.stop_at is None:
            return None
        template = self.decision.template
        idle = template.idle if template is not None else Idle()
        return max(self.cordon.stop_at, told_at + idle.warn_before)


def drained(snapshots: Sequence[NodeSnapshot], decisions: Sequence[SessionDecision]) -> Iterator[Drained]:
    """Yield the sessions on drained GPUs, with the drain that ends first."""
    reports = {
        snapshot.report.node: snapshot.report
        for snapshot in snapshots
        if snapshot.report is not None and snapshot.report.cordons
    }
    for decision in decisions:
        report = reports.get(decision.node)
        found = _drain_of(decision.session, report) if report is not None else None
        if report is not None and found is not None and decision.session.confirmed:
            index = next((gpu.index for gpu in report.gpus if gpu.uuid == found.gpu), None)
            where = f"node {report.node}" if index is None else f"GPU {index} of node {report.node}"
            yield Drained(decision, found, where)


def _drain_of(session: SessionReport, report: Report) -> Cordon | None:
    drains = [cordon for cordon in report.cordons if cordon.drain and (not cordon.gpu or cordon.gpu in session.gpus)]
    return min(drains, key=lambda drain: drain.stop_at if drain.stop_at is not None else float("inf"), default=None)


class Drains:
    """Tells users of drains, withdraws what it told when a drain has ended, and stops servers.

    The sessions' messages say whose user was told when, for the next service. This one remembers it, since an older
    agent forgets why a message stands.
    """

    def __init__(self, actions: SessionActions) -> None:
        self._actions = actions
        self._told: dict[str, tuple[Cordon, float, float]] = {}
        """By session: the drain, when the session was opened, and when its user was told."""
        self._stopped: dict[str, float] = {}

    def due(
        self, snapshots: Sequence[NodeSnapshot], decisions: Sequence[SessionDecision], now: float
    ) -> Iterator[tuple[str, Callable[[], Awaitable[bool]]]]:
        """Yield what is to be done now, by the session's name."""
        self._stopped = {name: at for name, at in self._stopped.items() if 0 <= now - at < STOP_AGAIN}
        found = {one.decision.session.id: one for one in drained(snapshots, decisions)}
        if all(snapshot.report is not None for snapshot in snapshots):
            # sessions of an agent that is silent have not ended
            self._told = {name: told for name, told in self._told.items() if name in found}
        for decision in decisions:
            session = decision.session
            if session.id not in found and session.confirmed and session.message_of(MessageCause.DRAIN) is not None:
                yield decision.name, partial(self._withdraw, decision)
        for name, one in found.items():
            told_at = self._told_at(one, now)
            if told_at is None:
                yield one.decision.name, partial(self._tell, one, now)
                continue
            self._told[name] = (one.cordon, one.decision.session.opened_at, told_at)
            stop_at = one.stop_at(told_at)
            exempt = exempts(one.decision.session.exemption, now)
            if stop_at is not None and now >= stop_at and not exempt and name not in self._stopped:
                self._stopped[name] = now
                yield one.decision.name, partial(self._stop, one)

    def clock_was_set(self, by: float) -> None:
        """Move when users were told by a step of the clock: their notice periods stay as long as they are."""
        self._told = {name: (drain, opened_at, at + by) for name, (drain, opened_at, at) in self._told.items()}

    def next_stop(
        self, snapshots: Sequence[NodeSnapshot], decisions: Sequence[SessionDecision], now: float
    ) -> float | None:
        """Return when the next stop is due; None: there is none."""
        told = ((one, self._told_at(one, now)) for one in drained(snapshots, decisions))
        ends = (one.stop_at(at if at is not None else now) for one, at in told)
        return min((at for at in ends if at is not None and at > now), default=None)

    def _told_at(self, one: Drained, now: float) -> float | None:
        """Return when the session's user was told of the drain as it is now; None: the user was not."""
        session, (cordon, opened_at, at) = one.decision.session, self._told.get(one.decision.session.id, _NOBODY)
        # an instant later than now: the clock was set back
        if (cordon, opened_at) == (one.cordon, session.opened_at):
            return min(at, now)
        message = session.message_of(MessageCause.DRAIN)
        return min(message.at, now) if message is not None and one.is_told_by(message) else None

    async def _tell(self, one: Drained, now: float) -> bool:
        session, admin = one.decision.session, _admin(one.cordon)
        outcome = await self._actions.message(one.decision, admin, one.text(now), MessageCause.DRAIN)
        self._told[session.id] = (one.cordon, session.opened_at, now)
        return outcome.changed

    async def _withdraw(self, decision: SessionDecision) -> bool:
        message = decision.session.message_of(MessageCause.DRAIN)
        admin = Actor(message.by if message is not None else "", is_admin=True)
        return (await self._actions.withdraw_messages(decision, admin, MessageCause.DRAIN)).changed

    async def _stop(self, one: Drained) -> bool:
        why = words.taken_out(one.where, one.cordon.reason)
        return (await self._actions.stop(one.decision, _admin(one.cordon), why)).changed


_NOBODY: tuple[Cordon | None, float, float] = (None, 0.0, 0.0)


def _admin(cordon: Cordon) -> Actor:
    return Actor(cordon.by, is_admin=True)
