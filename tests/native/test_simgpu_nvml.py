"""The simulated NVML under nvidia-ml-py."""

from __future__ import annotations

import time
from typing import Any

from tests.native.conftest import Run, Start

MIB = 1 << 20

LOOK = """
import pynvml as nvml
nvml.nvmlInit()
device = nvml.nvmlDeviceGetHandleByIndex(0)
"""


def test_what_nvml_says_of_the_machine(said: Run) -> None:
    heard = said(
        LOOK
        + """
second = nvml.nvmlDeviceGetHandleByIndex(1)
check(cu.cuInit(0))
uuid = nvml.nvmlDeviceGetUUID(second)
as_bytes = bytes.fromhex(uuid.removeprefix("GPU-").replace("-", ""))
pci = nvml.nvmlDeviceGetPciInfo(second)
say({
    "count": nvml.nvmlDeviceGetCount(), "cuda": nvml.nvmlSystemGetCudaDriverVersion(),
    "driver": nvml.nvmlSystemGetDriverVersion(), "name": nvml.nvmlDeviceGetName(second),
    "same_uuid": as_bytes == check(cu.cuDeviceGetUuid(1)).bytes,
    "by_uuid": nvml.nvmlDeviceGetIndex(nvml.nvmlDeviceGetHandleByUUID(uuid)),
    "by_bus": nvml.nvmlDeviceGetIndex(nvml.nvmlDeviceGetHandleByPciBusId(pci.busId)),
    "by_serial": nvml.nvmlDeviceGetIndex(nvml.nvmlDeviceGetHandleBySerial(nvml.nvmlDeviceGetSerial(second))),
    "minor": nvml.nvmlDeviceGetMinorNumber(second),
    "capability": list(nvml.nvmlDeviceGetCudaComputeCapability(second)),
    "power": nvml.nvmlDeviceGetPowerUsage(second), "celsius": nvml.nvmlDeviceGetTemperature(second, 0),
})
nvml.nvmlShutdown()
""",
        SIMGPU_DEVICES="2",
        SIMGPU_MODEL="Test GPU",
    )
    assert heard == {
        "count": 2, "cuda": 13000, "driver": "580.65.06", "name": "Test GPU", "same_uuid": True, "by_uuid": 1,
        "by_bus": 1, "by_serial": 1, "minor": 1, "capability": [8, 0], "power": 40000, "celsius": 34,
    }  # fmt: skip


def test_visible_devices_are_no_matter_to_nvml(said: Run) -> None:
    assert said(LOOK + "say(nvml.nvmlDeviceGetCount())", SIMGPU_DEVICES="3", CUDA_VISIBLE_DEVICES="2") == 3


def test_what_is_not_there_says_so(said: Run) -> None:
    heard = said(
        LOOK
        + """
def attempt(call, *arguments):
    try:
        call(*arguments)
    except nvml.NVMLError as error:
        return str(error)
    return "fine"
say([attempt(nvml.nvmlDeviceGetMigMode, device), attempt(nvml.nvmlDeviceGetEccMode, device),
     attempt(nvml.nvmlDeviceGetNumFans, device), attempt(nvml.nvmlDeviceGetHandleByIndex, 5),
     attempt(nvml.nvmlDeviceGetHandleByUUID, "GPU-nothing"), nvml.nvmlShutdown(), attempt(nvml.nvmlDeviceGetCount)])
"""
    )
    assert heard == [
        "Not Supported", "Not Supported", "Function Not Found", "Invalid Argument", "Not Found", None, "Uninitialized",
    ]  # fmt: skip


def test_processes_and_their_memory(simulated: Start, said: Run) -> None:
    first = simulated("machine = Machine(); machine.plain(100 << 20); say(os.getpid()); listen()")
    second = simulated(
        """
        machine = Machine()
        address = machine.managed(60 << 20)
        machine.launch("touch", address, 60 << 20, 0)
        machine.synchronize()
        say(os.getpid())
        listen()
        """
    )
    only_started = simulated("check(cu.cuInit(0)); say(os.getpid()); listen()")
    pids = [first.hear(), second.hear()]
    only_started.hear()
    look = (
        LOOK
        + """
found = nvml.nvmlDeviceGetComputeRunningProcesses(device)
memory, newer = nvml.nvmlDeviceGetMemoryInfo(device), nvml.nvmlDeviceGetMemoryInfo(device, version=nvml.nvmlMemory_v2)
say([[[p.pid, p.usedGpuMemory] for p in found], [memory.total, memory.free, memory.used],
     [newer.total, newer.free, newer.used]])
"""
    )
    processes, memory, newer = said(look)
    assert sorted(processes) == sorted([[pids[0], 100 * MIB], [pids[1], 60 * MIB]])
    assert memory == newer == [1024 * MIB, 864 * MIB, 160 * MIB]
    first.kill()
    processes, memory, _ = said(look)
    assert processes == [[pids[1], 60 * MIB]]
    assert memory[2] == 60 * MIB


def test_utilisation_is_the_busy_share_of_the_last_second(said: Run) -> None:
    heard = said(
        LOOK
        + """
machine = Machine()
idle = nvml.nvmlDeviceGetUtilizationRates(device).gpu
machine.launch("spin", 1_300_000_000)
machine.synchronize()
busy = nvml.nvmlDeviceGetUtilizationRates(device).gpu
time.sleep(1.2)
say([idle, busy, nvml.nvmlDeviceGetUtilizationRates(device).gpu, nvml.nvmlSystemGetProcessName(os.getpid()) != ""])
"""
    )
    idle, busy, later, named = heard
    assert idle == 0
    assert 70 <= busy <= 100
    assert later == 0
    assert named


def test_statistics_are_in_both_libraries(said: Run) -> None:
    heard = said(
        """
        machine = Machine()
        machine.launch("spin", 1_000_000)
        machine.synchronize()
        nvml, found = ctypes.CDLL("libnvidia-ml.so.1"), Stats()
        result = nvml.simgpu_stats(0, ctypes.byref(found), ctypes.sizeof(found))
        machine.plain(6 << 20)
        nvml.simgpu_resident.restype = ctypes.c_int64
        held = [nvml.simgpu_resident(0, os.getpid()), nvml.simgpu_resident(0, 1), nvml.simgpu_resident(9, 1)]
        short = Stats()
        nvml.simgpu_stats(0, ctypes.byref(short), 8)
        say([result, found.kernels, found.busy_ns >= 1_000_000, short.kernels, short.busy_ns,
             nvml.simgpu_stats(7, ctypes.byref(found), 8), held])
        """
    )
    assert heard == [0, 1, True, 1, 0, -1, [6 * MIB, 0, -1]]


PROCESS_TIME = """
nvidia_ml = ctypes.CDLL("libnvidia-ml.so.1")
nvidia_ml.simgpu_gpu_time.restype = ctypes.c_int64
"""


def test_gpu_time_is_counted_per_process_and_can_be_read_after_its_end(simulated: Start, said: Run) -> None:
    """One process computes for 100 ms in a burst of which half is another's; each has what it computed."""
    work = """
    machine = Machine()
    say(os.getpid())
    listen()
    for _ in range({count}):
        machine.launch("spin", 10_000_000)
    machine.synchronize()
    say(0)
    listen()
    """
    programs = [simulated(work.format(count=count)) for count in (10, 30)]
    pids = [program.hear() for program in programs]
    look = LOOK + PROCESS_TIME + f"say([nvidia_ml.simgpu_gpu_time(0, pid) for pid in {[*pids, 1, -1]}])"
    assert said(look) == [0, 0, 0, 0]
    for program in programs:
        program.say()
    for program in programs:
        program.hear()
    programs[0].say()
    programs[0].finish()
    programs[1].kill()
    first, second, *others = said(look)
    assert 100e6 <= first <= 101e6
    assert 300e6 <= second <= 301e6
    assert others == [0, 0]
    assert said(LOOK + PROCESS_TIME + "say(nvidia_ml.simgpu_gpu_time(5, 1))") == -1


def test_process_utilisation_is_each_processes_share_since_the_last_look(simulated: Start, said: Run) -> None:
    """Two processes: one computes alone for half a second and then shares the GPU with the other."""
    work = """
    machine = Machine()
    say(os.getpid())
    for _ in range(2):
        for _ in range(listen()):
            machine.launch("spin", 5_000_000)
        machine.synchronize()
        say(0)
    """
    watch = simulated(
        LOOK
        + """
def look(since):
    try:
        found = nvml.nvmlDeviceGetProcessUtilization(device, since)
    except nvml.NVMLError as error:
        return str(error)
    return {one.pid: [one.smUtil, one.timeStamp] for one in found}
while True:
    since = listen()
    say([look(since), time.time_ns() // 1000])
"""
    )

    def look(since: int) -> tuple[Any, int]:
        watch.say(since)
        found, now = watch.hear()
        return found if isinstance(found, str) else {int(pid): one for pid, one in found.items()}, now

    one, other = simulated(work), simulated(work)
    first, second = one.hear(), other.hear()
    found, start = look(0)
    assert found == "Not Found"
    one.say(120)
    one.hear()
    time.sleep(0.2)
    found, now = look(start)
    assert set(found) == {first}
    busy, at = found[first]
    assert start < at <= now
    # 600 ms of 800, in samples of 1/6 s
    assert 55 <= busy <= 100, busy
    one.say(60)
    other.say(60)
    one.hear()
    other.hear()
    time.sleep(0.2)
    found, _ = look(now)
    assert set(found) == {first, second}
    assert abs(found[first][0] - found[second][0]) <= 8, found
    assert 30 <= found[first][0] <= 50, found
    # nothing is told twice: not to one who asks from the latest timestamp on
    assert look(max(at for _, at in found.values()))[0] == "Not Found"
    # and the whole buffer has both
    assert set(look(0)[0]) == {first, second}


def test_process_utilisation_asks_for_room_as_nvml_does(said: Run) -> None:
    heard = said(
        LOOK
        + """
machine = Machine()
call, count = nvml._nvmlGetFunctionPointer("nvmlDeviceGetProcessUtilization"), ctypes.c_uint(0)
samples = (nvml.c_nvmlProcessUtilizationSample_t * 300)()
since = ctypes.c_ulonglong(0)
nothing = call(device, None, ctypes.byref(count), since)
machine.launch("spin", 350_000_000)
machine.synchronize()
asked = call(device, None, ctypes.byref(count), since)
room = count.value
count.value = 0
short = call(device, samples, ctypes.byref(count), since)
count.value = 300
fits = call(device, samples, ctypes.byref(count), since)
say([nothing, asked, room > 0, short, fits, count.value, samples[0].pid == os.getpid(),
     call(device, None, None, since), call(None, None, ctypes.byref(count), since)])
"""
    )
    assert heard == [6, 7, True, 7, 0, 1, True, 2, 2]
