"""Records on disk: whole or as before, and never the end of the agent."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from gpushare_spawner.agent.metrics import ReportCollector
from gpushare_spawner.agent.session_records import RecordFolder, SessionRecord, Store, short_name
from gpushare_spawner.agent.state_folder import AlreadyRunning, PathTooLong, StateFolder
from gpushare_spawner.doctor.agent import report_findings
from gpushare_spawner.doctor.finding import Level
from gpushare_spawner.model.control import ControlRefused, TierRequest
from gpushare_spawner.model.share import Tier
from tests.agent.conftest import Agent, Eventually, request_for


def record(id: str = "ada", opened_at: float = 1000.0) -> SessionRecord:
    return SessionRecord.opened(request_for(id), opened_at)


async def test_records_come_back_as_they_were_oldest_first(tmp_path: Path) -> None:
    folder = RecordFolder(tmp_path / "records")
    store = Store(folder)
    young, old = record("young", 2000), record("old", 1000)
    young.tier, young.effective_units, young.gpu_seconds = Tier.DOWNGRADED, 10, 1.5
    store.put(young)
    store.put(old)
    await store.flush()
    assert folder.load() == [old, young]
    store.remove("old")
    store.put(young)
    await store.close()
    assert folder.load() == [young]
    assert (tmp_path / "records").stat().st_mode & 0o777 == 0o700


async def test_only_the_latest_of_each_session_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RecordFolder(tmp_path)
    writes = []
    monkeypatch.setattr(RecordFolder, "write", lambda self, name, content: writes.append((name, content)))
    store = Store(folder)
    for units in range(20):
        one = record()
        one.effective_units = units
        store.put(one)
    await store.close()
    assert len(writes) <= 2
    assert json.loads(writes[-1][1])["effective_units"] == 19


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "file: Invalid JSON"),
        (b"\x00\xff" * 500, "file: Invalid JSON"),
        (b"[]", "file: "),
        (b'{"version": 2}', "version: "),
        (b'{"version": 1, "tier": "asleep"}', "tier: "),
        (b"x" * 2_000_000, "2000000 bytes"),
    ],
)
async def test_a_record_that_cannot_be_read_is_set_aside_with_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes, reason: str
) -> None:
    folder = RecordFolder(tmp_path)
    good = record("good")
    folder.write(f"{short_name('good')}.json", good.model_dump_json().encode())
    bad = tmp_path / "0123456789abcdef.json"
    bad.write_bytes(content)
    assert folder.load() == [good]
    assert not bad.exists()
    assert bad.with_suffix(".bad").read_bytes() == content
    assert reason in bad.with_suffix(".reason").read_text()
    assert reason in caplog.text
    assert folder.load() == [good]


async def test_a_record_under_another_ones_name_is_set_aside(tmp_path: Path) -> None:
    folder = RecordFolder(tmp_path)
    folder.write(f"{'0' * 16}.json", record().model_dump_json().encode())
    assert folder.load() == []
    assert "wrong file name" in (tmp_path / f"{'0' * 16}.reason").read_text()


async def test_a_corrupt_record_does_not_stop_the_agent(agent: Agent) -> None:
    agent.open("ada")
    agent.open("bob")
    await agent.stop()
    path = agent.path / "records" / f"{short_name('ada')}.json"
    path.write_bytes(path.read_bytes()[:100])
    await agent.start()
    assert [one.id for one in agent.node.report().sessions] == ["bob"]
    agent.open("ada")


async def test_a_write_that_fails_leaves_the_old_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RecordFolder(tmp_path)
    old = record()
    folder.write(f"{short_name('ada')}.json", old.model_dump_json().encode())
    monkeypatch.setattr(os, "fsync", _no_space)
    with pytest.raises(OSError, match="No space"):
        folder.write(f"{short_name('ada')}.json", b"half a rec")
    assert folder.load() == [old]
    assert [path.name for path in tmp_path.iterdir()] == [f"{short_name('ada')}.json"]


def _no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


DOWN = TierRequest(id="ada", tier=Tier.DOWNGRADED, effective_units=10, reason="idle")


async def test_session_that_cannot_be_written_is_not_opened_and_nothing_of_it_stays(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    before = agent.node.report()
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", _no_space)
        for _ in range(2):
            with pytest.raises(ControlRefused, match=r"cannot store session ada on disk: No space left.*Free space"):
                await agent.node.requests.answer(request_for("ada"))
            assert not agent.node.report().sessions
    await eventually(lambda: agent.node.report().state_trouble is None)
    assert agent.node.report().gpus == before.gpus
    await agent.node.requests.answer(request_for("ada", share_units=100))
    await agent.stop()
    await agent.start()
    assert [one.id for one in agent.node.report().sessions] == ["ada"]


async def test_session_that_is_opened_again_on_a_full_disk_is_refused_too(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    await agent.node.requests.answer(request_for("ada"))
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", _no_space)
        with pytest.raises(ControlRefused, match="No space left"):
            await agent.node.requests.answer(request_for("ada"))
    assert not agent.node.report().sessions


async def test_tier_change_on_a_full_disk_holds_and_is_shown_as_not_durable(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, eventually: Eventually
) -> None:
    await agent.node.requests.answer(request_for("ada"))
    told: list[str | None] = []
    agent.node.changed = lambda: told.append(agent.node.report().state_trouble)
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", _no_space)
        await agent.node.requests.answer(DOWN)
        report = agent.node.report()
        assert report.sessions[0].tier is Tier.DOWNGRADED
        assert "No space left" in str(report.state_trouble)
        assert "gpushare_node_state_durable 0.0" in metrics_of(agent)
        found = report_findings("/x", report, ())
        assert [one for one in found if one.level is Level.PROBLEM and "No space left" in one.what]
        said = [entry for entry in caplog.records if entry.levelno == logging.ERROR]
        assert len(said) == 1
        assert "only in memory" in said[0].getMessage()
        # a kill now would lose it
        assert [one.tier for one in agent.state.records.load()] == [Tier.ACTIVE]
    await eventually(lambda: agent.node.report().state_trouble is None)
    assert "gpushare_node_state_durable 1.0" in metrics_of(agent)
    assert "records of sessions are written again" in caplog.text
    assert [one.tier for one in agent.state.records.load()] == [Tier.DOWNGRADED]
    # the report is published when that begins and when it ends
    assert any(told)
    assert told[-1] is None


def metrics_of(agent: Agent) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ReportCollector(agent.node.report, names=False))
    return generate_latest(registry).decode()


@pytest.fixture
def tiny_disk(short_folder: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    path = short_folder / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k,nr_inodes=1000", "tmpfs", str(path)]
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a tiny file system")
async def test_a_really_full_file_system(tiny_disk: Path, eventually: Eventually) -> None:
    agent = Agent(tiny_disk)
    await agent.start()
    for number in range(8):
        await agent.node.requests.answer(request_for(f"before-{number}", share_units=5))
    filler = tiny_disk / "filler"
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"x" * 512)
    for number in range(4):
        with pytest.raises(ControlRefused, match="No space left on device"):
            await agent.node.requests.answer(request_for(f"full-{number}", share_units=5))
    await agent.node.requests.answer(TierRequest(id="before-0", tier=Tier.RELEASED, effective_units=0, reason="idle"))
    report = agent.node.report()
    assert len(report.sessions) == 8
    assert "No space left on device" in str(report.state_trouble)
    filler.unlink()
    await eventually(lambda: agent.node.report().state_trouble is None)
    # what an agent finds that starts after a kill
    kept = agent.state.records.load()
    assert {one.request.id: one.tier for one in kept if one.tier is not Tier.ACTIVE} == {"before-0": Tier.RELEASED}
    await agent.stop()
    again = Agent(tiny_disk)
    await again.start()
    assert len(again.node.report().sessions) == 8
    await again.stop()


def test_two_agents_on_one_folder(short_folder: Path) -> None:
    first = StateFolder(short_folder)
    with pytest.raises(AlreadyRunning, match=f"process {os.getpid()}"):
        StateFolder(short_folder)
    first.close()
    StateFolder(short_folder).close()


def test_a_path_too_long_for_a_socket(tmp_path: Path) -> None:
    with pytest.raises(PathTooLong, match="shorter --state-dir"):
        StateFolder(tmp_path / ("d" * 100))
    assert list(tmp_path.iterdir()) == []
