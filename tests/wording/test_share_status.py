"""The share in words, where the figures decide the sentence."""

from __future__ import annotations

import pytest

from gpushare_spawner.wording.actions import closed
from gpushare_spawner.wording.share_status import received_time


@pytest.mark.parametrize(
    ("received", "entitled", "said"),
    [
        (7.0, 7.0, "all that it was entitled to (7 s)"),
        (9.0, 7.0, "all that it was entitled to (7 s)"),
        (6.99, 7.0, "all that it was entitled to (7 s)"),
        (3.0, 7.0, "3 s of the 7 s that it was entitled to"),
    ],
)
def test_received_time_is_compared_with_what_the_session_was_entitled_to(
    received: float, entitled: float, said: str
) -> None:
    assert received_time(received, entitled) == said


@pytest.mark.parametrize(
    ("drain", "reason", "said"),
    [
        (True, "kernel update", "Draining (admin: kernel update). No new sessions."),
        (False, "", "Cordoned (admin). No new sessions."),
    ],
)
def test_a_closed_gpu_says_by_whom_and_why(drain: bool, reason: str, said: str) -> None:
    assert closed(drain, "admin", reason) == said
