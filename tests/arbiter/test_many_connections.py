"""The time for a decision does not grow with the square of the connections of a session."""

from __future__ import annotations

import sys

from gpushare_spawner.arbiter.gpu_arbiter import GpuArbiter

GIB = 2**30
SESSIONS = 6


def lines_of_a_decision(connections: int) -> int:
    """Lines of Python that one decision runs, while so many clients of each session have waited for very long."""
    arbiter = GpuArbiter(16 * GIB)
    for session in range(SESSIONS):
        arbiter.add_session(f"s{session}", 16, 0.0)
        for number in range(connections):
            arbiter.connect((session, number), f"s{session}", 0.0)
            arbiter.request((session, number), 10 * GIB, 0, 0.0)
    lines = 0

    def trace(frame: object, event: str, argument: object) -> object:
        nonlocal lines
        lines += event == "line"
        return trace

    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        arbiter.tick(4000.0)
    finally:
        sys.settrace(None)
    return lines


def test_four_times_as_many_connections_cost_at_most_four_times_as_much() -> None:
    assert lines_of_a_decision(80) < 4.1 * lines_of_a_decision(20)
