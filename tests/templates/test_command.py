"""``gpushare templates``, as an admin calls it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from gpushare_spawner.cli import main

SHIPPED = Path(__file__).parents[2] / "templates"


def test_check_of_the_shipped_templates(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["templates", "check", str(SHIPPED)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"quarter-gpu \(default\) +0.25 GPU +after 8 min, ", said)
    assert "after 8 min, downgraded to 0.25 GPU; after 15 min, " in said
    assert "5 templates, no problems." in said
    assert "resources.memory.limit" not in said, "each guarantee is kept on GPUs of up to 80 GiB"


def test_check_of_a_bad_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text("name: a\ndisplay_name: '[red]x'\n")
    (tmp_path / "b.yaml").write_text("name: b\ndisplay_name: b\ngpu: {fraction: .nan}\n")
    (tmp_path / "c.yaml").write_text("[" * 1000)
    assert main(["templates", "check", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("b.yaml:3: gpu.fraction: nan is not a fraction; write")]
    assert [line for line in lines if line.startswith("c.yaml:1: nested more than 32 levels deep")]
    assert lines[-1] == "2 problems, 1 valid template."


def test_check_names_a_memory_limit_that_does_not_hold_what_is_guaranteed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = "name: {0}\ndisplay_name: {0}\ngpu: {{{1}}}\nresources: {{memory: {{limit: {2}}}}}\n"
    for name, gpu, limit in (
        ("low", "fraction: 0.25", "16Gi"),
        ("bytes", "fraction: 0.05, memory: {guarantee: 9Gi}", "8Gi"),
        ("enough", "fraction: 0.25", "20Gi"),
        ("plain", "fraction: 0.25, memory: {oversubscribe: false}", "1Gi"),
        ("whole", "count: 1", "1Gi"),
        ("by-mig", "fraction: 0.25, layer: mig", "1Gi"),
        ("whole-plain", "count: 1, memory: {engine: suspend}", "1Gi"),
    ):
        (tmp_path / f"{name}.yaml").write_text(template.format(name, gpu, limit))
    assert main(["templates", "check", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "0.25 GPU by NVIDIA MIG" in out
    said = [line for line in out.splitlines() if "resources.memory.limit" in line]
    assert [line.split(":")[0] for line in said] == ["bytes.yaml", "low.yaml", "whole-plain.yaml"]
    assert "limit (8 GiB) is less than the guaranteed GPU memory: GPU memory" in said[0]
    assert "limit (16 GiB) is less than the guaranteed GPU memory on GPUs of more than 64 GiB" in said[1]
    (tmp_path / "whole-plain.yaml").unlink()
    (tmp_path / "layers.yaml").write_text("rules: [{layer: hami}]")
    assert main(["templates", "check", str(tmp_path)]) == 0
    assert "resources.memory.limit" not in capsys.readouterr().out


def test_check_names_a_release_resources_that_can_be_without_effect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = (
        "name: {0}\ndisplay_name: {0}\ngpu: {{fraction: 0.25}}\nresources: {1}\n"
        "idle: {{release_after: 45m, release_resources: {{cpu: 100m}}}}\n"
    )
    override = "kubespawner_override: {mem_guarantee: 1G}\n"
    for name, memory, more in (("half", "{}", ""), ("limit", "{limit: 80Gi}", ""), ("override", "{}", override)):
        text = template.format(name, f"{{cpu: {{guarantee: 1}}, memory: {memory}}}")
        (tmp_path / f"{name}.yaml").write_text(text + more)
    assert main(["templates", "check", str(tmp_path)]) == 0
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "release_resources" in line]
    assert said.startswith("half.yaml: idle.release_resources has no effect on servers that request no memory")
    assert (
        "Give it resources.memory.guarantee, unless the hub's configuration does (KubeSpawner.mem_guarantee)." in said
    )


def test_labels_that_no_template_has_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = "name: {0}\ndisplay_name: {0}\ngpu: {{fraction: 0.1}}\nlabels: [{0}]\nplacement: {1}\n"
    (tmp_path / "exam.yaml").write_text(template.format("exam", "{apart_from: [exam, labs]}"))
    (tmp_path / "lab.yaml").write_text(template.format("lab", "{near: [lab, exma]}"))
    assert main(["templates", "check", str(tmp_path)]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "label" in line]
    assert said == [
        "exam.yaml: placement.apart_from: no template has the label labs",
        "lab.yaml: placement.near: no template has the label exma",
    ]


def test_servers_that_are_never_reclaimed_without_a_guarantee_are_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "name: kept\ndisplay_name: K\ngpu: {fraction: 0.1}\nreclaimable: false\n"
    (tmp_path / "kept.yaml").write_text(text)

    def warned() -> list[str]:
        assert main(["templates", "check", str(tmp_path)]) == 0
        return [line for line in capsys.readouterr().out.splitlines() if "reclaimable" in line]

    assert warned() == ["kept.yaml: reclaimable: false has no effect without quotas.yaml"]
    (tmp_path / "quotas.yaml").write_text("default: {maximum: 1}\n")
    assert warned() == ["kept.yaml: reclaimable: false: each spawn is refused, because quotas.yaml guarantees no GPUs"]
    (tmp_path / "quotas.yaml").write_text("default: {guarantee: 1}\n")
    assert warned() == []


def test_check_of_a_folder_without_templates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["templates", "check", str(tmp_path)]) == 1
    assert "no templates" in capsys.readouterr().out
    assert main(["templates", "check", str(tmp_path / "missing")]) == 1
    assert "cannot be listed" in capsys.readouterr().out


def test_check_of_odd_file_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # a byte that is no UTF-8; in a locale of another encoding it can be a letter
    name = os.fsdecode(b"bad\xff\n.yaml")
    (tmp_path / name).write_text("[")
    assert main(["templates", "check", str(tmp_path)]) == 1
    shown = name.encode("utf-8", "backslashreplace").decode().replace("\n", "\\n")
    assert f"{shown}:1: is not YAML" in capsys.readouterr().out


def test_schema_is_json_that_names_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["templates", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert {"name", "display_name", "gpu", "idle"} <= schema["properties"].keys()


def test_check_without_a_folder_checks_the_hubs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSHARE_TEMPLATES", str(SHIPPED))
    monkeypatch.chdir(tmp_path)
    assert main(["templates", "check"]) == 0
    said = capsys.readouterr().out
    assert f"Checking the folder of this machine's hub: {SHIPPED}" in said
    assert "quarter-gpu" in said
    monkeypatch.setenv("GPUSHARE_TEMPLATES", str(tmp_path / "none"))
    assert main(["templates", "check"]) == 1


def test_numbers_without_a_unit_are_warned_of_with_what_they_mean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.yaml").write_text(
        "name: a\ndisplay_name: A\ngpu: {fraction: 0.5, memory: {limit: 24}}\n"
        "resources: {memory: {limit: 8Gi}}\nidle:\n  release_after: 10\n  stop_after: 8h\n"
    )
    (tmp_path / "idle.yaml").write_text("groups:\n  ml: {release_after: 600}\n")
    assert main(["templates", "check", str(tmp_path)]) == 0
    warned = [line for line in capsys.readouterr().out.splitlines() if " means " in line]
    assert warned == [
        "a.yaml:3: gpu.memory.limit: 24 means 24 bytes; write a unit, like 24Gi or 24%, if you mean another amount",
        "a.yaml:6: idle.release_after: 10 means 10 s; write a unit, like 10m, if you mean another time",
        "idle.yaml:2: groups.ml.release_after: 600 means 600 s (10 min); "
        "write a unit, like 600m, if you mean another time",
    ]


@pytest.mark.parametrize("number", ["1000", "1e3", "1.0e+3", "+1000", "1000."])
def test_each_way_to_write_a_number_without_a_unit_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: str
) -> None:
    (tmp_path / "a.yaml").write_text(f"name: a\ndisplay_name: A\nidle: {{stop_after: {number}}}\n")
    assert main(["templates", "check", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert f"a.yaml:3: idle.stop_after: {number} means 1,000 s (16 min 40 s); write a unit, like 1000m" in said


def test_check_as_json_has_the_templates_the_problems_and_the_warnings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["templates", "check", "--json", str(SHIPPED)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["folder"], len(said["templates"]), said["problems"]) == (str(SHIPPED), 5, [])
    quarter = next(template for template in said["templates"] if template["name"] == "quarter-gpu")
    assert quarter["gpu"]["fraction"] == 0.25
    assert main(["templates", "check", "--json", str(tmp_path)]) == 1
    assert json.loads(capsys.readouterr().out)["problems"] == [
        f"{tmp_path}: no templates. Template files end in .yaml or .yml."
    ]
    (tmp_path / "b.yaml").write_text("name: b\ndisplay_name: b\ngpu: {fraction: .nan}\n")
    assert main(["templates", "check", "--json", str(tmp_path)]) == 1
    assert json.loads(capsys.readouterr().out)["problems"][0].startswith("b.yaml:3: gpu.fraction: nan is not")
