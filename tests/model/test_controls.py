"""Session controls as they cross process boundaries: requests, reports, and frames with texts."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from gpushare_spawner.model.control import REQUEST, AnswerRequest, ControlsRequest, MessageRequest
from gpushare_spawner.model.controls import Ask, AskAnswer, Controls, Exemption, Keep, Message
from gpushare_spawner.model.frames import AskKind
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
def test_requests_about_controls_survive_json(request_made: ControlsRequest | MessageRequest | AnswerRequest) -> None:
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
