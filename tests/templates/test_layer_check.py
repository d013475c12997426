"""``gpushare templates check`` with sharing layers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from gpushare_spawner.cli import main

SHIPPED = Path(__file__).parents[2] / "templates"

PROMISES = """\
name: quarter
display_name: 0.25 GPU
gpu:
  fraction: 0.25
  memory:
    oversubscribe: true
    limit: 50%
idle:
  downgrade_after: 5m
  downgrade_to: 0.10
"""
PLAIN = "name: plain\ndisplay_name: plain\ngpu: {fraction: 0.25}\n"


def checked(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    status = main(["templates", "check", str(folder)])
    return status, capsys.readouterr().out.splitlines()


def test_template_that_promises_what_its_layer_cannot_is_a_problem_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_text(PROMISES.replace("  fraction", "  layer: mig\n  fraction"))
    status, lines = checked(tmp_path, capsys)
    assert status == 1
    assert (
        "a.yaml:7: gpu.memory.oversubscribe: NVIDIA MIG does not move GPU memory to host memory; "
        "write oversubscribe: false, or remove the line"
    ) in lines


def test_all_promises_that_no_layer_of_the_nodes_keeps_are_problems(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_text(PROMISES)
    (tmp_path / "b.yaml").write_text(PLAIN)
    (tmp_path / "layers.yaml").write_text("rules: [{layer: kai}]\n")
    status, lines = checked(tmp_path, capsys)
    assert status == 1
    problems = [line for line in lines if line.startswith("a.yaml:")]
    assert [line.split(": ")[:2] for line in problems] == [
        ["a.yaml:6", "gpu.memory.oversubscribe"],
        ["a.yaml:7", "gpu.memory.limit"],
        ["a.yaml:9", "idle.downgrade_after"],
    ]
    assert all("(its nodes have the layer kai by layers.yaml)" in line for line in problems)
    assert lines[-1] == "3 problems, 2 valid templates."


def test_template_that_another_layer_can_serve_is_only_left_out_on_those_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_text(PROMISES)
    (tmp_path / "b.yaml").write_text(PROMISES.replace("quarter", "b").replace("gpu:", 'gpu:\n  models: ["*A100*"]'))
    (tmp_path / "layers.yaml").write_text('rules: [{models: ["*T4*"], layer: nvshare}]\n')
    status, lines = checked(tmp_path, capsys)
    assert status == 0
    notes = [line for line in lines if "not offered" in line]
    assert notes == ["a.yaml: not offered on nodes of the layer nvshare: nvshare does not limit GPU memory: a session "
                     "can allocate all of it"]  # fmt: skip
    assert any(line.startswith("layer nvshare: nvshare is not maintained any more") for line in lines)
    assert lines[-1] == "2 templates, layers.yaml, no problems."


def test_wrong_layers_file_is_a_problem_with_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text(PLAIN)
    (tmp_path / "layers.yaml").write_text("rules:\n- layer: mig\n  options:\n    mig: {strategie: single}\n")
    status, lines = checked(tmp_path, capsys)
    assert status == 1
    assert "layers.yaml:4: rules.0.options.mig.strategie: unknown field; did you mean 'strategy'?" in lines


@pytest.mark.parametrize("layer", ["mig", "kai"])
def test_shipped_templates_promise_more_than_other_layers_keep(
    layer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in SHIPPED.glob("*.yaml"):
        shutil.copy(file, tmp_path)
    (tmp_path / "layers.yaml").write_text(f"rules: [{{layer: {layer}}}]\n")
    status, lines = checked(tmp_path, capsys)
    assert status == 1
    refused = {line.split(":")[0] for line in lines if "gpu.memory.oversubscribe" in line}
    assert refused == {"20-tenth-gpu.yaml", "30-quarter-gpu.yaml", "40-half-gpu.yaml", "50-whole-gpu.yaml"}


def test_schema_of_the_layers_file_names_each_layer_and_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["templates", "schema", "layers"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert "time-slicing" in schema["$defs"]["LayerName"]["enum"]
    assert "time-slicing" in schema["$defs"]["AllOptions"]["properties"]
    assert schema["$defs"]["KaiOptions"]["properties"]["queue"]["default"] == "default-queue"
