"""Rounds: why a GPU may not be given out, from figures alone."""

from __future__ import annotations

from unittest import mock

from gpushare_spawner.agent.gpus.nvml import GpuState
from gpushare_spawner.agent.periodic import Rounds, RoundSettings
from tests.agent.peers import FIRST, SECOND

GPUS = {FIRST.uuid: FIRST, SECOND.uuid: SECOND}
WELL = {FIRST.uuid: GpuState(healthy=True), SECOND.uuid: GpuState(healthy=True)}


def rounds(states: dict[str, GpuState]) -> Rounds:
    made = Rounds(RoundSettings(), GPUS, mock.Mock(), mock.Mock(), mock.Mock())
    made.states = states
    return made


def test_gpu_that_the_driver_calls_sick_is_named_with_its_trouble() -> None:
    states = {**WELL, FIRST.uuid: GpuState(healthy=False, trouble="broke with Xid 79")}
    health = rounds(states)
    assert health.trouble(FIRST.uuid) == f"GPU 0 ({FIRST.uuid}) broke with Xid 79"
    assert (health.healthy(FIRST.uuid), health.healthy(SECOND.uuid)) == (False, True)


def test_withheld_gpu_gives_the_reason_although_the_driver_answers() -> None:
    health = rounds(WELL)
    health.withheld = {SECOND.uuid: "another device plugin offers it"}
    assert health.trouble(SECOND.uuid) == "another device plugin offers it"
    assert health.healthy(FIRST.uuid)


def test_newest_answer_of_the_driver_counts() -> None:
    states = dict(WELL)
    health = rounds(states)
    assert health.healthy(FIRST.uuid)
    states[FIRST.uuid] = GpuState(healthy=False, trouble="does not answer")
    assert not health.healthy(FIRST.uuid)
