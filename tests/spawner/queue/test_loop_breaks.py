"""Long work lets other tasks run."""

from __future__ import annotations

import asyncio
import gc

import pytest

from gpushare_spawner.spawner.queue.loop_breaks import LoopBreaks


async def test_others_run_when_the_last_break_is_too_long_ago_and_not_before() -> None:
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
    breaks = LoopBreaks(0.004, lambda: now, makes_lasting_objects=lasting)
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
