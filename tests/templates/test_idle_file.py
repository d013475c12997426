"""The idle policy's file: what is wrong is said with file, line and field; the last valid version stays in force."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import jsonschema
import pytest
import yaml

from gpushare_spawner.cli import main
from gpushare_spawner.doctor.files import check_templates
from gpushare_spawner.doctor.finding import Level, Machine
from gpushare_spawner.model.idle_policy import IdlePolicy
from gpushare_spawner.templates.command import schema_of
from gpushare_spawner.templates.folder import PolicyFolder
from gpushare_spawner.templates.parser import IDLE_POLICY, parse

GOOD = """\
defaults: {release_after: 10m, stop_after: 3d, warn_before: 2m}
groups:
  ml-course: {release_after: 5m, when: always}
  staff: {stop_after: null, keep: {longest: 1d}}
limits: {release_after: 4h, keep: {longest: 2d, per_day: 3}}
quiet_hours:
  - {days: [mon, tue, wed, thu, fri], start: 22:00, end: "06:00", time_zone: Europe/Berlin, actions: [stop, release]}
"""
TEMPLATE = "name: a\ndisplay_name: A\ngpu: {fraction: 0.25}\n"


def test_a_good_file_is_read_and_fits_its_schema() -> None:
    read = parse(IDLE_POLICY, GOOD, "idle.yaml")
    assert read.problems == ()
    assert read.content is not None
    assert read.content.defaults.release_after == 600
    assert "stop_after" in read.content.groups["staff"].model_fields_set
    jsonschema.Draft202012Validator(schema_of("idle")).validate(yaml.safe_load(GOOD.replace("22:00", "'22:00'")))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("defaults: {release: 5m}", "idle.yaml:1: defaults.release: unknown field; did you mean 'release_after'?"),
        ("groups:\n  a: {release_after: soon}", "idle.yaml:2: groups.a.release_after: 'soon' is not a duration; write"),
        (
            "groups:\n  a: {release_after: 5h, stop_after: 1h}",
            "idle.yaml:2: groups.a: stop_after (1 h) must be more than release_after (5 h)",
        ),
        ("limits:\n  stop_after: 0", "idle.yaml:1: limits: stop_after must be more than 0 s"),
        (
            "quiet_hours:\n  - {start: '22:00', end: '6:00', time_zone: Berlin}",
            "idle.yaml:2: quiet_hours.0.time_zone: 'Berlin' is not a time zone; write a name of the IANA database",
        ),
        (
            "quiet_hours:\n  - start: 22.30\n    end: '6:00'\n    time_zone: UTC",
            "idle.yaml:2: quiet_hours.0.start: 22.3 is not a time of day; write hours and minutes in quotes, like",
        ),
        ("quiet_hours:\n  - {end: '6:00', time_zone: UTC}", "idle.yaml:2: quiet_hours.0.start: is missing"),
        (
            "quiet_hours:\n  - {start: '6:00', end: '6:00', time_zone: UTC}",
            "idle.yaml:1: quiet_hours: leave no time of the week for stop; shorten them",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_place(source: str, expected: str) -> None:
    read = parse(IDLE_POLICY, source, "idle.yaml")
    assert read.content is None
    (problem,) = map(str, read.problems)
    assert problem.startswith(expected)


def test_the_last_valid_version_stays_in_force_and_a_removed_file_ends_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "idle.yaml"
    file = PolicyFolder(tmp_path)
    assert file.load().idle is None
    path.write_text(GOOD)
    assert file.load().idle is not None
    path.write_text("defaults: 5m\n")
    os.utime(path, (1, 1))
    with caplog.at_level(logging.INFO):
        kept = file.load()
        file.load()
        assert kept.idle is not None
        assert str(kept.problems[0]).endswith("the last valid version of the idle policy stays in force")
        path.unlink()
        assert file.load().idle is None
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO", "INFO"]


def test_the_file_is_no_template(tmp_path: Path) -> None:
    (tmp_path / "idle.yaml").write_text(GOOD)
    (tmp_path / "a.yaml").write_text(TEMPLATE)
    found = PolicyFolder(tmp_path).load()
    assert [one.name for one in found.templates] == ["a"]
    assert not found.problems


def test_the_check_shows_what_applies_and_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text(TEMPLATE)
    assert main(["templates", "check", str(tmp_path)]) == 0
    assert "no idle actions" in capsys.readouterr().out
    (tmp_path / "idle.yaml").write_text(GOOD)
    assert main(["templates", "check", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "after 10 min, released and lent" in out
    assert "1 template, idle.yaml, no problems." in out
    (tmp_path / "idle.yaml").write_text("defaults: {relase_after: 5m}\n")
    assert main(["templates", "check", str(tmp_path)]) == 1
    assert "idle.yaml:1: defaults.relase_after: unknown field" in capsys.readouterr().out


def test_the_doctor_checks_it(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {})
    (tmp_path / "a.yaml").write_text(TEMPLATE)
    (tmp_path / "idle.yaml").write_text(GOOD)
    said = [(one.level, one.what) for one in check_templates(tmp_path, (), machine) if "idle.yaml" in one.where]
    assert said == [(Level.OK, "the idle policy is valid")]
    (tmp_path / "idle.yaml").write_text("limits: {stop_after: 0}\n")
    levels = [one.level for one in check_templates(tmp_path, (), machine) if "idle.yaml" in one.where]
    assert levels == [Level.PROBLEM]


def test_the_schema_describes_each_field() -> None:
    schema = schema_of("idle")
    assert set(schema["properties"]) == set(IdlePolicy.model_fields)
    for part in (schema, *schema["$defs"].values()):
        assert all(field.get("description") for field in part.get("properties", {}).values())
