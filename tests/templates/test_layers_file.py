"""The file of sharing layers beside the templates."""

from __future__ import annotations

from pathlib import Path

from gpushare_spawner.model.layers import LayerName
from gpushare_spawner.model.template import Template
from gpushare_spawner.templates.folder import PolicyFolder
from gpushare_spawner.templates.parser import LAYERS, TEMPLATE, parse
from tests.present import present

GOOD = """\
rules:
  - {models: ["*A100*"], layer: mig}
  - {nodes: {pool: kai}, layer: kai, options: {kai: {queue: notebooks}}}
options: {hami: {scheduler: my-hami}}
"""


def test_rules_and_options_are_read_and_change_with_the_file(tmp_path: Path) -> None:
    file = PolicyFolder(tmp_path)
    assert file.load().layers is None
    (tmp_path / "layers.yaml").write_text(GOOD)
    read = file.load().layers
    assert read is not None
    assert present(read.rule_of({}, "NVIDIA-A100-SXM4-80GB")).layer is LayerName.MIG
    assert present(read.rule_of({"pool": "kai"}, "NVIDIA-L4")).layer is LayerName.KAI
    (tmp_path / "layers.yaml").write_text("rules: [{layer: magic}]")
    now = file.load()
    assert now.layers == read
    assert "layers.yaml:1: rules.0.layer" in str(now.problems[0])
    (tmp_path / "layers.yaml").unlink()
    assert file.load().layers is None


def test_layers_are_no_template_and_a_template_names_its_layer(tmp_path: Path) -> None:
    (tmp_path / "layers.yaml").write_text(GOOD)
    (tmp_path / "a.yaml").write_text("{name: a, display_name: A, gpu: {fraction: 0.5, layer: hami}}")
    folder = PolicyFolder(tmp_path).load()
    assert not folder.problems
    (template,) = folder.templates
    assert template.gpu is not None
    assert template.gpu.layer is LayerName.HAMI


def test_problems_name_line_and_field() -> None:
    unknown = parse(TEMPLATE, "name: a\ndisplay_name: A\ngpu:\n  fraction: 0.5\n  layer: magic\n", "a.yaml")
    assert "a.yaml:5: gpu.layer" in str(unknown.problems[0])
    misspelt = parse(LAYERS, "rules:\n  - layer: kai\n    option: {}\n", "layers.yaml")
    assert "layers.yaml:3: rules.0.option: unknown field" in str(misspelt.problems[0])
    options = "options: {time-slicing: {replica: 4}, mig: {strategy: both}}"
    rule = "rules:\n  - layer: mig\n    options: {timeslicing: {}}\n"
    assert [str(one) for one in parse(LAYERS, rule + options, "layers.yaml").problems] == [
        "layers.yaml:3: rules.0.options.timeslicing: unknown field; did you mean 'time-slicing'?",
        "layers.yaml:4: options.time-slicing.replica: unknown field; did you mean 'replicas'?",
        "layers.yaml:4: options.mig.strategy: must be single or mixed, not both",
    ]


def test_a_template_without_a_layer_has_none() -> None:
    template = Template.model_validate({"name": "a", "display_name": "A", "gpu": {"fraction": 0.5}})
    assert template.gpu is not None
    assert template.gpu.layer is None
