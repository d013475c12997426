"""The driver's samples: whose they are, and when they are asked for."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import cast

import pytest

from gpushare_spawner.agent import processes
from gpushare_spawner.agent.gpus.arbitration import GpuArbitration
from gpushare_spawner.agent.gpus.nvml import Gpu, GpuSource, Utilisation
from gpushare_spawner.agent.gpus.samples import Delivery, Pids
from gpushare_spawner.arbiter.session import ArbiterSettings
from gpushare_spawner.model.frames import Kind
from tests.agent.peers import FIRST, GIB
from tests.agent.test_arbitration import Recorder, World, frame


class Driver:
    """Answers as told, and counts the questions."""

    def __init__(self, *answers: tuple[Utilisation, ...] | None) -> None:
        self.answers = list(answers)
        self.asked: list[float] = []

    def utilisation(self, gpu: Gpu, since: float) -> tuple[Utilisation, ...] | None:
        assert gpu is FIRST
        self.asked.append(since)
        return self.answers.pop(0) if self.answers else ()


class Listener:
    """Competes as long as it is told to."""

    def __init__(self) -> None:
        self.contended = True
        self.heard: list[tuple[tuple[float, float], Mapping[int, float]]] = []

    def delivered(
        self, seconds_ago: tuple[float, float], busy: Mapping[int, float], strangers: Mapping[int, str]
    ) -> None:
        self.heard.append((seconds_ago, busy))


async def test_samples_are_asked_for_while_sessions_compete_and_not_otherwise() -> None:
    driver, listener = Driver(), Listener()
    delivery = Delivery(FIRST, cast("GpuSource", driver), listener)
    await asyncio.sleep(0.3)
    assert driver.asked == []
    driver.answers.append((Utilisation(7, time.time() + 0.15, 0.5),))
    delivery.request()
    delivery.request()
    await asyncio.sleep(0.3)
    assert len(driver.asked) == 1
    ((since, until), busy), *_ = listener.heard
    assert since - until == pytest.approx(0.15, abs=0.05)
    assert busy[7] == pytest.approx(0.5 * (since - until))
    listener.contended = False
    await asyncio.sleep(0.5)
    assert len(driver.asked) == 2
    delivery.close()


@pytest.mark.parametrize("step", [86400.0, -86400.0])
async def test_a_clock_that_is_set_makes_no_sample_of_a_day(step: float) -> None:
    """Else somebody would be charged with a day of GPU time."""
    driver, listener = Driver(), Listener()
    delivery = Delivery(FIRST, cast("GpuSource", driver), listener, every=0.02)
    stepped = 0.0
    delivery._clock._wall = lambda: time.time() + stepped
    delivery.request()
    await asyncio.sleep(0.1)
    driver.answers.append((Utilisation(7, time.time(), 0.5),))  # of before, read after it
    stepped = step
    await asyncio.sleep(0.1)
    driver.answers += [(Utilisation(7, time.time() + stepped + after, 0.5),) for after in (0.0, 0.02, 0.04)]
    await asyncio.sleep(0.2)
    delivery.close()
    assert listener.heard
    assert all(0 <= since - until < 1 and sum(busy.values()) < 1 for (since, until), busy in listener.heard)


async def test_a_driver_that_never_tells_is_asked_once() -> None:
    driver, listener = Driver(None), Listener()
    delivery = Delivery(FIRST, cast("GpuSource", driver), listener)
    for _ in range(3):
        delivery.request()
        await asyncio.sleep(0.25)
    assert len(driver.asked) == 1
    assert listener.heard == []


async def test_one_that_wants_the_next_sample_while_it_takes_one_starts_no_second_row_of_questions() -> None:
    """The arbitration does. Rows became more and more, and two threads asked at the same time."""
    driver = Driver()

    class Wanting(Listener):
        def delivered(
            self, seconds_ago: tuple[float, float], busy: Mapping[int, float], strangers: Mapping[int, str]
        ) -> None:
            super().delivered(seconds_ago, busy, strangers)
            delivery.request()

    delivery = Delivery(FIRST, cast("GpuSource", driver), listener := Wanting())
    driver.answers += [(Utilisation(7, time.time() + 0.15 + 0.01 * number, 0.5),) for number in range(60)]
    delivery.request()
    await asyncio.sleep(1.5)
    assert len(listener.heard) >= 2
    assert len(driver.asked) <= 7, "five times a second"
    delivery.close()


async def test_samples_go_on_where_the_sessions_of_processes_cannot_be_found() -> None:
    driver, listener = Driver(), Listener()

    def fail(pids: object) -> Mapping[int, str]:
        raise KeyError(7)

    delivery = Delivery(FIRST, cast("GpuSource", driver), listener, fail)
    delivery.request()
    driver.answers += [(Utilisation(7, time.time() + seconds, 0.5),) for seconds in (0.1, 0.3, 0.5)]
    await asyncio.sleep(1.0)
    assert len(listener.heard) >= 2
    delivery.close()


def test_seconds_of_all_processes_of_a_session_are_added_up() -> None:
    pids = Pids()
    me, parent = os.getpid(), os.getppid()
    pids.joined(1, "ada", processes.named(me))
    pids.joined(2, "ada", processes.named(me))
    pids.joined(3, "bob", processes.named(parent))
    assert pids.by_session({me: 0.2, parent: 0.1, 4711: 9.0}, {}) == {"ada": 0.2, "bob": 0.1}
    assert pids.by_session({}, {}) == {"ada": 0.0, "bob": 0.0}


def test_a_process_without_a_connection_counts_for_the_session_that_the_kernel_names() -> None:
    pids = Pids()
    pids.joined(1, "ada", processes.named(os.getpid()))
    # a connection counts more than the attribution
    strangers = {os.getpid(): "bob", 4711: "ada", 4712: "bob"}
    seconds = {os.getpid(): 0.2, 4711: 0.1, 4712: 0.3, 4713: 0.4}
    assert pids.by_session(seconds, strangers) == {"ada": pytest.approx(0.3), "bob": 0.3}


def test_a_session_with_a_process_that_cannot_be_seen_is_left_out() -> None:
    pids = Pids()
    pids.joined(1, "ada", processes.named(os.getpid()))
    pids.joined(2, "ada", None)
    assert pids.by_session({os.getpid(): 0.2}, {}) == {}


def test_a_process_that_left_and_lives_on_still_counts_until_it_ends() -> None:
    pids = Pids()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        pids.joined(1, "ada", processes.named(process.pid))
        assert pids.left(1)
        assert pids.by_session({process.pid: 0.2}, {}) == {"ada": 0.2}
        assert pids.ended() == []
        process.kill()
    assert pids.ended() == [(1, "ada")]
    assert not pids.waiting
    assert pids.by_session({process.pid: 0.2}, {}) == {}


def test_clients_that_know_a_pace_are_told_it_when_others_come() -> None:
    world = World()
    shell = GpuArbitration(FIRST, ArbiterSettings(), lambda: world.now, world.call_at)
    new, old, other = (Recorder(number, world) for number in (1, 2, 3))
    for client, session, paced in ((new, "ada", True), (old, "ada", False), (other, "bob", True)):
        shell.add_session(session, 25) if client is not old else None
        shell.join(client, session, paced=paced)
        shell.receive(client, frame(Kind.REQUEST, GIB))
    lease = new.told[0][2][0]
    paces = [fields[3] for _, kind, fields in new.told if kind is Kind.GRANT and fields[0] == lease]
    assert paces == [0, 100_000_000, 20_000_000]
    assert other.told[0][2][3] == 20_000_000
    assert all(len(fields) == 3 for _, _, fields in old.told)
