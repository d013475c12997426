"""Which sessions count as interactive, and what a hand-off beside others stops, figure by figure."""

from __future__ import annotations

import pytest

from gpushare_spawner.arbiter.session import ArbiterSettings, ArbitratedSession, Client
from gpushare_spawner.arbiter.time_slices import bound, is_interactive, newcomers, part_of_gpu

SETTINGS = ArbiterSettings(short_burst=5.0, long_pause=30.0, returning_pause=10.0, overhead_bound=0.025)


@pytest.mark.parametrize(
    ("attained", "typical_burst", "pause", "interactive"),
    [
        (5.0, None, 1.0, True),
        (5.1, None, 100.0, False),
        (0.0, 5.0, 1.0, True),
        (0.0, 5.1, 9.9, False),
        (0.0, 5.1, 10.0, True),
    ],
)
def test_a_session_is_interactive_by_its_work_since_its_pause_and_after_ten_seconds_if_its_bursts_are_long(
    attained: float, typical_burst: float | None, pause: float, interactive: bool
) -> None:
    session = ArbitratedSession("a", 10, attained=attained, pause=pause)
    if typical_burst is not None:
        session.bursts.learn(typical_burst)
    assert is_interactive(session, SETTINGS) is interactive
    expected = SETTINGS.interactive_overhead_bound if interactive else SETTINGS.overhead_bound
    assert bound([Client("c", session)], SETTINGS) == expected
    assert bound([], SETTINGS) == SETTINGS.overhead_bound


def test_those_that_paused_may_come_early_the_least_attained_first() -> None:
    sessions = [
        ArbitratedSession("a", 1, attained=3.0),
        ArbitratedSession("b", 1, attained=1.0),
        ArbitratedSession("c", 1, paused=False),
    ]
    clients = [Client(session.id, session) for session in sessions]
    assert [client.id for client in newcomers(clients, SETTINGS)] == ["b", "a"]


def test_a_hand_off_stops_the_movers_part_of_the_gpu_by_weight_of_those_at_work_beside_it() -> None:
    mover, worker, quiet, parked = (
        Client(name, ArbitratedSession(name, weight)) for name, weight in zip("mwqp", (20, 60, 40, 20), strict=True)
    )
    worker.lease = quiet.lease = 1
    quiet.quiet_since = 0.0
    assert part_of_gpu([mover], []) == 1.0
    assert part_of_gpu([mover], [worker, quiet, mover]) == pytest.approx(0.25)
    parked.parked = True
    assert part_of_gpu([mover], [worker, quiet, parked]) == pytest.approx(0.2)
    assert part_of_gpu([], [worker]) == 1.0


def test_a_session_of_which_no_burst_is_known_is_interactive_however_short_bursts_have_to_be() -> None:
    assert is_interactive(ArbitratedSession("a", 10, pause=1.0), ArbiterSettings(short_burst=0.5))
