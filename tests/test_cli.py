"""The ``gpushare`` command itself; each part's options are tested with the part."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gpushare_spawner import __version__
from gpushare_spawner.cli import COMMANDS

GPUSHARE = [sys.executable, "-m", "gpushare_spawner.cli"]


def test_the_version() -> None:
    assert subprocess.check_output([*GPUSHARE, "--version"], text=True) == f"gpushare-spawner {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_part_explains_itself(command: str) -> None:
    said = subprocess.check_output([*GPUSHARE, command, "--help"], text=True)
    assert said.startswith(f"usage: gpushare {command}")


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
