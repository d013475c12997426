"""What only admins do to a session that does not change its share: exempt it from idle actions, and send messages."""

from __future__ import annotations

import logging

from gpushare_spawner.model.controls import Exemption, Message, MessageCause
from gpushare_spawner.model.instant import LATEST
from gpushare_spawner.model.protocol.control import MessageRequest
from gpushare_spawner.model.protocol.frames import MAX_TEXT_LETTERS
from gpushare_spawner.service.actions.action_log import ActionLog
from gpushare_spawner.service.actions.controls import ControlsOfSessions
from gpushare_spawner.service.actions.keeps import EXEMPTION_ENDED, SAME
from gpushare_spawner.service.actions.outcome import (
    ActionRefused,
    Actor,
    Outcome,
    RefusalCode,
    Target,
    check_admin,
    refusals,
)
from gpushare_spawner.service.actions.texts import harmless
from gpushare_spawner.wording.controls import session_controls as words

log = logging.getLogger("gpushare.service.actions")

EXEMPT, MESSAGE, MESSAGE_WITHDRAWN = "exempt", "message", "message-withdrawn"
"""What the history calls these actions."""
SAME_MESSAGE = 60.0
"""Seconds within which a message with the same text is the same message."""


class AdminActions:
    """Each method raises ActionRefused."""

    def __init__(self, controls: ControlsOfSessions, log: ActionLog) -> None:
        self._controls = controls
        self._log = log

    async def exempt(self, one: Target, actor: Actor, until: float | None = None, reason: str = "") -> Outcome:
        """Exempt a session from idle actions until an instant (seconds since the epoch); None: without end."""
        check_admin(actor)
        reason = harmless(reason)
        async with self._controls.of_user(one.session.user):
            session, controls = await self._controls.read(one)
            now = self._controls.clock()
            if until is not None and not now < until <= LATEST:
                raise ActionRefused(words.EXEMPTION_NOT_IN_FUTURE, RefusalCode.BAD_REQUEST)
            seconds = None if until is None else until - now
            standing = controls.exemption
            if standing is not None and _same_end(standing.until, until) and standing.reason == reason:
                return Outcome(False, words.exempt_already(seconds))
            exemption = Exemption(until=until, by=actor.name, reason=reason)
            await self._controls.write(one, controls.model_copy(update={"exemption": exemption}))
        self._log.session(session, one.node, EXEMPT, actor.name, reason=f"{words.exempted(seconds)} {reason}".strip())
        return Outcome(True, words.exempted(seconds))

    async def end_exemption(self, one: Target, actor: Actor) -> Outcome:
        """End an exemption: idle actions apply again, each after its notice."""
        check_admin(actor)
        async with self._controls.of_user(one.session.user):
            session, controls = await self._controls.read(one)
            if controls.exemption is None:
                return Outcome(False, words.NOT_EXEMPT)
            await self._controls.write(one, controls.model_copy(update={"exemption": None}))
        self._log.session(session, one.node, EXEMPTION_ENDED, actor.name, reason=words.EXEMPTION_ENDED)
        return Outcome(True, words.EXEMPTION_ENDED)

    async def message(self, one: Target, actor: Actor, text: str, cause: MessageCause = MessageCause.ADMIN) -> Outcome:
        """Show the session's user a text, in JupyterLab and in `gpushare status`, instead of the one of this cause."""
        check_admin(actor)
        text = harmless(text)
        if not text:
            raise ActionRefused(words.NO_TEXT, RefusalCode.BAD_REQUEST)
        if len(text) > MAX_TEXT_LETTERS:
            raise ActionRefused(words.message_too_long(len(text), MAX_TEXT_LETTERS), RefusalCode.BAD_REQUEST)
        async with self._controls.of_user(one.session.user):
            session, _ = await self._controls.read(one)
            now, last = self._controls.clock(), session.message_of(cause)
            if last is not None and (last.text, last.by) == (text, actor.name) and abs(now - last.at) < SAME_MESSAGE:
                return Outcome(False, words.MESSAGE_SENT_ALREADY)
            with refusals():
                message = Message(text=text, by=actor.name, at=now, cause=cause)
                await one.agent.message(MessageRequest(id=session.id, message=message))
        self._log.session(session, one.node, MESSAGE, actor.name, reason=text)
        return Outcome(True, words.MESSAGE_SENT)

    async def explain(self, one: Target, actor: Actor, text: str) -> bool:
        """Show the session's user why somebody else acts on the session. Returns whether that worked: the action is
        done all the same, and has its own line in the history."""
        message = Message(
            text=text[:MAX_TEXT_LETTERS], by=actor.name, at=self._controls.clock(), cause=MessageCause.ACTION
        )
        try:
            async with self._controls.of_user(one.session.user):
                session, _ = await self._controls.read(one)
                with refusals():
                    await one.agent.message(MessageRequest(id=session.id, message=message))
        except ActionRefused as error:
            log.info("The user of session %s is not told of an action: %s", one.session.id, error.to_admins)
            return False
        return True

    async def withdraw_messages(self, one: Target, actor: Actor, *causes: MessageCause) -> Outcome:
        """Withdraw the messages of these causes that the session's user has."""
        check_admin(actor)
        async with self._controls.of_user(one.session.user):
            session, _ = await self._controls.read(one)
            standing = [message for cause in causes if (message := session.message_of(cause)) is not None]
            if not standing:
                return Outcome(False, words.NO_MESSAGE)
            for number, message in enumerate(standing):
                if number:
                    await self._controls.read(one)  # on Kubernetes the pod has changed
                with refusals():
                    await one.agent.message(MessageRequest.withdraw(session.id, message.cause))
        reason = " ".join(message.text for message in standing)
        self._log.session(session, one.node, MESSAGE_WITHDRAWN, actor.name, reason=reason)
        return Outcome(True, words.MESSAGE_WITHDRAWN)


def _same_end(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one - other) <= SAME
