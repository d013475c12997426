"""What observers are sent about session controls: the frames CONTROLS and TEXT of docs/reference/protocol.md."""

from __future__ import annotations

from typing import Protocol

from gpushare_spawner.model.controls import AskAnswer, Controls, Message
from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.protocol.frames import MAX_TEXT_LETTERS, NO_END, Feature, Kind, TextTopic, text_parts

MILLISECONDS = 1000


class Receiver(Protocol):
    """A connection of an observer."""

    @property
    def features(self) -> Feature:
        """What the process says that it can do."""

    def send(self, kind: Kind, *fields: int) -> None:
        """Send a frame."""


def send_controls(to: Receiver, controls: Controls, largest_share: int) -> None:
    """Send until when the user keeps the share, until when an admin exempts the session, and how its share can grow.

    `largest_share`: in units; 0: the share cannot be changed.
    """
    if Feature.CONTROLS not in to.features:
        return
    keep, exemption = controls.keep, controls.exemption
    exempt_until = 0
    if exemption is not None:
        exempt_until = NO_END if exemption.until is None else _milliseconds(exemption.until)
    to.send(Kind.CONTROLS, 0 if keep is None else _milliseconds(keep.until), exempt_until, largest_share)


def send_message(to: Receiver, message: Message) -> None:
    """Send an admin's message."""
    _send_text(to, TextTopic.MESSAGE, _milliseconds(message.at), message.text)


def send_answer(to: Receiver, answer: AskAnswer) -> None:
    """Send what became of an ask."""
    _send_text(to, TextTopic.ANSWER, answer.number, answer.text, answer.done)


def send_not_suspendable(to: Receiver, reason: str) -> None:
    """Send why the session cannot be suspended."""
    _send_text(to, TextTopic.NOT_SUSPENDABLE, 1, reason[:MAX_TEXT_LETTERS])


def send_layer(to: Receiver, layer: LayerName, gpus: int, trouble: str | None) -> None:
    """Send which sharing layer gives the session so many GPUs, and what is wrong with it. Of our own layer nothing is
    sent."""
    if layer is not LayerName.NATIVE:
        _send_text(to, TextTopic.LAYER, gpus, layer)
        if trouble is not None:
            _send_text(to, TextTopic.LAYER_TROUBLE, 1, trouble[:MAX_TEXT_LETTERS])


def _send_text(to: Receiver, topic: TextTopic, number: int, text: str, done: bool = False) -> None:
    if Feature.CONTROLS in to.features:
        for part in text_parts(topic, number, text, done):
            to.send(Kind.TEXT, *part.fields())


def _milliseconds(instant: float) -> int:
    return round(instant * MILLISECONDS)
