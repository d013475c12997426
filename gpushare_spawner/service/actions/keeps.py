"""Actions that change no share: keeps of users, and exemptions and messages of admins.

Changes of shares and tiers: see `share`. Stops and restarts: see `restart`.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpushare_spawner.idle.keep import (
    CLOCKS_DIFFER,
    DAY,
    KeepRule,
    KeepsLeft,
    holds,
    in_force,
    keep_refused,
    keeps_left,
)
from gpushare_spawner.model.control import MessageRequest
from gpushare_spawner.model.controls import ASK_SECONDS, MOST_KEEPS, Controls, Exemption, Keep, Message, MessageCause
from gpushare_spawner.model.frames import MAX_TEXT_LETTERS
from gpushare_spawner.model.quantity import LATEST
from gpushare_spawner.model.report import SessionReport
from gpushare_spawner.model.template import Idle, Template
from gpushare_spawner.service.actions.outcome import (
    CULLER,
    ActionLog,
    ActionOutcome,
    ActionRefused,
    Actor,
    ControlsOfSessions,
    ReceivedAsk,
    RefusalCode,
    SessionsOfUser,
    Target,
    answer_to,
    check_admin,
    check_own,
    harmless,
    refusals,
)
from gpushare_spawner.service.templates import SessionTemplates
from gpushare_spawner.wording import actions as words

KEEP, KEEP_ENDED, EXEMPTION_ENDED = "keep", "keep-ended", "exempt-ended"
"""Names of these actions in the history."""
SAME = 5.0
"""Seconds. A keep that ends within this time of the current keep is the same: a request that is sent twice."""


@dataclass(frozen=True)
class KeepLength:
    """The length of a keep: a duration in seconds, or until an instant."""

    seconds: float | None = None
    until: float | None = None


class KeepActions:
    """Keeps of shares. Each method raises ActionRefused."""

    def __init__(
        self,
        controls: ControlsOfSessions,
        templates: Callable[[], Mapping[str, Template]],
        rule_of: Callable[[Idle | None], KeepRule],
        log: ActionLog,
    ) -> None:
        """Create the actions. ``rule_of`` returns the limits for a template; None if the template is gone."""
        self._controls = controls
        self._templates = templates
        self._rule_of = rule_of
        self._log = log
        self._began: dict[str, Counter[tuple[str, float]]] = {}
        """By user: ids of sessions, and when their keeps began. Agents forget the keeps of an ended session, and a user
        can restart a server at any time."""
        self._standing: dict[str, dict[str, tuple[str, Keep]]] = {}
        """By user and id of the session: its node and its keep. They count while the node's agent is unavailable."""

    def rule(self, session: SessionReport) -> KeepRule:
        """Return the limits of keeps of a session's user."""
        template = SessionTemplates.of(self._templates()).of_user(session.template, session.user)
        return self._rule_of(template.idle if template is not None else None)

    async def keep(
        self, target: Target, actor: Actor, length: KeepLength, received: ReceivedAsk | None = None
    ) -> ActionOutcome:
        """Keep a share, extend a keep, or let it end sooner. The limits do not apply to a sooner end.

        ``received``: the ask behind this action; the same ask again leads to the same end of the keep.
        """
        check_own(target, actor)
        async with self._controls.of_user(target.session.user):
            session, controls = await self._controls.read(target)
            now = self._controls.clock()
            begin = now if received is None else min(now, max(received.at, now - ASK_SECONDS))
            until = length.until if length.until is not None else begin + (length.seconds or 0.0)
            if not math.isfinite(until) or not now < until <= LATEST:
                raise ActionRefused(words.KEEP_NOT_IN_FUTURE, RefusalCode.BAD_REQUEST)
            standing = controls.keep
            if standing is not None and abs(standing.until - until) <= SAME:
                return ActionOutcome(False, words.kept_already(standing.until - now))
            if standing is not None and until < standing.until:
                sooner = Keep(until=until, since=standing.since, by=actor.name)
                changed = controls.model_copy(update={"keep": sooner})
            else:
                changed = await self._extended(session, controls, actor, until, until - begin, now)
            text = words.kept(until - begin, session.tier)
            await self._controls.write(target, changed, answer_to(received, text, now))
            self._remember(session, target.node, changed, now)
        self._log.session(session, target.node, KEEP, actor.name, reason=text)
        return ActionOutcome(True, text)

    async def end_keep(self, target: Target, actor: Actor, received: ReceivedAsk | None = None) -> ActionOutcome:
        """End a keep: idle actions apply again, each after its notice."""
        check_own(target, actor)
        async with self._controls.of_user(target.session.user):
            session, controls = await self._controls.read(target)
            if controls.keep is None:
                return ActionOutcome(False, words.NO_KEEP)
            changed = controls.model_copy(update={"keep": None})
            await self._controls.write(target, changed, answer_to(received, words.KEEP_ENDED, self._controls.clock()))
            self._standing.get(session.user, {}).pop(session.id, None)
        self._log.session(session, target.node, KEEP_ENDED, actor.name, reason=words.KEEP_ENDED)
        return ActionOutcome(True, words.KEEP_ENDED)

    async def ask_left(self, target: Target, actor: Actor) -> ActionOutcome:
        """Return how many keeps the session's user has left, as a sentence. Changes nothing."""
        check_own(target, actor)
        session, controls = await self._controls.read(target)
        others = await self._controls.of_others(session)
        now = self._controls.clock()
        return ActionOutcome(
            False, words.keeps_left(self.left(session, {**others.controls, session.id: controls}, now), now)
        )

    def left(self, session: SessionReport, controls: Mapping[str, Controls], now: float) -> KeepsLeft:
        """Return the keeps that a session's user has left. ``controls``: in force, of all sessions of the user."""
        return keeps_left(self.rule(session), self._begun(session.user, controls, now), now)

    def _begun(self, user: str, controls: Mapping[str, Controls], now: float) -> list[float]:
        """Return when keeps of a user's sessions began, ended keeps included."""
        began = _counted(controls)
        # keeps later than now are from before the clock was set back, and the reports date them as now
        began |= _filtered(self._began.get(user, Counter()), lambda begin: begin <= now)
        return [begin for _, begin in began.elements()]

    async def settle(self, target: Target) -> bool:
        """Remove expired controls, and date keeps of the future as of now. Returns whether that was necessary.

        Otherwise a clock that is set back would restore an expired keep, and keeps would count as of today until the
        clock has caught up.
        """
        async with self._controls.of_user(target.session.user):
            session, controls = await self._controls.read(target)
            before = session.controls
            if not has_to_settle(session, self._controls.clock()):
                return False
            await self._controls.write(target, controls)
        if before.keep is not None and controls.keep is None:
            self._log.session(session, target.node, KEEP_ENDED, CULLER, reason=words.KEEP_WAS_OVER)
        if before.exemption is not None and controls.exemption is None:
            self._log.session(session, target.node, EXEMPTION_ENDED, CULLER, reason=words.EXEMPTION_WAS_OVER)
        return True

    async def _extended(
        self, session: SessionReport, controls: Controls, actor: Actor, until: float, seconds: float, now: float
    ) -> Controls:
        keep = Keep(until=until, since=now, by=actor.name)
        if actor.is_admin:
            # an admin's keep does not count for the user
            return controls.model_copy(update={"keep": keep})
        others = await self._controls.of_others(session)
        began = self._begun(session.user, {**others.controls, session.id: controls}, now)
        kept = sum(holds(other.keep, now) for other in others.controls.values())
        kept += self._kept_on_silent_nodes(session, others, now)
        refusal = keep_refused(self.rule(session), seconds, began, kept, now)
        if refusal is not None:
            raise ActionRefused(words.keep_refused(refusal, now), RefusalCode.LIMIT)
        return controls.model_copy(update={"keep": keep, "keeps": (*controls.keeps, now)[-MOST_KEEPS:]})

    def _kept_on_silent_nodes(self, session: SessionReport, others: SessionsOfUser, now: float) -> int:
        """Return how many other sessions of the user have keeps from this service on nodes with unavailable agents."""
        return sum(
            node not in others.nodes and holds(keep, now)
            for name, (node, keep) in self._standing.get(session.user, {}).items()
            if name != session.id and name not in others.controls
        )

    def _remember(self, session: SessionReport, node: str, controls: Controls, now: float) -> None:
        """Remember the keep, and when keeps began, as long as they count."""
        standing = {
            user: {name: entry for name, entry in keeps.items() if holds(entry[1], now)}
            for user, keeps in self._standing.items()
        }
        if controls.keep is not None:
            standing.setdefault(session.user, {})[session.id] = node, controls.keep
        self._standing = {user: keeps for user, keeps in standing.items() if keeps}
        began = self._began.get(session.user, Counter()) | _counted({session.id: controls})
        counts = {
            user: _filtered(begun, lambda begin: begin > now - DAY)
            for user, begun in {**self._began, session.user: began}.items()
        }
        self._began = {user: begun for user, begun in counts.items() if begun}


def _counted(controls: Mapping[str, Controls]) -> Counter[tuple[str, float]]:
    return Counter((session, begin) for session, state in controls.items() for begin in state.keeps)


def _filtered(began: Counter[tuple[str, float]], counts: Callable[[float], bool]) -> Counter[tuple[str, float]]:
    return Counter({entry: number for entry, number in began.items() if counts(entry[1])})


def has_to_settle(session: SessionReport, now: float) -> bool:
    """Return whether `KeepActions.settle` would change something."""
    if any(began > now + CLOCKS_DIFFER for began in session.keeps):
        return True
    if session.keep is None and session.exemption is None:
        return False
    settled = in_force(session.controls, now)
    return (settled.keep, settled.exemption) != (session.keep, session.exemption)


log = logging.getLogger("gpushare.service.actions")

EXEMPT, MESSAGE, MESSAGE_WITHDRAWN = "exempt", "message", "message-withdrawn"
"""Names of these actions in the history."""
SAME_MESSAGE = 60.0
"""Seconds. A message with the same text within this time is the same message."""


class AdminActions:
    """Exemptions and messages. Each method raises ActionRefused."""

    def __init__(self, controls: ControlsOfSessions, log: ActionLog) -> None:
        self._controls = controls
        self._log = log

    async def exempt(self, target: Target, actor: Actor, until: float | None = None, reason: str = "") -> ActionOutcome:
        """Exempt a session from idle actions until an instant (seconds since the epoch); None: without end."""
        check_admin(actor)
        reason = harmless(reason)
        async with self._controls.of_user(target.session.user):
            session, controls = await self._controls.read(target)
            now = self._controls.clock()
            if until is not None and not now < until <= LATEST:
                raise ActionRefused(words.EXEMPTION_NOT_IN_FUTURE, RefusalCode.BAD_REQUEST)
            seconds = None if until is None else until - now
            standing = controls.exemption
            if standing is not None and _same_end(standing.until, until) and standing.reason == reason:
                return ActionOutcome(False, words.exempt_already(seconds))
            exemption = Exemption(until=until, by=actor.name, reason=reason)
            await self._controls.write(target, controls.model_copy(update={"exemption": exemption}))
        self._log.session(
            session, target.node, EXEMPT, actor.name, reason=f"{words.exempted(seconds)} {reason}".strip()
        )
        return ActionOutcome(True, words.exempted(seconds))

    async def end_exemption(self, target: Target, actor: Actor) -> ActionOutcome:
        """End an exemption: idle actions apply again, each after its notice."""
        check_admin(actor)
        async with self._controls.of_user(target.session.user):
            session, controls = await self._controls.read(target)
            if controls.exemption is None:
                return ActionOutcome(False, words.NOT_EXEMPT)
            await self._controls.write(target, controls.model_copy(update={"exemption": None}))
        self._log.session(session, target.node, EXEMPTION_ENDED, actor.name, reason=words.EXEMPTION_ENDED)
        return ActionOutcome(True, words.EXEMPTION_ENDED)

    async def message(
        self, target: Target, actor: Actor, text: str, cause: MessageCause = MessageCause.ADMIN
    ) -> ActionOutcome:
        """Show the session's user a text in JupyterLab and in `gpushare status`.

        It replaces the message of the same cause.
        """
        check_admin(actor)
        text = harmless(text)
        if not text:
            raise ActionRefused(words.NO_TEXT, RefusalCode.BAD_REQUEST)
        if len(text) > MAX_TEXT_LETTERS:
            raise ActionRefused(words.message_too_long(len(text), MAX_TEXT_LETTERS), RefusalCode.BAD_REQUEST)
        async with self._controls.of_user(target.session.user):
            session, _ = await self._controls.read(target)
            now, last = self._controls.clock(), session.message_of(cause)
            if last is not None and (last.text, last.by) == (text, actor.name) and abs(now - last.at) < SAME_MESSAGE:
                return ActionOutcome(False, words.MESSAGE_SENT_ALREADY)
            with refusals():
                message = Message(text=text, by=actor.name, at=now, cause=cause)
                await target.agent.message(MessageRequest(id=session.id, message=message))
        self._log.session(session, target.node, MESSAGE, actor.name, reason=text)
        return ActionOutcome(True, words.MESSAGE_SENT)

    async def explain(self, target: Target, actor: Actor, text: str) -> bool:
        """Show the session's user the reason for another person's action. Returns whether that worked.

        The action is carried out in any case, and has its own line in the history.
        """
        message = Message(
            text=text[:MAX_TEXT_LETTERS], by=actor.name, at=self._controls.clock(), cause=MessageCause.ACTION
        )
        try:
            async with self._controls.of_user(target.session.user):
                session, _ = await self._controls.read(target)
                with refusals():
                    await target.agent.message(MessageRequest(id=session.id, message=message))
        except ActionRefused as error:
            log.info("The user of session %s is not told of an action: %s", target.session.id, error.to_admins)
            return False
        return True

    async def withdraw_messages(self, target: Target, actor: Actor, *causes: MessageCause) -> ActionOutcome:
        """Withdraw the session's messages of these causes."""
        check_admin(actor)
        async with self._controls.of_user(target.session.user):
            session, _ = await self._controls.read(target)
            standing = [message for cause in causes if (message := session.message_of(cause)) is not None]
            if not standing:
                return ActionOutcome(False, words.NO_MESSAGE)
            for number, message in enumerate(standing):
                if number:
                    await self._controls.read(target)  # on Kubernetes the pod has changed
                with refusals():
                    await target.agent.message(MessageRequest.withdraw(session.id, message.cause))
        reason = " ".join(message.text for message in standing)
        self._log.session(session, target.node, MESSAGE_WITHDRAWN, actor.name, reason=reason)
        return ActionOutcome(True, words.MESSAGE_WITHDRAWN)


def _same_end(end: float | None, other: float | None) -> bool:
    if end is None or other is None:
        return end is other
    return abs(end - other) <= SAME
