"""When the agent looks at what is on a GPU."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from typing import cast

from gpushare_spawner.agent.gpus.nvml import Gpu, GpuSource, GpuState
from gpushare_spawner.agent.gpus.samples import MemoryQueries
from tests.agent.peers import FIRST


class Driver:
    """Counts the questions; answers when it may."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self.answer: GpuState | None = GpuState(healthy=True, memory_used_bytes=7)
        self.may_answer = threading.Event()
        self.may_answer.set()

    def memory(self, gpu: Gpu) -> GpuState | None:
        assert gpu is FIRST
        self.asked.append(time.monotonic())
        self.may_answer.wait(5)
        return self.answer


class Listener:
    def __init__(self) -> None:
        self.poll_interval: float | None = None
        self.heard: list[Mapping[str, GpuState]] = []


def looking() -> tuple[Driver, Listener, MemoryQueries]:
    driver, listener = Driver(), Listener()
    source = cast("GpuSource", driver)
    return driver, listener, MemoryQueries(FIRST, source, lambda: listener.poll_interval, listener.heard.append)


async def test_the_driver_is_asked_every_so_often_while_it_matters_and_not_otherwise() -> None:
    driver, listener, looks = looking()
    looks.request()
    await asyncio.sleep(0.1)
    assert driver.asked == []
    listener.poll_interval = 0.05
    looks.request()
    looks.request()
    await asyncio.sleep(0.28)
    assert 3 <= len(driver.asked) <= 6
    assert listener.heard[0][FIRST.uuid].memory_used_bytes == 7
    listener.poll_interval = None
    await asyncio.sleep(0.1)
    asked = len(driver.asked)
    await asyncio.sleep(0.15)
    assert len(driver.asked) == asked


async def test_a_first_request_is_looked_at_at_once_also_while_a_question_is_out() -> None:
    driver, listener, looks = looking()
    driver.may_answer.clear()
    looks.at_once()
    await asyncio.sleep(0.05)
    assert len(driver.asked) == 1
    looks.at_once()
    driver.may_answer.set()
    await asyncio.sleep(0.1)
    assert len(driver.asked) == len(listener.heard) == 2


async def test_many_first_requests_are_few_questions() -> None:
    driver, _, looks = looking()
    for _ in range(100):
        looks.at_once()
        await asyncio.sleep(0.001)
    assert len(driver.asked) < 30


async def test_a_driver_without_an_answer_is_asked_again_and_nobody_after_the_end() -> None:
    driver, listener, looks = looking()
    driver.answer, listener.poll_interval = None, 0.02
    looks.request()
    await asyncio.sleep(0.15)
    assert len(driver.asked) >= 2
    assert listener.heard == []
    looks.close()
    await asyncio.sleep(0.05)
    asked = len(driver.asked)
    looks.at_once()
    looks.request()
    await asyncio.sleep(0.1)
    assert len(driver.asked) == asked
