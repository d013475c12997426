"""Short bursts of many processes: all are read, and the arbiter hears of as many as the session's budget allows."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import cast

import pytest

from gpushare_spawner.agent import session_socket
from gpushare_spawner.agent.gpus.arbitration import CudaClient
from gpushare_spawner.agent.session_socket import COSTS, CPU_SHARE, FRAMES_IN_STORE, FRAMES_PER_SECOND, FairReading
from gpushare_spawner.agent.sessions.conversation import BurstFrames
from gpushare_spawner.model.frames import NO_GPU, Frame, Kind
from tests.agent.conftest import Agent, Eventually
from tests.agent.peers import FIRST

TELLING = 0.00083
"""Seconds that the arbiter takes for BUSY or IDLE, measured with 50 sessions on a GPU."""
READING = 0.00003
"""Seconds for a frame beside that."""
BURSTS = 150
"""A second: the library sends no more, as gaps under 3 ms end no burst."""
BUFFER = 278
"""Frames that a socket's buffer holds. The library gives a connection up whose buffer is full."""


class Machine:
    """The agent's event loop and one session's processes, in virtual time; only the session takes CPU time."""

    def __init__(self, processes: int, frames_per_second: float) -> None:
        self.now = self.cpu = 0.0
        self.timers: list[tuple[float, int, Callable[[], None]]] = []
        loop = cast("asyncio.AbstractEventLoop", self)
        self.reading = FairReading(loop, lambda: self.cpu)
        self.bursts: BurstFrames[Process] = BurstFrames(self.reading, self.tell, self.call_later)
        self.processes = [Process(self, frames_per_second, number / 1000) for number in range(processes)]

    def time(self) -> float:
        return self.now

    def call_soon(self, call: Callable[[], None]) -> asyncio.TimerHandle:
        return self.call_later(0.0, call)

    def call_later(self, seconds: float, call: Callable[[], None]) -> asyncio.TimerHandle:
        self.timers.append((self.now + seconds, len(self.timers), call))
        return cast("asyncio.TimerHandle", call)

    def works(self, seconds: float) -> None:
        self.cpu += seconds
        self.now += seconds

    def tell(self, process: Process, frame: Frame) -> None:
        self.works(TELLING)
        process.told(frame)

    def run(self, until: float) -> None:
        while self.now < until:
            begun = self.now
            due = sorted((timer for timer in self.timers if timer[0] <= self.now), key=lambda timer: timer[:2])
            self.timers = [timer for timer in self.timers if timer[0] > self.now]
            for _, _, call in due:
                call()
            for process in self.processes:
                process.sends()
                if process.unread and not process.held:
                    self.reading.readable(process)
            if self.now == begun:
                self.now += 0.0002


class Process:
    """One with short bursts."""

    def __init__(self, machine: Machine, frames_per_second: float, begins: float) -> None:
        self.machine, self.every, self.next_at = machine, 1 / frames_per_second, begins
        self.unread: deque[Frame] = deque()
        self.held = False
        self.most_unread = self.sent = 0
        self.last_told: Frame | None = None
        self.last_sent: Frame | None = None
        self.silences: list[float] = []
        self.told_at = 0.0

    def sends(self) -> None:
        """What it has sent by now; its next frame waits where the buffer is full."""
        while self.next_at <= self.machine.now and len(self.unread) < BUFFER:
            self.last_sent = Frame(Kind.IDLE if self.sent % 2 else Kind.BUSY, (1, self.sent, 0), NO_GPU)
            self.unread.append(self.last_sent)
            self.sent += 1
            self.next_at = max(self.next_at + self.every, self.machine.now - 1)
        self.most_unread = max(self.most_unread, len(self.unread))

    def told(self, frame: Frame) -> None:
        self.silences.append(self.machine.now - self.told_at)
        self.last_told, self.told_at = frame, self.machine.now

    def read_frame(self) -> float | None:
        if not self.unread:
            return None
        self.machine.works(READING)
        frame = self.unread.popleft()
        self.machine.bursts.received(self, frame)
        return COSTS.get(frame.kind, 1)

    def pause_reading(self) -> None:
        self.held = True

    def resume_reading(self) -> None:
        self.held = False


def most_cpu(seconds: float) -> float:
    """What a session may take, with what it had saved up and the last frame."""
    return 1.05 * CPU_SHARE * (seconds + FRAMES_IN_STORE / FRAMES_PER_SECOND)


@pytest.mark.parametrize("processes", [1, 2, 4, 6])
def test_bursts_of_honest_processes_beside_50_sessions_fill_no_buffer(processes: int) -> None:
    machine = Machine(processes, 2 * BURSTS)
    machine.run(until=4)
    assert max(process.most_unread for process in machine.processes) < BUFFER / 4
    assert min(process.sent for process in machine.processes) >= 1190, "none of them had to wait"
    assert machine.cpu <= most_cpu(4)
    # the arbiter knows of each process what it did some ten milliseconds ago
    assert max(max(process.silences) for process in machine.processes) < 0.02 * processes


def test_one_process_is_heard_at_once() -> None:
    machine = Machine(1, BURSTS)
    machine.run(until=5)
    (process,) = machine.processes
    assert process.last_told is process.last_sent
    assert len(process.silences) == process.sent


def test_the_last_state_is_heard_when_the_bursts_end() -> None:
    machine = Machine(4, 2 * BURSTS)
    machine.run(until=5)
    for process in machine.processes:
        process.next_at = float("inf")
    machine.run(until=5.5)
    assert all(process.last_told is process.last_sent for process in machine.processes)


@pytest.mark.parametrize("processes", [1, 16, 100])
def test_floods_take_no_more_than_the_bound(processes: int) -> None:
    machine = Machine(processes, 100_000)
    machine.run(until=3)
    assert machine.cpu <= most_cpu(3)


async def test_frames_beyond_the_budget_are_heard_in_order_before_the_next_frame_of_another_kind(
    agent: Agent, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = await agent.peer(agent.open("ada"))
    peer.send(Kind.REQUEST, 1000, 0, 1, gpu=FIRST.uuid)
    lease = (await peer.until(Kind.GRANT)).fields[0]
    arbitration = agent.node.arbitrations[FIRST.uuid]
    heard: list[tuple[Kind, int]] = []
    receive = arbitration.receive

    def hears(client: CudaClient, frame: Frame) -> None:
        heard.append((frame.kind, frame.fields[1]))
        receive(client, frame)

    monkeypatch.setattr(arbitration, "receive", hears)
    # no spare budget, as after many short bursts
    monkeypatch.setattr(session_socket, "KEPT_FOR_READING", 10 * FRAMES_IN_STORE)
    for number in range(1, 4):
        peer.send(Kind.IDLE, lease, number, 0, gpu=FIRST.uuid)
        peer.send(Kind.BUSY, lease, 0, 0, gpu=FIRST.uuid)
    await asyncio.sleep(0.05)
    assert not heard
    peer.send(Kind.RELEASE, lease, 9, 0, gpu=FIRST.uuid)
    await eventually(lambda: len(heard) == 3)
    assert heard == [(Kind.IDLE, 3), (Kind.BUSY, 0), (Kind.RELEASE, 9)]
    assert not agent.node.report().sessions[0].gpu_busy
