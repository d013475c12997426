"""MIG on the simulated GPUs: what NVML says of instances, and how programs compute on them."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.native.conftest import Run, Start

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
    + [attempt(nvml.nvmlDeviceGetMigDeviceHandleByIndex, gpus[0], 7), nvml.nvmlDeviceGetCount()])
""",
        SIMGPU_DEVICES="3",
        SIMGPU_MIG="0:7g.80gb;1:",
        **A100,
    )
    assert heard == [
        [[1, 1], 7, 1, "Not Found"], [[1, 1], 7, 0, "Not Found"], [[0, 0], 0, 0, "Not Found"], "Invalid Argument", 3,
    ]  # fmt: skip


@pytest.mark.parametrize(("setting", "mode"), [("", "Not Supported"), ("off", [0, 0])])
def test_gpu_without_instances_says_whether_it_could_have_some(said: Run, setting: str, mode: Any) -> None:
    heard = said(
        LOOK
        + """
say([attempt(nvml.nvmlDeviceGetMigMode, device), nvml.nvmlDeviceGetMaxMigDeviceCount(device),
     attempt(nvml.nvmlDeviceGetMigDeviceHandleByIndex, device, 0), nvml.nvmlDeviceGetUtilizationRates(device).gpu,
     attempt(nvml.nvmlDeviceGetGpuInstanceId, device), attempt(nvml.nvmlDeviceGetAttributes_v2, device)])
""",
        SIMGPU_MIG=setting,
        **A100,
    )
    missing = "Not Found" if setting else "Not Supported"
    assert heard == [mode, 0, missing, 0, "Not Supported", "Not Supported"]


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
