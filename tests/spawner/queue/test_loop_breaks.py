"""Long work lets other tasks run."""

from __future__ import annotations

import asyncio
import gc
from unittest.mock import Mock

import pytest

from gpushare_spawner.spawner.queue import queue
from gpushare_spawner.spawner.queue.queue import LoopBreaks


async def test_others_run_when_the_last_break_is_too_long_ago_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoopBreaks, "freezes", 0)  # as in a process that has read nothing: a break collects no garbage
    now = 0.0
    others = 0

    async def count() -> None:
        nonlocal others
        while True:
            others += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(count())
    breaks = LoopBreaks(0.004, lambda: now)
    await breaks.pause_if_due()
    assert others == 0
    now = 0.004
    await breaks.pause_if_due()
    assert others == 1
    await breaks.pause_if_due()
    assert others == 1
    now = 0.008
    await breaks.through(range(3))
    assert others == 2
    other.cancel()


@pytest.mark.parametrize("lasting", [False, True])
async def test_the_garbage_collector_leaves_out_what_stays_from_the_next_break_on(lasting: bool) -> None:
    now = 0.0
    breaks = LoopBreaks(0.004, lambda: now, lasting=lasting)
    frozen = gc.get_freeze_count()
    try:
        made = [[number] for number in range(1000)]
        now = 0.003
        await breaks.pause_if_due()
        assert gc.get_freeze_count() == frozen
        now = 0.006
        await breaks.pause_if_due()
        assert (gc.get_freeze_count() >= frozen + len(made)) == lasting
    finally:
        gc.unfreeze()


async def test_readings_that_fail_for_ever_exclude_no_more_objects_after_some_breaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cycles that are garbage at such a moment would stay for ever."""
    monkeypatch.setattr(queue, "MOST_FREEZES", 3)
    monkeypatch.setattr(LoopBreaks, "freezes", 0)
    freeze = Mock()
    monkeypatch.setattr(gc, "freeze", freeze)
    for _ in range(10):
        await LoopBreaks(0.0, lambda: 0.0, lasting=True).through(range(2))
    assert freeze.call_count == 3


@pytest.mark.parametrize(("took", "middle", "before", "collects", "freezes"), [
    (0.005, 2, 1, True, True), (0.003, 2, 1, True, False), (0.005, 1, 1, False, False),
    (0.005, 2, 0, False, False), (0.005, 2, queue.MOST_FREEZES, False, False),
])  # fmt: skip
async def test_later_work_collects_often_and_excludes_what_stays_where_it_is_much(
    monkeypatch: pytest.MonkeyPatch, took: float, middle: int, before: int, collects: bool, freezes: bool
) -> None:
    """Not in a process that never read a large cluster: there a collection of all would take longer than a break."""
    now, freeze, collect = 0.0, Mock(), Mock()

    def pass_time(generation: int) -> None:
        nonlocal now
        now += took

    collect.side_effect = pass_time
    monkeypatch.setattr(gc, "freeze", freeze)
    monkeypatch.setattr(gc, "collect", collect)
    monkeypatch.setattr(gc, "get_count", lambda: (0, 0, middle))
    monkeypatch.setattr(LoopBreaks, "freezes", before)
    breaks = LoopBreaks(0.004, lambda: now)
    now = 0.004
    await breaks.pause_if_due()
    assert (collect.called, freeze.called, LoopBreaks.freezes) == (collects, freezes, before + freezes)


async def test_tuples_of_numbers_and_strings_are_no_work_for_the_collector_after_that() -> None:
    made = [(number, (str(number), number)) for number in range(100)]
    try:
        await LoopBreaks(0.0, lambda: 0.0, lasting=True).pause_if_due()
        assert not any(gc.is_tracked(one[1]) for one in made)
    finally:
        gc.unfreeze()
