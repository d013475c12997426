"""Energy is divided by GPU time, and the power without work by held units."""

from __future__ import annotations

import asyncio

import pytest

from gpushare_spawner.agent.gpus.nvml import GpuState
from gpushare_spawner.agent.gpus.samples import LONGEST_SAMPLE, Energy
from tests.agent.conftest import Agent
from tests.agent.peers import FIRST


def test_power_above_that_without_work_goes_to_those_who_work_by_their_time() -> None:
    energy = Energy()
    units = {"ann": 25, "bob": 50}
    energy.divided("GPU-0", 40.0, 0.0, {}, units)
    energy.divided("GPU-0", 240.0, 2.0, {"ann": 0.75, "bob": 0.25}, units)
    joules = energy.divided("GPU-0", 240.0, 4.0, {"ann": 0.75, "bob": 0.25}, units)
    assert joules == pytest.approx({"ann": 2 * (40 * 0.25 + 200 * 0.75), "bob": 2 * (40 * 0.5 + 200 * 0.25)})


def test_a_session_without_units_has_only_the_energy_of_its_work() -> None:
    energy = Energy()
    energy.divided("GPU-0", 40.0, 0.0, {}, {"ann": 0, "bob": 50})
    joules = energy.divided("GPU-0", 40.0, 2.0, {"ann": 0.0}, {"ann": 0, "bob": 50})
    assert joules == pytest.approx({"ann": 0, "bob": 40})


def test_the_sum_is_the_energy_of_the_gpu_while_all_units_are_held_and_one_works() -> None:
    energy, total, expected = Energy(), 0.0, 0.0
    powers = [40.0, 250.0, 250.0, 180.0, 40.0, 40.0, 200.0, 200.0]
    for second, watts in enumerate(powers):
        busy = {"ann": 1.0} if max(watts, powers[second - 1]) > 40 and second else {}
        total += sum(energy.divided("GPU-0", watts, float(second), busy, {"ann": 60, "bob": 40}).values())
        expected += (watts + powers[second - 1]) / 2 if second else 0.0
    assert total == pytest.approx(expected)


def test_after_a_pause_of_the_readings_the_past_counts_only_for_moments() -> None:
    energy = Energy()
    energy.divided("GPU-0", 100.0, 0.0, {}, {"ann": 100})
    joules = energy.divided("GPU-0", 100.0, 3600.0, {}, {"ann": 100})
    assert joules["ann"] == pytest.approx(100 * LONGEST_SAMPLE)


async def test_the_agent_adds_the_energy_of_each_session_to_its_report_and_record(agent: Agent) -> None:
    agent.open("ada", share_units=25)
    agent.open("bob", share_units=50)
    measured = {FIRST.uuid: GpuState(healthy=True, power_watts=100.0)}
    agent.node.rounds._polled(measured)
    await asyncio.sleep(0.05)
    agent.node.rounds._polled(measured)
    joules = {session.id: session.energy_joules for session in agent.node.report().sessions}
    assert joules["ada"] >= 0.05 * 100 * 0.25
    assert joules["bob"] == pytest.approx(2 * joules["ada"])
    assert agent.node.sessions["ada"].record.energy_joules == joules["ada"]
    # without a figure of the driver nothing is added
    agent.node.rounds._polled({FIRST.uuid: GpuState(healthy=True)})
    assert agent.node.sessions["ada"].record.energy_joules == joules["ada"]
