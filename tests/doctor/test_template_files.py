"""doctor/files.py: templates as a machine's hub reads them."""

from __future__ import annotations

from pathlib import Path

from gpushare_spawner.agent.gpus.nvml import Gpu
from gpushare_spawner.doctor.files import check_templates
from gpushare_spawner.doctor.finding import Level, Machine
from gpushare_spawner.model.layers_file import MigInstance
from gpushare_spawner.shipped import shipped
from tests.placement.instances import A100, PROFILES

L4 = Gpu(0, "GPU-5543a1f8-be84-51d9-b6ef-c988bafad2eb", "NVIDIA L4", 24 * 2**30)

MACHINE = Machine(Path("/nowhere"), {})
NODE = Machine(Path("/nowhere"), {"KUBERNETES_SERVICE_HOST": "10.96.0.1"})


def test_the_shipped_templates_have_nothing_to_do() -> None:
    assert {finding.level for finding in check_templates(shipped("templates"), (L4,), MACHINE)} == {Level.OK}


def test_a_missing_folder_is_a_problem_but_on_a_node(tmp_path: Path) -> None:
    (found,) = check_templates(tmp_path / "none", (), MACHINE)
    assert found.level is Level.PROBLEM
    assert "gpushare config-path templates" in found.remedy
    assert check_templates(tmp_path / "none", (), NODE)[0].level is Level.SKIPPED


def test_an_empty_folder_is_a_problem(tmp_path: Path) -> None:
    (found,) = check_templates(tmp_path, (), MACHINE)
    assert found.level is Level.PROBLEM


def test_a_mistake_is_named_with_file_line_and_field(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("name: a\ndisplay_name: A\ngpu: {fraction: 700}\n")
    (found,) = check_templates(tmp_path, (), MACHINE)
    assert (found.level, found.where) == (Level.PROBLEM, str(tmp_path / "a.yaml:3"))
    assert found.what.startswith("gpu.fraction: ")
    assert found.remedy


def test_models_that_are_not_here_are_a_note(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("name: a\ndisplay_name: A\ngpu: {fraction: 0.5, models: ['*H100*']}\n")
    found = check_templates(tmp_path, (L4,), MACHINE)
    assert [finding.level for finding in found] == [Level.NOTE, Level.OK]
    assert "*H100*" in found[0].what


def test_a_named_gpu_that_is_not_here_is_a_note(tmp_path: Path) -> None:
    uuid = "GPU-8f6b2c1e-0000-5000-8000-0123456789ab"
    (tmp_path / "a.yaml").write_text(f"name: a\ndisplay_name: A\ngpu: {{fraction: 0.5}}\nplacement: {{gpu: {uuid}}}\n")
    found = check_templates(tmp_path, (L4,), MACHINE)
    assert [finding.level for finding in found] == [Level.NOTE, Level.OK]
    assert found[0].what == f"a needs GPU {uuid}, which this machine does not have"
    (same,) = check_templates(tmp_path, (Gpu(0, uuid, L4.model, L4.memory_bytes),), MACHINE)
    assert same.level is Level.OK
    assert [finding.level for finding in check_templates(tmp_path, (L4,), NODE)] == [Level.OK], "unknown"
    assert [finding.level for finding in check_templates(tmp_path, (L4,), NODE, {uuid})] == [Level.OK]
    found = check_templates(tmp_path, (L4,), NODE, {"GPU-other"})
    assert found[0].what == f"a needs GPU {uuid}, which no node of the cluster has"


TEMPLATE = "name: a\ndisplay_name: A\ngpu: {fraction: 0.5}\n"


def quotas(tmp_path: Path, text: str, machine: Machine = MACHINE) -> list[tuple[Level, str]]:
    (tmp_path / "a.yaml").write_text(TEMPLATE)
    (tmp_path / "quotas.yaml").write_text(text)
    found = check_templates(tmp_path, (L4,), machine)
    assert all(finding.remedy for finding in found if finding.level is not Level.OK)
    return [
        (one.level, f"{one.where.removeprefix(str(tmp_path))} {one.what}")
        for one in found
        if "quotas.yaml" in one.where
    ]


def test_quotas_are_checked_with_the_templates(tmp_path: Path) -> None:
    assert quotas(tmp_path, "groups: {ml: {guarantee: 1}}") == [(Level.OK, "/quotas.yaml quotas are valid")]
    ((level, said),) = quotas(tmp_path, "groups:\n  ml: {guarantee: lots}\n")
    assert level is Level.PROBLEM
    assert said.startswith("/quotas.yaml:2 groups.ml.guarantee: ")


def test_guarantees_beyond_the_gpus_are_a_note(tmp_path: Path) -> None:
    text = "groups: {ml: {guarantee: 2}}"
    first, last = quotas(tmp_path, text)
    assert first[0] is Level.NOTE
    assert "the guarantees add up to 2 GPUs, and there are 1 GPU" in first[1]
    assert last[0] is Level.OK
    assert [level for level, _ in quotas(tmp_path, text, NODE)] == [Level.OK]


def test_teams_beyond_their_department_are_a_problem(tmp_path: Path) -> None:
    ((level, said),) = quotas(tmp_path, "groups:\n  d:\n    guarantee: 0.5\n    teams: {t: {guarantee: 1}}\n")
    assert level is Level.PROBLEM
    assert said.startswith("/quotas.yaml:3 groups.d.guarantee: its teams and users are guaranteed 1 in all, more than")


def test_layers_are_checked_with_the_templates(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "name: a\ndisplay_name: a\ngpu:\n  fraction: 0.25\n  memory: {oversubscribe: true}\n"
    )
    (tmp_path / "layers.yaml").write_text("rules: [{layer: kubeshare}]\n")
    found = {one.what: one for one in check_templates(tmp_path, (), MACHINE)}
    (broken,) = [one for what, one in found.items() if what.startswith("gpu.memory.oversubscribe: KubeShare does not")]
    assert broken.level is Level.PROBLEM
    assert broken.where == f"{tmp_path}/a.yaml:5"
    assert any("KubeShare is not maintained any more" in what for what in found)
    assert found["the sharing layers are valid"].level is Level.OK
    (tmp_path / "layers.yaml").write_text("rules: [{layer: magic}]\n")
    wrong = [one for one in check_templates(tmp_path, (), MACHINE) if one.where.endswith("layers.yaml:1")]
    assert [one.level for one in wrong] == [Level.PROBLEM]


def test_mps_needs_its_program(tmp_path: Path) -> None:
    templates, programs = tmp_path / "templates", tmp_path / "bin"
    machine = Machine(tmp_path, {"PATH": "/bin"})
    templates.mkdir()
    programs.mkdir()
    (templates / "a.yaml").write_text("{name: a, display_name: a, gpu: {fraction: 0.25, layer: mps}}")
    (missing,) = [one for one in check_templates(templates, (), machine) if one.where == "nvidia-cuda-mps-control"]
    assert missing.level is Level.NOTE
    assert "is not installed" in missing.what
    assert "compute utilities" in missing.remedy
    program = programs / "nvidia-cuda-mps-control"
    program.touch(0o755)
    (found,) = [one for one in check_templates(templates, (), machine) if one.where == "nvidia-cuda-mps-control"]
    assert found.level is Level.OK
    assert str(program) in found.what


def test_template_with_a_layer_of_clusters_is_a_note_on_one_machine(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("{name: a, display_name: a, gpu: {fraction: 0.25, layer: hami}}")
    (found,) = (one for one in check_templates(tmp_path, (), MACHINE) if one.level is Level.NOTE)
    assert found.where == str(tmp_path / "a.yaml")
    assert "works on Kubernetes only" in found.what
    assert {one.level for one in check_templates(tmp_path, (), NODE)} == {Level.OK}


def test_mig_template_that_no_instance_holds_is_a_note_on_one_machine(tmp_path: Path) -> None:
    for name, fraction in (("small", 0.1), ("half", 0.5)):
        text = f"name: {name}\ndisplay_name: x\ngpu: {{fraction: {fraction}, layer: mig, models: ['*A100*']}}\n"
        (tmp_path / f"{name}.yaml").write_text(text)
    mig = MigInstance("GPU-a", A100, PROFILES["1g.10gb"])
    instance = Gpu(0, "MIG-1", f"{A100} MIG 1g.10gb", PROFILES["1g.10gb"].memory_bytes, mig=mig)
    (found,) = (one for one in check_templates(tmp_path, (instance,), MACHINE) if one.level is not Level.OK)
    assert (found.level, found.where) == (Level.NOTE, str(tmp_path / "half.yaml"))
    assert found.what == "no MIG instance of this machine holds the share of half"
    # in a cluster the other nodes can have one, and of an unknown machine nothing is said
    for gpus, machine in (((instance,), NODE), ((), MACHINE)):
        assert {one.level for one in check_templates(tmp_path, gpus, machine)} == {Level.OK}


def test_quotas_count_an_instance_as_the_part_that_it_is(tmp_path: Path) -> None:
    (tmp_path / "quotas.yaml").write_text("groups: {ml: {guarantee: 1}}\n")
    mig = MigInstance("GPU-a", A100, PROFILES["3g.40gb"])
    instance = Gpu(0, "MIG-1", f"{A100} MIG 3g.40gb", 2**30, mig=mig)
    assert any(
        "guarantee" in one.what.lower()
        for one in check_templates(tmp_path, (instance,), MACHINE)
        if one.level is Level.NOTE
    )
