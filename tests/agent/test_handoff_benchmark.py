"""What the hand-off benchmark counts."""

from __future__ import annotations

from benchmarks.handoff import Burst, hand_offs, percentile


def test_only_those_count_who_waited_when_the_other_ended() -> None:
    first = [
        Burst(asked=0, began=0, ended=30),
        Burst(asked=40, began=65, ended=95),
        Burst(asked=200, began=205, ended=235),
    ]
    second = [Burst(asked=10, began=34, ended=64), Burst(asked=70, began=99, ended=129)]
    # 30 -> 34, 64 -> 65, 95 -> 99; the last one asked long after the other had ended
    assert hand_offs(first, second) == [4, 1, 4]


def test_bursts_of_the_same_process_are_no_hand_off() -> None:
    assert hand_offs([Burst(0, 0, 30), Burst(31, 32, 62)], []) == []


def test_percentiles_by_nearest_rank() -> None:
    assert percentile(list(range(1, 101)), 99) == 99
    assert percentile(list(range(1, 101)), 50) == 50
    assert percentile([7], 99) == 7
