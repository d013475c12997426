"""When a GPU is taken for sick, and when for well again."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pynvml
import pytest

from gpushare_spawner.agent.gpus.nvml import GpuState, Nvml
from gpushare_spawner.agent.periodic import RoundSettings

from .conftest import Agent, Eventually
from .peers import FIRST, SECOND


class Driver:
    """NVML of a machine with two GPUs, as far as their health goes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, int]] = []
        self.split: set[str] = set()
        self.registered: set[str] = set()
        handles = [FIRST.uuid, SECOND.uuid]
        for name, does in {
            "nvmlInit": lambda: None,
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda index: handles[index],
            "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
            "nvmlDeviceGetUUID": lambda handle: handle,
            "nvmlDeviceGetName": lambda handle: "A100",
            "nvmlDeviceGetMinorNumber": lambda handle: handles.index(handle),
            "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=2**34, used=2**30),
            "nvmlDeviceGetMigMode": lambda handle: (int(handle in self.split), 0),
            "nvmlDeviceGetComputeRunningProcesses": lambda handle: [],
            "nvmlEventSetCreate": lambda: "events",
            "nvmlEventSetFree": lambda events: None,
            "nvmlDeviceRegisterEvents": self.register,
            "nvmlEventSetWait_v2": self.wait,
        }.items():
            patch.setattr(pynvml, name, does)

    def register(self, handle: str, types: int, events: object) -> None:
        assert (types, events) == (pynvml.nvmlEventTypeXidCriticalError, "events")
        self.registered.add(handle)

    def wait(self, events: object, milliseconds: int) -> SimpleNamespace:
        assert milliseconds == 0
        if not self.events:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        device, xid = self.events.pop(0)
        return SimpleNamespace(device=device, eventType=pynvml.nvmlEventTypeXidCriticalError, eventData=xid)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


def test_an_error_of_the_gpu_is_remembered_and_one_of_a_program_is_not(driver: Driver) -> None:
    nvml = Nvml()
    first, second = nvml.gpus()
    assert driver.registered == {FIRST.uuid, SECOND.uuid}
    driver.events = [(FIRST.uuid, 31), (SECOND.uuid, 79), (FIRST.uuid, 13)]
    assert nvml.state(first).healthy
    for _ in range(2):
        assert not nvml.state(second).healthy
        assert "Xid 79" in nvml.state(second).trouble
    assert nvml.state(first).healthy


def test_a_driver_without_events_is_one_that_reports_none(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    with monkeypatch.context() as patched:
        patched.setattr(pynvml, "nvmlDeviceRegisterEvents", refuses)
        nvml = Nvml()
        assert all(nvml.state(gpu).healthy for gpu in nvml.gpus())
    monkeypatch.setattr(pynvml, "nvmlEventSetCreate", refuses)
    nvml = Nvml()
    assert all(nvml.state(gpu).healthy for gpu in nvml.gpus())


def test_a_gpu_that_is_split_later_is_not_shared(driver: Driver) -> None:
    nvml = Nvml()
    first, second = nvml.gpus()
    driver.split.add(SECOND.uuid)
    assert nvml.state(first).healthy
    assert nvml.state(second) == GpuState(False, "has been split by MIG", 2**30)


async def test_a_gpu_that_comes_and_goes_is_sick(agent: Agent, eventually: Eventually) -> None:
    await agent.stop()
    long = RoundSettings(check_every=0.02, poll_every=0.02, well_after=600.0)
    await agent.start(rounds=long)
    agent.source.states[FIRST.uuid] = GpuState(healthy=False)
    await eventually(lambda: not agent.node.rounds.healthy(FIRST.uuid))
    # it answers again: that says nothing yet
    agent.source.states[FIRST.uuid] = GpuState(healthy=True)
    for _ in range(10):
        await asyncio.sleep(0.05)
        assert agent.node.rounds.trouble(FIRST.uuid) is not None
    assert "a moment ago" in (agent.node.rounds.trouble(FIRST.uuid) or "")
    assert agent.node.rounds.healthy(SECOND.uuid)
    # until it has done so for a while
    agent.node.rounds._settings = replace(long, well_after=0.2)
    await eventually(lambda: agent.node.rounds.healthy(FIRST.uuid))


async def test_what_is_wrong_is_said(agent: Agent, eventually: Eventually, caplog: pytest.LogCaptureFixture) -> None:
    agent.source.states[FIRST.uuid] = replace(GpuState(healthy=False), trouble="broke with Xid 79")
    await eventually(lambda: not agent.node.rounds.healthy(FIRST.uuid))
    assert agent.node.rounds.trouble(FIRST.uuid) == f"GPU 0 ({FIRST.uuid}) broke with Xid 79"
    assert f"GPU {FIRST.uuid} broke with Xid 79; its sessions stay" in caplog.text
