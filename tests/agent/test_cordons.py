"""Cordons of the node and its GPUs: kept by the agent over restarts, and in its report."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpushare_spawner.agent.state.cordons import Cordons
from gpushare_spawner.model.cordon import Cordon
from gpushare_spawner.model.protocol.control import ControlRefused, CordonRequest
from tests.agent.peers import FIRST, SECOND

from .conftest import Agent

BROKEN = Cordon(gpu=FIRST.uuid, by="boss", reason="The fan is broken.", since=1000.0)
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
    with pytest.raises(ControlRefused, match="the cordon is of"):
        await agent.node.requests.answer(CordonRequest(gpu=SECOND.uuid, cordon=BROKEN))


async def test_a_disk_that_refuses_leaves_everything_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cordons = Cordons(tmp_path / "missing" / "cordons.json")
    with pytest.raises(OSError, match="No such file"):
        await cordons.put("", NODE)
    assert cordons.now == ()
    (tmp_path / "cordons.json").write_text("[{]")
    assert Cordons(tmp_path / "cordons.json").now == ()
    assert "cannot read the cordons of this node" in caplog.text


async def test_the_same_cordons_are_not_written_again(tmp_path: Path) -> None:
    cordons = Cordons(tmp_path / "cordons.json")
    await cordons.replace([BROKEN, NODE])
    written = (tmp_path / "cordons.json").stat().st_mtime_ns
    await cordons.replace([NODE, BROKEN])
    assert (tmp_path / "cordons.json").stat().st_mtime_ns == written
    assert set(Cordons(tmp_path / "cordons.json").now) == {BROKEN, NODE}
