"""The quota file: what is wrong is said with file, line and field; the last valid version stays in force."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gpushare_spawner.cli import main
from gpushare_spawner.templates.command import schema_of
from gpushare_spawner.templates.folder import PolicyFolder
from gpushare_spawner.templates.parser import QUOTAS, parse
from tests.present import present

GOOD = """\
groups:
  physics:
    guarantee: 6
    maximum: 10
    teams:
      optics: {guarantee: 3.5, servers: 12, per_user: {servers: 2}}
      theory: {guarantee: 2.5, weight: 2}
  ml-course: {guarantee: 2, maximum: 4, weight: 0.5}
users:
  ada: {guarantee: 1}
default: {guarantee: 0.25, maximum: 1}
half_life: 7d
"""
TEMPLATE = "name: a\ndisplay_name: a\n"


def said(source: str) -> list[str]:
    parsed = parse(QUOTAS, source, "quotas.yaml")
    assert parsed.content is None
    return [str(problem) for problem in parsed.problems]


def test_good_quotas_are_read_in_units_of_one_percent() -> None:
    parsed = parse(QUOTAS, GOOD, "quotas.yaml")
    assert parsed.problems == ()
    quotas = present(parsed.content)
    physics = quotas.groups["physics"]
    assert (physics.guaranteed_units, physics.maximum_units, physics.unshared) == (600, 1000, (0, None, None))
    assert physics.teams["optics"].per_user.servers == 2
    assert quotas.default.maximum_units == 100
    assert quotas.half_life == 7 * 86400
    assert quotas.guaranteed_units == 600 + 200 + 100, "the default's number of users is not known"


def test_a_department_without_a_guarantee_is_guaranteed_what_its_teams_are() -> None:
    parsed = parse(QUOTAS, "groups: {a: {teams: {b: {guarantee: 0.29}, c: {guarantee: 0.58}}}}", "quotas.yaml")
    assert present(parsed.content).groups["a"].guaranteed_units == 87


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("groups:\n  a: {guarantee: -1}", "quotas.yaml:2: groups.a.guarantee: -1 is out of range; write a number"),
        ("groups:\n  a:\n    guarantee: 0.255", "quotas.yaml:3: groups.a.guarantee: 0.255 is finer than 0.01; write"),
        ("users:\n  a: {guarantee: yes}", "quotas.yaml:2: users.a.guarantee: 'yes' is not a number of GPUs; write a"),
        ("users:\n  a: {guarantee: .inf}", "quotas.yaml:2: users.a.guarantee: inf is not a number of GPUs; write a"),
        ("groups:\n  a: {guarante: 1}", "quotas.yaml:2: groups.a.guarante: unknown field; did you mean 'guarantee'?"),
        (
            "groups:\n  a: {guarantee: 2, maximum: 1}",
            "quotas.yaml:2: groups.a: the maximum (1) is less than the guarantee (2); raise the maximum or lower",
        ),
        (
            "groups:\n  a:\n    teams:\n      b: {weight: much}",
            "quotas.yaml:4: groups.a.teams.b.weight: must be a number, not much; write a number without quotes",
        ),
        (
            "groups:\n  a: {per_user: {servers: 3}, teams: {b: {}}}",
            "quotas.yaml:2: groups.a: a group with teams has no servers of its own; give per_user in the teams",
        ),
        (
            "groups:\n  a:\n    guarantee: 1\n    teams: {b: {guarantee: 0.75}, c: {users: {d: {guarantee: 0.5}}}}",
            "quotas.yaml:3: groups.a.guarantee: its teams and users are guaranteed 1.25 in all, more than 1; raise it "
            "to 1.25, or lower theirs",
        ),
        (
            "groups:\n a:\n    teams:\n     b:\n      cpu: {guarantee: 1.5}\n      users: {c: {cpu: {guarantee: 2}}}",
            "quotas.yaml:5: groups.a.teams.b.cpu.guarantee: its teams and users are guaranteed 2 in all, more than "
            "1.5; raise it to 2, or lower theirs",
        ),
        (
            "groups:\n  a: {maximum: 1, teams: {b: {guarantee: 2}}}",
            "quotas.yaml:2: groups.a: the maximum (1) is less than the guarantee (2); raise the maximum or lower",
        ),
        (
            "users:\n  a: {memory: {guarantee: 8Gi, maximum: 4Gi}}",
            "quotas.yaml:2: users.a.memory: the maximum (4Gi) is less than the guarantee (8Gi); raise the maximum or",
        ),
        (
            "groups:\n  a:\n    teams:\n      b:\n        teams:\n          a: {}",
            "quotas.yaml:6: groups.a.teams.b.teams.a: a is a group already; give each JupyterHub group one quota",
        ),
        (
            "users:\n  ada: {}\ngroups:\n  a:\n    users:\n      ada: {}",
            "quotas.yaml:6: groups.a.users.ada: ada is a user already; give each user one quota",
        ),
        (
            "groups:\n  a:\n    users: {ada: {}}\n  b:\n    teams: {c: {users: {ada: {}}}}",
            "quotas.yaml:5: groups.b.teams.c.users.ada: ada is a user of a already; give each user one quota",
        ),
        (
            "groups:\n  a: {}\n  b:\n    teams:\n      a: {}",
            "quotas.yaml:5: groups.b.teams.a: a is a group already; give each JupyterHub group one quota",
        ),
        (
            "groups:\n  a: {teams: {c: {}}}\n  b:\n    teams:\n      c: {}",
            "quotas.yaml:5: groups.b.teams.c: c is a team of a already; give each JupyterHub group one quota",
        ),
        ("groups:\n  a: &a {teams: {b: *a}}", "quotas.yaml:2: the alias *a contains itself; write the value out"),
        ("half_life: 0", "quotas.yaml:1: half_life: must be more than 0 s; write a duration like 24h or 7d"),
        ("half_life: soon", "quotas.yaml:1: half_life: 'soon' is not a duration; write a duration like"),
        ('users:\n  "": {}', "quotas.yaml:2: users.: is empty; write a value, or remove the field"),
        ("users: [ada]", "quotas.yaml:1: users: must have fields, not a list; write  field: value  lines below it"),
        ("users: {ada: 1}", "quotas.yaml:1: users.ada: must have fields, not 1; its fields are guarantee, maximum,"),
        ("users:\n  a: {servers: 0}", "quotas.yaml:2: users.a.servers: 0 is too small; write at least 1"),
        ("users:\n  a: {per_user: {servers: x}}", "quotas.yaml:2: users.a.per_user.servers: must be a whole number"),
        ("- ada", "quotas.yaml:1: has a list, not fields; begin with a line like  groups:"),
        ("", "quotas.yaml: the file is empty; write at least  groups: {}  or delete the file"),
        ("users: {}\n---\nusers: {}", "quotas.yaml:2: a second document starts here; write the quotas in one document"),
    ],
)
def test_a_wrong_field_is_said_with_line_and_advice(source: str, expected: str) -> None:
    (problem,) = said(source)
    assert problem.startswith(expected)


VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
FIELDS = st.sampled_from(
    ["guarantee", "maximum", "weight", "servers", "per_user", "teams", "users", "cpu", "memory", "x"]
)
NESTED = st.recursive(VALUES, lambda inner: st.dictionaries(FIELDS, inner, max_size=3), max_leaves=8)


@given(st.dictionaries(st.sampled_from(["groups", "users", "default", "half_life"]), NESTED, max_size=4))
@settings(deadline=None, max_examples=100)
def test_whatever_the_fields_contain_there_are_quotas_or_problems(data: dict[str, Any]) -> None:
    parsed = parse(QUOTAS, yaml.safe_dump(data, allow_unicode=True), "quotas.yaml")
    assert (parsed.content is None) == bool(parsed.problems)
    for problem in parsed.problems:
        assert str(problem).isprintable()


def test_the_quota_file_is_no_template(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(TEMPLATE)
    (tmp_path / "quotas.yaml").write_text(GOOD)
    templates = PolicyFolder(tmp_path).load()
    assert templates.problems == ()
    assert [template.name for template in templates.templates] == ["a"]


def changed(path: Path, text: str, second: int) -> None:
    path.write_text(text)
    os.utime(path, (second, second))


def test_a_bad_quota_file_keeps_the_last_valid_quotas_and_the_log_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "quotas.yaml"
    quotas = PolicyFolder(tmp_path, logging.getLogger("hub"))
    assert quotas.load().quotas is None
    changed(path, "users: {ada: {guarantee: 1}}", 1000)
    before = present(quotas.load().quotas)
    assert before.users["ada"].guarantee == 1
    changed(path, "users: {ada: {guarantee: x}}", 2000)
    for _ in range(2):
        assert quotas.load().quotas == before
    (problem,) = quotas.load().problems
    assert str(problem).endswith("; the last valid version of the quotas stays in force")
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1
    changed(path, "users: {ada: {guarantee: 3}}", 3000)
    assert present(quotas.load().quotas).users["ada"].guarantee == 3
    assert quotas.load().problems == ()


def test_quotas_end_with_their_file_but_not_with_an_unreadable_folder(tmp_path: Path) -> None:
    folder = tmp_path / "templates"
    folder.mkdir()
    (folder / "quotas.yaml").write_text(GOOD)
    quotas = PolicyFolder(folder)
    assert quotas.load().quotas is not None
    folder.rename(tmp_path / "elsewhere")
    assert quotas.load().quotas is not None, "a network disk that is away removes no quota"
    (tmp_path / "elsewhere").rename(folder)
    (folder / "quotas.yaml").unlink()
    assert quotas.load().quotas is None


def test_a_file_that_was_read_a_moment_ago_is_not_looked_at_again(tmp_path: Path) -> None:
    quotas = PolicyFolder(tmp_path)
    assert quotas.load().quotas is None
    (tmp_path / "quotas.yaml").write_text(GOOD)
    assert quotas.load(max_age=60).quotas is None
    assert quotas.load().quotas is not None


def check(tmp_path: Path, quotas: str, *options: str) -> int:
    (tmp_path / "a.yaml").write_text(TEMPLATE)
    (tmp_path / "quotas.yaml").write_text(quotas)
    return main(["templates", "check", str(tmp_path), *options])


def test_check_reads_the_quotas_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path, GOOD, "--gpus", "9") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 template, 6 quotas, no problems."
    assert check(tmp_path, "users:\n  ada: {guarantee: x}") == 1
    assert "quotas.yaml:2: users.ada.guarantee: 'x' is not" in capsys.readouterr().out


def test_check_warns_of_guarantees_that_cannot_be_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path, GOOD, "--gpus", "8") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("quotas.yaml: the guarantees add up to 9 GPUs, and there are 8 GPUs: ")


@pytest.mark.parametrize("gpus", ["0", "-1", "1.5", "many"])
def test_check_wants_a_whole_number_of_gpus(tmp_path: Path, gpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        check(tmp_path, GOOD, "--gpus", gpus)
    assert "write a whole number, like 8" in capsys.readouterr().err


def test_the_schema_describes_every_field_and_accepts_good_quotas() -> None:
    schema = schema_of("quotas")
    jsonschema.validate(yaml.safe_load(GOOD), schema)
    for part in [schema, *schema["$defs"].values()]:
        assert part["description"]
        assert [name for name, field in part["properties"].items() if not field.get("description")] == []
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"groups": {"a": {"guarante": 1}}}, schema)


def test_the_command_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["templates", "schema", "quotas"]) == 0
    assert '"title": "Quotas"' in capsys.readouterr().out
