"""doctor/library.py: whether libgpushare.so loads, for everybody, and is the package's."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpushare_spawner import __version__, native
from gpushare_spawner.doctor.finding import Level
from gpushare_spawner.doctor.library import LibraryFacts, findings, probe, version_number, version_text

GOOD = LibraryFacts(Path("/opt/libgpushare.so"), root=True, reported=version_number(__version__))
ROOT = Path(__file__).parents[2]


def test_a_good_library_has_nothing_to_do() -> None:
    assert {finding.level for finding in findings(GOOD)} == {Level.OK}


@pytest.mark.parametrize(
    ("change", "level", "what"),
    [
        ({"missing": True}, Level.PROBLEM, "missing"),
        ({"refused": "wrong ELF class"}, Level.PROBLEM, "wrong ELF class"),
        ({"closed": "/root"}, Level.PROBLEM, "other users cannot read /root"),
        ({"closed": "/root", "root": False}, Level.NOTE, "other users cannot read /root"),
        ({"reported": 99}, Level.PROBLEM, "has version 0.0.99, but the package has 0.1.0"),
        ({"reported": None}, Level.SKIPPED, "no CUDA driver"),
        ({"reported": None, "silent": "does not connect"}, Level.PROBLEM, "does not connect"),
    ],
)
def test_what_is_wrong_with_a_library_is_said(change: dict[str, Any], level: Level, what: str) -> None:
    (found,) = [finding for finding in findings(replace(GOOD, **change)) if finding.level is not Level.OK]
    assert found.level is level
    assert what in found.what
    assert bool(found.remedy) == (level is not Level.SKIPPED)


def test_versions_are_numbers_as_the_library_has_them() -> None:
    assert version_number("1.2.3") == 10203
    assert version_number("0.1.0.dev4") == 100
    assert version_text(10203) == "1.2.3"


def test_the_library_has_the_version_of_the_package() -> None:
    (path,) = (ROOT / "gpushare_spawner" / "native" / "preload").rglob("frames.h")
    header = path.read_text()
    line = next(line for line in header.splitlines() if line.startswith("#define LIBRARY_VERSION"))
    assert int(line.split()[2]) == version_number(__version__)


def test_the_probe_sees_what_the_linker_and_other_users_see(open_folder: Path) -> None:
    assert probe(open_folder / "libgpushare.so").missing
    text = open_folder / "libgpushare.so"
    text.write_text("no library")
    assert "libgpushare.so" in probe(text).refused
    copy = open_folder / "closed" / "libgpushare.so"
    copy.parent.mkdir()
    copy.write_bytes(native.preload_library().read_bytes())
    os.chmod(copy, 0o644)
    os.chmod(copy.parent, 0o755)
    facts = probe(copy)
    assert (facts.refused, facts.closed) == ("", "")
    os.chmod(copy.parent, 0o700)
    assert probe(copy).closed == str(copy.parent)
