"""What a template's card says of idle actions."""

from __future__ import annotations

from gpushare_spawner.model.template import Template, TemplateGpu
from gpushare_spawner.wording.spawn_form import idle_actions, maximum


def test_a_card_says_the_limit_of_gpu_time() -> None:
    gpu = {"fraction": 0.25, "time": {"limit": "25%"}}
    assert maximum(TemplateGpu.model_validate(gpu), None) == "at most 25 % of the GPU's time, and all of its memory"


def test_a_template_that_waits_for_pressure_says_so_of_downgrade_and_release() -> None:
    idle = {"downgrade_after": "5m", "downgrade_to": 0.1, "release_after": "15m", "stop_after": "8h"}
    fields = {"name": "q", "display_name": "Q", "gpu": {"fraction": 0.25}}
    assert idle_actions(Template.model_validate({**fields, "idle": {**idle, "when": "pressure"}})) == [
        "after 5 min, downgraded to 0.10 GPU if a spawn waits for it",
        "after 15 min, released and lent if a spawn waits for it",
        "after 8 h, the server is stopped",
    ]
    assert idle_actions(Template.model_validate({**fields, "idle": idle}))[1] == "after 15 min, released and lent"
