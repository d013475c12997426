"""Puts texts together that come as several TEXT frames. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from gpushare_spawner.model.protocol.frames import MAX_TEXT_LETTERS, Frame, TextPart


@dataclass(frozen=True)
class ReceivedText:
    """A complete text."""

    topic: int
    """See `TextTopic`; another number is of a newer agent."""
    number: int
    done: bool
    text: str
    """At most MAX_TEXT_LETTERS long; bytes that are no UTF-8 are replaced."""


class TextReader:
    """Reads the TEXT frames of one connection. It keeps one unfinished text for each topic, of 2 KiB at most."""

    MOST_TOPICS = 8
    """Topics of unfinished texts that are kept; the oldest is dropped."""

    def __init__(self) -> None:
        self._unfinished: dict[int, list[TextPart]] = {}

    def take(self, frame: Frame) -> ReceivedText | None:
        """Return the text that this frame completes, if it completes one.

        A part that does not continue its text drops the text. Raises FrameError for a frame that no text has.
        """
        part = TextPart.of(frame)
        parts = self._unfinished.pop(part.topic, [])
        if part.part == 0:
            parts = []
        if part.part != len(parts) or any((one.number, one.parts) != (part.number, part.parts) for one in parts):
            return None
        parts.append(part)
        if len(parts) < part.parts:
            while len(self._unfinished) >= self.MOST_TOPICS:
                del self._unfinished[next(iter(self._unfinished))]
            self._unfinished[part.topic] = parts
            return None
        text = b"".join(one.data for one in parts).decode(errors="replace")[:MAX_TEXT_LETTERS]
        return ReceivedText(part.topic, part.number, part.done, text)
