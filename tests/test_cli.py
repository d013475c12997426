"""The ``gpushare`` command itself; each part's options are tested with the part."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpushare_spawner import __version__
from gpushare_spawner.cli import COMMANDS, main, subcommand_parser
from gpushare_spawner.wording.layers import wrong_keep_time
from tests.notebook.scripted_agent import ScriptedAgent

GPUSHARE = [sys.executable, "-m", "gpushare_spawner.cli"]


def test_the_version() -> None:
    assert subprocess.check_output([*GPUSHARE, "--version"], text=True) == f"gpushare-spawner {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_part_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert not end.value.code
    assert capsys.readouterr().out.startswith(f"usage: gpushare {command}")


def test_help_names_every_part() -> None:
    said = subprocess.check_output([*GPUSHARE, "--help"], text=True)
    assert all(command in said for command in COMMANDS)


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    schema = [*GPUSHARE, "templates", "schema"]
    with subprocess.Popen(schema, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == ("", 0)


@pytest.mark.parametrize("command", ["agent", "service"])
def test_command_imports_no_kubernetes_package_for_its_options(command: str) -> None:
    program = (
        "import sys; from gpushare_spawner.cli import subcommand_parser; "
        f"subcommand_parser({command!r}).parse_args([]); "
        "print(*sorted({name.split('.')[0] for name in sys.modules} & {'grpc', 'google', 'kubernetes_asyncio'}))"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_whose_encoding_lacks_a_letter_shows_its_number(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "gpu.yaml").write_text(
        "{name: gpu, display_name: 0.25 GPU, gpu: {fraction: 0.25}, access: {users: [日本]}}", encoding="utf-8"
    )
    with ScriptedAgent(tmp_path / "socket") as agent:
        agent.script.message = ("日本", 1_999_999_999.0)
        environment = os.environ | {"PYTHONIOENCODING": encoding, "GPUSHARE_SOCKET": str(agent.path)}
        for command in (["status"], ["templates", "check", str(tmp_path)]):
            done = subprocess.run([*GPUSHARE, *command], env=environment, capture_output=True)
            assert (done.returncode, done.stderr) == (0, b""), command
            assert b"\\u65e5\\u672c" in done.stdout, command


@pytest.mark.parametrize("command", COMMANDS)
def test_a_misspelt_option_prints_the_usage_of_its_own_subcommand(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {"templates": [command, "check"], "keep": [command, "1h"], "plan": [command, "hub.log"]}.get(
        command, [command]
    )
    with pytest.raises(SystemExit) as end:
        main([*words, "--jason"])
    said = capsys.readouterr().err
    own = words[:2] if command == "templates" else words[:1]
    assert end.value.code == 2
    assert said.startswith(f"usage: gpushare {' '.join(own)} ")
    assert "unrecognized arguments: --jason" in said


@pytest.mark.parametrize("time", ["-1h", "0", "0s", "soon", "-1", "1e400"])
def test_a_wrong_time_of_a_keep_is_answered_with_what_would_be_right(
    time: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keep", time]) == 2
    assert capsys.readouterr().err == f"gpushare: {wrong_keep_time(time, 'end')}\n"


NO_RESULT = {
    "agent": "runs until it is stopped, and logs",
    "agent resume": "logs each process that it resumes; its exit status is the result",
    "service": "runs until it is stopped, and logs",
    "demo": "runs until it is stopped, and shows its steps",
    "templates schema": "its result is JSON in any case",
}
"""Subcommands without --json, each with the reason."""


def test_each_subcommand_that_prints_a_result_can_print_json() -> None:
    without, parsers = set(), {name: subcommand_parser(name) for name in COMMANDS}
    while parsers:
        name, parser = parsers.popitem()
        parts = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        parsers |= {f"{name} {part}": inner for action in parts for part, inner in action.choices.items()}
        if not any(action.required for action in parts) and "--json" not in parser._option_string_actions:
            without.add(name)
    assert without == set(NO_RESULT)
