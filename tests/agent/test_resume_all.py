"""`gpushare agent resume`: what a stopped agent has left suspended, from its records."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpushare_spawner import cli
from gpushare_spawner.agent import processes
from gpushare_spawner.agent.gpus.nvml import GpuState
from gpushare_spawner.agent.session_records import RecordFolder, SessionRecord, Store, Suspension
from gpushare_spawner.agent.state_folder import FolderLock
from gpushare_spawner.agent.suspend import steps
from gpushare_spawner.agent.suspend.checkpoints import ProcessState
from tests.agent.conftest import request_for
from tests.agent.peers import FIRST, GpusOnPaper
from tests.agent.test_suspender_failures import SIZE, ScriptedDriver


@pytest.fixture
def pid() -> Iterator[int]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process.pid
        process.kill()


class Left:
    """The records of an agent that was stopped, and the driver."""

    def __init__(self, folder: Path) -> None:
        self.folder = RecordFolder(folder)
        self.source = GpusOnPaper()
        self.driver = ScriptedDriver(self.source)
        self.said: list[str] = []

    async def record(self, session: str, pid: int, left: bool = False, gpu: str = FIRST.uuid) -> None:
        """A suspended process of a session; `left`: which has ended."""
        name = processes.named(pid)
        assert name is not None
        record = SessionRecord.opened(request_for(session, gpus=(gpu,)), 0.0)
        record.suspension = Suspension(processes=(name,), sizes=(SIZE,), complete=True)
        self.driver.states[pid] = ProcessState.CHECKPOINTED
        store = Store(self.folder)
        (store.put_left if left else store.put)(record)
        await store.close()

    async def resume(self) -> bool:
        self.said.clear()
        return await steps.resume_all(self.folder, [FIRST], self.source, self.driver, self.said.append)


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Left:
    monkeypatch.setattr(steps, "MEMORY_WITHIN", 0.1)
    monkeypatch.setattr(steps, "SPARE_WITHIN", 0.05)
    return Left(tmp_path / "records")


@pytest.mark.parametrize("ended", [False, True])
async def test_suspended_process_runs_again_and_its_record_says_so(left: Left, pid: int, ended: bool) -> None:
    await left.record("ann", pid, left=ended)
    assert await left.resume()
    assert left.driver.states == {pid: ProcessState.RUNNING}
    assert left.said == [f"Process {pid} of session ann runs again."]
    assert [record.suspension for record in left.folder.load()] == ([] if ended else [None])
    assert left.folder.left() == []
    assert await left.resume()
    assert left.said == []


async def test_process_without_memory_stays_suspended_and_its_record_stays(left: Left, pid: int) -> None:
    await left.record("ann", pid)
    left.source.states[FIRST.uuid] = GpuState(healthy=True, memory_used_bytes=FIRST.memory_bytes - SIZE // 2)
    assert not await left.resume()
    assert left.driver.states == {pid: ProcessState.CHECKPOINTED}
    assert left.said == [f"Process {pid} of session ann stays suspended: 50 MiB more must be free on its GPU."]
    left.source.states.clear()
    assert await left.resume()


async def test_process_of_a_gpu_that_is_not_there_is_named(left: Left, pid: int) -> None:
    await left.record("ann", pid, left=True, gpu="GPU-0")
    assert not await left.resume()
    assert left.said == [f"Process {pid} of session ann stays suspended: its GPU is missing."]
    assert len(left.folder.left()) == 1


def test_command_says_where_no_agent_has_been(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["agent", "resume", "--state-dir", str(tmp_path / "none")]) == 1
    assert "none does not exist: no agent has stored sessions there" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_command_makes_nothing_in_a_folder_where_no_agent_has_been(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["agent", "resume", "--state-dir", str(tmp_path)]) == 1
    assert f"{tmp_path} has no folder records: no agent has stored sessions there" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("part", ["torn", "sizes"])
@pytest.mark.parametrize("ended", [False, True])
async def test_unreadable_record_is_told_each_time_and_others_are_resumed(
    left: Left, pid: int, part: str, ended: bool
) -> None:
    await left.record("ann", pid, left=ended)
    (path,) = left.folder.folder.iterdir()
    record = json.loads(path.read_text())
    record["suspension"]["sizes"] = []
    path.write_text(json.dumps(record) if part == "sizes" else path.read_text()[:-20])
    with subprocess.Popen(["sleep", "60"]) as other:
        await left.record("ben", other.pid)
        for said in ([f"Process {other.pid} of session ben runs again."], []):
            assert not await left.resume()
            assert left.said[:-1] == said
            assert f"{path.with_suffix('.bad')} cannot be read" in left.said[-1]
        assert left.driver.states == {pid: ProcessState.CHECKPOINTED, other.pid: ProcessState.RUNNING}
        other.kill()


async def test_record_of_processes_that_names_none_is_set_aside(left: Left, pid: int) -> None:
    await left.record("ann", pid, left=True)
    (path,) = left.folder.folder.iterdir()
    record = json.loads(path.read_text())
    record["suspension"] = None
    path.rename(named := path.with_name(path.name.split("-")[0] + "-.left"))
    named.write_text(json.dumps(record))
    assert left.folder.left() == []
    assert "contains no suspended process" in named.with_suffix(".reason").read_text()


def test_command_does_nothing_beside_an_agent(short_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (short_folder / "records").mkdir()
    lock = FolderLock(short_folder)
    assert cli.main(["agent", "--state-dir", str(short_folder), "resume"]) == 1
    assert "another agent" in capsys.readouterr().err
    lock.close()
