"""Keeps what the service decided about a session on behalf of users and admins, and tells the session's observers.

The service decides and the agent keeps: nothing here takes or restores units, see tiers.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.model.controls import AskAnswer, Controls, Message
from gpushare_spawner.model.protocol.control import MessageRequest

log = logging.getLogger(__name__)


class SessionControls:
    """Sets keep, exemption and messages of a session, and passes on answers to its asks."""

    def __init__(self, save: Callable[[Session], None], changed: Callable[[], None]) -> None:
        """`save` writes a session's record; `changed` is called where only the report is another one."""
        self._save = save
        self._changed = changed

    def replace(self, session: Session, controls: Controls) -> None:
        """Set what stands for the session from now on."""
        if session.record.controls == controls:
            return
        session.record.controls = controls
        log.info("session %s: keep %s, exemption %s", session.id, controls.keep, controls.exemption)
        if session.conversation is not None:
            session.conversation.tell_controls()
        self._save(session)

    def message(self, session: Session, request: MessageRequest) -> None:
        """Show the session's user a message, or withdraw one."""
        self._show(session, request.messages(session.record.messages))

    def _show(self, session: Session, messages: tuple[Message, ...]) -> None:
        """Show the session's user these messages and no others."""
        if session.record.messages == messages:
            return
        session.record.messages = messages
        if session.conversation is not None:
            session.conversation.tell_messages()
        self._save(session)

    def follow(
        self, session: Session, controls: Controls, messages: tuple[Message, ...], answers: Iterable[AskAnswer]
    ) -> None:
        """Take over what the service wrote elsewhere, as often as it is looked at. Only asks that wait are answered."""
        self.replace(session, controls)
        self._show(session, messages)
        waiting = {ask.number for ask in session.asks.waiting()} if session.asks is not None else set()
        for answer in answers:
            if answer.number in waiting:
                self.answer(session, answer)

    def answer(self, session: Session, answer: AskAnswer) -> None:
        """Pass an answer on to the session's observers, once."""
        if session.asks is None or not session.asks.answered(answer):
            return
        if session.conversation is not None:
            session.conversation.tell_answer(answer)
        # the report no longer has the ask
        self._changed()
