"""Engine `suspend`: memory stays plain, no thread is in a driver call while the process is suspended, and a thread that
comes to one asks for the GPU first.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpushare_spawner.model.frames import Feature, Frame, Kind
from tests.native.preload_agent import Peer, ScriptedAgent
from tests.native.preload_clients import Client
from tests.present import present

if TYPE_CHECKING:
    from tests.native.preload_clients import Start

pytest_plugins = ["tests.native.preload_clients", "tests.native.preload_stub"]
MIB = 1 << 20
FEATURES = Feature.PACE | Feature.SUSPEND
STUB_GPU = bytes([7]) * 16
TALK = (Kind.MEMORY, Kind.IDLE, Kind.BUSY)

STEPS = """
d = Driver()
say("ready")
while (line := hear()) is not None:
    exec(line)
    say("done")
"""
"""Carries out what the test says."""


def suspending_agent(path: Path, gpus: list[bytes], features: int = FEATURES) -> ScriptedAgent:
    return ScriptedAgent(path, gpus, total=1 << 30, welcome_features=features)


@pytest.fixture
def agent(socket_path: Path, gpus: list[bytes]) -> Iterator[ScriptedAgent]:
    agent = suspending_agent(socket_path, gpus)
    yield agent
    agent.stop()


@pytest.fixture
def stub_agent(socket_path: Path) -> Iterator[ScriptedAgent]:
    """The agent of the stub driver's GPU."""
    agent = suspending_agent(socket_path, [STUB_GPU])
    yield agent
    agent.stop()


def quiet(client: Client, seconds: float = 0.1) -> bool:
    """Whether the program says nothing for this long."""
    return not select.select([present(client.process.stdout)], [], [], seconds)[0]


def said(client: Client, code: str) -> None:
    """Have the program carry this out."""
    client.say(code)
    assert client.hear() == "done"


def suspended(peer: Peer, number: int = 1) -> tuple[int, ...]:
    """Suspend the process; what SUSPEND_READY says: f1 to f6."""
    asked = time.monotonic()
    peer.send(Kind.SUSPEND, number)
    ready = peer.expect(Kind.SUSPEND_READY, skip=(*TALK, Kind.REQUEST))  # a thread may come just now
    assert time.monotonic() - asked < 1.0  # the promise is 0.5 s; a machine under load is slower
    assert ready.fields[0] == number
    return ready.fields[1:7]


def requested(peer: Peer) -> Frame:
    return peer.expect(Kind.REQUEST, skip=TALK)


def test_memory_stays_plain_and_is_reported_as_plain(start: Start, agent: ScriptedAgent, gpus: list[bytes]) -> None:
    client = start(
        """
        d = Driver()
        at = d.alloc(16 * MIB)
        later = d.alloc_async(16 * MIB)
        say([d.attribute(IS_MANAGED, at), d.attribute(IS_MANAGED, later)])
        own = c.c_uint64()
        d("cuMemAllocManaged", c.byref(own), c.c_size_t(MIB), c.c_uint(1))
        say(d.attribute(IS_MANAGED, own.value))
        hear()
        """,
        GPUSHARE_ENGINE="suspend",
    )
    peer = agent.peer()
    assert present(peer.hello).fields[3] == FEATURES | Feature.RESERVE | Feature.PAGE_IN
    assert client.hear() == [0, 0]
    assert client.hear() == 1
    deadline = time.monotonic() + 5
    while (said := peer.expect(Kind.MEMORY, skip=TALK).fields[:2])[1] < 33 * MIB and time.monotonic() < deadline:
        pass
    assert said[0] == 0
    assert said[1] >= 33 * MIB
    client.say()
    client.end()


CALLS = [
    "d.alloc(MIB)",
    "d.free(at)",
    "d.alloc_async(MIB)",
    "d.stream()",
    "d.synchronize()",
    "d.memory()",
    "d.load()",
    "d.enter()",
    "d('cuStreamQuery', None)",
    "d('cuStreamSynchronize', None)",
    "d('cuEventCreate', c.byref(c.c_void_p()), c.c_uint(0))",
    "d('cuMemHostAlloc', c.byref(c.c_void_p()), c.c_size_t(4096), c.c_uint(0))",
    "d.write(at2, b'four')",
    "d.fill(at2, 1, 7)",
]


def test_calls_wait_in_front_of_the_driver_and_request_the_gpu_first(
    start: Start, agent: ScriptedAgent, gpus: list[bytes]
) -> None:
    client = start(STEPS, GPUSHARE_ENGINE="suspend")
    peer = agent.peer()
    client.hear()
    said(client, "at, at2 = d.alloc(MIB), d.alloc(MIB); d.kernel('fill_u32')")
    for number, call in enumerate(CALLS, 1):
        *ties, contexts, ready, plain = suspended(peer, number)
        assert (ties, contexts, ready) == ([0, 0, 0], 1, 1), call
        assert plain >= 1 * MIB
        client.say(call)
        assert requested(peer).gpu == gpus[0], call
        assert quiet(client, 0.02), call
        peer.send(Kind.RESUMED, number)
        if "fill" not in call and "write" not in call:
            assert client.hear() == "done", f"{call}: RESUMED is enough, it launches no work"
            peer.grant(gpus[0], number)
        else:
            assert quiet(client, 0.05), f"{call} ran without a lease"
            peer.grant(gpus[0], number)
            assert client.hear() == "done"
        peer.revoke(gpus[0], number)
        peer.expect(Kind.RELEASE, skip=TALK)


def test_calls_that_read_what_the_host_knows_go_on(start: Start, agent: ScriptedAgent) -> None:
    client = start(STEPS, GPUSHARE_ENGINE="suspend")
    peer = agent.peer()
    client.hear()
    assert suspended(peer)[4] == 1
    said(client, "d('cuCtxGetCurrent', c.byref(c.c_void_p())); d('cuCtxGetDevice', c.byref(c.c_int())); d.total()")
    peer.nothing(0.05, skip=TALK)


def test_grant_ends_a_suspension(start: Start, agent: ScriptedAgent, gpus: list[bytes]) -> None:
    client = start(STEPS, GPUSHARE_ENGINE="suspend")
    peer = agent.peer()
    client.hear()
    suspended(peer)
    client.say("d.alloc(MIB)")
    requested(peer)
    peer.grant(gpus[0], 1)
    assert client.hear() == "done"


def test_a_process_with_a_lease_is_not_ready_and_goes_on(start: Start, agent: ScriptedAgent, gpus: list[bytes]) -> None:
    client = start(STEPS, GPUSHARE_ENGINE="suspend")
    peer = agent.peer()
    client.hear()
    client.say("d.spin(0.001)")
    requested(peer)
    peer.grant(gpus[0], 1)
    assert client.hear() == "done"
    assert suspended(peer)[4] == 0
    said(client, "d.alloc(MIB); d.synchronize()")
    peer.revoke(gpus[0], 1)
    peer.expect(Kind.RELEASE, skip=TALK)
    assert suspended(peer, 2)[4] == 1


def test_a_process_that_captures_is_not_ready(start: Start, agent: ScriptedAgent, gpus: list[bytes]) -> None:
    client = start(STEPS, GPUSHARE_ENGINE="suspend")
    peer = agent.peer()
    client.hear()
    said(client, "s = d.stream(); d('cuStreamBeginCapture_v2', s, 2)")
    assert suspended(peer)[4] == 0
    said(client, "graph = c.c_void_p(); d('cuStreamEndCapture', s, c.byref(graph))")
    assert suspended(peer, 2)[4] == 1


def test_a_process_with_managed_memory_is_not_ready_until_it_is_freed(start: Start, agent: ScriptedAgent) -> None:
    client = start(STEPS, GPUSHARE_ENGINE="suspend")
    peer = agent.peer()
    client.hear()
    said(client, "own = c.c_uint64(); d('cuMemAllocManaged', c.byref(own), c.c_size_t(MIB), c.c_uint(1))")
    managed, opened, exported, _, ready, _ = suspended(peer)
    assert (managed, opened, exported, ready) == (MIB, 0, 0, 0)
    said(client, "d.free(own.value)")
    assert suspended(peer, 2)[0] == 0


TIES = [
    # (what makes the tie, what ends it, the field that counts it)
    ("call('cuIpcOpenMemHandle_v2', c.byref(a), Handle(), 0)", "call('cuIpcCloseMemHandle', a)", 1),
    ("call('cuIpcOpenEventHandle', c.byref(a), Handle())", "call('cuEventDestroy_v2', a)", 1),
    ("call('cuMemImportFromShareableHandle', c.byref(a), None, 1)", "call('cuMemRelease', a)", 1),
    ("call('cuMemPoolImportFromShareableHandle', c.byref(a), None, 1, 0)", "call('cuMemPoolDestroy', a)", 1),
    ("call('cuImportExternalMemory', c.byref(a), None)", "call('cuDestroyExternalMemory', a)", 1),
    ("alloc(); call('cuIpcGetMemHandle', c.byref(Handle()), c.c_uint64(a.value + 8))", "call('cuMemFree_v2', a)", 2),
    ("alloc(); call('cuMemGetHandleForAddressRange', None, a, c.c_size_t(1), 1, 0)", "call('cuMemFree_v2', a)", 2),
    ("call('cuIpcGetEventHandle', c.byref(Handle()), a)", "call('cuEventDestroy_v2', a)", 2),
    (
        "call('cuMemCreate', c.byref(a), c.c_size_t(64), ON_GPU, 0);"
        " call('cuMemExportToShareableHandle', None, a, 1, 0)",
        "call('cuMemRelease', a)",
        2,
    ),
    ("call('cuMulticastCreate', c.byref(a), None)", "call('cuMemRelease', a)", 2),
    ("call('cuMemPoolExportToShareableHandle', None, a, 1, 0)", "call('cuMemPoolDestroy', a)", 2),
    ("call('cuModuleGetGlobal_v2', c.byref(b), None, a, b'managed')", "call('cuModuleUnload', a)", 0),
    ("call('cuMemAllocFromPoolAsync', c.byref(b), c.c_size_t(64), a, None)", "call('cuMemPoolDestroy', a)", 0),
]

TIED = """
library = c.CDLL("libcuda.so.1")
Handle = c.c_char * 64
a, b = c.c_uint64(77), c.c_uint64()
ON_GPU = (c.c_int * 16)(1, 0, 1, 0)  # CUmemAllocationProp: on device 0

class Handle(c.Structure):
    _fields_ = [("bytes", c.c_char * 64)]

def call(name, *arguments):
    result = getattr(library, name)(*arguments)
    assert result == 0, (name, result)

def alloc():
    call("cuMemAlloc_v2", c.byref(a), c.c_size_t(64))

call("cuInit", 0)
say("ready")
while (line := hear()) is not None:
    exec(line)
    say("done")
"""


def test_what_ties_a_process_to_others_is_counted_until_it_ends(
    start: Start, stub_agent: ScriptedAgent, stub_folder: Path
) -> None:
    client = start(TIED, GPUSHARE_ENGINE="suspend", LD_LIBRARY_PATH=str(stub_folder), STUB_CONTEXT="1")
    peer = stub_agent.peer()
    client.hear()
    for number, (begin, end, field) in enumerate(TIES, 1):
        said(client, begin)
        counted = suspended(peer, 2 * number)
        assert [bool(count) for count in counted[:3]] == [field == at for at in range(3)], begin
        assert counted[4] == 0, "with a tie it is not ready"
        said(client, end)
        counted = suspended(peer, 2 * number + 1)
        assert (counted[:3], counted[4]) == ((0, 0, 0), 1), end
        peer.send(Kind.RESUMED, 2 * number + 1)


@pytest.mark.parametrize(("seconds", "ready"), [(0.25, 1), (1.5, 0)])
def test_a_thread_inside_a_call_is_waited_for(
    start: Start, stub_agent: ScriptedAgent, stub_folder: Path, seconds: float, ready: int
) -> None:
    """A call that takes longer than the agent waits: not now, and the process runs on."""
    client = start(
        TIED,
        GPUSHARE_ENGINE="suspend",
        LD_LIBRARY_PATH=str(stub_folder),
        STUB_CONTEXT="1",
        STUB_SLOW=f"{seconds * 1e6:.0f}",
    )
    peer = stub_agent.peer()
    client.hear()
    client.say("say('inside'); call('cuCtxSynchronize')")
    assert client.hear() == "inside"
    time.sleep(0.05)
    assert suspended(peer)[4] == ready
    peer.send(Kind.RESUMED, 1)
    assert client.hear() == "done"
    assert suspended(peer, 2)[4] == 1


def test_threads_of_two_gpus_ask_each_for_its_own(start: Start, agent: ScriptedAgent, gpus: list[bytes]) -> None:
    """The GPU of a thread is that of its current context; one RESUMED is for all."""
    client = start(
        """
        go, ready = threading.Event(), threading.Semaphore(0)
        def alloc(d):
            d("cuCtxSetCurrent", d.context)
            ready.release()
            go.wait()
            d.alloc(MIB)
        threads = [threading.Thread(target=alloc, args=(Driver(i),)) for i in (0, 1)]
        for t in threads: t.start()
        for t in threads: ready.acquire()
        say("ready")
        hear()
        go.set()
        for t in threads: t.join()
        say("done")
        """,
        GPUSHARE_ENGINE="suspend",
    )
    peer = agent.peer()
    client.hear()
    *_, contexts, ready, _ = suspended(peer)
    assert (contexts, ready) == (2, 1)
    client.say()
    assert {requested(peer).gpu, requested(peer).gpu} == set(gpus)
    assert quiet(client, 0.05)
    peer.send(Kind.RESUMED, 1)
    assert client.hear() == "done"


def test_an_old_number_resumes_nothing(start: Start, agent: ScriptedAgent) -> None:
    client = start(STEPS, GPUSHARE_ENGINE="suspend")
    peer = agent.peer()
    client.hear()
    suspended(peer, 5)
    client.say("d.alloc(MIB)")
    requested(peer)
    peer.send(Kind.RESUMED, 4)
    assert quiet(client, 0.1)
    peer.send(Kind.RESUMED, 5)
    assert client.hear() == "done"


def test_two_processes_of_a_session_are_suspended_each_by_itself(
    start: Start, agent: ScriptedAgent, gpus: list[bytes]
) -> None:
    clients = {}
    for _ in range(2):
        client = start(STEPS, GPUSHARE_ENGINE="suspend")
        clients[client.process.pid] = client
        client.hear()
    peers = [agent.peer(), agent.peer()]
    for peer in peers:
        assert suspended(peer)[4] == 1
    for peer in peers:
        client = clients[present(peer.hello).fields[1]]
        client.say("d.alloc(MIB)")
        requested(peer)
        assert quiet(client, 0.02)
        peer.send(Kind.RESUMED, 1)
        assert client.hear() == "done"


def test_a_forked_child_of_a_suspended_process_is_not_suspended(start: Start, agent: ScriptedAgent) -> None:
    """It cannot use the parent's driver, and is told so at once; the parent stays suspended."""
    client = start(STEPS, GPUSHARE_ENGINE="suspend")
    peer = agent.peer()
    client.hear()
    assert suspended(peer)[4] == 1
    client.say("""
child = os.fork()
if child == 0:
    say(d.result("cuMemAlloc_v2", c.byref(c.c_uint64()), c.c_size_t(MIB)))
    os._exit(0)
os.waitpid(child, 0)
""")
    assert client.hear() == 3, "CUDA_ERROR_NOT_INITIALIZED"
    assert client.hear() == "done"
    peer.nothing(0.05, skip=TALK)
    client.say("d.alloc(MIB)")
    requested(peer)
    peer.send(Kind.RESUMED, 1)
    assert client.hear() == "done"


def test_a_suspended_process_that_ends_asks_and_does_not_hang(start: Start, agent: ScriptedAgent) -> None:
    client = start(STEPS, GPUSHARE_ENGINE="suspend")
    peer = agent.peer()
    client.hear()
    assert suspended(peer)[4] == 1
    client.say(None)
    client.end(timeout=5)


def test_an_interrupt_does_not_send_a_thread_into_the_driver(
    start: Start, agent: ScriptedAgent, gpus: list[bytes]
) -> None:
    client = start(STEPS, GPUSHARE_ENGINE="suspend")
    peer = agent.peer()
    client.hear()
    said(client, "import signal; signal.signal(signal.SIGUSR1, lambda *_: None)")
    assert suspended(peer)[4] == 1
    client.say("d.alloc(MIB)")
    requested(peer)
    os.kill(client.process.pid, 10)
    assert quiet(client, 0.1)
    peer.send(Kind.RESUMED, 1)
    assert client.hear() == "done"


# A call that waits for memory while the process is suspended.

FULL = """
d = Driver()
import ctypes as c, signal
signal.signal(signal.SIGUSR1, lambda *_: None)
library, block = c.CDLL("libcuda.so.1"), c.c_uint64()
say("ready")
hear()
say(library.cuMemAlloc_v2(c.byref(block), c.c_size_t(1 << 38)))  # less than the agent allows, more than the GPU has
while (line := hear()) is not None:
    exec(line)
    say("done")
"""
OUT_OF_MEMORY = 2


@pytest.mark.parametrize("end", ["refusal", "signal"])
def test_call_that_waits_for_memory_returns_the_error_though_its_process_is_suspended(
    start: Start, socket_path: Path, gpus: list[bytes], end: str
) -> None:
    agent = ScriptedAgent(socket_path, gpus, total=1 << 40, welcome_features=FEATURES)
    try:
        client = start(FULL, GPUSHARE_ENGINE="suspend")
        peer = agent.peer()
        client.hear()
        client.say("go")
        asked = requested(peer)
        assert 0 < asked.fields[3] <= asked.fields[1]
        assert suspended(peer)[4] == 1
        peer.send(Kind.GRANT, 0, gpu=gpus[0])  # still waiting
        assert quiet(client)
        if end == "refusal":
            peer.send(Kind.GRANT, 0, 0, 0, 0, 1, gpu=gpus[0])
        else:
            os.kill(client.process.pid, 10)
        assert client.hear() == OUT_OF_MEMORY
        client.say("d.alloc(MIB)")
        assert quiet(client), "the process is suspended, and its next call waits"
        peer.send(Kind.RESUMED, 1)
        assert client.hear() == "done"
    finally:
        agent.stop()


# The agent goes while the process is suspended.


@pytest.mark.parametrize("waiting", [True, False], ids=["a thread waits", "no thread waits"])
def test_without_the_agent_threads_go_on_and_the_next_agent_decides(
    start: Start, agent: ScriptedAgent, socket_path: Path, gpus: list[bytes], waiting: bool
) -> None:
    client = start(STEPS, GPUSHARE_ENGINE="suspend")
    peer = agent.peer()
    client.hear()
    said(client, "d.alloc(MIB)")
    assert suspended(peer, 7)[4] == 1
    if waiting:
        client.say("d.alloc(MIB)")
        requested(peer)
    agent.stop()
    if waiting:
        assert client.hear() == "done", "the simulated driver blocks nothing here: the process is not checkpointed"
    again = suspending_agent(socket_path, gpus)
    peer = again.peer()
    ready = peer.expect(Kind.SUSPEND_READY, skip=TALK)
    assert (ready.fields[0], ready.fields[5]) == (0, 1)
    assert suspended(peer, 1)[4] == 1, "the agent found it suspended"
    client.say("d.alloc(MIB)")
    requested(peer)
    assert quiet(client, 0.05)
    peer.send(Kind.RESUMED, 1)
    assert client.hear() == "done"
    assert suspended(peer, 2)[4] == 1
    again.stop()


@pytest.mark.parametrize("features", [FEATURES, Feature.PACE], ids=["RESUMED", "an agent without the feature"])
def test_the_next_agent_ends_the_suspension(
    start: Start, agent: ScriptedAgent, socket_path: Path, gpus: list[bytes], features: Feature
) -> None:
    client = start(STEPS, GPUSHARE_ENGINE="suspend")
    peer = agent.peer()
    client.hear()
    said(client, "d.alloc(MIB)")
    assert suspended(peer, 7)[4] == 1
    agent.stop()
    again = suspending_agent(socket_path, gpus, features)
    peer = again.peer()
    peer.expect(Kind.MEMORY, skip=(Kind.SUSPEND_READY,))  # by now the library has read WELCOME
    if features & Feature.SUSPEND:
        peer.send(Kind.RESUMED, 0)
    said(client, "d.alloc(MIB)")
    client.say("d.spin(0.001)")
    requested(peer)
    peer.grant(gpus[0], 1)
    assert client.hear() == "done"
    peer.expect(Kind.IDLE, skip=(Kind.MEMORY,))
    again.stop()


def test_engine_managed_knows_no_suspension(start: Start, socket_path: Path, gpus: list[bytes]) -> None:
    """SUSPEND to a process that did not say it can: an unexpected frame, which ends the connection."""
    agent = suspending_agent(socket_path, gpus)
    client = start(STEPS)
    peer = agent.peer()
    assert not present(peer.hello).fields[3] & Feature.SUSPEND
    client.hear()
    peer.send(Kind.SUSPEND, 1)
    assert peer.closed()
    agent.stop()
