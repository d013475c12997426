"""``gpushare plan`` as an admin runs it: table, JSON, page, and errors in sentences."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpushare_spawner.cli import main

ROWS = "".join(
    f"u{user},,{day * 86400 + 30000 + 600 * user},{day * 86400 + 44000 + 900 * user},1,6,g{user % 2}\n"
    for day in range(3)
    for user in range(12)
)


@pytest.fixture
def sources(tmp_path: Path) -> list[str]:
    servers, work = tmp_path / "servers.csv", tmp_path / "work.csv"
    servers.write_text(f"user,server,start,end,gpus,memory_gib,group\n{ROWS}u1,,x,,1,,\n")
    work.write_text(
        "user,start,end\n"
        + "".join(
            f"u{user},{day * 86400 + 31000 + 600 * user},{day * 86400 + 32000 + 600 * user}\n"
            for day in range(3)
            for user in range(12)
        )
    )
    return [str(servers), str(work)]


def test_table_names_all_ways_groups_and_wrong_rows(sources: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *sources, "--gpus", "8x80GiB"]) == 0
    output = capsys.readouterr()
    assert "12 users, 36 servers with a GPU" in output.out
    assert "GPUs needed" in output.out
    assert "g1" in output.out
    assert "servers.csv:38: 'x' is no ISO time" in output.err
    assert "Not modelled" not in output.out


def test_json_has_all_answers_and_a_seed_repeats_them(sources: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for _ in range(2):
        assert main(["plan", *sources, "--gpus", "8", "--json", "--seed", "7"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    assert list(found[0]["ways"]) == ["whole", "static", "shares", "culler"]
    assert found[0]["ways"]["whole"]["gpus"] == 12
    assert found[0]["ways"]["culler"]["gpus"] < 3
    assert found[0]["problem_count"] == 1


def test_page_is_one_file_without_scripts_and_escapes_names(
    sources: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = Path(sources[0])
    servers.write_text(servers.read_text().replace("g1", "<script>x").replace("g0", "[/b]"))
    page = tmp_path / "plan.html"
    assert main(["plan", *sources, "--gpus", "8", "--html", str(page)]) == 0
    assert "[/b]" in capsys.readouterr().out
    text = page.read_text()
    assert "<script" not in text
    assert "&lt;script&gt;x" in text
    assert not re.search(r"(src|href)=", text)
    assert text.count("<svg") == 2
    assert "prefers-color-scheme: dark" in text


def test_templates_and_quotas_of_the_admin_are_tried(
    sources: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "templates"
    folder.mkdir()
    (folder / "half.yaml").write_text("name: half\ndisplay_name: Half a GPU\ngpu: {fraction: 0.5}\n")
    quotas = tmp_path / "quotas.yaml"
    quotas.write_text("groups: {g0: {maximum: 1}}\n")
    given = ["--gpus", "8", "--templates", str(folder), "--quotas", str(quotas), "--json"]
    assert main(["plan", *sources, *given]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["goal"]["templates"] == ["half"]
    assert found["ways"]["culler"]["refused"] > 0
    assert found["ways"]["shares"]["gpus"] == 6 or found["ways"]["shares"]["refused"]
    quotas.write_text("groups: {g0: {maximum: many}}\n")
    assert main(["plan", *sources, *given]) == 1
    assert "quotas.yaml:1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpus", "x"], "write it like 24x80GiB"),
        (["--time-zone", "Mars/Base"], "is no time zone"),
        (["--wait-p95", "soon"], "soon"),
    ],
)
def test_wrong_options_are_errors_in_sentences(
    sources: list[str], arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status: object = main(["plan", *sources, *arguments])
    except SystemExit as end:
        status = end.code
    assert status in (1, 2)
    assert said in capsys.readouterr().err


def test_sources_without_servers_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.csv").write_text("")
    assert main(["plan", str(tmp_path / "empty.csv")]) == 1
    output = capsys.readouterr()
    assert "empty.csv: is empty" in output.err
    assert "there is no server with a GPU" in output.err


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("ada,,2026-01-01T00:00Z,2026-01-01T00:00Z", "no server with a GPU in the sources ran"),
        ("ada,,1976-01-01T00:00Z,2026-01-01T00:00Z", "the sources are of 50 years, and a plan is of 10 at most"),
        ("ada,,0001-01-01T00:00,2026-01-01T00:00Z", "rows.csv:2: 0001-01-01T00:00 is before 1970"),
    ],
)
def test_sources_of_which_no_plan_can_be_made_are_errors_in_sentences(
    row: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.csv").write_text(f"user,server,start,end\n{row}\n")
    zone = ["--time-zone", "Europe/Berlin"]
    assert main(["plan", str(tmp_path / "rows.csv"), *zone]) == 1
    assert said in capsys.readouterr().err


def test_help_imports_neither_pydantic_models_nor_the_service() -> None:
    code = "import sys; from gpushare_spawner.cli import main\ntry: main(['plan', '--help'])\nexcept SystemExit: pass\n"
    code += "print([name for name in sys.modules if name in ('pydantic', 'rich', 'sqlalchemy', 'jupyterhub')])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    assert run.stdout.rstrip().endswith("[]")
