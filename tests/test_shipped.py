"""gpushare_spawner/shipped.py: the files that come with the package, in a checkout. test_wheels.py has the wheel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpushare_spawner.cli import main
from gpushare_spawner.shipped import FOLDERS, NotShipped, files, shipped

ROOT = Path(__file__).parents[1]


def test_folders_and_files_are_found_by_path_and_by_name() -> None:
    assert shipped() == ROOT
    assert shipped("templates") == ROOT / "templates"
    assert shipped("jupyterhub_config.d/10-gpushare.py") == ROOT / "jupyterhub_config.d" / "10-gpushare.py"
    assert shipped("gpushare-agent.service") == ROOT / "systemd" / "gpushare-agent.service"
    assert shipped("gpushare-tljh.py") == ROOT / "jupyterhub_config.d" / "tljh" / "gpushare-tljh.py"


def test_a_name_of_nothing_and_a_name_of_several_files_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotShipped, match=r"'pyproject\.toml'; `gpushare config-path` lists"):
        shipped("pyproject.toml")
    for folder in (*FOLDERS, "helm-values/one", "helm-values/two"):
        (tmp_path / "share" / folder).mkdir(parents=True)
    for folder in ("one", "two"):
        (tmp_path / "share" / "helm-values" / folder / "jupyterhub.yaml").touch()
    monkeypatch.setattr("gpushare_spawner.shipped._PACKAGE", tmp_path)
    with pytest.raises(NotShipped, match=r"several files have the name 'jupyterhub.yaml'.*one/jupyterhub.yaml"):
        shipped("jupyterhub.yaml")


def test_the_list_has_every_folder_and_not_the_demo() -> None:
    listed = [path.relative_to(ROOT) for path in files()]
    assert {path.parts[0] for path in listed} == set(FOLDERS)
    assert Path("jupyterhub_config.d/90-demo.py") not in listed


def test_the_paths_for_programs_are_those_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config-path"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert main(["config-path", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == lines
