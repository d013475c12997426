"""A session's controls (keep, exemption, messages), its notebook server's asks, and cordons. Pure data.

The service decides, with its own clock, and the agent stores the decisions. The limits of keeps are in `idle.keep`. A
cordon keeps new sessions away from a GPU or a node. A drain is a cordon that also asks the users of running sessions to
leave.

`SpawnNote` is the service's note to the spawner in a spawn request, about an action on the earlier server or spawn. It
is a user option, because the hub's route for servers accepts nothing else. The spawner removes it immediately.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gpushare_spawner.model.frames import MAX_TEXT_LETTERS, AskKind
from gpushare_spawner.model.part import MessagePart
from gpushare_spawner.model.quantity import Instant

MOST_KEEPS = 16
"""Maximum number of recorded start times of keeps, for the limit on keeps within 24 hours."""
MOST_ASKS = 4
"""Maximum number of a session's asks that wait at the same time: of asks to act, and of asks that only read."""
ASK_SECONDS = 60.0
"""Seconds after which an ask is dropped, because its sender has timed out by then."""

AskNumber = Annotated[int, Field(ge=1, le=2**32 - 1)]
Text = Annotated[str, Field(max_length=MAX_TEXT_LETTERS)]


class Keep(MessagePart):
    """A user's keep of the share. It prevents downgrades, releases and idle stops until it ends."""

    until: Instant
    since: Instant
    by: str
    """The name of the user or admin."""


class Exemption(MessagePart):
    """An admin's exemption of the session from all idle actions."""

    until: Instant | None = None
    """None: indefinitely."""
    by: str
    reason: str = ""


class MessageCause(StrEnum):
    """The cause of a message. A message ends with its cause. Only the last message of each cause is shown."""

    ADMIN = "admin"
    """An admin wrote the message. It lasts until an admin withdraws it."""
    DRAIN = "drain"
    """The session's GPU or node is drained. The message ends with the drain."""
    ACTION = "action"
    """An admin acted on the session and gave a reason. The message lasts like one of cause ADMIN."""
    BYPASS = "bypass"
    """Processes without the library make the session exceed its memory limit. The message lasts as long."""
    BUDGET = "budget"
    """What is left of the session's budgets. The status shows it apart from admins' messages."""

    @classmethod
    def _missing_(cls, value: Any) -> MessageCause:
        return cls.ADMIN  # a cause of a newer version


class Message(MessagePart):
    """An admin's message to the session's user. Instants in the text have the form of `wording.amounts.utc`."""

    text: Annotated[str, Field(min_length=1, max_length=MAX_TEXT_LETTERS)]
    by: str
    at: Instant
    cause: MessageCause = MessageCause.ADMIN


def with_message(messages: Iterable[Message], message: Message) -> tuple[Message, ...]:
    """Return the messages with a new one, earliest first. It replaces the message of the same cause."""
    return tuple(sorted((*without_message(messages, message.cause), message), key=lambda entry: entry.at))


def without_message(messages: Iterable[Message], cause: MessageCause) -> tuple[Message, ...]:
    """Return the messages without the message of a cause."""
    return tuple(message for message in messages if message.cause is not cause)


class Ask(MessagePart):
    """An ask: a request of the session's own notebook server to the service."""

    number: AskNumber
    """Number that the sender chooses and the answer repeats."""
    kind: Annotated[AskKind | int, Field(union_mode="left_to_right")]
    """A number without an AskKind is from a newer agent."""
    value: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Seconds of a keep or units of a share; otherwise 0."""
    at: Instant
    """The time of its arrival, by the agent's clock."""


class AskAnswer(MessagePart):
    """The result of an ask."""

    number: AskNumber
    done: bool
    text: Text
    at: Instant


class Controls(MessagePart):
    """A session's current controls. The service always writes all of them."""

    keep: Keep | None = None
    keeps: Annotated[tuple[Instant, ...], Field(max_length=MOST_KEEPS)] = ()
    """The start times of the keeps of the last 24 hours, earliest first."""
    exemption: Exemption | None = None


NO_CONTROLS = Controls()
"""The controls of a session without any decision."""


MAX_REASON = 200
"""Maximum characters of a reason. It becomes part of a message to each session's user, see `Message`."""


class Cordon(MessagePart):
    """An admin's decision to exclude a GPU or node from new sessions. Running sessions keep their shares."""

    gpu: str = ""
    """The GPU's UUID; empty: all GPUs of the node."""
    by: str
    reason: Annotated[str, Field(max_length=MAX_REASON)] = ""
    since: Instant
    drain: bool = False
    """Whether the users of the sessions there are asked to leave."""
    stop_at: Instant | None = None
    """For a drain: the time at which the remaining servers are stopped, but not before their users have had the notice
    period of their template; None: never."""


NOTE_OPTION = "gpushare_note"
"""Name of the user option. Users can also set it, but only they read the text."""
STATE_KEY = "gpushare_stopped"
"""Key in the spawner's state for the reason why the server was stopped. The hub's pages read it
(`spawner/pages/hub`)."""
MAX_LETTERS = 500


class SpawnNote(BaseModel):
    """A note about an action on the earlier server or spawn."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    text: str = Field(min_length=1, max_length=MAX_LETTERS)
    """The action as a sentence."""
    cancelled: bool = False
    """Whether the earlier spawn was cancelled. Nothing is started then, and the text is shown to the user."""
    stopped: bool = False
    """Whether the server was stopped. Nothing is started then, and the hub's pages show the text until the next
    spawn."""

    def within(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the user options with this note."""
        return {**options, NOTE_OPTION: self.model_dump(exclude_defaults=True)}


def taken_out(options: Any) -> tuple[dict[str, Any], SpawnNote] | None:
    """Return the user options without their note, and the note; None if there is no valid note."""
    if not isinstance(options, dict) or NOTE_OPTION not in options:
        return None
    try:
        note = SpawnNote.model_validate(options[NOTE_OPTION])
    except ValidationError:
        return None
    return {name: value for name, value in options.items() if name != NOTE_OPTION}, note
