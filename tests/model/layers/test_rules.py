"""Which layer a node has by `layers.yaml`."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gpushare_spawner.model.layers import LAYERS, IdleReach, LayerName, PlacedBy
from gpushare_spawner.model.layers_file import HamiOptions, KaiOptions, LayerRule, LayersFile, MigOptions, matches
from tests.present import present

A100, T4 = "NVIDIA-A100-SXM4-80GB", "Tesla-T4"


def test_each_layer_is_declared_once_and_only_ours_is_placed_by_the_ledger() -> None:
    assert set(LAYERS) == set(LayerName)
    assert [layer.name for layer in LAYERS.values() if layer.places is PlacedBy.LEDGER] == [LayerName.NATIVE]
    assert {name for name, layer in LAYERS.items() if layer.reach} == {LayerName.NATIVE}
    assert LAYERS[LayerName.NATIVE].reach == frozenset(IdleReach)
    assert [layer.name for layer in LAYERS.values() if layer.source is None] == [LayerName.NATIVE]


def test_first_rule_that_applies_to_a_node_counts_and_without_one_the_layer_is_native() -> None:
    file = LayersFile.model_validate(
        {
            "rules": [
                {"nodes": {"pool": "teaching"}, "layer": "time-slicing"},
                {"models": ["*A100*"], "layer": "mig"},
                {"nodes": {"pool": "labs"}, "models": ["*T4*"], "layer": "mps"},
            ]
        }
    )
    assert present(file.rule_of({"pool": "teaching"}, T4)).layer is LayerName.TIME_SLICING
    assert present(file.rule_of({"pool": "research"}, A100)).layer is LayerName.MIG
    assert file.rule_of({}, T4) is None
    assert file.layers_for(["*A100*"]) == (LayerName.TIME_SLICING, LayerName.MIG, LayerName.NATIVE)
    assert file.layers_for(["*T4*"]) == (LayerName.TIME_SLICING, LayerName.MPS, LayerName.NATIVE)


def test_rule_without_nodes_and_models_leaves_no_node_to_the_native_layer() -> None:
    file = LayersFile.model_validate({"rules": [{"layer": "hami"}]})
    assert present(file.rule_of({}, "")).layer is LayerName.HAMI
    assert file.layers_for(["*A100*"]) == (LayerName.HAMI,)


def test_options_of_a_rule_override_those_of_the_file_field_by_field() -> None:
    file = LayersFile.model_validate(
        {
            "rules": [{"layer": "kai", "options": {"kai": {"priority_class": "train"}}}],
            "options": {"kai": {"queue": "notebooks", "priority_class": "build"}},
        }
    )
    options = file.options_of(LayerName.KAI, file.rules[0])
    assert isinstance(options, KaiOptions)
    assert (options.queue, options.priority_class) == ("notebooks", "train")
    assert file.options_of(LayerName.KAI) == KaiOptions(queue="notebooks")
    assert file.options_of(LayerName.HAMI, None) == HamiOptions()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"rules": [{"layer": "mig", "options": {"kai": {"queue": "q"}}}]}, "options of kai have no effect"),
        ({"rules": [{"layer": "slices"}]}, "rules.0.layer"),
        ({"rules": [{"models": ["*"]}]}, "rules.0.layer"),
        ({"options": {"kai": {"queu": "q"}}}, "options.kai.queu"),
        ({"options": {"hami": {"resource": "gpu"}}}, "options.hami.resource"),
        ({"options": {"native": {}}}, "options.native"),
    ],
)
def test_misspelt_fields_and_options_without_effect_are_refused(content: dict[str, object], expected: str) -> None:
    with pytest.raises(ValidationError, match=expected):
        LayersFile.model_validate(content)


def test_options_of_time_slicing_are_written_with_a_dash() -> None:
    file = LayersFile.model_validate({"options": {"time-slicing": {"replicas": 4}}})
    assert file.options_of(LayerName.TIME_SLICING).model_dump()["replicas"] == 4
    assert file.options.given() == {LayerName.TIME_SLICING}
    assert MigOptions().strategy is None


def test_model_name_of_a_label_has_dashes_where_a_pattern_has_spaces() -> None:
    assert matches("NVIDIA-A100-SXM4-80GB", "nvidia a100*")
    assert matches("NVIDIA A100-SXM4-80GB", "*a100-sxm4*")
    assert not matches("Tesla-T4", "*A100*")


def test_rule_may_apply_where_one_pattern_is_a_special_case_of_the_other() -> None:
    rule = LayerRule(models=("*A100*",), layer=LayerName.MIG)
    assert rule.may_apply(["*a100-sxm4*"])
    assert rule.may_apply(["*T4*", "NVIDIA A100*"])
    assert rule.may_apply([])
    assert not rule.may_apply(["*T4*"])
    assert LayerRule(layer=LayerName.MIG).may_apply(["*T4*"])


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(st.text("ab-", min_size=1, max_size=6), st.text("ab*?", max_size=6))
def test_rule_for_one_model_may_apply_to_each_pattern_that_matches_it(model: str, pattern: str) -> None:
    if matches(model, pattern):
        assert LayerRule(models=(model,), layer=LayerName.MIG).may_apply([pattern])


@pytest.mark.parametrize(
    ("first", "later"),
    [
        ({"layer": "hami"}, {"nodes": {"pool": "a"}, "layer": "mps"}),
        ({"nodes": {"pool": "a"}, "layer": "mps"}, {"nodes": {"pool": "a", "zone": "b"}, "layer": "kai"}),
        ({"models": ["*A100*", "*L4*"], "layer": "mps"}, {"models": ["*L4*"], "layer": "native"}),
        ({"models": ["*A100*"], "layer": "hami"}, {"models": ["*A100*"], "layer": "kai"}),
    ],
)
def test_rule_that_can_never_count_is_an_error(first: dict[str, object], later: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=r"rule 2 \(layer .*\) is never used: rule 1 \(layer .*\) applies to all"):
        LayersFile.model_validate({"rules": [first, later]})


@pytest.mark.parametrize(
    ("first", "later"),
    [
        ({"nodes": {"pool": "a"}, "layer": "mps"}, {"layer": "kai"}),
        ({"nodes": {"pool": "a"}, "layer": "mps"}, {"models": ["*A100*"], "layer": "kai"}),
        ({"models": ["*A100*"], "layer": "hami"}, {"models": ["*80GB*"], "layer": "kai"}),
        # on one machine the first does not work, and the second counts
        ({"models": ["*A100*"], "layer": "hami"}, {"models": ["*A100*"], "layer": "mps"}),
        # GPUs in MIG mode, and those that are not
        ({"layer": "mig"}, {"layer": "mps"}),
    ],
)
def test_rule_that_counts_somewhere_is_no_error(first: dict[str, object], later: dict[str, object]) -> None:
    assert len(LayersFile.model_validate({"rules": [first, later]}).rules) == 2
