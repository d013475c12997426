"""An exception without a text, and a status without a phrase, still say something."""

from __future__ import annotations

import pytest

from gpushare_spawner.wording.amounts import http_status, reason


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError("no route"), "no route"),
        (TimeoutError(), "TimeoutError"),
        (ConnectionResetError(""), "ConnectionResetError"),
    ],
)
def test_a_reason_is_never_empty(error: Exception, said: str) -> None:
    assert reason(error) == said


@pytest.mark.parametrize(
    ("phrase", "said"), [("Service Unavailable", "503 Service Unavailable"), ("", "503"), (None, "503")]
)
def test_a_status_without_a_phrase_is_its_number(phrase: str | None, said: str) -> None:
    assert http_status(503, phrase) == said
