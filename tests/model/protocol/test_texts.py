"""Texts that come in several frames are put together, and nothing that an agent sends fills the memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_spawner.model.frames import (
    MAX_TEXT_LETTERS,
    MAX_TEXT_PARTS,
    Frame,
    FrameError,
    Kind,
    ReceivedText,
    TextPart,
    TextReader,
    TextTopic,
    text_parts,
)

LONG = "wörter " * 40


def frames(topic: int, number: int, text: str, done: bool = False) -> list[Frame]:
    return [Frame(Kind.TEXT, part.fields()) for part in text_parts(TextTopic(topic), number, text, done)]


def read(reader: TextReader, sent: list[Frame]) -> list[ReceivedText]:
    return [text for frame in sent if (text := reader.take(frame)) is not None]


@given(st.text(max_size=MAX_TEXT_LETTERS), st.integers(1, 2**64 - 1), st.booleans())
def test_a_text_is_read_as_it_was_sent(text: str, number: int, done: bool) -> None:
    sent = frames(TextTopic.ANSWER, number, text, done)
    assert read(TextReader(), sent) == [ReceivedText(TextTopic.ANSWER, number, done, text)]


def test_parts_of_texts_of_two_topics_may_alternate() -> None:
    answer, message = frames(TextTopic.ANSWER, 7, LONG), frames(TextTopic.MESSAGE, 8, LONG[1:])
    mixed = [frame for pair in zip(answer, message, strict=True) for frame in pair]
    assert {(text.topic, text.text) for text in read(TextReader(), mixed)} == {(1, LONG), (2, LONG[1:])}


def test_a_text_without_one_of_its_parts_is_dropped_and_the_next_one_is_read() -> None:
    reader = TextReader()
    broken = frames(TextTopic.ANSWER, 7, LONG)
    assert read(reader, broken[:1] + broken[2:]) == []
    assert [text.number for text in read(reader, frames(TextTopic.ANSWER, 8, LONG))] == [8]


def test_a_text_that_another_one_interrupts_is_dropped() -> None:
    first, second = frames(TextTopic.ANSWER, 7, LONG), frames(TextTopic.ANSWER, 8, LONG)
    assert [text.number for text in read(TextReader(), [first[0], *second, *first[1:]])] == [8]


def test_parts_of_two_texts_do_not_become_one() -> None:
    first, second = frames(TextTopic.ANSWER, 7, LONG), frames(TextTopic.ANSWER, 8, LONG)
    assert read(TextReader(), first[:1] + second[1:]) == []


def test_unfinished_texts_of_many_topics_are_not_kept() -> None:
    reader = TextReader()
    for topic in range(1000):
        assert reader.take(Frame(Kind.TEXT, TextPart(topic, 1, 0, 2, False, b"a").fields())) is None
    assert len(reader._unfinished) == TextReader.MOST_TOPICS
    assert reader.take(Frame(Kind.TEXT, TextPart(999, 1, 1, 2, False, b"b").fields())) is not None


@pytest.mark.parametrize("parts", [0, MAX_TEXT_PARTS + 1, 2**16 - 1])
def test_a_text_of_too_many_parts_is_refused(parts: int) -> None:
    with pytest.raises(FrameError, match="a TEXT frame with part"):
        TextReader().take(Frame(Kind.TEXT, (1, 1, parts << 16, 1)))


def test_bytes_that_are_no_utf_8_are_replaced() -> None:
    (text,) = read(TextReader(), [Frame(Kind.TEXT, TextPart(1, 1, 0, 1, True, b"a\xffb").fields())])
    assert text.text == "a\ufffdb"
