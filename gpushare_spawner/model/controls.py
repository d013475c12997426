"""What users and admins decide about one session: a keep, an exemption, messages; and what its notebook server asks.

The service decides, with its own clock; the agent keeps what was decided. Limits of keeps: `idle.keep`.

A cordon keeps new sessions away from a GPU or a node; a drain also has the sessions there leave. Pure data.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from gpushare_spawner.model.frames import MAX_TEXT_LETTERS, AskKind
from gpushare_spawner.model.quantity import Instant

MOST_KEEPS = 16
"""Beginnings of keeps that are remembered for "how often"."""
MOST_ASKS = 4
"""Asks of one session that wait for an answer at a time: so many that act, and so many that only read."""
ASK_SECONDS = 60.0
"""After this time an ask is dropped: whoever asked has given up."""

AskNumber = Annotated[int, Field(ge=1, le=2**32 - 1)]
Text = Annotated[str, Field(max_length=MAX_TEXT_LETTERS)]


class _Control(BaseModel):
    # Unknown fields are ignored: a newer service can write more than this agent understands.
    model_config = ConfigDict(extra="ignore", frozen=True)


class Keep(_Control):
    """The user keeps the share: no downgrade, release or idle stop comes."""

    until: Instant
    since: Instant
    by: str
    """The name of the user who gave it."""


class Exemption(_Control):
    """No idle action at all comes to the session, by an admin's decision."""

    until: Instant | None = None
    """None: without end."""
    by: str
    reason: str = ""


class MessageCause(StrEnum):
    """Why a message stands. A message ends with its cause; of each cause the last message stands."""

    ADMIN = "admin"
    """An admin wrote it. It stands until an admin withdraws it."""
    DRAIN = "drain"
    """The session's GPU or node is drained. It ends with the drain."""
    ACTION = "action"
    """An admin acted on the session, and says why. It stands as one of an admin."""

    @classmethod
    def _missing_(cls, value: Any) -> MessageCause:
        return cls.ADMIN  # a cause that only a newer version knows


class Message(_Control):
    """What an admin tells the session's user. Instants in the text are as `wording.amounts.utc` writes them."""

    text: Annotated[str, Field(min_length=1, max_length=MAX_TEXT_LETTERS)]
    by: str
    at: Instant
    cause: MessageCause = MessageCause.ADMIN


def with_message(messages: Iterable[Message], message: Message) -> tuple[Message, ...]:
    """Return the messages after another one has come, the earliest first: it replaces the one of its cause."""
    return tuple(sorted((*without_message(messages, message.cause), message), key=lambda one: one.at))


def without_message(messages: Iterable[Message], cause: MessageCause) -> tuple[Message, ...]:
    """Return the messages without that of a cause."""
    return tuple(message for message in messages if message.cause is not cause)


class Ask(_Control):
    """What the session's own notebook server asks of the service."""

    number: AskNumber
    """Chosen by whoever asks; the answer repeats it."""
    kind: Annotated[AskKind | int, Field(union_mode="left_to_right")]
    """Another number is of a newer agent."""
    value: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Seconds of a keep, units of a share; else 0."""
    at: Instant
    """When it came, by the agent's clock."""


class AskAnswer(_Control):
    """What became of an ask."""

    number: AskNumber
    done: bool
    text: Text
    at: Instant


class Controls(_Control):
    """What stands for a session now. The service writes all of it at once."""

    keep: Keep | None = None
    keeps: Annotated[tuple[Instant, ...], Field(max_length=MOST_KEEPS)] = ()
    """When keeps of the last 24 hours began, the earliest first."""
    exemption: Exemption | None = None


NO_CONTROLS = Controls()
"""Nobody has decided anything."""


MAX_REASON = 200
"""Letters. The reason goes into a message to each session's user, see `model.controls.Message`."""


class Cordon(BaseModel):
    """By an admin's decision no new sessions come. Sessions that run keep their shares."""

    # Unknown fields are ignored: a newer service can write more than this agent understands.
    model_config = ConfigDict(extra="ignore", frozen=True)

    gpu: str = ""
    """The GPU's UUID; empty: all GPUs of the node."""
    by: str
    reason: Annotated[str, Field(max_length=MAX_REASON)] = ""
    since: Instant
    drain: bool = False
    """The sessions there are told to leave."""
    stop_at: Instant | None = None
    """Of a drain: when the servers that are still there are stopped, but not before their template's notice period
    after their users were told is over; None: never."""
