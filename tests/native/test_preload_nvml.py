"""NVML under the library: the share and the session's own processes, in programs that never call cuInit too."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from gpushare_spawner.model.frames import Frame, Kind
from gpushare_spawner.sharing.native import merged
from tests.agent.agent_process import AgentProcess
from tests.agent.conftest import request_for
from tests.libraries import simulated_driver
from tests.native.preload_agent import AnsweringAgent, ScriptedAgent
from tests.native.session_program import Program

if TYPE_CHECKING:
    from tests.native.preload_clients import Start

pytest_plugins = ["tests.native.preload_clients"]

MIB = 1 << 20
LIMIT = 3 * 2**30

LOOK = """
import ctypes, json, os, pynvml as n, sys
n.nvmlInit()
def attempt(call, *arguments):
    try:
        return call(*arguments)
    except n.NVMLError as error:
        return str(error)
def details(handle, mode):
    entries = (n.c_nvmlProcessDetail_v1_t * 40)()
    found = n.c_nvmlProcessDetailList_v1_t(n.nvmlProcessDetailList_v1, mode, 40, entries)
    call = n._nvmlGetFunctionPointer("nvmlDeviceGetRunningProcessDetailList")
    assert call(handle, ctypes.byref(found)) == 0
    return [[one.pid, one.usedGpuMemory] for one in entries[: found.numProcArrayEntries]]
def uses(handle, seen):
    entries = (n.c_nvmlProcessUtilizationInfo_v1_t * 40)()
    found = n.c_nvmlProcessesUtilizationInfo_v1_t(n.ProcessesUtilizationInfo_v1, 40, seen, entries)
    code = n._nvmlGetFunctionPointer("nvmlDeviceGetProcessesUtilizationInfo")(handle, ctypes.byref(found))
    return code or [[one.pid, one.smUtil] for one in entries[: found.processSamplesCount]]
def look(handle):
    old, new = n.nvmlDeviceGetMemoryInfo(handle), n.nvmlDeviceGetMemoryInfo(handle, version=n.nvmlMemory_v2)
    running = n._nvmlGetFunctionPointer("nvmlDeviceGetComputeRunningProcesses")
    room = ctypes.c_uint(0)
    asked = running(handle, ctypes.byref(room), None)
    samples = attempt(n.nvmlDeviceGetProcessUtilization, handle, 0)
    newest = max((one.timeStamp for one in samples), default=0) if isinstance(samples, list) else 0
    return {
        "uuid": n.nvmlDeviceGetUUID(handle), "index": n.nvmlDeviceGetIndex(handle),
        "memory": [old.total, old.free, old.used], "newer": [new.total, new.free, new.used, new.reserved],
        "processes": [[p.pid, p.usedGpuMemory] for p in n.nvmlDeviceGetComputeRunningProcesses(handle)],
        "asked": [asked, room.value], "graphics": len(n.nvmlDeviceGetGraphicsRunningProcesses(handle)),
        "details": details(handle, 0), "other details": details(handle, 1),
        "util": n.nvmlDeviceGetUtilizationRates(handle).gpu,
        "uses": [[one.pid, one.smUtil] for one in samples] if isinstance(samples, list) else samples,
        "use details": uses(handle, 0),
        "seen": [attempt(n.nvmlDeviceGetProcessUtilization, handle, newest), uses(handle, newest)] if newest else [],
    }
def everything():
    return {"count": n.nvmlDeviceGetCount(), "beyond": attempt(n.nvmlDeviceGetHandleByIndex, n.nvmlDeviceGetCount()),
            "gpus": [look(n.nvmlDeviceGetHandleByIndex(i)) for i in range(n.nvmlDeviceGetCount())]}
"""
ONCE = LOOK + "print(json.dumps(everything()), flush=True)"


class Machine:
    """Two simulated GPUs, and the environments of two sessions of which one has the second GPU alone."""

    def __init__(self, agent: AgentProcess, gpus: list[str], own: dict[str, str], neighbour: dict[str, str]) -> None:
        self.agent, self.gpus, self.own, self.neighbour = agent, gpus, own, neighbour

    def seen(self, code: str = ONCE, **more: str) -> Any:
        """What a program of the session prints: one that uses NVML and never calls cuInit."""
        return json.loads(subprocess.check_output([sys.executable, "-c", code], env=self.own | more, timeout=60))

    def smi(self) -> Any:
        command = [sys.executable, "-m", "gpushare_spawner.cli", "smi", "--json"]
        return json.loads(subprocess.check_output(command, env=self.own, timeout=60))["gpus"]


async def opened(agent: AgentProcess) -> Machine:
    await agent.start()
    gpus = [gpu.uuid for gpu in (await agent.client.report()).gpus]
    ada = await agent.client.open(request_for("ada", gpus=(gpus[1],), memory_limit=str(LIMIT)))
    bob = await agent.client.open(request_for("bob", gpus=(gpus[1],)))
    return Machine(agent, gpus, merged(os.environ, ada.environment), merged(os.environ, bob.environment))


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    """One for all tests here: an agent starts in seconds."""
    # pytest's own folders are too long for the path of a socket
    with tempfile.TemporaryDirectory(prefix="nvml") as folder:
        agent = AgentProcess(Path(folder), gpus=2)
        yield asyncio.run(opened(agent))
        agent.end(signal.SIGKILL)


def test_nvml_shows_the_share_and_its_processes_as_smi_does(machine: Machine) -> None:
    with ExitStack() as ends:
        ada, bob = Program(machine.own, 256), Program(machine.neighbour, 100)
        ends.callback(ada.end)
        ends.callback(bob.end)
        ada.spin(0.2)
        (free, total), _ = ada.hear()
        seen, (shown,) = machine.seen(), machine.smi()
        (gpu,) = seen["gpus"]
        assert (seen["count"], gpu["index"], gpu["uuid"]) == (1, 0, machine.gpus[1])
        assert seen["beyond"] == "Invalid Argument"
        assert gpu["memory"] == [LIMIT, LIMIT - 256 * MIB, 256 * MIB] == [total, free, total - free]
        assert gpu["newer"] == [*gpu["memory"], 0]
        assert gpu["memory"] == [shown[f"memory_{name}_bytes"] for name in ("total", "free", "used")]
        assert gpu["processes"] == gpu["details"] == [[ada.pid, 256 * MIB]]
        assert gpu["processes"] == [[one["pid"], one["memory_bytes"]] for one in shown["processes"]]
        assert gpu["asked"] == [7, 1]
        assert (gpu["graphics"], gpu["other details"]) == (0, [])
        whole = machine.seen(GPUSHARE_NVML="driver")
        assert whole["count"] == 2
        assert {pid for pid, _ in whole["gpus"][1]["processes"]} == {ada.pid, bob.pid}
        assert whole["gpus"][1]["memory"][0] != LIMIT
        assert whole["gpus"][1]["index"] == 1
        assert shown["driver"]["name"].startswith("Simulated")


def test_utilisation_is_the_sessions_own_part_of_the_gpu(machine: Machine) -> None:
    """Both compute all the time, and each has about half of the GPU; then the neighbour alone, then nobody."""
    with ExitStack() as ends:
        ada, bob = Program(machine.own, 16), Program(machine.neighbour, 16)
        ends.callback(ada.end)
        ends.callback(bob.end)
        for one in (ada, bob):
            one.spin(60.0)
        time.sleep(1.2)
        (gpu,), (shown,) = machine.seen()["gpus"], machine.smi()
        assert 25 <= gpu["util"] <= 75, gpu
        assert gpu["uses"] == gpu["use details"] == [[ada.pid, gpu["util"]]]
        assert gpu["seen"] == ["Not Found", 6], "nothing that was seen is told again"
        assert 0.25 <= shown["utilisation"] <= 0.75, shown
        assert shown["processes"][0]["utilisation"] == pytest.approx(shown["utilisation"])
        assert shown["driver"]["utilisation"] >= 0.6, "of the whole GPU, although NVML shows the share"
        ada.end()
        time.sleep(1.3)
        (gpu,) = machine.seen()["gpus"]
        assert (gpu["util"], gpu["uses"], gpu["use details"]) == (0, "Not Found", 6)
        (whole,) = machine.seen(GPUSHARE_NVML="driver")["gpus"][1:]
        assert whole["util"] >= 50, whole


def test_nvitop_shows_the_share_and_its_processes(machine: Machine) -> None:
    with ExitStack() as ends:
        ada, bob = Program(machine.own, 256), Program(machine.neighbour, 100)
        ends.callback(ada.end)
        ends.callback(bob.end)
        command = [sys.executable, "-m", "nvitop", "--once", "--no-unicode"]
        shown = subprocess.check_output(
            command, env=machine.own | {"TERM": "xterm", "COLUMNS": "100"}, text=True, stderr=subprocess.DEVNULL
        )
    assert "256.0MiB / 3072MiB" in shown
    assert f" {ada.pid} C" in shown
    assert f" {bob.pid} " not in shown
    assert shown.count("Simulated GPU") + shown.count("ulated GPU") == 1, "one GPU of two"


STEPS = (
    LOOK
    + """
for line in sys.stdin:
    print(json.dumps(everything()), flush=True)
"""
)


def test_program_that_goes_on_sees_the_agents_end_and_return_and_keeps_its_numbers(machine: Machine) -> None:
    watch = subprocess.Popen(
        [sys.executable, "-c", STEPS], env=machine.own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def look() -> Any:
        assert watch.stdin is not None
        assert watch.stdout is not None
        time.sleep(1.1)  # figures stand for a second
        watch.stdin.write("look\n")
        watch.stdin.flush()
        return json.loads(watch.stdout.readline())

    try:
        first = look()
        assert first["gpus"][0]["memory"] == [LIMIT, LIMIT, 0]
        machine.agent.end(signal.SIGKILL)
        without = look()
        assert without["count"] == 1
        assert without["gpus"][0]["uuid"] == machine.gpus[1]
        assert without == first, "the last answer stands for 5 s"
        asyncio.run(machine.agent.start())
        assert look() == first
    finally:
        watch.kill()
        watch.communicate()


# -- with a scripted agent, or none -----------------------------------------------------------------------------------


def test_without_an_agent_nvml_shows_what_the_driver_says(start: Start, gpus: list[bytes]) -> None:
    client = start(LOOK + "say([n.nvmlDeviceGetCount(), look(n.nvmlDeviceGetHandleByIndex(1))['memory'][0]])")
    assert client.hear() == [2, 1024 * MIB]
    assert client.end() == "", "and says nothing"


def test_agent_that_does_not_answer_holds_nvml_up_for_half_a_second_at_most(
    start: Start, socket_path: Path, gpus: list[bytes]
) -> None:
    agent = ScriptedAgent(socket_path, gpus, greets=False)
    client = start(
        LOOK
        + """
begun = time.monotonic()
first = n.nvmlDeviceGetCount()
between = time.monotonic()
rest = [n.nvmlDeviceGetMemoryInfo(n.nvmlDeviceGetHandleByIndex(0)).total for _ in range(100)]
say([first, rest[-1], between - begun, time.monotonic() - between])
"""
    )
    count, total, first, rest = client.hear()
    assert (count, total) == (2, 1024 * MIB)
    assert 0.45 <= first < 2
    assert rest < 0.4, "the others wait no more"
    agent.stop()


def test_older_agent_without_use_leaves_utilisation_to_the_driver(
    start: Start, socket_path: Path, gpus: list[bytes]
) -> None:
    status = [Frame(Kind.STATUS, (25, 0, 25, 0, 25, 100 * MIB, 0, 400 * MIB), gpu=gpu) for gpu in gpus]
    process = Frame(Kind.SESSION_MEMORY, (1, 77, 100 * MIB), gpu=gpus[0])
    agent = AnsweringAgent(socket_path, gpus, 0, [process, *status])
    client = start(LOOK + "say([look(n.nvmlDeviceGetHandleByIndex(0)) for _ in range(2)])")
    first, second = client.hear()
    assert first["memory"] == [400 * MIB, 300 * MIB, 100 * MIB]
    assert first["processes"] == [[77, 100 * MIB]]
    assert (first["util"], first["uses"]) == (0, "Not Found")
    assert second == first
    assert agent.observers == 1, "figures stand for a second"
    agent.stop()


@pytest.mark.parametrize("answer", ["nothing of use", "too many GPUs", "an error"])
def test_answers_that_cannot_be_used_leave_nvml_as_the_driver_has_it(
    start: Start, socket_path: Path, gpus: list[bytes], answer: str
) -> None:
    frames = {
        "nothing of use": [Frame(Kind.STATUS, (), gpu=bytes(16))],
        "too many GPUs": [],
        "an error": [Frame(Kind.ERROR, (3,))],
    }[answer]
    agent = AnsweringAgent(socket_path, gpus * 40 if answer == "too many GPUs" else gpus, 0, frames)
    client = start(LOOK + "say([n.nvmlDeviceGetCount(), look(n.nvmlDeviceGetHandleByIndex(0))['memory'][0]])")
    assert client.hear() == [2, 1024 * MIB]
    client.end()
    agent.stop()


def test_forked_child_asks_for_itself(start: Start, socket_path: Path, gpus: list[bytes]) -> None:
    """Forked while another thread waits for the agent's answer: the child does not wait for that thread."""
    agent = ScriptedAgent(socket_path, gpus, greets=False)
    client = start(
        LOOK
        + """
handle = None
thread = threading.Thread(target=n.nvmlDeviceGetCount)
thread.start()
time.sleep(0.1)
child = os.fork()
if child == 0:
    os._exit(n.nvmlDeviceGetCount())
say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
thread.join()
"""
    )
    assert client.hear() == 2
    client.end()
    agent.stop()


def test_nvml_alone_starts_no_thread_and_leaves_no_file_open(
    start: Start, socket_path: Path, gpus: list[bytes]
) -> None:
    status = [Frame(Kind.STATUS, (25, 0, 25, 0, 25, 0, 0, 400 * MIB), gpu=gpu) for gpu in gpus]
    agent = AnsweringAgent(socket_path, gpus, 0, status)
    client = start(
        LOOK
        + """
def state():
    files = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    names = sorted(os.readlink(file) for file in files if os.path.exists(file))
    return [len(os.listdir("/proc/self/task")), [name for name in names if "simgpu" not in name]]
before = state()
say([n.nvmlDeviceGetMemoryInfo(n.nvmlDeviceGetHandleByIndex(0)).total, before, state()])
"""
    )
    total, before, after = client.hear()
    assert total == 400 * MIB
    assert after == before
    client.end()
    agent.stop()


C_PROGRAM = r"""
#include <stdio.h>
typedef void *nvmlDevice_t;
int nvmlInit_v2(void), nvmlDeviceGetCount_v2(unsigned *), nvmlDeviceGetHandleByIndex_v2(unsigned, nvmlDevice_t *);
int nvmlDeviceGetMemoryInfo(nvmlDevice_t, unsigned long long *);
int nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t, unsigned *, void *);
int main(void) {
    unsigned count = 0, processes = 9;
    unsigned long long memory[3] = {0};
    char list[9 * 24];
    nvmlDevice_t device = 0;
    int bad = nvmlInit_v2() | nvmlDeviceGetCount_v2(&count) | nvmlDeviceGetHandleByIndex_v2(0, &device);
    bad |= nvmlDeviceGetMemoryInfo(device, memory) | nvmlDeviceGetComputeRunningProcesses_v3(device, &processes, list);
    printf("[%d, %u, %llu, %llu, %u]\n", bad, count, memory[0], memory[2], processes);
    return 0;
}
"""


def test_c_program_that_is_linked_against_nvml_sees_the_share_too(machine: Machine, tmp_path: Path) -> None:
    source, program = tmp_path / "look.c", tmp_path / "look"
    source.write_text(C_PROGRAM)
    library = simulated_driver() / "libnvidia-ml.so.1"
    zig = [sys.executable, "-m", "ziglang", "cc"]
    subprocess.run([*zig, str(source), str(library), "-o", str(program)], check=True, timeout=120)
    share, whole = (
        json.loads(subprocess.check_output([program], env=machine.own | more, timeout=60))
        for more in ({}, {"GPUSHARE_NVML": "driver"})
    )
    assert share == [0, 1, LIMIT, 0, 0]
    assert whole[:2] == [0, 2]
    assert whole[2] != LIMIT
