"""Cordons of the node and its GPUs: kept by the agent over restarts, and in its report."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpushare_spawner.agent.session_records import Cordons
from gpushare_spawner.model.control import ControlRefused, CordonRequest
from gpushare_spawner.model.controls import Cordon
from tests.agent.peers import FIRST, SECOND

from .conftest import Agent

BROKEN = Cordon(gpu=FIRST.uuid, by="boss", reason="The fan is broken.", since=1000.0)
SPARE = Cordon(gpu=SECOND.uuid, by="boss", since=1000.0)
NODE = Cordon(by="boss", since=1000.0, drain=True, stop_at=2000.0)


async def test_a_cordoned_gpu_is_reported_as_such_also_after_a_restart(agent: Agent) -> None:
    await agent.node.requests.answer(CordonRequest(gpu=FIRST.uuid, cordon=BROKEN))
    await agent.stop()
    await agent.start()
    report = agent.node.report()
    assert report.cordon(FIRST.uuid) == BROKEN
    assert {gpu.uuid: gpu.cordoned for gpu in report.gpus} == {FIRST.uuid: True, SECOND.uuid: False}
    await agent.node.requests.answer(CordonRequest(gpu=FIRST.uuid, cordon=None))
    await agent.stop()
    await agent.start()
    assert agent.node.report().cordons == ()


async def test_a_cordon_of_the_node_is_one_of_all_its_gpus(agent: Agent) -> None:
    await agent.node.requests.answer(CordonRequest(cordon=NODE))
    report = agent.node.report()
    assert report.cordon() == NODE
    assert all(gpu.cordoned for gpu in report.gpus)


async def test_a_reservation_in_flight_still_opens_its_session(agent: Agent) -> None:
    await agent.node.requests.answer(CordonRequest(cordon=NODE))
    agent.open("ann")
    assert "ann" in agent.node.sessions


async def test_an_unknown_gpu_is_refused(agent: Agent) -> None:
    with pytest.raises(ControlRefused) as refused:
        await agent.node.requests.answer(CordonRequest(gpu="GPU-9", cordon=BROKEN))
    assert refused.value.code == "unknown-gpu"
    with pytest.raises(ControlRefused, match="the cordon is for"):
        await agent.node.requests.answer(CordonRequest(gpu=SECOND.uuid, cordon=BROKEN))


async def test_a_disk_that_refuses_leaves_everything_as_it_was(tmp_path: Path) -> None:
    cordons = Cordons(tmp_path / "missing" / "cordons.json")
    with pytest.raises(OSError, match="No such file"):
        await cordons.put("", NODE)
    assert cordons.now == ()


async def test_a_file_that_cannot_be_read_is_a_cordon_of_the_node_until_somebody_ends_it(
    agent: Agent, caplog: pytest.LogCaptureFixture
) -> None:
    await agent.node.requests.answer(CordonRequest(gpu=FIRST.uuid, cordon=BROKEN))
    path = agent.node.cordons.path
    await agent.stop()
    path.write_text("[{]")
    await agent.start()
    assert f"cannot read the cordons of this node, {path}" in caplog.text
    report = agent.node.report()
    assert all(gpu.cordoned for gpu in report.gpus)
    (unknown,) = report.cordons
    assert (unknown.gpu, unknown.drain, unknown.by) == ("", False, "gpushare-agent")
    assert unknown.reason == "The file with the cordons of this node cannot be read."
    await agent.node.requests.answer(CordonRequest(gpu=SECOND.uuid, cordon=SPARE))
    await agent.stop()
    await agent.start()
    assert set(agent.node.report().cordons) == {unknown, SPARE}, "kept with what an admin sets"
    await agent.node.requests.answer(CordonRequest(cordon=None))
    await agent.stop()
    await agent.start()
    assert agent.node.report().cordons == (SPARE,)


async def test_the_same_cordons_are_not_written_again(tmp_path: Path) -> None:
    cordons = Cordons(tmp_path / "cordons.json")
    await cordons.replace([BROKEN, NODE])
    written = (tmp_path / "cordons.json").stat().st_mtime_ns
    await cordons.replace([NODE, BROKEN])
    assert (tmp_path / "cordons.json").stat().st_mtime_ns == written
    assert set(Cordons(tmp_path / "cordons.json").now) == {BROKEN, NODE}
