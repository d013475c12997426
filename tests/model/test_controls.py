"""Session controls as they cross process boundaries: requests, reports, and frames with texts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from gpushare_spawner.model.control import REQUEST, AnswerRequest, ControlsRequest, MessageRequest
from gpushare_spawner.model.controls import Ask, AskAnswer, Controls, Exemption, Keep, Message
from gpushare_spawner.model.frames import (
    MAX_TEXT_LETTERS,
    MAX_TEXT_PARTS,
    AskKind,
    Frame,
    FrameError,
    Kind,
    TextPart,
    TextTopic,
    text_parts,
)
from gpushare_spawner.model.quantity import LATEST
from tests.model.test_messages import REPORT

CONTROLS = Controls(
    keep=Keep(until=2000, since=1000, by="ada"), keeps=(500, 1000), exemption=Exemption(by="root", reason="exam")
)
ANSWER = AskAnswer(number=7, done=True, text="Kept.", at=1000)


@pytest.mark.parametrize(
    "request_made",
    [
        ControlsRequest.of("ada", CONTROLS),
        ControlsRequest.of("ada", Controls(), ANSWER),
        MessageRequest(id="ada", message=Message(text="Please stop.", by="root", at=1000)),
        AnswerRequest(id="ada", answer=ANSWER),
    ],
)
def test_requests_about_controls_survive_json(
    request_made: ControlsRequest | MessageRequest | AnswerRequest,
) -> None:
    assert REQUEST.validate_json(request_made.model_dump_json()) == request_made


def test_a_request_replaces_all_controls_of_a_session() -> None:
    assert ControlsRequest.of("ada", CONTROLS).controls == CONTROLS
    session = REPORT.sessions[0].model_copy(update=dict(CONTROLS))
    assert session.controls == CONTROLS


@pytest.mark.parametrize("instant", ["NaN", "Infinity", "1e18", "-1", "253402300800"])
def test_instants_that_no_calendar_has_are_rejected(instant: str) -> None:
    with pytest.raises(ValidationError):
        Keep.model_validate_json(f'{{"until": {instant}, "since": 1, "by": "ada"}}')
    assert Keep(until=LATEST, since=0, by="ada").until == LATEST


@pytest.mark.parametrize(
    "wrong", [{"number": 0}, {"number": 2**32}, {"value": float("nan")}, {"value": float("inf")}, {"value": -1}]
)
def test_an_ask_out_of_bounds_is_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Ask.model_validate({"number": 1, "kind": AskKind.KEEP, "value": 60, "at": 1} | wrong)


def test_a_report_with_an_ask_of_a_newer_agent_can_be_read() -> None:
    raw = REPORT.model_dump(mode="json")
    raw["sessions"][0]["asks"] = [{"number": 1, "kind": kind, "value": 0, "at": 1} for kind in (AskKind.STOP, 99)]
    kinds = [ask.kind for ask in REPORT.model_validate(raw).sessions[0].asks]
    assert kinds == [AskKind.STOP, 99]
    assert isinstance(kinds[0], AskKind)


@given(st.text(max_size=MAX_TEXT_LETTERS), st.integers(0, 2**64 - 1), st.booleans())
def test_every_text_of_500_letters_fits_into_its_frames(text: str, number: int, done: bool) -> None:
    parts = text_parts(TextTopic.ANSWER, number, text, done)
    assert 1 <= len(parts) <= MAX_TEXT_PARTS
    received = [TextPart.of(Frame.unpack(Frame(Kind.TEXT, part.fields()).pack())) for part in parts]
    assert received == parts
    assert b"".join(part.data for part in received).decode() == text
    assert {(part.number, part.done, part.parts) for part in received} == {(number, done, len(parts))}
    assert [part.part for part in received] == list(range(len(parts)))


def test_a_text_that_is_too_long_is_rejected() -> None:
    with pytest.raises(FrameError, match="at most 2048 bytes"):
        text_parts(TextTopic.MESSAGE, 1, "x" * 2049)


@given(st.lists(st.integers(0, 2**64 - 1), min_size=12, max_size=12))
def test_random_text_frames_are_rejected_or_within_bounds(fields: list[int]) -> None:
    try:
        part = TextPart.of(Frame(Kind.TEXT, tuple(fields)))
    except FrameError:
        return
    assert part.part < part.parts <= MAX_TEXT_PARTS
    assert len(part.data) <= 64


def test_a_text_frame_with_an_impossible_part_is_rejected() -> None:
    for where, size in ((1 | 1 << 16, 0), (0, 0), (0 | 33 << 16, 0), (0 | 1 << 16, 65)):
        with pytest.raises(FrameError, match="a TEXT frame"):
            TextPart.of(Frame(Kind.TEXT, (1, 1, where, size, *[0] * 8)))
