"""cuCheckpointProcess* of the simulated driver: one process suspends another's CUDA state and brings it back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.native.conftest import Program, Run, Start, child_of

SCRIPT = Path(__file__).parent / "checkpoint_caller.py"
RUNNING, LOCKED, CHECKPOINTED, FAILED = range(4)


class Caller:
    """A process that runs checkpoint_caller.py."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.seconds = 0.0

    def begin(self, name: str, *arguments: Any) -> None:
        self.program.say([name, *arguments])

    def end(self) -> tuple[str, Any]:
        """The code of the call and its value; `seconds` is how long it took."""
        error, value, self.seconds = self.program.hear()
        return error.removeprefix("CUDA_").removeprefix("ERROR_"), value

    def ask(self, name: str, *arguments: Any) -> tuple[str, Any]:
        self.begin(name, *arguments)
        return self.end()

    def error(self, name: str, *arguments: Any) -> str:
        return self.ask(name, *arguments)[0]

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


Call = Callable[..., Caller]


@pytest.fixture
def caller(simgpu_environment: dict[str, str]) -> Iterator[Call]:
    """Start a caller, with environment variables besides; `user`: the number of the user that it becomes."""
    callers: list[Caller] = []

    def start(user: int | None = None, **more: str) -> Caller:
        command = [sys.executable, "-E", "-S", str(SCRIPT), *([] if user is None else [str(user)])]
        callers.append(Caller(Program(command, simgpu_environment | more)))
        return callers[-1]

    yield start
    for one in callers:
        one.program.process.kill()
        one.program.process.communicate()


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


def test_a_process_leaves_the_gpu_and_comes_back_with_its_memory(simulated: Start, caller: Call) -> None:
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


def test_a_lock_waits_for_the_work_and_gives_up_at_its_time_out(simulated: Start, caller: Call) -> None:
    program = simulated(
        holding(
            """
            for ms in (400, 150):
                listen()
                machine.launch("spin", ms * 1_000_000)
                say(True)
            listen()
            machine.synchronize()
            say(True)
            """
        )
    )
    program.hear()
    agent = caller()
    agent.state(program.pid)  # it has started now
    began = time.monotonic()
    program.say()
    program.hear()
    assert agent.error("lock", program.pid, 100) == "NOT_READY"
    assert 0.1 <= agent.seconds < 1
    assert agent.state(program.pid) == RUNNING
    program.say()
    program.hear()  # it could launch: it runs on
    agent.does(program.pid, "lock")
    assert time.monotonic() - began > 0.55
    program.say()
    time.sleep(0.05)
    agent.does(program.pid, "unlock")
    assert program.hear() is True


def stop(pid: int) -> None:
    """Stop a process: its threads run on for a moment after the signal was sent."""
    os.kill(pid, signal.SIGSTOP)
    stats = list(Path(f"/proc/{pid}/task").glob("*/stat"))
    while any(stat.read_text().rpartition(")")[2].split()[0] != "T" for stat in stats):
        time.sleep(0.001)


def test_a_lock_ends_when_its_caller_is_killed_and_the_process_is_stopped_or_gone(
    simulated: Start, caller: Call
) -> None:
    program = simulated(
        holding(
            """
            word = machine.plain(4)
            machine.write(word, np.zeros(1, np.uint32))
            check(cu.cuStreamWaitValue32(0, word, 1, 0))  # no end without the other stream
            other = machine.stream(cu.CUstream_flags.CU_STREAM_NON_BLOCKING.value)
            say(True)
            listen()
            check(cu.cuStreamWriteValue32(other, word, 1, 0))
            machine.synchronize()
            say(True)
            listen()
            """
        )
    )
    program.hear()
    program.hear()
    pid = program.pid
    agent, killed = caller(), caller()
    assert killed.state(pid) == RUNNING  # it has started now
    killed.begin("lock", pid)
    time.sleep(0.1)
    assert agent.error("lock", pid, 50) == "NOT_READY"  # the other one is at it
    assert agent.error("state", pid) == "SUCCESS"
    killed.program.kill()
    program.say()
    assert program.hear() is True
    assert agent.state(pid) == RUNNING
    stop(pid)
    assert agent.error("lock", pid, 50) == "NOT_READY"
    assert agent.seconds < 1
    os.kill(pid, signal.SIGCONT)
    time.sleep(0.05)
    assert agent.state(pid) == RUNNING
    agent.does(pid, "lock", "unlock")
    stop(pid)
    agent.begin("lock", pid)
    time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    # the second where the kill comes before the call: the dead process waits for its parent, and has no CUDA any more
    assert agent.end()[0] in ("INVALID_VALUE", "NOT_INITIALIZED")


def test_calls_that_change_something_wait_and_others_go_on(simulated: Start, caller: Call) -> None:
    program = simulated(
        holding(
            """
            import threading
            stream, event, pool = machine.stream(), machine.event(), check(cu.cuDeviceGetDefaultMemPool(0))
            check(cu.cuEventRecord(event, stream))
            machine.synchronize()
            graph = check(cu.cuGraphCreate(0))
            exec = check(cu.cuGraphInstantiate(graph, 0))
            prop = cu.CUmemAllocationProp()
            prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
            prop.location = place("device")
            some = np.zeros(1, np.uint32)
            blocked = {
                "launch": lambda: machine.launch("spin", 1000, stream=stream),
                "copy": lambda: machine.read(address, 1),
                "set": lambda: check(cu.cuMemsetD8(address, 0, 4)),
                "graph launch": lambda: check(cu.cuGraphLaunch(exec, stream)),
                "instantiate": lambda: check(cu.cuGraphInstantiate(graph, 0)),
                "record": lambda: check(cu.cuEventRecord(event, stream)),
                "event query": lambda: cu.cuEventQuery(event),
                "event create": lambda: machine.event(),
                "event wait": lambda: check(cu.cuEventSynchronize(event)),
                "stream query": lambda: cu.cuStreamQuery(stream),
                "stream create": lambda: machine.stream(),
                "stream wait": lambda: check(cu.cuStreamSynchronize(stream)),
                "host function": lambda: check(cu.cuStreamWriteValue32(stream, address, 1, 0)),
                "context": lambda: check(cu.cuDevicePrimaryCtxRetain(0)),
                "context wait": lambda: machine.synchronize(),
                "module": lambda: check(cu.cuModuleLoadData(PTX.read_bytes() + b"\\0")),
                "alloc": lambda: machine.plain(1 << 20),
                "alloc async": lambda: check(cu.cuMemAllocAsync(1 << 20, stream)),
                "free": lambda: check(cu.cuMemFree(0)),
                "managed": lambda: machine.managed(1),
                "pinned": lambda: check(cu.cuMemAllocHost(4096)),
                "register": lambda: check(cu.cuMemHostRegister(some.ctypes.data, some.nbytes, 0)),
                "vmm": lambda: check(cu.cuMemCreate(2 << 20, prop, 0)),
                "reserve": lambda: check(cu.cuMemAddressReserve(2 << 20, 0, 0, 0)),
                "info": lambda: check(cu.cuMemGetInfo()),
            }
            done = []
            def call(name):
                check(cu.cuCtxSetCurrent(machine.context))
                say_from.wait()
                blocked[name]()
                done.append(name)
            say_from = threading.Event()
            threads = [threading.Thread(target=call, args=(name,), daemon=True) for name in blocked]
            for thread in threads:
                thread.start()
            listen()
            say_from.set()
            time.sleep(0.15)
            free = [
                cu.cuCtxGetCurrent(), cu.cuCtxSetCurrent(machine.context), cu.cuDriverGetVersion(),
                cu.cuDeviceGetCount(), cu.cuGetErrorString(cu.CUresult(1)), cu.cuStreamIsCapturing(stream),
                cu.cuMemGetAddressRange(address),
                cu.cuPointerGetAttribute(cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address),
                cu.cuInit(0), cu.cuModuleGetFunction(machine.module, b"spin"), cu.cuStreamGetFlags(stream),
            ]
            say([done[:], sorted({code(result) for result in free})])
            for thread in threads:
                thread.join()
            say(sorted(set(blocked) - set(done)))
            """
        )
    )
    program.hear()
    agent = caller()
    agent.does(program.pid, "lock")
    program.say()
    assert program.hear() == [[], ["CUDA_SUCCESS"]]
    agent.does(program.pid, "checkpoint", "restore", "unlock")
    assert program.hear() == []


def test_each_call_needs_its_state(simulated: Start, caller: Call) -> None:
    program = simulated(holding("listen()"))
    program.hear()
    agent, pid = caller(), program.pid
    allowed = {RUNNING: {"lock"}, LOCKED: {"checkpoint", "unlock"}, CHECKPOINTED: {"restore"}}
    for step, state in (("lock", LOCKED), ("checkpoint", CHECKPOINTED), ("restore", LOCKED), ("unlock", RUNNING)):
        now = agent.state(pid)
        for name in {"lock", "checkpoint", "restore", "unlock"} - allowed[now]:
            assert (now, name, agent.error(name, pid)) == (now, name, "ILLEGAL_STATE")
        assert agent.state(pid) == now
        agent.does(pid, step)
        assert agent.state(pid) == state


def test_a_pid_has_to_be_of_a_process_that_uses_cuda(simulated: Start, caller: Call) -> None:
    program = simulated("say(0); listen(); check(cu.cuInit(0)); say(1); listen()")
    program.hear()
    agent = caller()
    ended = subprocess.Popen(["true"])
    ended.wait()
    for name in ("lock", "checkpoint", "restore", "unlock", "state", "thread"):
        assert {agent.error(name, pid) for pid in (0, -1, ended.pid)} == {"INVALID_VALUE"}
        assert agent.error(name, program.pid) == "NOT_INITIALIZED"
    program.say()
    program.hear()
    assert agent.state(program.pid) == RUNNING
    error, thread = agent.ask("thread", program.pid)
    assert error == "SUCCESS"
    assert thread != program.pid
    assert os.path.isdir(f"/proc/{program.pid}/task/{thread}")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user for a moment")
def test_another_user_is_not_permitted(simulated: Start, caller: Call) -> None:
    path = f"/dev/shm/simgpu-test-{os.getpid()}-{time.monotonic_ns()}"
    try:
        program = simulated(HOLDS + "listen()", SIMGPU_STATE=path)
        program.hear()
        agent = caller(user=65534, SIMGPU_STATE=path)
        for name in ("lock", "checkpoint", "restore", "unlock", "state", "thread"):
            assert agent.error(name, program.pid) == "NOT_PERMITTED"
    finally:
        os.unlink(path)


@pytest.mark.parametrize("support", ["absent", "unsupported"])
def test_a_driver_without_checkpoints(simulated: Start, support: str) -> None:
    program = simulated(
        """
        check(cu.cuInit(0))
        library, found = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        name = b"cuCheckpointProcessLock"
        versions = (12070, 12080)
        say([library.cuGetProcAddress(name, ctypes.byref(found), version, ctypes.c_uint64(0)) for version in versions])
        say(library.cuCheckpointProcessLock(os.getpid(), None))
        """,
        SIMGPU_CHECKPOINT=support,
    )
    not_found, not_supported = 500, 801
    assert program.hear() == [not_found, not_found if support == "absent" else 0]
    assert program.hear() == not_supported


def test_arguments_have_to_be_zero_where_they_are_reserved(said: Run) -> None:
    program = """
    check(cu.cuInit(0))
    library = ctypes.CDLL("libcuda.so.1")
    def call(name, *words):
        return getattr(library, "cuCheckpointProcess" + name)(os.getpid(), (ctypes.c_uint64 * 8)(*words))
    wrong = [call(name, *[0] * at, 1) for name in ("Lock", "Checkpoint", "Unlock") for at in range(1, 8)]
    wrong += [call("Checkpoint", 1), call("Unlock", 1), call("Lock", 1 << 32)]
    wrong += [call("Restore", 1), call("Restore", 0, 1), call("Restore", 0, 0, 1)]
    pair = (ctypes.c_uint8 * 32)(*range(16), *range(16))
    moves = (ctypes.c_uint8 * 32)(1)
    right = [call("Lock", 1000), call("Checkpoint"), call("Restore", ctypes.addressof(pair), 1), call("Unlock")]
    say([sorted(set(wrong)), right, call("Restore", ctypes.addressof(moves), 1)])
    """
    assert said(program) == [[1], [0, 0, 0, 0], 801]


def test_all_kinds_of_device_memory_come_back_and_pinned_memory_stays(simulated: Start, caller: Call) -> None:
    program = simulated(
        holding(
            """
            size = 2 << 20
            small = [machine.plain(1000) for _ in range(5)]
            pitched, pitch = check(cu.cuMemAllocPitch(4000, 100, 4))
            pooled = check(cu.cuMemAllocAsync(size, 0))
            prop = cu.CUmemAllocationProp()
            prop.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
            prop.location = place("device")
            handle = check(cu.cuMemCreate(size, prop, 0))
            mapped, second = (check(cu.cuMemAddressReserve(size, 0, 0, 0)) for _ in range(2))
            access = cu.CUmemAccessDesc()
            access.location = place("device")
            for at, flags in ((mapped, 3), (second, 1)):
                access.flags = cu.CUmemAccess_flags(flags)
                check(cu.cuMemMap(at, size, 0, handle, 0))
                check(cu.cuMemSetAccess(at, size, [access], 1))
            pinned = check(cu.cuMemAllocHost(4096))
            host(pinned, 4)[:] = [1, 2, 3, 4]
            stream = machine.stream()
            check(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode(2)))
            machine.launch("add_u32", address, len(data), 1, stream=stream)
            exec = check(cu.cuGraphInstantiate(check(cu.cuStreamEndCapture(stream)), 0))
            places = [*small, pitched, pooled, mapped]
            for number, at in enumerate(places):
                check(cu.cuMemsetD32(at, number + 100, 250))
            say(stats()["memory_free"])
            listen()
            say([host(pinned, 4).tolist(), stats()["memory_free"] == stats()["memory"]])
            listen()
            check(cu.cuGraphLaunch(exec, stream))
            machine.synchronize()
            right = [(machine.read(at, 250) == number + 100).all() for number, at in enumerate([*places, second])
                     if at is not second] + [(machine.read(second, 250) == len(places) + 99).all()]
            right.append((machine.read(address, len(data)) == data + np.uint32(1)).all())
            refused = code(cu.cuMemsetD8(second, 0, 1))
            moved = [stats()["checkpointed"], stats()["restored"]]
            say([all(right), refused, stats()["memory_free"], moved])
            """
        )
    )
    program.hear()
    free = program.hear()
    agent, pid = caller(), program.pid
    agent.does(pid, "lock", "checkpoint")
    program.say()
    assert program.hear() == [[1, 2, 3, 4], True]
    agent.does(pid, "restore", "unlock")
    program.say()
    moved = (1 << 30) - free
    assert program.hear() == [True, "CUDA_ERROR_INVALID_VALUE", free, [moved, moved]]


def test_an_access_to_device_memory_of_a_suspended_process_is_seen(simulated: Start, caller: Call) -> None:
    program = simulated(holding("listen(); say(int(host(address, 1)[0])); listen(); say(int(host(address, 1)[0]))"))
    program.hear()
    agent, pid = caller(), program.pid
    program.say()
    program.hear()
    agent.does(pid, "lock", "checkpoint")
    program.say()
    program.finish(status=-signal.SIGSEGV)


@pytest.mark.parametrize(
    ("settings", "out", "back"),
    [
        ({"SIMGPU_D2H": "80MiB", "SIMGPU_H2D": "160MiB"}, 0.2, 0.1),
        ({"SIMGPU_CHECKPOINT_D2H": "160MiB", "SIMGPU_CHECKPOINT_H2D": "80MiB", "SIMGPU_RESTORE_MS": "100"}, 0.1, 0.3),
    ],
)
def test_moving_takes_the_time_of_the_bus_or_the_longer_time_that_is_set(
    simulated: Start, caller: Call, settings: dict[str, str], out: float, back: float
) -> None:
    program = simulated(holding("listen()"), **settings)
    program.hear()
    agent, pid = caller(), program.pid
    agent.does(pid, "lock", "checkpoint")
    assert 0.95 * out < agent.seconds < out + 0.3
    agent.does(pid, "restore")
    assert 0.95 * back < agent.seconds < back + 0.3
    agent.does(pid, "unlock")


def test_contexts_take_memory_and_leave_with_it(simulated: Start, caller: Call) -> None:
    settings = {"SIMGPU_CONTEXT_MEMORY": "301MiB", "SIMGPU_MEMORY": "1GiB"}
    program = simulated(
        holding(
            """
            second = check(cu.cuCtxCreate(None, 0, machine.device))
            other = code(cu.cuCtxCreate(None, 0, machine.device))
            check(cu.cuCtxDestroy(second))
            check(cu.cuCtxSetCurrent(machine.context))
            say([other, check(cu.cuMemGetInfo())[0] >> 20])
            """
        )
        + "listen()",
        **settings,
    )
    program.hear()
    assert program.hear() == ["CUDA_SUCCESS", 1024 - 2 * 302 - 16]
    agent, pid = caller(**settings), program.pid
    assert agent.shown() == {"used": 620, "processes": {str(pid): 620}}
    agent.does(pid, "lock", "checkpoint")
    assert agent.shown() == {"used": 0, "processes": {}}
    agent.does(pid, "restore", "unlock")
    assert agent.shown() == {"used": 620, "processes": {str(pid): 620}}
    # a third one's context does not fit into what is left besides its memory, and leaves nothing behind
    third = simulated(
        """
        check(cu.cuInit(0))
        first = check(cu.cuDevicePrimaryCtxRetain(0))
        say([code(cu.cuCtxCreate(None, 0, 0)), code(cu.cuDevicePrimaryCtxRetain(0))])
        check(cu.cuDevicePrimaryCtxReset(0))
        say(stats()["memory_free"] >> 20)
        """,
        **settings,
    )
    assert third.hear() == ["CUDA_ERROR_OUT_OF_MEMORY", "CUDA_SUCCESS"]
    assert third.hear() == 1024 - 620


@pytest.mark.parametrize("retry", ["yes", ""])
def test_a_restore_that_is_short_of_memory_leaves_the_process_checkpointed(
    simulated: Start, caller: Call, retry: str
) -> None:
    settings = {"SIMGPU_CHECKPOINT_RETRY": retry, "SIMGPU_CONTEXT_MEMORY": "100MiB"}
    program = simulated(
        holding("machine.plain(600 << 20); listen(); say(bool((machine.read(address, len(data)) == data).all()))"),
        **settings,
    )
    program.hear()
    agent, pid = caller(**settings), program.pid
    agent.does(pid, "lock", "checkpoint")
    # with managed memory, which makes room, and with 316 MiB that do not: 716 MiB are wanted
    other = simulated(
        """
        machine = Machine()
        managed = machine.managed(600 << 20)
        machine.prefetch(managed, 600 << 20, place("device"))
        machine.synchronize()
        taken = machine.plain(316 << 20)
        say(True)
        listen()
        check(cu.cuMemFree(taken))
        say(True)
        listen()
        """,
        **settings,
    )
    other.hear()
    before = agent.shown()
    assert agent.error("restore", pid) == "OUT_OF_MEMORY"
    assert agent.state(pid) == CHECKPOINTED
    assert agent.shown() == before
    assert agent.error("unlock", pid) == "ILLEGAL_STATE"
    other.say()
    other.hear()
    if not retry:
        assert [agent.error("restore", pid) for _ in range(2)] == ["OPERATING_SYSTEM"] * 2
        return
    agent.does(pid, "restore", "unlock")
    assert agent.shown()["processes"][str(pid)] == 716
    program.say()
    assert program.hear() is True


@pytest.mark.parametrize("managed", ["fail", "refuse"])
def test_managed_memory_cannot_be_checkpointed(simulated: Start, caller: Call, managed: str) -> None:
    program = simulated(
        holding("held = machine.managed(4 << 20); say(0); machine.synchronize(); say(0); listen()"),
        SIMGPU_CHECKPOINT_MANAGED=managed,
    )
    program.hear()
    program.hear()
    program.hear()
    agent, pid = caller(), program.pid
    agent.does(pid, "lock")
    assert agent.error("checkpoint", pid) == "NOT_SUPPORTED"
    assert agent.shown()["processes"] == {str(pid): 16}
    if managed == "refuse":
        agent.does(pid, "unlock")
        return
    assert agent.state(pid) == FAILED
    assert {agent.error(name, pid) for name in ("lock", "checkpoint", "restore", "unlock")} == {"ILLEGAL_STATE"}
    program.kill()
    assert agent.shown()["processes"] == {}


def test_forked_children_are_processes_of_their_own(simulated: Start, caller: Call) -> None:
    program = simulated(
        """
        children, end_with_parent = [], 1
        for number in range(2):
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                ctypes.CDLL(None).prctl(end_with_parent, 9)
                machine = Machine()
                address = machine.plain(10 << 20)
                check(cu.cuMemsetD32(address, number, 1000))
                say(os.getpid())
                os.read(read, 1)
                say(["child", bool((machine.read(address, 1000) == number).all())])
                os._exit(0)
            children.append(write)
        listen()
        for write in children:
            os.write(write, b"x")
        listen()
        """
    )
    pids = [program.hear(), program.hear()]
    agent = caller()
    assert agent.error("state", program.pid) == "NOT_INITIALIZED"
    for pid in pids:
        agent.does(pid, "lock", "checkpoint")
    assert agent.shown() == {"used": 0, "processes": {}}
    program.say()
    for pid in pids:
        agent.does(pid, "restore", "unlock")
        assert program.hear() == ["child", True]


def test_a_fork_of_a_locked_process_does_not_wait(simulated: Start, caller: Call) -> None:
    program = simulated(
        holding(
            """
            listen()
            child = os.fork()
            if child == 0:
                os._exit(code(cu.cuMemAlloc(1)) == "CUDA_ERROR_NOT_INITIALIZED")
            say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            """
        )
    )
    program.hear()
    agent = caller()
    agent.does(program.pid, "lock")
    program.say()
    assert program.hear() == 1
    agent.does(program.pid, "unlock")


@pytest.mark.parametrize("steps", [("lock",), ("lock", "checkpoint"), ("lock", "checkpoint", "restore")])
def test_another_caller_goes_on_after_a_kill_and_a_dead_process_leaves_nothing(
    simulated: Start, caller: Call, steps: tuple[str, ...]
) -> None:
    program = simulated(holding("listen(); say(bool((machine.read(address, len(data)) == data).all())); listen()"))
    program.hear()
    pid, first, agent = program.pid, caller(), caller()
    first.does(pid, *steps)
    first.program.kill()
    rest = ("lock", "checkpoint", "restore", "unlock")[len(steps) :] if len(steps) > 1 else ("unlock",)
    agent.does(pid, *rest)
    program.say()
    assert program.hear() is True
    agent.does(pid, *steps)
    program.kill()
    assert agent.shown() == {"used": 0, "processes": {}}
    assert agent.error("state", pid) == "INVALID_VALUE"


def test_a_process_in_a_pod_is_suspended_from_outside(simulated: Start, caller: Call, pod: tuple[str, ...]) -> None:
    program = simulated(holding("listen(); say(bool((machine.read(address, len(data)) == data).all()))"), pod)
    program.hear()
    agent, pid = caller(), child_of(program.pid)
    error, thread = agent.ask("thread", pid)
    assert error == "SUCCESS"
    assert os.path.isdir(f"/proc/{pid}/task/{thread}")
    agent.does(pid, "lock", "checkpoint")
    assert agent.shown() == {"used": 0, "processes": {}}
    agent.does(pid, "restore", "unlock")
    program.say()
    assert program.hear() is True


def test_threads_at_work_are_suspended_again_and_again(simulated: Start, caller: Call) -> None:
    """Calls of all kinds meet the lock at any point, and nothing of what they computed is lost."""
    program = simulated(
        holding(
            """
            import threading
            ended, rounds, wrong = threading.Event(), [0] * 4, []
            def work(number):
                check(cu.cuCtxSetCurrent(machine.context))
                stream = machine.stream(cu.CUstream_flags.CU_STREAM_NON_BLOCKING.value)
                kept, expected = machine.plain(4096), 0
                check(cu.cuMemsetD32(kept, 0, 1024))
                while not ended.is_set():
                    taken = check(cu.cuMemAllocAsync(3 << 20, stream)) if number % 2 else machine.plain(700 << number)
                    check(cu.cuMemsetD32Async(taken, number, 100, stream))
                    machine.launch("add_u32", taken, 100, 5, stream=stream)
                    machine.launch("add_u32", kept, 1024, 1, stream=stream)
                    out = np.empty(100, np.uint32)
                    check(cu.cuMemcpyDtoHAsync(out.ctypes.data, taken, out.nbytes, stream))
                    check(cu.cuStreamSynchronize(stream))
                    if not (out == number + 5).all():
                        wrong.append(number)
                    check(cu.cuMemFreeAsync(taken, stream) if number % 2 else cu.cuMemFree(taken))
                    rounds[number] += 1
                if not (machine.read(kept, 1024) == rounds[number]).all():
                    wrong.append(number)
            threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
            for thread in threads:
                thread.start()
            say(True)
            listen()
            ended.set()
            for thread in threads:
                thread.join()
            say([wrong, min(rounds) > 10, bool((machine.read(address, len(data)) == data).all())])
            """
        ),
        SIMGPU_D2H="100GB",
        SIMGPU_H2D="100GB",
    )
    program.hear()
    program.hear()
    agent, pid = caller(), program.pid
    until = time.monotonic() + 1
    while time.monotonic() < until:
        agent.does(pid, "lock")
        if agent.shown()["used"] % 4:
            agent.does(pid, "unlock")
            continue
        agent.does(pid, "checkpoint")
        assert agent.shown() == {"used": 0, "processes": {}}
        agent.does(pid, "restore", "unlock")
    program.say()
    assert program.hear() == [[], True, True]
    program.finish()


def test_a_process_on_two_gpus_returns_to_both_or_to_none(simulated: Start, caller: Call) -> None:
    settings = {"SIMGPU_DEVICES": "2", "SIMGPU_CONTEXT_MEMORY": "10MiB", "SIMGPU_CHECKPOINT_RETRY": "yes"}
    program = simulated(
        """
        machines = [Machine(0), Machine(1)]
        places = []
        for number, machine in enumerate(machines):
            check(cu.cuCtxSetCurrent(machine.context))
            places.append(machine.plain(300 << 20))
            check(cu.cuMemsetD32(places[-1], number + 1, 1000))
        say(True)
        listen()
        say([int(machine.read(at, 1000).sum()) for machine, at in zip(machines, places, strict=True)])
        """,
        **settings,
    )
    program.hear()
    agent, pid = caller(**settings), program.pid
    agent.does(pid, "lock", "checkpoint")
    assert [agent.shown(gpu)["used"] for gpu in range(2)] == [0, 0]
    other = simulated(
        """
        machine = Machine(1)
        taken = machine.plain(800 << 20)
        say(0)
        listen()
        check(cu.cuMemFree(taken))
        say(0)
        listen()
        """,
        **settings,
    )
    other.hear()
    assert agent.error("restore", pid) == "OUT_OF_MEMORY"
    assert agent.shown(0) == {"used": 0, "processes": {}}
    other.say()
    other.hear()
    agent.does(pid, "restore", "unlock")
    assert agent.shown(0) == {"used": 310, "processes": {str(pid): 310}}
    assert agent.shown(1)["processes"][str(pid)] == 310
    program.say()
    assert program.hear() == [1000, 2000]


def test_a_setting_that_is_none_is_refused_with_the_words_that_would_be_right(simulated: Start) -> None:
    program = simulated("say(code(cu.cuInit(0)))", SIMGPU_CHECKPOINT="maybe")
    assert program.hear() == "CUDA_ERROR_SYSTEM_NOT_READY"
    assert "SIMGPU_CHECKPOINT=maybe is none of: supported absent unsupported" in program.finish()
