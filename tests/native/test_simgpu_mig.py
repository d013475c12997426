"""MIG on the simulated GPUs: what NVML says of instances, and how programs compute on them."""

from __future__ import annotations

import re

import pytest

from tests.native.conftest import Program, Run, Start

MIB = 1 << 20
A100 = {"SIMGPU_MEMORY": "80GiB", "SIMGPU_MODEL": "NVIDIA A100-SXM4-80GB"}
LOOK = """
import pynvml as nvml
nvml.nvmlInit()
device = nvml.nvmlDeviceGetHandleByIndex(0)
def attempt(call, *arguments):
    try:
        return call(*arguments)
    except nvml.NVMLError as error:
        return str(error)
def instances(gpu=0):
    parent = nvml.nvmlDeviceGetHandleByIndex(gpu)
    found = (attempt(nvml.nvmlDeviceGetMigDeviceHandleByIndex, parent, i) for i in range(7))
    return [one for one in found if not isinstance(one, str)]
"""


def test_instances_are_as_the_setting_says(said: Run) -> None:
    heard = said(
        LOOK
        + """
def of(one):
    has = nvml.nvmlDeviceGetAttributes_v2(one)
    memory, parent = nvml.nvmlDeviceGetMemoryInfo(one), nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(one)
    again = nvml.nvmlDeviceGetHandleByUUID(nvml.nvmlDeviceGetUUID(one))
    return [nvml.nvmlDeviceGetName(one), nvml.nvmlDeviceGetGpuInstanceId(one), nvml.nvmlDeviceGetComputeInstanceId(one),
            nvml.nvmlDeviceGetIndex(one), nvml.nvmlDeviceGetIndex(parent), nvml.nvmlDeviceIsMigDeviceHandle(one).value,
            memory.total >> 20, memory.used, has.memorySizeMB, has.multiprocessorCount, has.gpuInstanceSliceCount,
            has.computeInstanceSliceCount, has.sharedCopyEngineCount, nvml.nvmlDeviceGetIndex(again)]
say([[of(one) for one in instances()], nvml.nvmlDeviceGetUUID(instances()[0]),
     nvml.nvmlDeviceGetMemoryInfo(device).total >> 20, nvml.nvmlDeviceGetName(device),
     nvml.nvmlDeviceIsMigDeviceHandle(device).value])
""",
        SIMGPU_MIG="0:1g.10gb,1g.10gb,3g.40gb",
        **A100,
    )
    found, uuid, parent, name, is_mig = heard
    model = "NVIDIA A100-SXM4-80GB"
    small = [9728, 0, 9728, 10, 1, 1, 1]
    # ids and places as on an A100: as far up as possible, the first of the list first; listed by id
    assert found == [
        [f"{model} MIG 3g.40gb", 1, 0, 0, 0, 1, 40448, 0, 40448, 30, 3, 3, 3, 0],
        [f"{model} MIG 1g.10gb", 12, 0, 1, 0, 1, *small, 1],
        [f"{model} MIG 1g.10gb", 13, 0, 2, 0, 1, *small, 2],
    ]
    assert re.fullmatch(r"MIG(-[0-9a-f]{4,12}){5}", uuid)
    assert (parent, name, is_mig) == (81920, model, 0)


def test_mode_and_counts_differ_by_gpu(said: Run) -> None:
    heard = said(
        LOOK
        + """
gpus = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(3)]
say([[attempt(nvml.nvmlDeviceGetMigMode, gpu), nvml.nvmlDeviceGetMaxMigDeviceCount(gpu), len(instances(i)),
      attempt(nvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu, 6)] for i, gpu in enumerate(gpus)]
    + [attempt(nvml.nvmlDeviceGetMigDeviceHandleByIndex, gpus[0], 7), nvml.nvmlDeviceGetCount(),
       nvml.nvmlDeviceGetUtilizationRates(gpus[2]).gpu, attempt(nvml.nvmlDeviceGetGpuInstanceId, gpus[0]),
       attempt(nvml.nvmlDeviceGetAttributes_v2, gpus[0])])
""",
        SIMGPU_DEVICES="3",
        SIMGPU_MIG="0:7g.80gb;1:",
        **A100,
    )
    assert heard == [
        [[1, 1], 7, 1, "Not Found"], [[1, 1], 7, 0, "Not Found"], [[0, 0], 0, 0, "Not Found"], "Invalid Argument", 3, 0,
        "Not Supported", "Not Supported",
    ]  # fmt: skip


PROFILES = """
found = {}
for kind in range(nvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
    one = attempt(nvml.nvmlDeviceGetGpuInstanceProfileInfo, device, kind)
    if isinstance(one, str):
        assert one == "Not Supported", one
        continue
    same = nvml.nvmlDeviceGetGpuInstanceProfileInfo(device, kind, version=1)
    assert (same.id, same.memorySizeMB, same.ofaCount) == (one.id, one.memorySizeMB, one.ofaCount)
    by_id = nvml.nvmlDeviceGetGpuInstanceProfileInfoById(device, one.id)
    assert (by_id.id, by_id.name) == (one.id, one.name)
    places, count = (nvml.c_nvmlGpuInstancePlacement_t * 8)(), ctypes.c_uint(8)
    nvml.nvmlDeviceGetGpuInstancePossiblePlacements(device, one.id, places, ctypes.byref(count))
    found[one.name] = [
        one.id, one.sliceCount, one.multiprocessorCount, one.memorySizeMB, one.instanceCount,
        nvml.nvmlDeviceGetGpuInstanceRemainingCapacity(device, one.id), [place.start for place in places[:count.value]],
    ]
"""


def test_profiles_are_those_of_an_a100(said: Run) -> None:
    """Ids, counts and places as NVIDIA's MIG user guide has them; memory within 1 % of what a card shows."""
    heard = said(LOOK + PROFILES + "say(found)", SIMGPU_MIG="0:3g.40gb,1g.10gb", **A100)
    assert heard == {
        "MIG 1g.10gb": [19, 1, 10, 9728, 7, 3, [0, 1, 2, 3, 4, 5, 6]],
        "MIG 1g.10gb+me": [20, 1, 10, 9728, 1, 1, [0, 1, 2, 3, 4, 5, 6]],
        "MIG 1g.20gb": [15, 1, 10, 19968, 4, 1, [0, 2, 4, 6]],
        "MIG 2g.20gb": [14, 2, 20, 19968, 3, 1, [0, 2, 4]],
        "MIG 3g.40gb": [9, 3, 30, 40448, 2, 0, [0, 4]],
        "MIG 4g.40gb": [5, 4, 40, 40448, 1, 0, [0]],
        "MIG 7g.80gb": [0, 7, 70, 81408, 1, 0, [0]],
    }


# One program for several machines: importing NVIDIA's bindings costs more than all that is asked of them.
MACHINES = """
import pynvml as nvml
for number, settings in enumerate({machines}):
    if os.fork() == 0:
        os.environ.update(settings, SIMGPU_STATE=os.environ["SIMGPU_STATE"] + str(number))
        {look}
        os._exit(0)
    os.wait()
"""


def test_profiles_are_named_after_the_memory_as_nvidia_names_them(simulated: Start) -> None:
    """An A100 of 40 GB, an H100 NVL and an H200, and a small GPU for tests."""
    names = {
        "40GiB": "1g.5gb 1g.5gb+me 1g.10gb 2g.10gb 3g.20gb 4g.20gb 7g.40gb",
        "93.6GiB": "1g.12gb 1g.12gb+me 1g.24gb 2g.24gb 3g.47gb 4g.47gb 7g.94gb",
        "140.4GiB": "1g.18gb 1g.18gb+me 1g.35gb 2g.35gb 3g.71gb 4g.71gb 7g.141gb",
        "8GiB": "1g.1gb 1g.1gb+me 1g.2gb 2g.2gb 3g.4gb 4g.4gb 7g.8gb",
    }
    look = """
        nvml.nvmlInit()
        device = nvml.nvmlDeviceGetHandleByIndex(0)
        kinds = [0, 7, 9, 1, 2, 3, 4]
        say([nvml.nvmlDeviceGetGpuInstanceProfileInfo(device, kind).name for kind in kinds])
    """
    machines = [{"SIMGPU_MEMORY": memory, "SIMGPU_MIG": "0:"} for memory in names]
    program = simulated(MACHINES.format(machines=machines, look=look.strip()))
    for expected in names.values():
        assert program.hear() == [f"MIG {name}" for name in expected.split()]


def test_gpu_without_instances_says_whether_it_could_have_some(simulated: Start) -> None:
    look = """
        nvml.nvmlInit()
        device = nvml.nvmlDeviceGetHandleByIndex(0)
        try:
            say([nvml.nvmlDeviceGetMigMode(device), nvml.nvmlDeviceGetMaxMigDeviceCount(device)])
        except nvml.NVMLError as error:
            say(str(error))
    """
    program = simulated(MACHINES.format(machines=[A100, {**A100, "SIMGPU_MIG": "off"}], look=look.strip()))
    assert [program.hear(), program.hear()] == ["Not Supported", [[0, 0], 0]]


def test_instances_lie_side_by_side(said: Run) -> None:
    profiles = [
        "1g.10gb,1g.10gb,1g.10gb,1g.10gb,1g.10gb,1g.10gb,1g.10gb", "1g.10gb,2g.20gb,4g.40gb", "3g.40gb,4g.40gb",
        "2g.20gb,2g.20gb,2g.20gb,1g.10gb", "1g.10gb+me,1g.20gb,4g.40gb",
    ]  # fmt: skip
    heard = said(
        LOOK
        + """
for gpu in range(5):
    ids = [nvml.nvmlDeviceGetGpuInstanceId(one) for one in instances(gpu)]
    uuids = {nvml.nvmlDeviceGetUUID(one) for one in instances(gpu)}
    names = sorted(nvml.nvmlDeviceGetName(one).split()[-1] for one in instances(gpu))
    found = [*found, [ids, len(uuids), names]] if gpu else [[ids, len(uuids), names]]
say(found)
""",
        SIMGPU_DEVICES="5",
        SIMGPU_MIG=";".join(f"{gpu}:{one}" for gpu, one in enumerate(profiles)),
        **A100,
    )
    for wanted, (ids, uuids, names) in zip(profiles, heard, strict=True):
        assert names == sorted(wanted.split(","))
        assert ids == sorted(set(ids))
        assert uuids == len(ids)


def test_wrong_setting_is_refused_with_the_reason(simulated: Start) -> None:
    complaints = {
        "off": "SIMGPU_MEMORY must be at least 8GiB and hold at least 32 pages",
        "0:1g.5gb": "there is no profile 1g.5gb; with this SIMGPU_MEMORY there are 1g.10gb 1g.10gb+me 1g.20gb",
        "0:4g.40gb,4g.40gb": "these instances do not fit on one GPU together",
        "0:1g.10gb+me,1g.10gb+me": "these instances do not fit on one GPU together",
        "1:1g.10gb": "there are not as many GPUs (SIMGPU_DEVICES)",
        "0:;0:": "it names a GPU twice",
        "0:1g.10gb,": "a profile is missing after a comma",
        "1g.10gb": 'it has to be "off" or like 0:1g.10gb,3g.40gb;1:',
    }
    look = """
        try:
            nvml.nvmlInit()
        except nvml.NVMLError_DriverNotLoaded:
            say("refused")
    """
    machines = [{**A100, "SIMGPU_MIG": setting} for setting in complaints]
    machines[0]["SIMGPU_MEMORY"] = "1GiB"
    program = simulated(MACHINES.format(machines=machines, look=look.strip()))
    assert [program.hear() for _ in complaints] == ["refused"] * len(complaints)
    errors = program.finish().splitlines()
    for (setting, complaint), line in zip(complaints.items(), errors, strict=True):
        assert line.startswith(f"simgpu: SIMGPU_MIG={setting}: {complaint}")


def test_what_nvml_does_not_tell_of_instances_and_of_their_gpu(said: Run) -> None:
    """Utilisation is known of neither; sensors, buses and serial numbers only of the whole GPU."""
    heard = said(
        LOOK
        + """
one = instances()[0]
calls = [(nvml.nvmlDeviceGetUtilizationRates,), (nvml.nvmlDeviceGetProcessUtilization, 0),
         (nvml.nvmlDeviceGetComputeMode,), (nvml.nvmlDeviceGetNumGpuCores,), (nvml.nvmlDeviceGetPowerUsage,),
         (nvml.nvmlDeviceGetSerial,), (nvml.nvmlDeviceGetMigMode,), (nvml.nvmlDeviceGetCudaComputeCapability,)]
def name(call):
    return call.__name__.removeprefix("nvmlDeviceGet")
say({name(call): [attempt(call, it, *more) == "Not Supported" for it in (device, one)] for call, *more in calls})
""",
        SIMGPU_MIG="0:1g.10gb",
        **A100,
    )
    assert heard == {
        "UtilizationRates": [True, True], "ProcessUtilization": [True, True], "ComputeMode": [True, False],
        "NumGpuCores": [True, True], "PowerUsage": [False, True], "Serial": [False, True], "MigMode": [False, True],
        "CudaComputeCapability": [False, False],
    }  # fmt: skip


def test_instances_have_the_same_uuids_after_a_restart_of_the_machine(simulated: Start) -> None:
    look = """
        if os.path.exists(os.environ["SIMGPU_STATE"][:-1] + "0"):
            os.environ["SIMGPU_STATE"] = os.environ["SIMGPU_STATE"][:-1] + "0"
            os.unlink(os.environ["SIMGPU_STATE"])
        nvml.nvmlInit()
        device = nvml.nvmlDeviceGetHandleByIndex(0)
        found = [nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, i) for i in (0, 1)]
        say([nvml.nvmlDeviceGetUUID(one) for one in found])
    """
    machines = [{**A100, "SIMGPU_MIG": setting} for setting in ("0:1g.10gb,3g.40gb", "0:2g.20gb,3g.40gb")]
    program = simulated(MACHINES.format(machines=machines, look=look.strip()))
    before, after = program.hear(), program.hear()
    # 3g.40gb lies in the lower half beside the 1g.10gb, and beside the 2g.20gb too
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_program_sees_one_instance_and_no_gpu_beside_it(said: Run) -> None:
    """CUDA's rules; where NVIDIA's manuals are silent they are as others have seen them on hardware."""
    heard = said(
        LOOK
        + """
import json
parent, plain = (nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(i)) for i in (0, 1))
empty = nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(2))
first, second = (nvml.nvmlDeviceGetUUID(one) for one in instances())
lists = {
    "nothing": None, "0": "0", "1": "1", "2": "2", "second": second, "both": second + "," + first,
    "mixed": plain + "," + second, "parent": parent, "plain": plain, "empty": empty, "ids": f"MIG-{parent}/13/0",
    "other ids": f"MIG-{parent}/13/1", "part": first[:12], "unknown": first[:-1] + "x",
}
names = {first: "first", second: "second", plain: "plain"}
for name, value in lists.items():
    if os.fork() == 0:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if value is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = value
        begun = code(cu.cuInit(0))
        seen = []
        for i in range(check(cu.cuDeviceGetCount()) if begun == "CUDA_SUCCESS" else 0):
            uuid = check(cu.cuDeviceGetUuid(i)).bytes.hex()
            seen += [names[one] for one in names if one[4:].replace("-", "") == uuid]
        with open(os.environ["SIMGPU_STATE"] + ".seen", "a") as file:
            file.write(json.dumps([name, seen or begun]) + chr(10))
        os._exit(0)
    os.wait()
with open(os.environ["SIMGPU_STATE"] + ".seen") as file:
    say(dict(json.loads(line) for line in file))
""",
        SIMGPU_DEVICES="3",
        SIMGPU_MIG="0:1g.10gb,3g.40gb;2:",
        **A100,
    )
    none = "CUDA_ERROR_NO_DEVICE"
    assert heard == {
        "nothing": ["first"], "0": ["plain"], "1": ["first"], "2": none, "second": ["second"], "both": ["second"],
        "mixed": ["second"], "parent": ["first"], "plain": ["plain"], "empty": none, "ids": ["second"],
        "other ids": none, "part": none, "unknown": none,
    }  # fmt: skip


SMALL = {"SIMGPU_MEMORY": "8GiB", "SIMGPU_MODEL": "Small", "SIMGPU_MIG": "0:1g.1gb,1g.1gb,3g.4gb"}
"""Instances 0 to 2: 3g.4gb with 4046 MiB, and two of 1g.1gb with 974 MiB."""
INSTANCE = """
import pynvml as nvml
nvml.nvmlInit()
gpu = nvml.nvmlDeviceGetHandleByIndex(0)
one = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, {index})
os.environ["CUDA_VISIBLE_DEVICES"] = nvml.nvmlDeviceGetUUID(one)
machine = Machine()
"""


def test_instance_is_a_device_of_its_own_size(said: Run) -> None:
    heard = said(
        INSTANCE.format(index=0)
        + """
has = cu.CUdevice_attribute
names = ("MULTIPROCESSOR_COUNT", "L2_CACHE_SIZE", "GLOBAL_MEMORY_BUS_WIDTH", "PCI_BUS_ID")
attributes = [check(cu.cuDeviceGetAttribute(getattr(has, "CU_DEVICE_ATTRIBUTE_" + name), 0)) for name in names]
bus = check(cu.cuDeviceGetPCIBusId(13, 0)).decode().partition(chr(0))[0]
name = check(cu.cuDeviceGetName(96, 0)).decode().partition(chr(0))[0]
say([name, check(cu.cuDeviceTotalMem(0)) >> 20, attributes, bus,
     nvml.nvmlDeviceGetPciInfo(gpu).busId.endswith(bus[-10:]), int(check(cu.cuDeviceGetByPCIBusId(bus.encode()))) == 0])
""",
        **SMALL,
    )
    assert heard == ["Small MIG 3g.4gb", 4046, [30, 3 << 20, 2048, 1], "0000:01:00.0", True, True]


def test_memory_of_an_instance_is_its_own(simulated: Start) -> None:
    """A neighbour on the same GPU has none of it; a killed program gives it back."""
    hold = """
    machine.plain(900 << 20)
    say([[number >> 20 for number in check(cu.cuMemGetInfo())], code(cu.cuMemAlloc(100 << 20)), os.getpid()])
    listen()
    """
    first, second = (simulated(INSTANCE.format(index=i) + hold.replace("    ", ""), **SMALL) for i in (1, 2))
    (memory, more, pid), (other, _, other_pid) = first.hear(), second.hear()
    assert memory == other == [74, 974]
    assert more == "CUDA_ERROR_OUT_OF_MEMORY"
    look = (
        LOOK
        + """
def at(one):
    found = nvml.nvmlDeviceGetComputeRunningProcesses(one)
    return [nvml.nvmlDeviceGetMemoryInfo(one).used >> 20,
            sorted([p.pid, p.usedGpuMemory >> 20, p.gpuInstanceId, p.computeInstanceId] for p in found)]
while True:
    say([at(one) for one in (device, *instances())])
    listen()
"""
    )
    one, two = [pid, 900, 12, 0], [other_pid, 900, 13, 0]
    watch = simulated(look, **SMALL)
    assert watch.hear() == [[1800, sorted([one, two])], [0, []], [900, [one]], [900, [two]]]
    first.kill()
    watch.say()
    assert watch.hear() == [[900, [two]], [0, []], [0, []], [900, [two]]]


def test_managed_memory_can_exceed_an_instance_and_evicts_nobody_elses(simulated: Start) -> None:
    code = (
        INSTANCE
        + """
address = machine.managed({mib} << 20)
machine.launch("touch", address, {mib} << 20, 0)
machine.synchronize()
free = check(cu.cuMemGetInfo())[0] >> 20
say([free, stats()["fault_evicted"] >> 20])
listen()
say(nvml.nvmlDeviceGetMemoryInfo(one).used >> 20)
"""
    )
    neighbour = simulated(code.format(index=2, mib=800), SIMGPU_FAULT_EVICT="1e12", **SMALL)
    assert neighbour.hear() == [174, 0]
    larger = simulated(code.format(index=1, mib=1200), **SMALL)
    assert larger.hear() == [0, 1200 - 974]
    neighbour.say()
    assert neighbour.hear() == 800


def test_programs_on_two_instances_do_not_slow_each_other(simulated: Start) -> None:
    code = (
        INSTANCE
        + """
say(0)
while True:
    listen()
    begun = time.monotonic()
    for _ in range(10):
        machine.launch("spin", 30_000_000)
    machine.synchronize()
    say(time.monotonic() - begun)
"""
    )

    first, other, same = (simulated(code.format(index=index), **SMALL) for index in (1, 2, 1))
    for program in (first, other, same):
        program.hear()

    def together(*programs: Program) -> list[float]:
        for program in programs:
            program.say()
        return [program.hear() for program in programs]

    # a loaded machine wakes sleepers late, and starts the two apart: one round in five is as it should be
    assert any(max(together(first, other)) < 0.45 for _ in range(5))
    assert any(max(together(first, same)) > 0.55 for _ in range(5))


def test_bandwidth_of_an_instance_follows_its_memory_slices(simulated: Start) -> None:
    code = (
        INSTANCE
        + """
size, begin, end = 2 << 20, machine.event(), machine.event()
address = machine.plain(size)
times = []
for _ in range(8):
    check(cu.cuEventRecord(begin, 0))
    machine.launch("fill_u32", address, size // 4, 1)
    check(cu.cuEventRecord(end, 0))
    machine.synchronize()
    times.append(check(cu.cuEventElapsedTime(begin, end)))
say(min(times))
"""
    )
    program = simulated(code.format(index=1), **SMALL, SIMGPU_HBM="1e9")
    # 2 MiB at an eighth of 1e9 bytes/s; other programs of this machine make some runs longer
    assert program.hear() == pytest.approx(16.8, rel=0.1)


def test_statistics_of_a_gpu_include_its_instances(said: Run) -> None:
    heard = said(
        INSTANCE.format(index=1)
        + """
machine.plain(64 << 20)
machine.launch("spin", 5_000_000)
machine.synchronize()
library = ctypes.CDLL("libcuda.so.1")
library.simgpu_resident.restype = library.simgpu_gpu_time.restype = ctypes.c_int64
found = stats()
say([found["kernels"], found["memory"] >> 20, (found["memory"] - found["memory_free"]) >> 20,
     library.simgpu_resident(0, os.getpid()) >> 20, library.simgpu_gpu_time(0, os.getpid()) // 1_000_000])
""",
        **SMALL,
    )
    kernels, memory, unusable, resident, milliseconds = heard
    assert (kernels, memory, resident, milliseconds) == (1, 8192, 64, 5)
    # what no instance has counts as used: three slices of 1 GiB without any, and the driver's part of the others
    assert unusable - 64 == 8192 - 4046 - 2 * 974


ADMIN = """
def create(id, start=None):
    if start is None:
        made = attempt(nvml.nvmlDeviceCreateGpuInstance, device, id)
    else:
        place = nvml.c_nvmlGpuInstancePlacement_t(start, 0)
        made = attempt(nvml.nvmlDeviceCreateGpuInstanceWithPlacement, device, id, ctypes.byref(place))
    if isinstance(made, str):
        return made
    info = nvml.nvmlGpuInstanceGetInfo(made)
    return [made, [info.id, info.profileId, info.placement.start, info.placement.size]]
"""


def test_admin_makes_and_removes_instances(said: Run) -> None:
    """A GPU instance becomes a MIG device with its compute instance, and is removed after it."""
    heard = said(
        LOOK
        + ADMIN
        + """
def names():
    return [nvml.nvmlDeviceGetName(one).split()[-1] for one in instances()]
large, small = create(9), create(19, 2)
found = {"made": [large[1], small[1]], "before": names()}
compute = attempt(nvml.nvmlGpuInstanceCreateComputeInstance, large[0], 2)
nvml.nvmlGpuInstanceCreateComputeInstance(small[0], 0)
found["after"] = names()
found["refused"] = [create(19, 2), create(9, 0), create(0), create(4), create(14, 1),
                    attempt(nvml.nvmlGpuInstanceCreateComputeInstance, large[0], 2),
                    attempt(nvml.nvmlGpuInstanceCreateComputeInstance, large[0], 0)]
found["left"] = [nvml.nvmlDeviceGetGpuInstanceRemainingCapacity(device, id) for id in (19, 14, 9)]
same = nvml.nvmlDeviceGetGpuInstanceById(device, small[1][0])
of = nvml.nvmlComputeInstanceGetInfo_v2(nvml.nvmlGpuInstanceGetComputeInstanceById(same, 0))
found["compute"] = [of.id, of.profileId, of.placement.start, of.placement.size]
some, count = (nvml.c_nvmlGpuInstance_t * 7)(), ctypes.c_uint(0)
found["listed"] = []
for id in (19, 9, 5):
    nvml.nvmlDeviceGetGpuInstances(device, id, some, ctypes.byref(count))
    found["listed"].append(count.value)
one, uuid = instances()[0], nvml.nvmlDeviceGetUUID(instances()[0])
found["destroyed"] = [attempt(nvml.nvmlGpuInstanceDestroy, large[0]), attempt(nvml.nvmlComputeInstanceDestroy, compute),
                      names(), attempt(nvml.nvmlGpuInstanceDestroy, large[0]),
                      attempt(nvml.nvmlGpuInstanceDestroy, large[0]), attempt(nvml.nvmlDeviceGetName, one),
                      attempt(nvml.nvmlDeviceGetHandleByUUID, uuid), create(0)]
again = create(9)
nvml.nvmlGpuInstanceCreateComputeInstance(again[0], 2)
found["again"] = nvml.nvmlDeviceGetUUID(instances()[0]) == uuid
say(found)
""",
        SIMGPU_MIG="0:",
        **A100,
    )
    in_use, short = "In use by another client", "Insufficient Resources"
    assert heard == {
        "made": [[2, 9, 4, 4], [9, 19, 2, 1]], "before": [], "after": ["3g.40gb", "1g.10gb"],
        "refused": [short, short, short, "Invalid Argument", "Invalid Argument", short, "Not Supported"],
        "left": [3, 1, 0], "compute": [0, 0, 0, 1], "listed": [1, 1, 0],
        "destroyed": [in_use, 0, ["1g.10gb"], 0, "Invalid Argument", "Invalid Argument", "Not Found", short],
        "again": True,
    }  # fmt: skip


def test_instance_in_use_cannot_be_removed_and_its_program_never_gets_another_one(simulated: Start) -> None:
    user = simulated(INSTANCE.format(index=1) + "machine.plain(64 << 20); say(0); listen()", **SMALL)
    late = simulated(
        INSTANCE.format(index=2).replace("machine = Machine()", "check(cu.cuInit(0))")
        + "say(0); listen(); say([code(cu.cuDevicePrimaryCtxRetain(0)), check(cu.cuDeviceGetCount())])",
        **SMALL,
    )
    admin = simulated(
        LOOK
        + ADMIN
        + """
before = {nvml.nvmlDeviceGetGpuInstanceId(one): one for one in instances()}
def remove(id):
    made = nvml.nvmlDeviceGetGpuInstanceById(device, id)
    compute = nvml.nvmlGpuInstanceGetComputeInstanceById(made, 0)
    return attempt(nvml.nvmlComputeInstanceDestroy, compute) or attempt(nvml.nvmlGpuInstanceDestroy, made)
say(sorted(before))
while True:
    removed = [remove(id) for id in listen()]
    other = create(19, 4)
    if not isinstance(other, str):
        nvml.nvmlGpuInstanceCreateComputeInstance(other[0], 0)
    say([removed, sorted(nvml.nvmlDeviceGetGpuInstanceId(one) for one in instances()),
         nvml.nvmlDeviceGetMemoryInfo(device).used >> 20])
""",
        **SMALL,
    )
    user.hear()
    late.hear()
    assert admin.hear() == [1, 12, 13]
    # 13, with a program that has no context yet, makes way for an instance one slice further down
    admin.say([12, 13])
    assert admin.hear() == [["In use by another client", 0], [1, 11, 12], 64]
    late.say()
    assert late.hear() == ["CUDA_ERROR_INVALID_DEVICE", 1]
    user.kill()
    admin.say([12])
    assert admin.hear() == [[0], [1, 11], 0]


@pytest.mark.slow
def test_mig_mode_changes_only_while_nobody_uses_the_gpu(simulated: Start, said: Run) -> None:
    settings = {**SMALL, "SIMGPU_MIG": "off"}
    user = simulated("machine = Machine(); machine.plain(2 << 20); say(0); listen()", **settings)
    user.hear()
    admin = simulated(
        LOOK
        + ADMIN
        + """
while True:
    mode = listen()
    status = nvml.nvmlDeviceSetMigMode(device, mode)
    say([status, nvml.nvmlDeviceGetMigMode(device), nvml.nvmlDeviceGetMemoryInfo(device).free >> 20])
    if nvml.nvmlDeviceGetMigMode(device)[0]:
        made = create(0)[0]
        say(nvml.nvmlDeviceSetMigMode(device, 0))
        nvml.nvmlGpuInstanceDestroy(made)
""",
        **settings,
    )
    in_use = 19
    admin.say(1)
    assert admin.hear() == [in_use, [0, 0], 8190]
    user.kill()
    admin.say(1)
    assert admin.hear() == [0, [1, 1], 8192]
    assert admin.hear() == in_use
    assert said("say(code(cu.cuInit(0)))", **settings) == "CUDA_ERROR_NO_DEVICE"
    admin.say(0)
    assert admin.hear() == [0, [0, 0], 8192]
    memory = said("machine = Machine(); machine.plain(5 << 30); say(check(cu.cuMemGetInfo())[0] >> 20)", **settings)
    assert memory == 8192 - 5120
