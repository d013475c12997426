"""The ``gpushare`` command itself; each part's options are tested with the part."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gpushare_spawner import __version__
from gpushare_spawner.cli import COMMANDS

GPUSHARE = [sys.executable, "-m", "gpushare_spawner.cli"]


def test_the_version():
    assert subprocess.check_output([*GPUSHARE, "--version"], text=True) == f"gpushare-spawner {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_part_explains_itself(command):
    said = subprocess.check_output([*GPUSHARE, command, "--help"], text=True)
    assert said.startswith(f"usage: gpushare {command}")


def test_help_names_every_part():
    said = subprocess.check_output([*GPUSHARE, "--help"], text=True)
    assert all(command in said for command in COMMANDS)


def test_a_reader_that_has_seen_enough_is_no_error():
    schema = [*GPUSHARE, "templates", "schema"]
    with subprocess.Popen(schema, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == ("", 0)
