"""What a user reads of a share that another sharing layer gives: in the status bar, its tooltip and the terminal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpushare_spawner.agent.sessions.conversation import own_gpus
from gpushare_spawner.model.layers import LAYERS, LayerName
from gpushare_spawner.model.share import Tier
from gpushare_spawner.model.share_status import PendingAction, ShareStatus
from gpushare_spawner.wording import share_status
from gpushare_spawner.wording.amounts import localised
from gpushare_spawner.wording.layers import daemon_restarted, when_idle
from tests.notebook.scripted_agent import GIB, GPU, OTHER_GPU, Script

NOON = 1_699_012_800.0
RESTARTED = daemon_restarted(0, NOON + 7500)


def of(**changes: Any) -> ShareStatus:
    return Script(**{"layer": "mps"} | changes).status()


def test_measured_session_has_the_terms_of_its_layer_in_place_of_tier_and_lease() -> None:
    now = of(layer_trouble=RESTARTED, quiet=600.0)
    assert share_status.line(now) == "0.25 GPU · NVIDIA MPS · GPU problem · 3.1 of 16 GiB"
    assert share_status.page(now, NOON).splitlines() == [
        "share           0.25 GPU",
        "shared by       NVIDIA MPS. Each session is kept within its part of the GPU's memory and time.",
        "idle actions    When the server is idle, it can only be stopped.",
        f"GPU problem     {localised(RESTARTED, NOON)}",
        "GPU work        none for 10 min",
        "memory          3.1 of 16 GiB allocated, 1 GiB of it on the GPU",
        "other sessions  1; 1 of 2 sessions on the GPU has work now",
    ]
    explained = share_status.explanation(now).splitlines()
    assert explained[:2] == [
        RESTARTED,
        "You have 0.25 GPU by NVIDIA MPS. Each session is kept within its part of the GPU's memory and time. When the "
        "server is idle, it can only be stopped.",
    ]


def test_session_without_an_agent_shows_no_figures() -> None:
    due = PendingAction(Tier.STOPPED, 1_700_000_000.0, 0, after_seconds=8 * 3600)
    now = ShareStatus(share_units=100, layer="kai", layer_gpus=2, notice=due)
    assert share_status.line(now) == "2 GPUs · KAI Scheduler"
    rows = {term.name: term.text for term in share_status.terms(now)}
    assert list(rows) == ["share", "shared by", "idle actions", "GPU work", "notice"]
    assert rows["GPU work"] == "not measured"
    assert rows["notice"].startswith("Your server will stop at {time}: idle for 8 h.")
    explained = share_status.explanation(now)
    assert explained.endswith("Nothing measures this server's GPU work.")
    assert "Memory" not in explained
    assert "No other session" not in explained


def test_layer_that_only_a_newer_agent_knows_is_shown_as_ours() -> None:
    assert share_status.line(of(layer="magic")) == share_status.line(of(layer=""))


@pytest.mark.parametrize("name", LayerName)
def test_what_idle_actions_can_do_follows_the_declaration(name: LayerName) -> None:
    can = "be downgraded, released, stopped" if name is LayerName.NATIVE else "only be stopped"
    assert when_idle(LAYERS[name]) == f"When the server is idle, it can {can}."


def test_of_all_gpus_of_a_node_those_with_memory_are_the_sessions_own() -> None:
    status = Script(layer="time-slicing", gpus=[GPU, OTHER_GPU]).status()
    empty = replace(status.gpus[0], memory_bytes=0)
    now = replace(status, gpus=own_gpus([empty, status.gpus[1]], 1))
    assert [gpu.uuid for gpu in now.gpus] == [OTHER_GPU]
    assert (now.gpu_count, now.limit_bytes) == (1, 16 * GIB)
    assert share_status.line(now).startswith("0.25 GPU · NVIDIA time-slicing · 3.1 of 16 GiB")
