"""The memory limit of a session holds for all its processes together: real agent, real library, simulated GPUs."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpushare_spawner.model.control import TierRequest
from gpushare_spawner.model.report import SessionReport
from gpushare_spawner.model.share import Tier
from gpushare_spawner.notebook.client import ask
from gpushare_spawner.sharing.native import merged
from tests.agent.agent_process import AgentProcess
from tests.agent.conftest import request_for
from tests.native.preload_clients import Client

MIB = 2**20
LIMIT = 512 * MIB

PROGRAM = """
d = Driver({device})
held = []
def alloc(size):
    try:
        held.append(d.alloc(size))
        return True
    except CudaError as error:
        return error.code
def try_async(size):
    try:
        return d.alloc_async(size)
    except CudaError:
        return None
def freed(at):
    d("cuCtxSetCurrent", d.context)
    d.free(at)
say("ready")
while True:
    what, *values = hear()
    say(eval(what)(*values))
"""
ALLOC, FREE, FREE_MEMORY = "alloc", "lambda n: d.free(held.pop(n))", "lambda: d.memory()"
ALLOC_ASYNC = "lambda n: d.alloc_async(n)"
NVML = """lambda: (__import__("pynvml").nvmlInit(), [(p.pid, p.usedGpuMemory) for p in
    __import__("pynvml").nvmlDeviceGetComputeRunningProcesses(
    __import__("pynvml").nvmlDeviceGetHandleByIndex(0))])[1]"""


@pytest.fixture
async def agent(short_folder: Path) -> AsyncIterator[AgentProcess]:
    agent = AgentProcess(short_folder)
    agent.environment["SIMGPU_MEMORY"] = "1GiB"
    await agent.start()
    yield agent
    if agent.process is not None and agent.process.poll() is None:
        agent.end(signal.SIGKILL)


class Programs:
    """CUDA programs of one session."""

    def __init__(self, agent: AgentProcess) -> None:
        self.agent = agent
        self.environment: dict[str, str] = {}
        self.clients: list[Client] = []

    async def open(self, **changes: Any) -> None:
        gpu = (await self.agent.client.report()).gpus[0].uuid
        values: dict[str, Any] = {"gpus": (gpu,), "memory_limit": LIMIT}
        opened = await self.agent.client.open(request_for("ada", **values | changes))
        self.environment = merged(os.environ, opened.environment)

    def start(self, device: int = 0, **more: str) -> Client:
        client = Client(PROGRAM.replace("{device}", str(device)), self.environment | {"GPUSHARE_LOG": "info"} | more)
        self.clients.append(client)
        assert client.hear() == "ready"
        return client

    @staticmethod
    def do(client: Client, what: str, *values: int) -> Any:
        client.say([what, *values])
        return client.hear()

    async def report(self) -> SessionReport:
        found = (await self.agent.client.report()).session("ada")
        assert found is not None
        return found

    async def until(self, holds: Callable[[], bool]) -> None:
        for _ in range(500):
            if holds():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it did not come about within 5 s")


@pytest.fixture
def programs(agent: AgentProcess) -> Iterator[Programs]:
    programs = Programs(agent)
    yield programs
    for client in programs.clients:
        client.process.kill()
        client.process.communicate()


async def test_two_processes_share_one_limit_as_the_driver_counts_it(programs: Programs) -> None:
    """Plain memory, so that the driver knows each byte; allocated in pieces by both in turn until both are refused."""
    await programs.open(oversubscribe=False)
    first, second = programs.start(), programs.start()
    answers = [programs.do(client, ALLOC, 60 * MIB) for _ in range(6) for client in (first, second)]
    assert answers.count(True) == LIMIT // (60 * MIB), answers
    assert set(answers) == {True, 2}, "CUDA_ERROR_OUT_OF_MEMORY, as on a smaller GPU"
    used = dict(programs.do(first, NVML))
    assert sum(used[client.process.pid] for client in (first, second)) == 480 * MIB


async def test_a_second_process_finds_what_the_first_does_not_use(programs: Programs) -> None:
    """What is left of the limit is allocated to the last MiB, wherever the first process's allowance ends."""
    await programs.open()
    first, second = programs.start(), programs.start()
    assert programs.do(first, ALLOC, 400 * MIB) is True
    assert programs.do(second, ALLOC, 112 * MIB) is True
    assert programs.do(second, ALLOC, MIB) == 2
    assert programs.do(first, ALLOC, MIB) == 2
    programs.do(first, FREE, 0)
    assert programs.do(second, ALLOC, 400 * MIB) is True, "freed memory is the other one's at once"
    report = await programs.report()
    assert report.memory_limit_hits.count == 2
    hit = report.memory_limit_hits.last
    assert hit is not None
    assert (hit.limit, hit.requested_bytes, hit.pid) == ("session", MIB, first.process.pid)
    assert hit.allocated_bytes == 512 * MIB


async def test_status_names_the_limit_the_processes_that_use_exclusively_and_what_helps(programs: Programs) -> None:
    await programs.open()
    first, second = programs.start(), programs.start()
    programs.do(first, ALLOC, 400 * MIB)
    programs.do(second, ALLOC, 100 * MIB)
    programs.do(second, ALLOC, 50 * MIB)
    page = str(await asyncio.to_thread(ask, programs.environment["GPUSHARE_SOCKET"]))
    assert "this session may allocate 512 MiB, all its kernels together" in page
    assert f"Restart python (process {first.process.pid}) to free 400 MiB." in page
    held = next(line for line in page.splitlines() if line.startswith("allocated by"))
    assert re.search(rf"process {first.process.pid}\) 400 MiB, .*process {second.process.pid}\) 100 MiB", held)


async def test_refused_allocations_are_remembered_over_a_restart_of_the_agent(
    programs: Programs, agent: AgentProcess
) -> None:
    await programs.open()
    client = programs.start()
    assert programs.do(client, ALLOC, 600 * MIB) == 2
    before = (await programs.report()).memory_limit_hits
    assert before.count == 1
    agent.end(signal.SIGTERM)
    await agent.start()
    assert (await programs.report()).memory_limit_hits == before


async def test_free_memory_is_the_sessions(programs: Programs) -> None:
    await programs.open()
    first, second = programs.start(), programs.start()
    programs.do(first, ALLOC, 100 * MIB)
    await programs.until(lambda: programs.do(second, FREE_MEMORY) == [412 * MIB, LIMIT])
    programs.do(second, ALLOC, 12 * MIB)
    await programs.until(lambda: programs.do(first, FREE_MEMORY) == [400 * MIB, LIMIT])
    first.process.kill()
    await programs.until(lambda: programs.do(second, FREE_MEMORY) == [500 * MIB, LIMIT])


async def test_memory_of_a_killed_process_is_free_again(programs: Programs) -> None:
    await programs.open()
    first, second = programs.start(), programs.start()
    assert programs.do(first, ALLOC, 500 * MIB) is True
    assert programs.do(second, ALLOC, 100 * MIB) == 2
    first.process.kill()
    first.process.wait()
    assert programs.do(second, ALLOC, 500 * MIB) is True


CACHE = """lambda n: (lambda at: (d.fill(at, 1024, 1), d.synchronize(), d.free_async(at)))(d.alloc_async(n)) and True"""
"""A burst, and memory that stays cached when it is freed."""


async def test_what_another_process_has_freed_and_cached_is_given_back(programs: Programs) -> None:
    """At once after its burst, while it keeps its lease; and when it has given its lease back because others waited."""
    await programs.open()
    first, second = programs.start(), programs.start()
    assert programs.do(first, CACHE, 400 * MIB) is True
    assert programs.do(first, CACHE, 300 * MIB) is True
    assert programs.do(second, ALLOC, 450 * MIB) is True
    assert programs.do(first, ALLOC, 62 * MIB) is True
    assert programs.do(first, ALLOC, MIB) == 2
    assert (await programs.report()).memory_limit_hits.count == 1


async def test_what_a_revoked_process_has_cached_is_given_back(programs: Programs, agent: AgentProcess) -> None:
    """It has no lease, and does not ask for one."""
    await programs.open()
    first, second = programs.start(), programs.start()
    assert programs.do(first, CACHE, 400 * MIB) is True
    await agent.client.send(TierRequest(id="ada", tier=Tier.RELEASED, effective_units=0, reason="test"))
    await asyncio.sleep(0.3)  # the lease is revoked, before the process would have given it back by itself
    assert programs.do(second, ALLOC, 450 * MIB) is True


SMALLER = """lambda big, small: (lambda blocks: ([d.fill(at, big // 4, 1) for at in blocks],
    [d.free_async(at) for at in blocks], d.synchronize()))([d.alloc_async(big) for _ in range(5)]) and [
    at and d.fill(at, small // 4, 2) for at in [try_async(small) for _ in range(6)]] and d.synchronize()"""
"""Five large blocks, all freed, then six smaller ones, as far as the limit goes; each is used from end to end."""


async def test_a_cached_block_that_serves_a_smaller_allocation_counts_in_full(programs: Programs) -> None:
    """The driver's figure, not the library's: what was freed and reused for less is still there in full."""
    await programs.open()
    client = programs.start()
    programs.do(client, SMALLER, 100 * MIB, 81 * MIB)
    assert dict(programs.do(client, NVML))[client.process.pid] <= LIMIT


WHILE_FREED = """lambda size: (alloc(size), d.spin(1.0), (lambda thread: (thread.start(), time.sleep(0.2),
    alloc(size), thread.join(), d.synchronize())[2])(__import__("threading").Thread(target=freed, args=[held.pop()]))
    )[2]"""
"""What an allocation is told while another thread's free waits for a kernel of 1 s."""


async def test_memory_counts_until_the_driver_has_it_back(programs: Programs) -> None:
    """A free waits for kernels; until then the memory is not there for another allocation."""
    await programs.open(oversubscribe=False)
    client = programs.start()
    assert programs.do(client, WHILE_FREED, 400 * MIB) == 2
    assert programs.do(client, ALLOC, 400 * MIB) is True
    assert dict(programs.do(client, NVML))[client.process.pid] == 400 * MIB


async def test_a_stopped_process_keeps_its_allowance_and_delays_no_answer(programs: Programs) -> None:
    await programs.open()
    first, second = programs.start(), programs.start()
    assert programs.do(first, ALLOC, 300 * MIB) is True
    # stopped in the same statement, before the library's thread gives anything back
    first.say(["lambda: (d.free(held.pop()), os.kill(os.getpid(), 19))[0]"])
    await asyncio.sleep(0.1)
    assert programs.do(second, ALLOC, 400 * MIB) == 2
    first.process.send_signal(signal.SIGCONT)
    await programs.until(lambda: programs.do(second, ALLOC, 400 * MIB) is True)


async def test_a_forked_child_neither_takes_memory_nor_gives_back_its_parents(programs: Programs) -> None:
    """As multiprocessing forks: the child has the parent's variables, and none of its memory."""
    await programs.open()
    parent, other = programs.start(), programs.start()
    assert programs.do(parent, ALLOC, 300 * MIB) is True
    assert programs.do(parent, "lambda: [os.fork() or os._exit(0) for _ in range(3)] and 3") == 3
    assert programs.do(parent, ALLOC, 100 * MIB) is True
    assert programs.do(other, ALLOC, 113 * MIB) == 2
    assert programs.do(other, ALLOC, 112 * MIB) is True
    assert (await programs.report()).processes == 2


async def test_the_limit_holds_over_a_restart_of_the_agent(programs: Programs, agent: AgentProcess) -> None:
    await programs.open()
    first, second = programs.start(), programs.start()
    assert programs.do(first, ALLOC, 300 * MIB) is True
    agent.end(signal.SIGKILL)
    await agent.start()

    async def all_back() -> None:
        while (await programs.report()).processes < 2:
            await asyncio.sleep(0.02)

    await asyncio.wait_for(all_back(), 10)
    assert programs.do(second, ALLOC, 300 * MIB) == 2
    assert programs.do(second, ALLOC, 200 * MIB) is True


async def test_without_the_agent_each_process_has_the_limit_for_itself(programs: Programs, agent: AgentProcess) -> None:
    await programs.open()
    first, second = programs.start(), programs.start()
    assert programs.do(first, ALLOC, 300 * MIB) is True
    agent.end(signal.SIGKILL)
    await programs.until(lambda: programs.do(second, FREE_MEMORY)[0] == LIMIT)
    assert programs.do(second, ALLOC, 300 * MIB) is True
    assert programs.do(second, ALLOC, 300 * MIB) == 2


async def test_an_agent_that_hangs_delays_an_allocation_by_two_seconds_once(
    programs: Programs, agent: AgentProcess
) -> None:
    await programs.open()
    client = programs.start()
    assert programs.do(client, ALLOC, MIB) is True
    assert agent.process is not None
    agent.process.send_signal(signal.SIGSTOP)
    begin = asyncio.get_running_loop().time()
    assert [programs.do(client, ALLOC, 50 * MIB) for _ in range(8)] == [True] * 8
    assert 1.9 < asyncio.get_running_loop().time() - begin < 3
    assert programs.do(client, ALLOC, 200 * MIB) == 2, "no process is ever shown more than the limit"
    agent.process.send_signal(signal.SIGCONT)
    await programs.until(lambda: programs.do(client, FREE_MEMORY)[0] == LIMIT - 401 * MIB)
    while (await programs.report()).memory_bytes != 401 * MIB:
        await asyncio.sleep(0.02)


async def test_each_gpu_has_its_own_limit(programs: Programs, agent: AgentProcess) -> None:
    uuids = tuple(gpu.uuid for gpu in (await agent.client.report()).gpus)
    await programs.open(gpus=uuids, share_units=100)
    first, second = programs.start(), programs.start(device=1)
    assert programs.do(first, ALLOC, 500 * MIB) is True
    assert programs.do(second, ALLOC, 500 * MIB) is True
    assert programs.do(first, ALLOC, 20 * MIB) == 2
