"""Keeps what the service decided about a session on behalf of users and admins, and tells the session's observers.

The service decides and the agent keeps: nothing here takes or restores units, see tiers.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from gpushare_spawner.agent.sessions.session import Session
from gpushare_spawner.model.controls import AskAnswer, Controls, Message

log = logging.getLogger(__name__)


class SessionControls:
    """Sets keep, exemption and message of a session, and passes on answers to its asks."""

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

    def show(self, session: Session, message: Message) -> None:
        """Show the session's user a message; it replaces the last one."""
        if session.record.message == message:
            return
        session.record.message = message
        if session.conversation is not None:
            session.conversation.tell_message()
        self._save(session)

    def follow(
        self, session: Session, controls: Controls, message: Message | None, answers: Iterable[AskAnswer]
    ) -> None:
        """Take over what the service wrote elsewhere, as often as it is looked at. Only asks that wait are answered."""
        self.replace(session, controls)
        if message is not None:
            self.show(session, message)
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
