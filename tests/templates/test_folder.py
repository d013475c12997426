"""The folder of templates: good ones stay good whatever lies beside them, and changes are seen."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest

from gpushare_spawner.templates.folder import Policy, PolicyFolder
from tests.present import present

SHIPPED = Path(__file__).parents[2] / "templates"


def card(name: str, more: str = "") -> str:
    return f"name: {name}\ndisplay_name: {name}\n{more}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "10-a.yaml").write_text(card("a"))
    (tmp_path / "20-b.yml").write_text(card("b", "gpu: {fraction: 0.25}\n"))
    return tmp_path


def names(templates: Policy) -> list[str]:
    return [template.name for template in templates.templates]


def test_the_templates_we_ship() -> None:
    templates = PolicyFolder(SHIPPED).load()
    assert templates.problems == ()
    assert names(templates) == ["cpu-only", "tenth-gpu", "quarter-gpu", "half-gpu", "whole-gpu"]
    assert [template.name for template in templates.templates if template.default] == ["quarter-gpu"]
    shares = {template.name: template.share.units for template in templates.templates if template.share}
    assert shares == {"tenth-gpu": 10, "quarter-gpu": 25, "half-gpu": 50, "whole-gpu": 100}
    assert present(templates.get("cpu-only")).share is None


def test_sorted_by_file_name_and_nothing_else_is_read(folder: Path) -> None:
    (folder / "05-z.yaml").write_text(card("z"))
    (folder / ".hidden.yaml").write_text("[")
    (folder / "notes.txt").write_text("[")
    (folder / "deeper.yaml").mkdir()
    (folder / "deeper.yaml" / "c.yaml").write_text(card("c"))
    templates = PolicyFolder(folder).load()
    assert names(templates) == ["z", "a", "b"]
    assert templates.problems == ()
    assert templates.files == {"z": "05-z.yaml", "a": "10-a.yaml", "b": "20-b.yml"}
    assert templates.get("nobody") is None


def test_one_bad_file_takes_no_other_down(folder: Path) -> None:
    (folder / "15-bad.yaml").write_text(card("bad", "gpu: {fraction: 65}\n"))
    (folder / "16-worse.yaml").write_bytes(b"\xff\x00")
    templates = PolicyFolder(folder).load()
    assert names(templates) == ["a", "b"]
    assert [problem.file for problem in templates.problems] == ["15-bad.yaml", "16-worse.yaml"]


def test_of_two_templates_with_one_name_the_first_file_counts(folder: Path) -> None:
    (folder / "30-again.yaml").write_text("display_name: other\nname: a\n")
    templates = PolicyFolder(folder).load()
    assert names(templates) == ["a", "b"]
    assert present(templates.get("a")).display_name == "a"
    (problem,) = templates.problems
    assert (problem.file, problem.line, problem.field) == ("30-again.yaml", 2, "name")
    assert "10-a.yaml" in str(problem)


def test_of_two_defaults_the_first_counts(folder: Path) -> None:
    (folder / "01-x.yaml").write_text(card("x", "default: true\n"))
    (folder / "02-y.yaml").write_text(card("y", "default: true\n"))
    templates = PolicyFolder(folder).load()
    assert [template.default for template in templates.templates] == [True, False, False, False]
    (problem,) = templates.problems
    assert (problem.file, problem.line) == ("02-y.yaml", 3)
    assert "01-x.yaml" in str(problem)


def test_a_change_is_seen_and_a_removed_file_is_gone(folder: Path) -> None:
    loader = PolicyFolder(folder)
    assert names(loader.load()) == ["a", "b"]
    (folder / "10-a.yaml").write_text(card("c"))
    (folder / "30-d.yaml").write_text(card("d"))
    assert names(loader.load()) == ["c", "b", "d"]
    (folder / "20-b.yml").unlink()
    assert names(loader.load()) == ["c", "d"]


def test_two_changes_within_one_tick_of_the_clock_are_both_seen(folder: Path) -> None:
    loader = PolicyFolder(folder)
    path = folder / "10-a.yaml"
    stamp = os.stat(path).st_mtime_ns
    loader.load()
    with path.open("r+") as file:  # the same inode, size and time
        file.write(card("z"))
    os.utime(path, ns=(stamp, stamp))
    assert names(loader.load()) == ["z", "b"]


def test_unchanged_files_are_not_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = PolicyFolder(folder)
    monkeypatch.setattr("gpushare_spawner.templates.folder.SETTLING_SECONDS", 0.0)
    first = loader.load()
    monkeypatch.setattr(
        "gpushare_spawner.templates.folder.read_file", lambda kind, path: pytest.fail(f"{path} was read again")
    )
    assert loader.load() is first


def test_the_last_good_version_stays_in_force_and_the_problem_says_so(folder: Path) -> None:
    loader = PolicyFolder(folder)
    loader.load()
    (folder / "20-b.yml").write_text(card("b", "gpu: {fraction: 0.25x}\n"))
    templates = loader.load()
    assert present(present(templates.get("b")).share).units == 25
    assert "the last valid version of b stays in force" in str(templates.problems[0])
    (folder / "20-b.yml").write_text(card("b", "gpu: {fraction: 0.5}\n"))
    templates = loader.load()
    assert present(present(templates.get("b")).share).units == 50
    assert templates.problems == ()


def test_a_hundred_megabytes_are_not_read(folder: Path) -> None:
    with (folder / "99-big.yaml").open("wb") as file:
        file.truncate(100 * 10**6)  # a hole: it takes no room on the disk
    started = time.monotonic()
    templates = PolicyFolder(folder).load()
    assert time.monotonic() - started < 5
    assert names(templates) == ["a", "b"]
    assert "has 100,000,000 bytes, more than the limit of 1,048,576" in str(templates.problems[0])


def test_a_pipe_a_dead_link_and_a_missing_folder_are_problems(folder: Path, tmp_path: Path) -> None:
    os.mkfifo(folder / "40-pipe.yaml")
    (folder / "41-link.yaml").symlink_to(tmp_path / "nowhere")
    templates = PolicyFolder(folder).load()
    assert names(templates) == ["a", "b"]
    assert [str(problem).split(";")[0] for problem in templates.problems] == [
        "40-pipe.yaml: is not a plain file",
        "41-link.yaml: cannot be read: No such file or directory",
    ]
    missing = PolicyFolder(tmp_path / "missing").load()
    assert len(missing.templates) == 0
    assert "cannot be listed: No such file or directory" in str(missing.problems[0])


def test_a_folder_that_vanishes_keeps_its_templates(folder: Path) -> None:
    loader = PolicyFolder(folder)
    loader.load()
    folder.rename(folder.with_name("away"))
    templates = loader.load()
    assert names(templates) == ["a", "b"]
    assert "the templates that were read before stay in force" in str(templates.problems[0])
    folder.with_name("away").rename(folder)
    assert loader.load().problems == ()


def test_a_config_map_that_kubernetes_swaps(tmp_path: Path) -> None:
    for version, name in (("..v1", "a"), ("..v2", "c")):
        (tmp_path / version).mkdir()
        (tmp_path / version / "t.yaml").write_text(card(name))
        os.utime(tmp_path / version / "t.yaml", (1, 1))
    (tmp_path / "..data").symlink_to("..v1")
    (tmp_path / "t.yaml").symlink_to("..data/t.yaml")
    loader = PolicyFolder(tmp_path)
    assert names(loader.load()) == ["a"]
    (tmp_path / "..new").symlink_to("..v2")
    (tmp_path / "..new").rename(tmp_path / "..data")
    assert names(loader.load()) == ["c"]


def test_each_problem_is_logged_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    loader = PolicyFolder(folder, logging.getLogger("hub"))
    (folder / "15-bad.yaml").write_text("[")
    for _ in range(3):
        loader.load()
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]
    assert "15-bad.yaml:1: is not YAML" in caplog.messages[0]
    assert caplog.messages[1].endswith(": a, b")
    caplog.clear()
    (folder / "15-bad.yaml").unlink()
    loader.load()
    assert "all problems are resolved" in caplog.text


def test_a_field_written_with_its_default_value_takes_effect(folder: Path) -> None:
    """A group that says "never" outranks the defaults, and equals one that says nothing by its values alone."""
    idle = folder / "idle.yaml"
    idle.write_text("defaults: {stop_after: 1h}\ngroups: {staff: {}}\n")
    policies = PolicyFolder(folder)
    assert "stop_after" not in present(policies.load().idle).groups["staff"].model_fields_set
    idle.write_text("defaults: {stop_after: 1h}\ngroups: {staff: {stop_after: null}}\n")
    assert "stop_after" in present(policies.load().idle).groups["staff"].model_fields_set


@pytest.mark.parametrize("name", ["quotas.yaml", "idle.yaml", "layers.yaml"])
def test_a_directory_in_place_of_a_policy_file_is_a_problem_and_the_last_version_stays(folder: Path, name: str) -> None:
    content = {
        "quotas.yaml": "groups: {staff: {guarantee: 1}}\n",
        "idle.yaml": "defaults: {stop_after: 1h}\n",
        "layers.yaml": "rules: [{layer: native}]\n",
    }[name]
    (folder / name).write_text(content)
    policies = PolicyFolder(folder)
    before = policies.load()
    assert before.problems == ()
    (folder / name).unlink()
    (folder / name).mkdir()
    after = policies.load()
    assert (after.quotas, after.idle, after.layers) == (before.quotas, before.idle, before.layers)
    (problem,) = after.problems
    assert name in str(problem)
    assert "stay" in str(problem)
