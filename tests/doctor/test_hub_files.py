"""doctor/files.py: the unit file and the hub's config files."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpushare_spawner.doctor import files
from gpushare_spawner.doctor.files import check_config, started_by
from gpushare_spawner.doctor.finding import Finding, Level, Machine
from gpushare_spawner.shipped import shipped

UNIT = "[Service]\nExecStartPre=-+/nowhere/nvidia-modprobe -c 0 -u\nExecStart=/usr/bin/gpushare agent\n"


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit file below the root of a machine that has its program."""
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "usr/bin/gpushare").touch()
    unit = Machine(tmp_path).path(files.UNIT)
    unit.parent.mkdir(parents=True)
    unit.write_text(UNIT)
    return unit


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "jupyterhub_config.d"
    folder.mkdir()
    for name in ("10-gpushare.py", "20-gpushare-service.py"):
        (folder / name).write_text(shipped(name).read_text())
    return folder


def wrong(folder: Path, unit: Path) -> list[Finding]:
    root = unit.parents[len(files.UNIT.parents) - 1]
    return [finding for finding in check_config([folder], Machine(root)) if finding.level is not Level.OK]


def test_the_shipped_files_in_their_place_have_nothing_to_do(folder: Path, unit: Path) -> None:
    assert not wrong(folder, unit)


def test_a_unit_that_starts_a_program_which_is_not_there(folder: Path, unit: Path) -> None:
    unit.write_text("ExecStart=/opt/gone/bin/gpushare agent\n")
    (found,) = wrong(folder, unit)
    assert found.level is Level.PROBLEM
    assert "starts /opt/gone/bin/gpushare, which does not exist" in found.what


def test_the_programs_of_a_unit_are_read_without_their_prefixes() -> None:
    assert started_by("ExecStartPre=/bin/a\nExecStart=-+/bin/b 'x y'\nExecStart=\n") == ["/bin/b"]
    assert started_by(shipped("gpushare-agent.service").read_text()) == ["/opt/tljh/hub/bin/gpushare"]


def test_a_folder_without_files_of_ours_is_a_note(tmp_path: Path, unit: Path) -> None:
    (tmp_path / "mine.py").touch()
    (found,) = wrong(tmp_path, unit)
    assert found.level is Level.NOTE
    assert "gpushare config-path" in found.remedy


def test_no_folder_and_no_unit_are_not_checked(tmp_path: Path) -> None:
    found = check_config([tmp_path / "none"], Machine(tmp_path))
    assert [finding.level for finding in found] == [Level.SKIPPED, Level.SKIPPED]


def test_tljhs_file_beside_the_others_is_a_problem(folder: Path, unit: Path) -> None:
    (folder / "gpushare-tljh.py").write_text(shipped("gpushare-tljh.py").read_text())
    (found,) = wrong(folder, unit)
    assert found.level is Level.PROBLEM
    assert "Remove 10-gpushare.py and 20-gpushare-service.py" in found.remedy


def test_an_edited_a_broken_and_a_missing_file_are_named(folder: Path, unit: Path) -> None:
    (folder / "10-gpushare.py").write_text("c.JupyterHub.spawner_class = 'x'\n")
    (folder / "20-gpushare-service.py").write_text("import os\nc.JupyterHub.services = [\n")
    edited, broken = wrong(folder, unit)
    assert (edited.level, edited.where) == (Level.NOTE, str(folder / "10-gpushare.py"))
    assert (broken.level, broken.where) == (Level.PROBLEM, f"{folder / '20-gpushare-service.py'}:2")
    (folder / "20-gpushare-service.py").unlink()
    assert "there is no idle culler" in wrong(folder, unit)[1].what
