"""NVML under the library as a hostile or careless program calls it: over an NVML that is full of a neighbour's
processes, and strict about its arguments."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gpushare_spawner.model.frames import Feature, Frame, Kind
from gpushare_spawner.native.build import compiler
from tests.native.preload_agent import AnsweringAgent, ScriptedAgent

if TYPE_CHECKING:
    from tests.native.preload_clients import Start

pytest_plugins = ["tests.native.preload_clients", "tests.native.preload_stub"]

OWN, OTHER = bytes([8]) * 16, bytes([7]) * 16
"""The stub's GPUs. The session has the second one."""
NEIGHBOUR = 4711
SHARE = [
    Frame(Kind.SESSION_MEMORY, (1, 77, 100), gpu=OWN),
    Frame(Kind.USE, (0, 50, 100), gpu=OWN),
    Frame(Kind.USE, (77, 50, 100), gpu=OWN),
    Frame(Kind.STATUS, (25, 0, 25, 0, 25, 100, 0, 400), gpu=OWN),
]

CALLS = """
n = c.CDLL("libnvidia-ml.so.1")
n.nvmlInit_v2()
def gpu(uuid):
    found = c.c_void_p()
    assert n.nvmlDeviceGetHandleByUUID(uuid.encode(), c.byref(found)) == 0
    return found
own, other = gpu("GPU-08080808-0808-0808-0808-080808080808"), gpu("GPU-07070707-0707-0707-0707-070707070707")
SIZES = {f"nvmlDeviceGet{kind}RunningProcesses{version}": 24 if version else 16
         for kind in ("Compute", "Graphics", "MPSCompute") for version in ("", "_v2", "_v3")}
SIZES |= {"nvmlDeviceGetAccountingPids": 4, "nvmlDeviceGetEncoderSessions": 40, "nvmlDeviceGetFBCSessions": 48}
class Details(c.Structure):
    _fields_ = [("version", c.c_uint), ("mode", c.c_uint), ("count", c.c_uint), ("entries", c.c_void_p)]
class Uses(c.Structure):
    _fields_ = [("version", c.c_uint), ("count", c.c_uint), ("seen", c.c_ulonglong), ("entries", c.c_void_p)]
def pids(buffer, size, count, offset=0):
    starts = [at * size + offset for at in range(count)]
    return [int.from_bytes(buffer[start:start + 4], "little") for start in starts]
def called(name, gpu, room, size, *more):
    "Result, count, pids, and whether what lies behind the room is as it was."
    buffer, count = c.create_string_buffer(b"z" * 4096, 4096), c.c_uint(room)
    arguments = (buffer, c.byref(count), *more) if "ProcessUtilization" in name else (c.byref(count), buffer)
    result = getattr(n, name)(gpu, *arguments)
    there = count.value if result == 0 else 0
    return [result, count.value, pids(buffer, size, there), buffer[room * size:] == b"z" * (4096 - room * size)]
def in_structure(name, gpu, kind, room, size, offset, **fields):
    buffer = c.create_string_buffer(b"z" * 4096, 4096)
    asked = kind(version=c.sizeof(kind) | 1 << 24, count=room, entries=c.cast(buffer, c.c_void_p), **fields)
    result = getattr(n, name)(gpu, c.byref(asked))
    there = asked.count if result == 0 else 0
    return [result, asked.count, pids(buffer, size, there, offset), buffer[room * size:] == b"z" * (4096 - room * size)]
def uses(gpu, room, seen=0):
    return [called("nvmlDeviceGetProcessUtilization", gpu, room, 32, c.c_ulonglong(seen)),
            in_structure("nvmlDeviceGetProcessesUtilizationInfo", gpu, Uses, room, 40, 8, seen=seen)]
def lists(gpu, room):
    listed = {name: called(name, gpu, room, size) for name, size in SIZES.items()}
    for mode in range(4):
        name = "nvmlDeviceGetRunningProcessDetailList"
        listed[f"{name} {mode}"] = in_structure(name, gpu, Details, room, 32, 0, mode=mode)
    return listed
def account(gpu, pid):
    return n.nvmlDeviceGetAccountingStats(gpu, pid, c.create_string_buffer(64))
def memory(gpu):
    old, new = (c.c_ulonglong * 3)(), (c.c_ulonglong * 5)(40 | 2 << 24)
    assert n.nvmlDeviceGetMemoryInfo(gpu, old) == n.nvmlDeviceGetMemoryInfo_v2(gpu, new) == 0
    return [list(old), list(new)[1:]]
def rates(gpu):
    found = (c.c_uint * 2)()
    return [n.nvmlDeviceGetUtilizationRates(gpu, found), *found]
"""
COMPUTE = [f"nvmlDeviceGetComputeRunningProcesses{version}" for version in ("", "_v2", "_v3")]
COMPUTE += ["nvmlDeviceGetRunningProcessDetailList 0"]
SUCCESS, INVALID_ARGUMENT, NOT_FOUND, INSUFFICIENT_SIZE, MISMATCH = 0, 2, 6, 7, 25


@pytest.fixture
def ask(start: Start, stub_nvml: Path) -> Start:
    """Start a program that has the calls."""

    def starting(code: str, **more: str | None) -> object:
        return start(CALLS + code, **{"LD_LIBRARY_PATH": str(stub_nvml)} | more)

    return starting  # type: ignore[return-value]


@pytest.mark.parametrize("agent", ["answers", "is not there", "has no USE"])
def test_no_list_has_a_neighbours_process(ask: Start, socket_path: Path, agent: str) -> None:
    """On the session's GPU and on the other one; what is not the session's is empty, as NVML has it."""
    features = 0 if agent == "has no USE" else Feature.USE
    if agent != "is not there":
        AnsweringAgent(socket_path, [OWN], features, [one for one in SHARE if features or one.kind is not Kind.USE])
    client = ask("""
say([[lists(own, 8), lists(other, 8)], [uses(own, 8), uses(other, 8)], [account(own, 4711), account(other, 4711)]])
""")
    found, used, accounts = client.hear()
    for gpu, names in enumerate(found):
        for name, (result, count, pids, untouched) in names.items():
            if name.endswith("List 3"):
                assert result == INVALID_ARGUMENT, "a mode that there is not"
                continue
            own = gpu == 0 and name in COMPUTE and agent != "is not there"
            assert (result, pids) == (SUCCESS, [77] if own else []), name
            assert (count, untouched) == (len(pids), True), name
    for gpu, both in enumerate(used):
        busy = gpu == 0 and agent == "answers"
        assert [[one[0], one[2]] for one in both] == [[SUCCESS, [77]] if busy else [NOT_FOUND, []]] * 2
    assert accounts == [NOT_FOUND, NOT_FOUND]
    client.end()


def test_switched_off_all_of_it_is_the_drivers(ask: Start, socket_path: Path) -> None:
    agent = AnsweringAgent(socket_path, [OWN], Feature.USE, SHARE)
    client = ask("say([lists(own, 8), uses(own, 8), account(own, 4711)])", GPUSHARE_NVML="driver")
    found, used, accounted = client.hear()
    assert [one[2] for name, one in found.items() if not name.endswith("List 3")] == [[NEIGHBOUR]] * 15
    assert [one[2] for one in used] == [[NEIGHBOUR]] * 2
    assert accounted == SUCCESS
    assert agent.observers == 0
    agent.stop()


def test_buffers_that_are_too_small_or_missing(ask: Start, socket_path: Path) -> None:
    """The count says what is needed; nothing is written beyond the room."""
    share = [Frame(Kind.SESSION_MEMORY, (1, pid, 100), gpu=OWN) for pid in (78, 79)]
    share += [Frame(Kind.USE, (pid, 10, 100), gpu=OWN) for pid in (78, 79)]
    agent = AnsweringAgent(socket_path, [OWN], Feature.USE, [*share, *SHARE])
    client = ask("""
nothing = c.c_uint(5)
say([lists(own, 2), lists(own, 3), uses(own, 2), uses(own, 3)])
say([[getattr(n, name)(own, None, None), getattr(n, name)(own, c.byref(c.c_uint(0)), None),
      getattr(n, name)(own, c.byref(nothing), None)] for name in SIZES if "Compute" in name])
say([n.nvmlDeviceGetMemoryInfo_v2(own, (c.c_ulonglong * 5)(24 | 2 << 24)), n.nvmlDeviceGetMemoryInfo(own, None),
     n.nvmlDeviceGetUtilizationRates(own, None), n.nvmlDeviceGetMemoryInfo(None, (c.c_ulonglong * 3)()),
     n.nvmlDeviceGetRunningProcessDetailList(own, c.byref(Details(version=1))),
     n.nvmlDeviceGetProcessesUtilizationInfo(own, c.byref(Uses(version=1)))])
n.nvmlShutdown()
say([lists(own, 3), uses(own, 3), n.nvmlDeviceGetCount_v2(c.byref(nothing))])
""")
    small, enough, small_use, use = client.hear()
    for name in COMPUTE:
        assert (small[name][:2], small[name][3]) == ([INSUFFICIENT_SIZE, 3], True), name
        assert enough[name] == [SUCCESS, 3, [78, 79, 77], True], name
    assert [[one[0], one[1] >= 3, one[3]] for one in small_use] == [[INSUFFICIENT_SIZE, True, True]] * 2
    assert use == [[SUCCESS, 3, [78, 79, 77], True]] * 2
    missing = client.hear()
    assert missing[:3] == [[INVALID_ARGUMENT, INSUFFICIENT_SIZE, INVALID_ARGUMENT]] * 3, "three compute processes"
    assert missing[3:] == [[INVALID_ARGUMENT, SUCCESS, INVALID_ARGUMENT]] * 3, "no MPS process"
    assert client.hear() == [MISMATCH, *[INVALID_ARGUMENT] * 3, MISMATCH, MISMATCH]
    ended, uses_then, count = client.hear()
    assert {one[0] for one in [*ended.values(), *uses_then]} == {1}, "uninitialised, as NVML says"
    assert count == 1
    client.end()
    agent.stop()


def test_free_and_used_memory_are_the_total(ask: Start, socket_path: Path) -> None:
    """Neighbours keep 250 of the share's 400 bytes from it: in the newer structure they are reserved."""
    agent = AnsweringAgent(socket_path, [OWN], Feature.USE, SHARE)
    client = ask("say([memory(own), memory(other)])")
    (old, new), others = client.hear()
    assert old == [400, 50, 350]
    assert new == [400, 250, 50, 100]
    assert others == [[1000, 50, 950], [1000, 0, 50, 950]]
    client.end()
    agent.stop()


STEPS = """
for line in sys.stdin:
    say([memory(own)[0], rates(own), lists(own, 8)["nvmlDeviceGetComputeRunningProcesses_v3"][2]])
"""


def test_last_answer_stands_for_five_seconds_and_then_the_driver_is_shown(
    ask: Start, socket_path: Path, fast: dict[str, str]
) -> None:
    """An agent that is started again must not make the share look like a whole GPU meanwhile."""
    agent = AnsweringAgent(socket_path, [OWN], Feature.USE, SHARE)
    times = 4
    client = ask(STEPS, **fast, FAST=str(times))

    def look(library_seconds: float = 0) -> list[object]:
        time.sleep(library_seconds / times)
        client.say()
        heard = client.hear()
        assert isinstance(heard, list)
        return heard

    share = look()
    assert share == [[400, 50, 350], [0, 50, 25], [77]]
    agent.stop()
    assert look(1.5) == share
    assert look(5) == [[1000, 50, 950], [0, 80, 40], []]
    agent = AnsweringAgent(socket_path, [OWN], Feature.USE, SHARE)
    assert look(1.5) == share
    client.end()
    agent.stop()


def test_agent_that_hangs_is_asked_less_and_less_often(ask: Start, socket_path: Path, fast: dict[str, str]) -> None:
    """A monitor that calls NVML all the time waits for half a second of two, four, eight and then ten."""
    agent = AnsweringAgent(socket_path, [OWN], Feature.USE, SHARE)
    agent.silent = True
    client = ask(
        """
begun = time.monotonic()
while time.monotonic() - begun < 1.5:  # 30 s of the library's
    rates(own)
    time.sleep(0.001)
say("done")
hear()
while rates(own) != [0, 50, 25]:
    time.sleep(0.01)
say(0)
""",
        **fast,
    )
    assert client.hear() == "done"
    assert 2 <= agent.observers <= 6, "not 20, every 1.5 s"
    agent.silent = False
    client.say()
    assert client.hear() == 0
    client.end()
    agent.stop()


CANCELLED = r"""
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>
static int (*rates)(void *, unsigned *);
static void *device;
static void *monitor(void *unused) {
    unsigned found[2];
    rates(device, found);
    pthread_testcancel();
    return unused;
}
int main(void) {
    void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW), *result;
    unsigned found[2];
    pthread_t thread;
    ((int (*)(void))dlsym(nvml, "nvmlInit_v2"))();
    ((int (*)(const char *, void **))dlsym(nvml, "nvmlDeviceGetHandleByUUID"))(
        "GPU-08080808-0808-0808-0808-080808080808", &device);
    rates = (int (*)(void *, unsigned *))dlsym(nvml, "nvmlDeviceGetUtilizationRates");
    pthread_create(&thread, NULL, monitor, NULL);
    usleep(100000);
    pthread_cancel(thread);
    pthread_join(thread, &result);
    printf("%d %d %u\n", result == PTHREAD_CANCELED, rates(device, found), found[0]);
    return 0;
}
"""


def test_thread_that_is_cancelled_in_a_question_keeps_no_lock(
    environment: dict[str, str], stub_nvml: Path, socket_path: Path, tmp_path: Path
) -> None:
    agent = ScriptedAgent(socket_path, [OWN], greets=False)
    source, program = tmp_path / "cancelled.c", tmp_path / "cancelled"
    source.write_text(CANCELLED)
    subprocess.run([*compiler(), "-o", str(program), str(source), "-ldl", "-lpthread"], check=True)
    said = subprocess.check_output(
        [program], env=environment | {"LD_LIBRARY_PATH": str(stub_nvml)}, timeout=20, text=True
    )
    assert said == "1 0 80\n"
    agent.stop()
