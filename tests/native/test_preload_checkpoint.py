"""Engine `suspend` with the simulated driver's checkpoints: what the agent does to a process, done by the test."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpushare_spawner.model.frames import Frame, Kind
from tests.libraries import NATIVE, SIMGPU
from tests.native.conftest import Program
from tests.native.preload_agent import Peer, ScriptedAgent
from tests.native.preload_clients import Client
from tests.native.test_preload_suspend import FEATURES, STEPS, TALK, quiet, requested, said, suspended
from tests.native.test_simgpu_checkpoint import CHECKPOINTED, RUNNING, SCRIPT, Caller

if TYPE_CHECKING:
    from tests.native.preload_clients import Start

pytest_plugins = ["tests.native.preload_clients"]

HOLDS = """
d = Driver()
blocks = [d.alloc(4 * MIB), d.alloc_async(4 * MIB)]
data = [os.urandom(4 * MIB) for _ in blocks]
for at, bytes_ in zip(blocks, data):
    d.write(at, bytes_)
fill, later = d.kernel("fill_u32"), d.stream()
d.synchronize()
""" + STEPS.replace("d = Driver()", "")
SAME = "assert [d.read(at, 4 * MIB) for at in blocks] == data; d.fill(blocks[0], 1, 7, later); d.synchronize()"


@pytest.fixture
def settings() -> dict[str, str]:
    """Of the simulated driver."""
    return {"SIMGPU_MEMORY": "12MiB"}


@pytest.fixture
def environment(environment: dict[str, str], settings: dict[str, str]) -> dict[str, str]:
    return environment | settings


@pytest.fixture
def driver(environment: dict[str, str]) -> Iterator[Caller]:
    """A process without the library that calls cuCheckpointProcess*."""
    bare = {name: value for name, value in environment.items() if name != "LD_PRELOAD"}
    caller = Caller(Program([sys.executable, "-E", "-S", str(SCRIPT)], bare))
    yield caller
    caller.program.process.kill()
    caller.program.process.communicate()


Held = Callable[[], tuple[Client, Peer]]


@pytest.fixture
def agent(socket_path: Path, gpus: list[bytes]) -> Iterator[ScriptedAgent]:
    agent = ScriptedAgent(socket_path, gpus, total=1 << 30, welcome_features=FEATURES)
    yield agent
    agent.stop()


def granted(peer: Peer, gpu: bytes, lease: int) -> None:
    """Answer the REQUEST that comes, take the lease back when the program is quiet."""
    requested(peer)
    peer.grant(gpu, lease)


def returned(peer: Peer, gpu: bytes, lease: int) -> None:
    peer.revoke(gpu, lease)
    peer.expect(Kind.RELEASE, skip=TALK)


@pytest.fixture
def held(start: Start, agent: ScriptedAgent, gpus: list[bytes]) -> Held:
    """Start a program that holds 8 MiB and has no lease."""

    def starting() -> tuple[Client, Peer]:
        client = start(HOLDS, GPUSHARE_ENGINE="suspend")
        peer = agent.peer()
        granted(peer, gpus[0], 1)
        assert client.hear() == "ready"
        returned(peer, gpus[0], 1)
        return client, peer

    return starting


def test_a_suspended_program_finds_its_memory_streams_and_code_again(
    held: Held, driver: Caller, gpus: list[bytes]
) -> None:
    client, peer = held()
    pid = client.process.pid
    assert suspended(peer)[4] == 1
    driver.does(pid, "lock", "checkpoint")
    assert driver.shown()["used"] == 0
    client.say(SAME)
    request = requested(peer)
    assert request.fields[1] >= 8 << 20, "what it had when the driver was asked last"
    assert quiet(client, 0.05)
    driver.does(pid, "restore", "unlock")
    peer.send(Kind.RESUMED, 1)
    assert quiet(client, 0.05), "it copied without a lease"
    peer.grant(gpus[0], 2)
    assert client.hear() == "done"
    assert driver.state(pid) == RUNNING
    returned(peer, gpus[0], 2)
    client.say(None)
    client.end()


def test_two_programs_that_do_not_fit_take_turns(held: Held, driver: Caller, gpus: list[bytes]) -> None:
    first, of_first = held()
    assert suspended(of_first)[4] == 1
    driver.does(first.process.pid, "lock", "checkpoint")
    second, of_second = held()
    assert driver.shown()["used"] == 8
    programs = [(first, of_first), (second, of_second)]
    for turn in range(4):
        (client, peer), (other, of_other) = programs[turn % 2], programs[1 - turn % 2]
        client.say(SAME if turn < 2 else "d.read(blocks[1], 4 * MIB) == data[1] or 1 / 0")
        requested(peer)
        assert suspended(of_other, turn + 2)[4] == 1
        driver.does(other.process.pid, "lock", "checkpoint")
        driver.does(client.process.pid, "restore", "unlock")
        peer.grant(gpus[0], turn + 2)
        assert client.hear() == "done"
        returned(peer, gpus[0], turn + 2)


def test_the_next_agent_hears_of_a_thread_that_the_driver_blocks(
    held: Held, driver: Caller, agent: ScriptedAgent, socket_path: Path, gpus: list[bytes]
) -> None:
    """The agent dies after the checkpoint; a thread goes on, into the driver."""
    client, peer = held()
    pid = client.process.pid
    assert suspended(peer)[4] == 1
    driver.does(pid, "lock", "checkpoint")
    agent.stop()
    client.say("d.alloc(MIB)")
    assert quiet(client, 0.1)
    again = ScriptedAgent(socket_path, gpus, total=1 << 30, welcome_features=FEATURES)
    peer = again.peer()
    ready: Frame = peer.expect(Kind.SUSPEND_READY, skip=(*TALK, Kind.REQUEST))
    assert (ready.fields[0], ready.fields[5]) == (0, 1)
    requested(peer)
    assert driver.state(pid) == CHECKPOINTED
    driver.does(pid, "restore", "unlock")
    peer.send(Kind.RESUMED, 0)
    assert client.hear() == "done"
    peer.grant(gpus[0], 1)
    said(client, SAME)
    again.stop()


def test_an_agent_that_finds_it_suspended_keeps_it_so(
    held: Held, driver: Caller, agent: ScriptedAgent, socket_path: Path, gpus: list[bytes]
) -> None:
    client, peer = held()
    pid = client.process.pid
    assert suspended(peer)[4] == 1
    driver.does(pid, "lock", "checkpoint")
    agent.stop()
    again = ScriptedAgent(socket_path, gpus, total=1 << 30, welcome_features=FEATURES)
    peer = again.peer()
    peer.expect(Kind.SUSPEND_READY, skip=TALK)
    assert suspended(peer, 3)[4] == 1
    peer.nothing(0.05, skip=TALK)
    client.say(SAME)
    requested(peer)
    driver.does(pid, "restore", "unlock")
    peer.grant(gpus[0], 1)
    assert client.hear() == "done"
    again.stop()


def test_a_suspended_program_that_exits_asks_to_be_resumed_where_the_driver_needs_it(
    held: Held, driver: Caller, gpus: list[bytes]
) -> None:
    client, peer = held()
    pid = client.process.pid
    assert suspended(peer)[4] == 1
    driver.does(pid, "lock", "checkpoint")
    client.say("import atexit; atexit.register(d.free, blocks[0]); raise SystemExit(7)")
    requested(peer)
    driver.does(pid, "restore", "unlock")
    peer.send(Kind.RESUMED, 1)
    client.end(status=7)


# A program finds the GPU full of another's memory.

ALLOC = "at = c.c_uint64(); say(d.result('cuMemAlloc_v2', c.byref(at), c.c_size_t(8 * MIB)))"
OUT_OF_MEMORY = 2


@pytest.mark.parametrize("leased", [False, True], ids=["without a lease", "with a lease"])
def test_an_allocation_that_finds_no_room_asks_for_it(
    held: Held, start: Start, driver: Caller, agent: ScriptedAgent, gpus: list[bytes], leased: bool
) -> None:
    first, of_first = held()
    client = start(STEPS, GPUSHARE_ENGINE="suspend")
    peer = agent.peer()
    client.hear()
    if leased:
        client.say("d.spin(0.001)")
        granted(peer, gpus[0], 2)
        assert client.hear() == "done"
    client.say(ALLOC)
    if leased:
        assert peer.expect(Kind.RELEASE, skip=TALK).fields[0] == 2
    assert requested(peer).fields[:2] == (0, 8 << 20)
    assert quiet(client, 0.05)
    assert suspended(of_first)[4] == 1
    driver.does(first.process.pid, "lock", "checkpoint")
    peer.grant(gpus[0], 3)
    assert client.hear() == 0
    assert client.hear() == "done"
    assert peer.expect(Kind.MEMORY, skip=(Kind.IDLE, Kind.BUSY)).fields[:2] == (0, 8 << 20)
    said(client, "assert d.result('cuMemAlloc_v2', c.byref(at), c.c_size_t(2 << 30)) == 2")  # beyond the limit


def test_an_allocation_fails_where_the_agent_made_no_room(
    held: Held, start: Start, agent: ScriptedAgent, gpus: list[bytes]
) -> None:
    """Two leases without room: the error stands, and the agent hears what there really is."""
    held()
    client = start(STEPS, GPUSHARE_ENGINE="suspend")
    peer = agent.peer()
    client.hear()
    said(client, "small = d.alloc(MIB)")
    client.say(ALLOC)
    assert requested(peer).fields[1] == 9 << 20
    peer.grant(gpus[0], 2)
    assert peer.expect(Kind.RELEASE, skip=TALK).fields[0] == 2
    assert requested(peer).fields[1] == 9 << 20
    peer.grant(gpus[0], 3)
    assert client.hear() == OUT_OF_MEMORY
    assert client.hear() == "done"
    while peer.expect(Kind.MEMORY, skip=(Kind.IDLE, Kind.BUSY)).fields[1] != 1 << 20:
        pass


@pytest.mark.parametrize("settings", [{"SIMGPU_MEMORY": "20MiB", "SIMGPU_CONTEXT_MEMORY": "8MiB"}], ids=[""])
def test_a_context_that_finds_no_room_asks_for_it(
    held: Held, start: Start, driver: Caller, agent: ScriptedAgent, gpus: list[bytes]
) -> None:
    first, of_first = held()
    client = start(STEPS, GPUSHARE_ENGINE="suspend")
    peer = agent.peer()
    assert requested(peer).fields[1] == 512 << 20
    assert suspended(of_first)[4] == 1
    driver.does(first.process.pid, "lock", "checkpoint")
    peer.grant(gpus[0], 2)
    assert client.hear() == "ready"


def test_an_interrupt_ends_the_wait_for_room_with_the_error(
    held: Held, start: Start, agent: ScriptedAgent, gpus: list[bytes]
) -> None:
    held()
    client = start(STEPS, GPUSHARE_ENGINE="suspend")
    peer = agent.peer()
    client.hear()
    said(client, "import signal; signal.signal(signal.SIGUSR1, lambda *_: None)")
    client.say(ALLOC)
    requested(peer)
    assert quiet(client, 0.05)
    client.process.send_signal(10)
    assert client.hear() == OUT_OF_MEMORY


def test_without_an_agent_that_suspends_an_allocation_fails_at_once(
    start: Start, socket_path: Path, gpus: list[bytes]
) -> None:
    agent = ScriptedAgent(socket_path, gpus, total=1 << 30)
    client = start(STEPS, GPUSHARE_ENGINE="suspend")
    peer = agent.peer()
    client.hear()
    client.say(ALLOC.replace("8 * MIB", "16 * MIB"))
    assert client.hear() == OUT_OF_MEMORY
    peer.nothing(0.05)
    agent.stop()


def test_every_call_that_the_simulated_driver_blocks_waits_in_front_of_it() -> None:
    """Of those that say so themselves; others come to it through a function that they share."""
    words = (NATIVE / "preload" / "driver" / "driver_calls.h").read_text()
    wait = set(re.findall(r"^(?:SUSPENDABLE|COUNTED|WATCHED|SINGLE)\((\w+)", words, re.MULTILINE))
    for name in re.findall(r"^(?:STREAMED|IMPLICIT)\((\w+)", words, re.MULTILINE):
        wait |= {name, f"{name}_ptsz", f"{name}_ptds"}
    block = {
        name
        for source in (SIMGPU / "cuda").rglob("*.c")
        for name, body in re.findall(r"EXPORT CUresult (cu\w+)\([^)]*\) \{(.*?)\n\}", source.read_text(), re.DOTALL)
        if "LOCKABLE()" in body
    }
    assert len(block) > 30
    assert block <= wait
