"""The wheels of both packages: what they contain, that they are reproducible, and that the images can build them."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpushare_spawner.shipped import files, shipped

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
ROOT = Path(__file__).parents[1]
SIMGPU = "packages/gpushare-simgpu"
DOCKERFILE = (ROOT / "Dockerfile").read_text()


@dataclass(frozen=True)
class Wheels:
    """The files."""

    spawner: Path
    simgpu: Path


def build(source: Path, into: Path) -> Wheels:
    """Both wheels from the checkout, or what there is of it, in `source`."""

    def wheel(folder: Path, name: str) -> Path:
        command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(into)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (path,) = into.glob(f"{name}-*.whl")
        return path

    return Wheels(wheel(source, "gpushare_spawner"), wheel(source / SIMGPU, "gpushare_simgpu"))


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    """Built in this checkout."""
    return build(ROOT, tmp_path_factory.mktemp("wheels"))


def copied_for_the_images() -> list[str]:
    """The files and folders that the Dockerfile copies to build the wheels."""
    copies = re.findall(r"^COPY (?!--)(.+?) \S+$", DOCKERFILE.partition(" AS hub\n")[0], re.MULTILINE)
    return [name for copy in copies for name in copy.split()]


def inside(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_for_users_has_the_library_and_nothing_of_a_simulated_driver(wheels: Wheels) -> None:
    names = inside(wheels.spawner)
    assert [name for name in names if ".so" in name] == ["gpushare_spawner/native/lib/libgpushare.so"]
    assert not [name for name in names if "simgpu" in name or name.endswith(".ptx")]


def test_the_wheel_for_users_has_jupyterlabs_extension_where_jupyterlab_looks_and_not_its_sources(
    wheels: Wheels,
) -> None:
    names = inside(wheels.spawner)
    installed = "share/jupyter/labextensions/@gpushare/lab/"
    extension = {name.partition(installed)[2] for name in names if installed in name}
    assert {"package.json", "install.json", "static/third-party-licenses.json"} <= extension
    assert [name for name in extension if name.startswith("static/remoteEntry.")]
    assert not [name for name in names if name.startswith("gpushare_spawner/notebook/lab")]
    assert not [name for name in names if name.endswith((".ts", ".tsbuildinfo")) or "node_modules" in name]


def test_the_sdist_has_the_extension_with_its_sources_so_that_a_wheel_from_it_needs_no_node(
    wheels: Wheels, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as sdist:
        sdist.extractall(tmp_path, filter="data")
    lab = next(tmp_path.glob("*/gpushare_spawner/notebook/lab"))
    assert {"src", "style", "package.json", "yarn.lock"} <= {path.name for path in lab.iterdir()}
    assert not {"node_modules", "lib", ".yarn"} & {path.name for path in lab.iterdir()}
    # without this environment's packages, so without jupyter-builder and node
    done = subprocess.run([sys.executable, "-S", str(lab / "build.py")], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout.strip()) == (0, str(lab.parent / "labextension")), done.stderr
    built = {path.name: path.read_bytes() for path in (lab.parent / "labextension/static").iterdir()}
    archive = zipfile.ZipFile(wheels.spawner)
    assert built == {
        Path(name).name: archive.read(name) for name in archive.namelist() if "@gpushare/lab/static/" in name
    }


def test_the_simulated_driver_is_a_wheel_of_its_own_without_its_sources(wheels: Wheels) -> None:
    names = {name for name in inside(wheels.simgpu) if ".dist-info/" not in name}
    package = ("__init__.py", "py.typed", "kernels.ptx", "lib/libcuda.so.1", "lib/libnvidia-ml.so.1")
    assert names == {f"gpushare_simgpu/{name}" for name in package}


def test_both_wheels_are_the_same_bytes_from_another_folder_with_only_what_the_images_copy(
    wheels: Wheels, tmp_path: Path
) -> None:
    other = tmp_path / "another" / "checkout"
    other.mkdir(parents=True)
    for name in copied_for_the_images():
        if (ROOT / name).is_dir():
            made = shutil.ignore_patterns("__pycache__", "lib", "labextension", "node_modules", ".yarn")
            shutil.copytree(ROOT / name, other / name, ignore=made, symlinks=True)
        else:
            shutil.copy(ROOT / name, other)
    # the npm packages, which yarn.lock says with their digests: without them the test would need a registry
    packages = "gpushare_spawner/notebook/lab/node_modules"
    shutil.copytree(ROOT / packages, other / packages, symlinks=True, copy_function=os.link)
    (tmp_path / "again").mkdir()
    again = build(other, tmp_path / "again")
    for first, second in ((wheels.spawner, again.spawner), (wheels.simgpu, again.simgpu)):
        assert first.name == second.name
        assert digests(first) == digests(second)
        assert first.read_bytes() == second.read_bytes()


def digests(wheel: Path) -> dict[str, str]:
    """Which file of a wheel differs, should one differ."""
    archive = zipfile.ZipFile(wheel)
    return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


def test_libraries_in_the_wheels_name_no_folder_of_the_machine_that_built_them(wheels: Wheels) -> None:
    for wheel in (wheels.spawner, wheels.simgpu):
        archive = zipfile.ZipFile(wheel)
        for name in archive.namelist():
            if ".so" in name:
                assert str(ROOT).encode() not in archive.read(name), name
                assert b".debug_info" not in archive.read(name), name


def test_an_installed_wheel_prints_where_the_files_are_that_came_with_it(wheels: Wheels, tmp_path: Path) -> None:
    prefix = "gpushare_spawner/share/"
    shared = {name.removeprefix(prefix) for name in inside(wheels.spawner) if name.startswith(prefix)}
    assert shared == {path.relative_to(ROOT).as_posix() for path in files()}

    venv.create(tmp_path / "env", with_pip=False)
    python = tmp_path / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "--python", str(python)]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", str(wheels.spawner)], check=True)
    command = [str(python.with_name("gpushare")), "config-path"]
    said = subprocess.run([*command, "gpushare-agent.service"], capture_output=True, text=True, cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    assert Path(said.stdout.strip()).read_text() == shipped("gpushare-agent.service").read_text()
    missing = subprocess.run([*command, "90-demo.py"], capture_output=True, text=True, cwd=tmp_path)
    assert missing.returncode == 1
    assert "no file or folder '90-demo.py'" in missing.stderr
