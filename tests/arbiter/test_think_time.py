"""How long a holder's pauses are, and which of them are worth waiting for."""

from __future__ import annotations

import pytest

from gpushare_spawner.arbiter.session import CLEARLY_LONGER, WINDOW, RecentSpans


def spans(*seconds: float) -> RecentSpans:
    recent = RecentSpans()
    for span in seconds:
        recent.learn(span)
    return recent


def test_the_typical_span_is_the_median_of_the_last_seven() -> None:
    assert spans().typical is None
    assert spans(1, 60, 2).typical == 2
    assert WINDOW == 7
    assert spans(*[100] * 7, 1, 2, 3).typical == 100
    assert spans(*[100] * 7, 1, 2, 3, 4).typical == 4
    assert spans(-3, -1).typical == 0


@pytest.mark.parametrize(
    ("pauses", "hand_off", "patience"),
    [
        ((), 1.0, 0.0),
        ((2.0, 3.0), 1.0, 0.0),  # all as long as a hand-off or longer
        ((1.0,), 1.0, 0.0),
        ((0.1,), 1.0, 0.4),
        ((0.1, 0.1, 0.2), 1.0, 0.4),  # the typical short one, not the longest
        ((0.1, 60.0), 1.0, 0.4),  # long ones are of another kind ...
        ((0.1, 60.0, 60.0), 1.0, 0.0),  # ... but three hand-offs in nine are not worth four tenths of one each time
        ((0.5,), 1.0, 1.0),  # never longer than the hand-off costs
        ((0.125, 60.0), 1.0, 0.5),  # as much is saved as is waited
        ((0.13, 60.0), 1.0, 0.0),
    ],
)
def test_a_holder_is_waited_for_until_its_pause_is_clearly_none_of_the_short_ones(
    pauses: tuple[float, ...], hand_off: float, patience: float
) -> None:
    assert CLEARLY_LONGER == 4
    assert spans(*pauses).patience(hand_off) == pytest.approx(patience)
