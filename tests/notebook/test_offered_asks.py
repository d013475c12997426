"""What JupyterLab offers to ask of the service: what the agent passes on, and the sharing layer can do."""

from __future__ import annotations

import pytest

from gpushare_spawner.model.share_status import ShareStatus
from gpushare_spawner.notebook.extension import missing_asks, offered_asks
from gpushare_spawner.wording.layers import NO_AGENT
from tests.notebook.scripted_agent import Script


@pytest.mark.parametrize(
    ("script", "offered", "missing"),
    [
        (Script(), ["keep", "end-keep", "release", "stop"], ""),
        (Script(largest_share=50), ["keep", "end-keep", "release", "share", "stop"], ""),
        (Script(takes_asks=False), [], ""),
        (
            Script(layer="mps", largest_share=50),
            ["keep", "end-keep", "stop"],
            "NVIDIA MPS provides this session's GPU and cannot change its share. You can stop the server.",
        ),
        # of an agent that knows more layers than this notebook server
        (Script(layer="magic"), ["keep", "end-keep", "release", "stop"], ""),
    ],
    ids=["ours", "ours, with room", "older agent", "mps", "unknown layer"],
)
def test_the_asks_are_those_that_can_be_carried_out(script: Script, offered: list[str], missing: str) -> None:
    status = script.status()
    assert (offered_asks(status), missing_asks(status)) == (offered, missing)


def test_without_an_agent_nothing_can_be_asked_and_the_reason_is_said() -> None:
    status = ShareStatus(share_units=25, layer="kai", layer_gpus=1)
    assert (offered_asks(status), missing_asks(status)) == ([], NO_AGENT)
