"""What this notebook server asks of the service through the agent: a keep, its end, a release, a stop, another share.

The service decides, and answers with a sentence. Beside the frames: docs/reference/protocol.md.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from typing import Any, Self

from gpushare_spawner.model.layers import LAYER_VARIABLE
from gpushare_spawner.model.protocol.frames import AskKind, Feature, Kind, TextTopic
from gpushare_spawner.model.protocol.texts import ReceivedText, TextReader
from gpushare_spawner.notebook.agent_connection import AgentConnection, AgentUnavailable, session_socket, with_agent
from gpushare_spawner.wording.controls.asks import NO_SHARE, OLD_AGENT, no_answer, wrong_kind, wrong_value
from gpushare_spawner.wording.layers import NO_AGENT

ANSWER_SECONDS = 15.0
"""How long an answer is waited for. The service looks within 2 s on one machine, within 5 s on Kubernetes."""
MOST = 2**53
"""The greatest value: beyond it JSON numbers are not exact. What is allowed is for the service to say."""

KINDS = {kind.name.lower().replace("_", "-"): kind for kind in AskKind}
"""By the name in POST gpushare/ask."""
WITH_VALUE = frozenset({AskKind.KEEP, AskKind.SHARE})


class NoAnswer(AgentUnavailable):
    """The agent took the ask, and the service has not answered in time."""


class WrongAsk(ValueError):
    """What a client sent is no ask; the message says what would be right."""


@dataclass(frozen=True)
class ServiceAsk:
    """One ask. Several observers of a session may ask at once, so the number is chosen at random."""

    kind: AskKind
    value: int
    """Seconds of a keep, units of a share; else 0."""
    number: int

    @classmethod
    def of(cls, kind: AskKind, value: float = 0) -> Self:
        """Return a new ask. Raises WrongAsk for a value that no ask of that kind has."""
        if kind not in WITH_VALUE:
            value = 0
        elif not 1 <= value <= MOST:
            raise WrongAsk(wrong_value(kind))
        return cls(kind, round(value), 1 + secrets.randbelow(2**32 - 1))

    @classmethod
    def from_json(cls, body: Any) -> Self:
        """Return the ask that a browser sent: {"kind": "keep", "value": 14400}. Raises WrongAsk."""
        kind, value = (body.get("kind"), body.get("value", 0)) if isinstance(body, dict) else (None, 0)
        if not isinstance(kind, str) or kind not in KINDS:
            raise WrongAsk(wrong_kind(KINDS))
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise WrongAsk(wrong_value(KINDS[kind]))
        return cls.of(KINDS[kind], value)

    @property
    def fields(self) -> tuple[int, int, int]:
        """The fields of its ASK frame."""
        return self.number, self.kind, self.value


def ask_service(one: ServiceAsk, path: str | None = None, timeout: float = ANSWER_SECONDS) -> ReceivedText:
    """Return the service's answer. ``path`` defaults to $GPUSHARE_SOCKET. Raises AgentUnavailable with a sentence."""
    path = path or session_socket()
    if path is None:
        raise AgentUnavailable(NO_AGENT if os.environ.get(LAYER_VARIABLE) else NO_SHARE)
    sent = False

    def answer(connection: AgentConnection) -> ReceivedText:
        nonlocal sent
        if not connection.welcome.fields[6] & Feature.CONTROLS:
            raise AgentUnavailable(OLD_AGENT)
        connection.send(Kind.ASK, *one.fields)
        sent = True
        reader = TextReader()
        while True:
            text = reader.take(connection.next({Kind.TEXT}))
            # answers go to all observers of the session
            if text is not None and (text.topic, text.number) == (TextTopic.ANSWER, one.number):
                return text

    try:
        return with_agent(path, timeout, answer)
    except AgentUnavailable as error:
        if sent and isinstance(error.__cause__, TimeoutError):
            raise NoAnswer(no_answer(timeout)) from error
        raise
