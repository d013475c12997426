"""cuCheckpointProcess* of the simulated driver: one process suspends another's CUDA state and brings it back."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from tests.native.conftest import Program, Start

MIB = 1 << 20
RUNNING, LOCKED, CHECKPOINTED, FAILED = range(4)

CALLER = """
def lock(pid, timeout_ms=0):
    args = cu.CUcheckpointLockArgs()
    args.timeoutMs = timeout_ms
    return cu.cuCheckpointProcessLock(pid, args)
CALLS = {
    "lock": lock,
    "checkpoint": lambda pid: cu.cuCheckpointProcessCheckpoint(pid, cu.CUcheckpointCheckpointArgs()),
    "restore": lambda pid: cu.cuCheckpointProcessRestore(pid, cu.CUcheckpointRestoreArgs()),
    "unlock": lambda pid: cu.cuCheckpointProcessUnlock(pid, cu.CUcheckpointUnlockArgs()),
    "state": cu.cuCheckpointProcessGetState,
    "thread": cu.cuCheckpointProcessGetRestoreThreadId,
}
import pynvml as nvml
nvml.nvmlInit()
def shown(device):
    handle = nvml.nvmlDeviceGetHandleByIndex(device)
    processes = {one.pid: one.usedGpuMemory >> 20 for one in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
    return {"used": nvml.nvmlDeviceGetMemoryInfo(handle).used >> 20, "processes": processes}
CALLS["shown"] = lambda device: (cu.CUresult.CUDA_SUCCESS, shown(device))
while True:
    name, *arguments = listen()
    began = time.monotonic()
    result = CALLS[name](*arguments)
    value = result[1] if len(result) > 1 else None
    say([code(result), value if value is None or isinstance(value, dict) else int(value), time.monotonic() - began])
"""


class Caller:
    """A process that calls cuCheckpointProcess* without cuInit, as an agent does."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.seconds = 0.0

    def ask(self, name: str, *arguments: Any) -> tuple[str, Any]:
        """Begin a call."""
        self.program.say([name, *arguments])
        return self.answer()

    def answer(self) -> tuple[str, Any]:
        """The code of the call and its value; `seconds` is how long it took."""
        error, value, self.seconds = self.program.hear()
        return error.removeprefix("CUDA_"), value

    def does(self, pid: int, *names: str) -> None:
        """Calls that have to succeed."""
        for name in names:
            assert (name, self.ask(name, pid)[0]) == (name, "SUCCESS")

    def state(self, pid: int) -> int:
        error, value = self.ask("state", pid)
        assert error == "SUCCESS"
        return int(value)

    def shown(self, device: int = 0) -> dict[str, Any]:
        """MiB used on a GPU, and by which processes, as NVML has it."""
        return dict(self.ask("shown", device)[1])


@pytest.fixture
def caller(simulated: Start) -> Callable[..., Caller]:
    def start(**more: str) -> Caller:
        return Caller(simulated(CALLER, **more))

    return start


HOLDS = """
machine = Machine()
data = np.random.default_rng(1).integers(0, 1 << 32, 4 << 20, dtype=np.uint32)  # 16 MiB
address = machine.plain(data.nbytes)
machine.write(address, data)
say(int(address))
"""
"""A program with 16 MiB of plain memory that it knows the content of; it says its address."""


def holding(code: str) -> str:
    return HOLDS + textwrap.dedent(code)


def test_a_process_leaves_the_gpu_and_comes_back_with_its_memory(
    simulated: Start, caller: Callable[..., Caller]
) -> None:
    program = simulated(
        holding(
            """
            listen()
            machine.launch("add_u32", address, len(data), 5)
            say(bool((machine.read(address, len(data)) == data + np.uint32(5)).all()))
            """
        )
    )
    program.hear()
    agent = caller()
    pid = program.pid
    assert agent.state(pid) == RUNNING
    assert agent.shown() == {"used": 16, "processes": {str(pid): 16}}
    agent.does(pid, "lock")
    assert agent.state(pid) == LOCKED
    assert agent.shown()["used"] == 16
    agent.does(pid, "checkpoint")
    assert agent.state(pid) == CHECKPOINTED
    assert agent.shown() == {"used": 0, "processes": {}}
    program.say()  # its launch waits
    agent.does(pid, "restore")
    assert agent.state(pid) == LOCKED
    assert agent.shown() == {"used": 16, "processes": {str(pid): 16}}
    agent.does(pid, "unlock")
    assert agent.state(pid) == RUNNING
    assert program.hear() is True
