"""Processes of several pid namespaces and of several users on one state file."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.native.conftest import Run, Start, child_of

MIB = 1 << 20
HOLD = """
machine = Machine()
machine.plain({mib} << 20)
machine.launch("spin", {ms}_000_000)
machine.synchronize()
say(os.getpid())
listen()
"""
LOOK = """
import pynvml as nvml
nvml.nvmlInit()
device = nvml.nvmlDeviceGetHandleByIndex(0)
library = ctypes.CDLL("libnvidia-ml.so.1")
library.simgpu_gpu_time.restype = ctypes.c_int64
def listed():
    found = nvml.nvmlDeviceGetComputeRunningProcesses(device)
    return {one.pid: [one.usedGpuMemory, library.simgpu_gpu_time(0, one.pid) // 1_000_000] for one in found}
"""


def test_processes_with_the_same_pid_in_two_pods_do_not_remove_each_other(
    simulated: Start, pod: tuple[str, ...]
) -> None:
    first, second = (simulated(HOLD.format(mib=mib, ms=ms), pod) for mib, ms in ((100, 20), (60, 40)))
    assert [first.hear(), second.hear()] == [1, 1]
    watch = simulated(LOOK + "while True: listen(); say(listed())")
    watch.say()
    found = watch.hear()
    # NVML shows each by the pid of the reader's namespace, which a parent of it can know
    children = {
        child_of(program.pid): expected for program, expected in ((first, [100 * MIB, 20]), (second, [60 * MIB, 40]))
    }
    assert {int(pid): numbers for pid, numbers in found.items()} == children
    # a third one that joins looks for dead ones; the two stay, and go only with their own processes
    third = simulated(HOLD.format(mib=10, ms=1), pod)
    third.hear()
    watch.say()
    assert len(watch.hear()) == 3
    first.kill()
    found = {}
    deadline = time.monotonic() + 5
    while len(found) != 2 and time.monotonic() < deadline:
        watch.say()
        found = watch.hear()
    assert sorted(numbers[0] for numbers in found.values()) == [10 * MIB, 60 * MIB]


def test_a_pod_reads_its_own_pid_and_a_number_that_no_process_has_for_its_neighbours(
    simulated: Start, pod: tuple[str, ...]
) -> None:
    outside = simulated(HOLD.format(mib=100, ms=20))
    neighbour = simulated(HOLD.format(mib=60, ms=20), pod)
    outside.hear()
    neighbour.hear()
    inside = simulated(LOOK + HOLD.format(mib=10, ms=20).replace("say(os.getpid())", "say(listed())"), pod)
    found = {int(pid): memory for pid, (memory, _) in inside.hear().items()}
    assert found.pop(1) == 10 * MIB
    assert sorted(found.values()) == [60 * MIB, 100 * MIB]
    assert all(pid > 4194304 for pid in found), found


def test_a_forked_child_does_not_keep_its_parents_place(simulated: Start, said: Run) -> None:
    """It has no part in CUDA, and may live on for long after its parent, as multiprocessing's helpers do."""
    parent = simulated(
        """
        machine = Machine()
        machine.plain(100 << 20)
        child = os.fork()
        if child == 0:
            time.sleep(20)
            os._exit(0)
        say(child)
        listen()
        """
    )
    child = parent.hear()
    look = LOOK + "say(listed())"
    assert said(look) == {str(parent.pid): [100 * MIB, 0]}
    parent.kill()
    os.kill(child, 0)
    assert said(look) == {}
    os.kill(child, 9)


@pytest.fixture
def shared_state() -> Iterator[Path]:
    """A state file in a folder that every user may enter."""
    path = Path(f"/dev/shm/simgpu-test-{os.getpid()}-{time.monotonic_ns()}")
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.parametrize(("given", "mode"), [("", None), ("0640", 0o640), ("666", 0o666)])
def test_the_state_file_has_the_mode_that_was_asked_for_whatever_the_umask(
    said: Run, shared_state: Path, given: str, mode: int | None
) -> None:
    standard = 0o666 if os.getuid() == 0 else 0o600
    code = "os.umask(0o077); check(cu.cuInit(0)); say(0)"
    said(code, SIMGPU_STATE=str(shared_state), SIMGPU_STATE_MODE=given)
    assert shared_state.stat().st_mode & 0o777 == (standard if mode is None else mode)


def test_a_mode_that_is_none_is_refused_with_the_reason(simulated: Start, shared_state: Path) -> None:
    for wrong in ("rw", "0888", "0400", "01777"):
        program = simulated("say(code(cu.cuInit(0)))", SIMGPU_STATE=str(shared_state), SIMGPU_STATE_MODE=wrong)
        assert program.hear() == "CUDA_ERROR_SYSTEM_NOT_READY"
        assert f"SIMGPU_STATE_MODE={wrong} is not an octal number" in program.finish()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user for a moment")
@pytest.mark.parametrize("mode", ["", "0600"])
def test_a_notebook_of_a_system_user_opens_the_state_that_the_agent_made_as_root(
    simulated: Start, shared_state: Path, mode: str
) -> None:
    owner = simulated(HOLD.format(mib=10, ms=1), SIMGPU_STATE=str(shared_state), SIMGPU_STATE_MODE=mode)
    owner.hear()
    code = """
    check(cu.cuDriverGetVersion())  # loaded while root
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    say(code(cu.cuInit(0)))
    """
    user = simulated(code, SIMGPU_STATE=str(shared_state))
    if mode == "":
        assert user.hear() == "CUDA_SUCCESS"
    else:
        assert user.hear() == "CUDA_ERROR_SYSTEM_NOT_READY"
        assert "SIMGPU_STATE_MODE=0666 lets all users" in user.finish()


STOPPED = """
machine = Machine()
block = machine.plain(4096)
check(cu.cuMemsetD32(block, 0, 1024))
machine.synchronize()
for number in range({kernels}):
    machine.launch("spin", 20_000_000)
machine.launch("add_u32", block, 1024, 7)
say(os.getpid())
listen()
began = time.monotonic()
machine.synchronize()
waited = time.monotonic() - began
words = np.zeros(1024, np.uint32)
check(cu.cuMemcpyDtoH(words.ctypes.data, block, 4096))
say([waited, int(words.sum())])
"""
BESIDE = """
machine = Machine()
machine.launch("spin", 1_000_000)
machine.synchronize()
say("ready")
while True:
    kernels = listen()
    began = time.monotonic()
    for _ in range(kernels):
        machine.launch("spin", 10_000_000)
    machine.synchronize()
    say(time.monotonic() - began)
"""


def test_kernels_of_a_stopped_process_end_as_on_a_gpu_and_others_go_on(simulated: Start) -> None:
    """It has queued 1 s of work. Another gets half of the GPU beside it, and all of it afterwards."""
    other = simulated(BESIDE)
    assert other.hear() == "ready"
    stopped = simulated(STOPPED.format(kernels=50))
    watch = simulated(LOOK + "while True: listen(); say(listed())")
    pid = stopped.hear()
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    try:
        other.say(20)
        beside = other.hear()
        assert 0.25 < beside < 0.9, "200 ms of work, in turns with the stopped process"
        time.sleep(max(0.0, 1.6 - (time.monotonic() - began)))
        watch.say()
        assert 900 < watch.hear()[str(pid)][1] < 1100, "its queue has run"
        for _ in range(3):
            other.say(20)
        # each alone; on a busy machine one of them can start late
        assert min(other.hear() for _ in range(3)) < 0.35, "nothing of it is left to run"
    finally:
        os.kill(pid, signal.SIGCONT)
    stopped.say()
    waited, total = stopped.hear()
    assert waited < 0.4, "its work was over"
    assert total == 7 * 1024, "and is done"
    watch.say()
    assert watch.hear()[str(pid)][1] < 1100, "no device time counts twice"


def test_process_that_is_stopped_and_goes_on_at_random_loses_no_work(simulated: Start) -> None:
    other, stopped = simulated(BESIDE), simulated(STOPPED.format(kernels=40))
    assert other.hear() == "ready"
    pid, chance = stopped.hear(), random.Random(1)
    for _ in range(12):
        other.say(2)
        time.sleep(chance.uniform(0, 0.03))
        os.kill(pid, signal.SIGSTOP)
        # one that is stopped inside a lock of the simulated driver holds the GPU until it goes on
        goes_on = threading.Timer(1.0, os.kill, (pid, signal.SIGCONT))
        goes_on.start()
        assert other.hear() < 2
        goes_on.cancel()
        time.sleep(chance.uniform(0, 0.05))
        os.kill(pid, signal.SIGCONT)
    stopped.say()
    assert stopped.hear()[1] == 7 * 1024
    other.say(10)
    assert other.hear() < 0.3


ENDLESS = """
machine = Machine()
buffer = machine.plain(2 << 20)
stream = machine.stream()
say(os.getpid())
listen()
events = []
def launches(count, launch):
    for _ in range(count):
        launch()
    events.append(machine.event())
    check(cu.cuEventRecord(events[-1], stream))
    if len(events) > 30:
        check(cu.cuEventSynchronize(events.pop(0)))
def graph(kernels):
    check(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    for _ in range(kernels):
        machine.launch("spin", 200_000, stream=stream)
    return check(cu.cuGraphInstantiate(check(cu.cuStreamEndCapture(stream)), 0))
while True:
    {work}
"""
WORK = {
    "long kernels": 'launches(10, lambda: machine.launch("spin", 10_000_000, stream=stream))',
    "long kernels on one page": """launches(
        1, lambda: machine.launch("touch", buffer, 4096, 100_000_000, stream=stream)
    )""",
    "short kernels and events": 'launches(1, lambda: machine.launch("spin", 200_000, stream=stream))',
    "kernels of a time slice": 'launches(1, lambda: machine.launch("spin", 2_000_000, stream=stream))',
    "short kernels and memsets": """launches(
        1, lambda: (machine.launch("spin", 200_000, stream=stream), cu.cuMemsetD32Async(buffer, 0, 1024, stream))
    )""",
    "graphs of short kernels": """whole = graph(20)
    while True: launches(1, lambda: check(cu.cuGraphLaunch(whole, stream)))""",
}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("long kernels", "short kernels and events"),
        ("long kernels", "short kernels and memsets"),
        ("long kernels", "graphs of short kernels"),
        ("long kernels on one page", "long kernels"),
        ("long kernels", "kernels of a time slice"),
    ],
)
def test_second_program_gets_half_of_the_gpu_from_its_start(simulated: Start, first: str, second: str) -> None:
    programs = [simulated(ENDLESS.format(work=WORK[kernels])) for kernels in (first, second)]
    pids = [program.hear() for program in programs]
    watch = simulated(LOOK + "while True: listen(); say(listed())")

    def milliseconds() -> list[int]:
        watch.say()
        found = watch.hear()
        return [found[str(pid)][1] for pid in pids]

    programs[0].say()
    time.sleep(0.5)
    programs[1].say()
    before = milliseconds()
    time.sleep(1)
    received = [late - early for early, late in zip(before, milliseconds(), strict=True)]
    assert 0.4 < received[1] / sum(received) < 0.6, received
