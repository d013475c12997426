"""Session controls in a pod's annotations: the service writes them, the agent follows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

from pydantic import Field, TypeAdapter

from gpushare_spawner.model.controls import MOST_ASKS, MOST_KEEPS, AskAnswer, Controls, Exemption, Keep, Message
from gpushare_spawner.model.instant import Instant
from gpushare_spawner.model.kubernetes.json_annotations import read_json
from gpushare_spawner.model.kubernetes.prefix import PREFIX

KEEP = PREFIX + "keep"
"""Annotation: JSON of `model.controls.Keep`; absent: the share is not kept."""
KEEPS = PREFIX + "keeps"
"""Annotation: JSON list of the instants at which keeps of the last 24 hours began; absent: none did."""
EXEMPTION = PREFIX + "exemption"
"""Annotation: JSON of `model.controls.Exemption`; absent: idle actions come to the session."""
MESSAGE = PREFIX + "message"
"""Annotation: JSON of `model.controls.Message`, the last one to the session's user; absent: none stands. For readers
that do not know `MESSAGES`."""
MESSAGES = PREFIX + "messages"
"""Annotation: JSON list of the `model.controls.Message` that stand, one of each cause, the earliest first; absent: at
most that of `MESSAGE` stands."""
ANSWERS = PREFIX + "answers"
"""Annotation: JSON list of the last `model.controls.AskAnswer`, the latest last."""

_KEEP: TypeAdapter[Keep | None] = TypeAdapter(Keep)
_EXEMPTION: TypeAdapter[Exemption | None] = TypeAdapter(Exemption)
_MESSAGE: TypeAdapter[Message | None] = TypeAdapter(Message)
_MESSAGES: TypeAdapter[tuple[Message, ...]] = TypeAdapter(tuple[Message, ...])
_KEEPS: TypeAdapter[tuple[float, ...]] = TypeAdapter(Annotated[tuple[Instant, ...], Field(max_length=MOST_KEEPS)])
_ANSWERS: TypeAdapter[tuple[AskAnswer, ...]] = TypeAdapter(tuple[AskAnswer, ...])


def controls_patch(controls: Controls) -> dict[str, str | None]:
    """Return the annotations of a merge patch that sets a session's controls."""
    keep, exemption = controls.keep, controls.exemption
    return {
        KEEP: None if keep is None else keep.model_dump_json(),
        KEEPS: _KEEPS.dump_json(controls.keeps).decode() if controls.keeps else None,
        EXEMPTION: None if exemption is None else exemption.model_dump_json(),
    }


def messages_patch(messages: Sequence[Message]) -> dict[str, str | None]:
    """Return the annotations of a merge patch that shows the user these messages, the earliest first, and no others."""
    if not messages:
        return {MESSAGE: None, MESSAGES: None}
    return {MESSAGE: messages[-1].model_dump_json(), MESSAGES: _MESSAGES.dump_json(tuple(messages)).decode()}


def answers_patch(before: Iterable[AskAnswer], answer: AskAnswer) -> dict[str, str | None]:
    """Return the annotations of a merge patch that answers an ask. ``before``: the answers that are there."""
    kept = [one for one in before if one.number != answer.number][-(MOST_ASKS - 1) :]
    return {ANSWERS: _ANSWERS.dump_json((*kept, answer)).decode()}


def read_controls(annotations: Mapping[str, str]) -> Controls:
    """Return the controls that annotations say. Raises ValueError, which names the annotation that is wrong."""
    return Controls(
        keep=read_json(annotations, KEEP, _KEEP, None),
        keeps=read_json(annotations, KEEPS, _KEEPS, ()),
        exemption=read_json(annotations, EXEMPTION, _EXEMPTION, None),
    )


def read_messages(annotations: Mapping[str, str]) -> tuple[Message, ...]:
    """Return the messages that stand, the earliest first. Raises ValueError as `read_controls` does."""
    last = read_json(annotations, MESSAGE, _MESSAGE, None)
    messages = read_json(annotations, MESSAGES, _MESSAGES, ())
    if last is None or last in messages:
        return messages if last is not None else ()
    return (last,)  # of an older service


def read_answers(annotations: Mapping[str, str]) -> tuple[AskAnswer, ...]:
    """Return the last answers. Raises ValueError as `read_controls` does."""
    return read_json(annotations, ANSWERS, _ANSWERS, ())
