"""What a template promises that a layer cannot keep."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from gpushare_spawner.model.layers import LAYERS, Enforcement, IdleReach, LayerName
from gpushare_spawner.model.template import Template


def template(gpu: dict[str, Any], **fields: Any) -> Template:
    return Template.model_validate({"name": "t", "display_name": "t", "gpu": gpu, **fields})


def broken(layer: str, gpu: dict[str, Any], **fields: Any) -> list[str]:
    return [one.field for one in template(gpu, **fields).broken_promises(LayerName(layer))]


def test_only_some_layers_give_a_part_of_each_of_several_gpus() -> None:
    able = {layer for layer in LayerName if not broken(layer, {"count": 2, "fraction": 0.5})}
    assert able == {LayerName.NATIVE, LayerName.HAMI}
    (told,) = template({"count": 2, "fraction": 0.5}).broken_promises(LayerName.KAI)
    assert (told.field, told.advice) == ("gpu.count", "remove the count, or the fraction")
    assert "whole GPUs, or a part of one" in told.what
    assert {layer for layer in LayerName if not broken(layer, {"fraction": 1.5})} == {LayerName.NATIVE}
    (told,) = template({"fraction": 1.5}).broken_promises(LayerName.HAMI)
    assert (told.field, told.what) == ("gpu.fraction", "HAMi gives a server the same part of each GPU")


OVERSUBSCRIBED = {"fraction": 0.25, "memory": {"oversubscribe": True}}
LIMITED = {"fraction": 0.25, "memory": {"limit": "50%"}}
GUARANTEED = {"fraction": 0.25, "memory": {"guarantee": "8Gi"}}
DOWNGRADED = {"downgrade_after": "5m", "downgrade_to": 0.1, "release_after": "1h"}


@pytest.mark.parametrize("layer", sorted(LayerName))
def test_template_without_promises_of_its_own_can_have_each_layer(layer: str) -> None:
    assert broken(layer, {"fraction": 0.25}, idle={"stop_after": "8h"}) == []
    assert broken(layer, {"count": 1}) == []
    assert template({"fraction": 0.25, "layer": layer}).gpu is not None


@pytest.mark.parametrize("layer", sorted(LayerName))
def test_idle_actions_need_a_layer_that_reaches_running_servers(layer: str) -> None:
    reach = LAYERS[LayerName(layer)].reach
    expected = ["idle.downgrade_after"] * (IdleReach.DOWNGRADE not in reach)
    expected += ["idle.release_after"] * (IdleReach.RELEASE not in reach)
    assert broken(layer, {"fraction": 0.25}, idle=DOWNGRADED) == expected


@pytest.mark.parametrize("layer", sorted(LayerName))
def test_memory_promises_need_a_layer_that_keeps_them(layer: str) -> None:
    declared = LAYERS[LayerName(layer)]
    assert broken(layer, OVERSUBSCRIBED) == ["gpu.memory.oversubscribe"] * (not declared.oversubscribes)
    assert broken(layer, LIMITED) == ["gpu.memory.limit"] * (layer != "native")
    assert broken(layer, GUARANTEED) == ["gpu.memory.guarantee"] * (declared.memory is Enforcement.NONE)
    limited = {"fraction": 0.25, "time": {"limit": "50%"}}
    assert "gpu.time.limit" in broken(layer, limited) or layer == "native"
    engine = {"fraction": 0.25, "memory": {"engine": "managed"}}
    assert broken(layer, engine) == ["gpu.memory.engine"] * (layer != "native")


@pytest.mark.parametrize(
    ("layer", "limit", "expected"),
    [
        ("hami", "25%", []),
        ("hami", "25.0%", []),
        ("mig", "25%", []),
        ("hami", "100%", ["gpu.memory.limit"]),
        ("time-slicing", "100%", []),
        ("kai", "100%", []),
        ("kai", "25%", ["gpu.memory.limit"]),
    ],
)
def test_limit_is_kept_where_it_is_what_the_layer_gives(layer: str, limit: str, expected: list[str]) -> None:
    assert broken(layer, {"fraction": 0.25, "memory": {"limit": limit}}) == expected


def test_shares_that_a_layer_does_not_have() -> None:
    assert broken("time-slicing", {"fraction": 0.51}) == ["gpu.fraction"]
    assert broken("mps", {"fraction": 0.5}) == []
    assert broken("nvshare", {"count": 2}) == ["gpu.count"]
    assert broken("mig", {"count": 2}) == []


def test_template_that_names_such_a_layer_is_refused_with_the_field_the_reason_and_what_would_be_right() -> None:
    with pytest.raises(ValidationError) as refused:
        template({"fraction": 0.25, "layer": "hami", "memory": {"oversubscribe": True}})
    (error,) = refused.value.errors()
    assert error["type"] == "layer_cannot"
    assert error["ctx"]["field"] == "gpu.memory.oversubscribe"
    assert error["msg"] == (
        "gpu.memory.oversubscribe: HAMi does not move GPU memory to host memory; "
        "write oversubscribe: false, or remove the line"
    )


def test_template_without_a_gpu_can_have_each_layer() -> None:
    cpu = Template.model_validate({"name": "t", "display_name": "t", "idle": {"stop_after": "1h"}})
    assert all(cpu.broken_promises(layer) == () for layer in LayerName)


def test_rules_for_the_choice_of_the_gpu_need_our_own_layer() -> None:
    fields = {"name": "t", "display_name": "t", "gpu": {"fraction": 0.5}, "placement": {"alone": True}}
    alone = Template.model_validate(fields)
    for layer in LayerName:
        promises = [promise.field for promise in alone.broken_promises(layer)]
        assert promises == ([] if layer is LayerName.NATIVE else ["placement"])
