"""Cordon and drain of GPUs and nodes, with agents that know them and with older ones."""

from __future__ import annotations

from gpushare_spawner.service.actions import drains
from gpushare_spawner.service.actions.context import RefusalCode
from gpushare_spawner.service.actions.drains import CordonTarget
from gpushare_spawner.wording import actions as words
from tests.service.actions.conftest import ROOT, Acting
from tests.service.actions.test_other_actions import refusal_of
from tests.service.conftest import HOUR, Clock


async def test_a_gpu_is_cordoned_drained_and_given_back(acting: Acting, clock: Clock) -> None:
    actions, gpu = acting.actions, CordonTarget(acting.client, "fake", "GPU-1")
    outcome = await drains.cordon(actions, gpu, ROOT, "Fan.")
    assert (outcome.changed, outcome.text) == (True, "GPU 1 of node fake gets no new servers.")
    assert [(one.uuid, one.cordoned) for one in acting.agent.report().gpus] == [("GPU-0", False), ("GPU-1", True)]
    assert (await drains.cordon(actions, gpu, ROOT, "Fan.")).text == "GPU 1 of node fake is already cordoned."
    clock.forward(HOUR)
    drained = await drains.drain(actions, gpu, ROOT, "Fan.", stop_after=HOUR)
    assert drained.text.endswith("Servers that still run there are stopped after 1 h, and after their notice period.")
    (standing,) = acting.agent.cordons
    assert (standing.drain, standing.stop_at, standing.by, standing.since) == (True, clock() + HOUR, "root", clock())
    clock.forward(1)
    assert not (await drains.drain(actions, gpu, ROOT, "Fan.", stop_after=HOUR)).changed, "sent twice"
    assert (await drains.drain(actions, gpu, ROOT, "Fan.")).changed, "without an end"
    assert (await drains.uncordon(actions, gpu, ROOT)).text == "GPU 1 of node fake gets new servers again."
    assert not acting.agent.cordons
    assert not (await drains.uncordon(actions, gpu, ROOT)).changed
    assert [(action.action, action.node) for action in acting.recorded] == [
        ("cordon", "fake"), ("drain", "fake"), ("drain", "fake"), ("drain-ended", "fake")
    ]  # fmt: skip


async def test_a_node_and_its_gpu_have_cordons_of_their_own(acting: Acting) -> None:
    actions = acting.actions
    await drains.cordon(actions, CordonTarget(acting.client, "fake"), ROOT)
    await drains.cordon(actions, CordonTarget(acting.client, "fake", "GPU-0"), ROOT)
    assert all(one.cordoned for one in acting.agent.report().gpus)
    assert (
        await drains.uncordon(actions, CordonTarget(acting.client, "fake"), ROOT)
    ).text == "Node fake gets new servers again."
    assert [one.cordoned for one in acting.agent.report().gpus] == [True, False]


async def test_an_older_agent_is_said(acting: Acting) -> None:
    acting.agent.older = True
    refusal = await refusal_of(drains.cordon(acting.actions, CordonTarget(acting.client, "fake"), ROOT))
    assert refusal.code is RefusalCode.OLDER_AGENT
    assert not acting.recorded


def test_what_users_are_told_says_what_to_do() -> None:
    assert words.drain_notice("GPU 0 of node a", "Fan.", None) == (
        "GPU 0 of node a is being taken out of service. Fan. Please save your work and restart your server. It will "
        "run elsewhere."
    )
    said = words.drain_notice("Node a", "", 1_767_261_900.0)
    assert "Your server will be stopped at 2026-01-01 10:05 UTC. Save your work" in said
    assert " out of service. New driver. Please save" in words.drain_notice("Node a", "New driver ", None)
