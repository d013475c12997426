"""Our own layer: a template and a placement become an environment, by way of the agent."""

from __future__ import annotations

import pytest

from gpushare_spawner.model.control import OpenRequest
from gpushare_spawner.model.layers import LayerName, MemoryEngine, Placement
from gpushare_spawner.model.template import Template, TemplateGpu
from gpushare_spawner.sharing.base import Tenant
from gpushare_spawner.sharing.native import merged, open_request, process_environment

QUARTER = Template.model_validate(
    {
        "name": "quarter-gpu",
        "display_name": "0.25 GPU",
        "gpu": {"fraction": 0.25, "memory": {"limit": "80%", "oversubscribe": False}},
    }
)


def test_a_request_says_whose_share_it_is_and_how_large() -> None:
    tenant = Tenant("ada lovelace", "two", uid=1001, quota="group:optics", user_units=50)
    assert open_request(tenant, QUARTER, Placement("here", ("GPU-1",), borrowed=10), confirm_within=30) == OpenRequest(
        id="ada=20lovelace+two",
        user="ada lovelace",
        server="two",
        uid=1001,
        template="quarter-gpu",
        quota="group:optics",
        user_units=50,
        gpus=("GPU-1",),
        share_units=25,
        borrowed_units=10,
        memory_limit="80%",
        oversubscribe=False,
        confirm_within=30,
    )


def test_engine_of_the_template_is_asked_for_and_the_default_is_left_out() -> None:
    memory = {"engine": "suspend"}
    suspended = QUARTER.model_copy(update={"gpu": TemplateGpu.model_validate({"fraction": 0.25, "memory": memory})})
    placement = Placement("here", ("GPU-1",))
    asked = open_request(Tenant("ada"), suspended, placement).model_dump(mode="json")
    assert OpenRequest.model_validate(asked).engine is MemoryEngine.SUSPEND
    # an agent that does not know engines refuses a request that names one
    assert "engine" not in open_request(Tenant("ada"), QUARTER, placement).model_dump(mode="json")


def test_limit_of_gpu_time_is_asked_for_and_the_default_is_left_out() -> None:
    limited = QUARTER.model_copy(
        update={"gpu": TemplateGpu.model_validate({"fraction": 0.25, "time": {"limit": "40%"}})}
    )
    placement = Placement("here", ("GPU-1",))
    asked = open_request(Tenant("ada"), limited, placement).model_dump(mode="json")
    assert OpenRequest.model_validate(asked).time_limit_units == 40
    # an agent that does not know limits of GPU time refuses a request that names one
    assert "time_limit_units" not in open_request(Tenant("ada"), QUARTER, placement).model_dump(mode="json")


@pytest.mark.parametrize(("memory", "limit"), [({}, "25%"), ({"guarantee": "10Gi"}, "10Gi")])
def test_template_with_mps_asks_for_its_guarantee_and_no_more(memory: dict[str, str], limit: str) -> None:
    gpu = TemplateGpu.model_validate({"fraction": 0.25, "layer": "mps", "memory": memory})
    placement = Placement("here", ("GPU-1",))
    asked = open_request(Tenant("ada"), QUARTER.model_copy(update={"gpu": gpu}), placement)
    assert (asked.layer, asked.memory_limit, asked.oversubscribe) == (LayerName.MPS, limit, False)
    assert OpenRequest.model_validate(asked.model_dump(mode="json")) == asked
    # an agent that does not know layers refuses a request that names one
    assert "layer" not in open_request(Tenant("ada"), QUARTER, placement).model_dump(mode="json")


def test_the_environment_leads_to_the_session_and_the_one_given_stays_as_it_is() -> None:
    before = {"PATH": "/bin", "LD_PRELOAD": "/theirs.so", "LD_LIBRARY_PATH": "/lib"}
    additions = {"GPUSHARE_SOCKET": "/s", "LD_PRELOAD": "/ours.so", "LD_LIBRARY_PATH": "/sim"}
    assert process_environment(before, additions) == {
        "PATH": "/bin",
        "GPUSHARE_SOCKET": "/s",
        "LD_PRELOAD": "/theirs.so /ours.so",
        "LD_LIBRARY_PATH": "/sim:/lib",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    }
    assert before["LD_PRELOAD"] == "/theirs.so"


def test_a_template_without_a_gpu_opens_nothing() -> None:
    template = Template.model_validate({"name": "cpu", "display_name": "CPU"})
    with pytest.raises(ValueError, match="asks for no GPU"):
        open_request(Tenant("ada"), template, Placement("here", ()))


@pytest.mark.parametrize(
    ("there", "result"),
    [
        ({}, {"LD_PRELOAD": "/o.so", "LD_LIBRARY_PATH": "/sim"}),
        ({"LD_PRELOAD": "/a.so:/b.so"}, {"LD_PRELOAD": "/a.so /b.so /o.so", "LD_LIBRARY_PATH": "/sim"}),
        ({"LD_PRELOAD": "/o.so /a.so"}, {"LD_PRELOAD": "/a.so /o.so", "LD_LIBRARY_PATH": "/sim"}),
        ({"LD_LIBRARY_PATH": "/lib::/sim"}, {"LD_PRELOAD": "/o.so", "LD_LIBRARY_PATH": "/sim:/lib"}),
    ],
)
def test_what_is_there_already_is_kept_and_not_repeated(there: dict[str, str], result: dict[str, str]) -> None:
    assert merged(there, {"LD_PRELOAD": "/o.so", "LD_LIBRARY_PATH": "/sim"}) == result


def test_frameworks_do_not_reserve_the_gpu_in_advance_unless_the_environment_says_so() -> None:
    assert process_environment({}, {}) == {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
    }
    chosen = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "TF_FORCE_GPU_ALLOW_GROWTH": ""}
    assert process_environment(chosen, {}) == chosen
