"""A release: one version everywhere, the same wheel from the same sources, locks with hashes."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from gpushare_spawner import __version__

ROOT = Path(__file__).parents[2]
CI = ROOT / ".ci"


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, CI / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


release, locks = module("release"), module("locks")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The files that name the version, with a section in the changelog."""
    for name in [*release.PLACES, *release.NUMBERS]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    section = f"## [{__version__}] - 2026-01-01\n\n### Added\n\n- A thing.\n"
    log = f"# Changelog\n\n## [Unreleased]\n\n{section}\n[Unreleased]: x\n"
    (tmp_path / "CHANGELOG.md").write_text(log)
    return tmp_path


def test_every_place_names_the_same_version(tree: Path) -> None:
    release.check(f"v{__version__}", tree)
    assert release.notes(f"v{__version__}", tree) == "### Added\n\n- A thing."


def test_a_place_that_names_another_version_is_named(tree: Path) -> None:
    with pytest.raises(release.Trouble) as said:
        release.check("v7.8.9", tree)
    for name in release.PLACES:
        assert f"{name}: {__version__}, and the tag says 7.8.9" in str(said.value)
    for name in release.NUMBERS:
        assert re.search(rf"{re.escape(name)}: \d+, and the tag says 70809", str(said.value))


def test_a_place_without_a_version_is_named(tree: Path) -> None:
    (tree / "gpushare_spawner" / "__init__.py").write_text("")
    with pytest.raises(release.Trouble, match=r"__init__\.py: no version"):
        release.check(f"v{__version__}", tree)


def test_a_release_without_a_section_in_the_changelog_is_refused(tree: Path) -> None:
    (tree / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n\n- A thing.\n")
    with pytest.raises(release.Trouble, match="no section"):
        release.check(f"v{__version__}", tree)


@pytest.mark.parametrize("tag", ["1.2.3", "v1.2", "v1.2.3-rc1", "main"])
def test_other_tags_are_no_releases(tag: str, tree: Path) -> None:
    with pytest.raises(release.Trouble, match="is not the tag of a release"):
        release.check(tag, tree)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_same_sources_give_the_same_wheel_at_another_time(tmp_path: Path) -> None:
    """Without the libraries: tests/test_wheels.py compares them, and the release workflow everything."""

    def hatch(target: str, sources: Path, into: Path) -> Path:
        command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(into)]
        environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000", "HATCH_BUILD_NO_HOOKS": "true"}
        subprocess.run(command, cwd=sources, env=environment, check=True, capture_output=True)
        return next(into.iterdir())

    sdist = hatch("sdist", ROOT, tmp_path / "sdist")
    wheels: list[Path] = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        sources = next(folder.iterdir())
        for path in sources.rglob("*.py"):
            os.utime(path, (len(wheels) * 1e6, len(wheels) * 1e6))
        wheels.append(hatch("wheel", sources, folder / "dist"))
    assert wheels[0].read_bytes() == wheels[1].read_bytes()
    with zipfile.ZipFile(wheels[0]) as wheel:
        assert "gpushare_spawner/cli.py" in wheel.namelist()
        assert {info.date_time[0] for info in wheel.infolist()} == {2023}


@pytest.mark.parametrize("name", ["build", "demo", "dev"])
def test_a_lock_has_an_exact_version_and_hashes_for_every_package(name: str) -> None:
    text = (CI / "locks" / f"{name}.txt").read_text()
    packages = re.split(r"\n(?! )", text.strip())[1:]
    assert len(packages) >= 7
    assert [one for one in packages if not re.match(r"[\w.\[\]-]+==\S+", one) or "--hash=sha256:" not in one] == []


def test_a_lock_that_pyproject_has_left_behind_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dev.txt").write_text("# make lock; requirements 0000000000000000\nziglang==0.1\n")
    (tmp_path / "demo.txt").write_text(locks.first_line("demo") + "ziglang==0.1\n")
    monkeypatch.setattr(locks, "LOCKS", tmp_path)
    assert locks.fitting("dev") is None
    assert locks.fitting("build") is None
    assert locks.fitting("demo") == tmp_path / "demo.txt"


DIGEST = "sha256:" + "ab" * 32


def docker(folder: Path, monkeypatch: pytest.MonkeyPatch, answer: str, status: int = 0) -> Path:
    """A docker that says this of each image, and writes down what it was asked."""
    (folder / "docker").write_text(f"#!/bin/sh\necho \"$@\" >> {folder}/asked\necho '{answer}'\nexit {status}\n")
    (folder / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder / "asked"


def test_each_base_image_gets_the_digest_that_its_tag_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = docker(tmp_path, monkeypatch, f'"{DIGEST}"')
    dockerfile = (ROOT / "Dockerfile").read_text()
    images = dict(re.findall(r"^ARG (\w+_IMAGE)=(\S+)$", dockerfile, flags=re.MULTILINE))
    assert len(images) >= 2
    assert release.bases(dockerfile) == [f"{name}={image}@{DIGEST}" for name, image in images.items()]
    assert [line.split()[3] for line in asked.read_text().splitlines()] == list(images.values())


@pytest.mark.parametrize(
    ("dockerfile", "answer", "status", "said"),
    [
        ("ARG A_IMAGE=a:1\nFROM ${A_IMAGE} AS a\nFROM busybox:latest\n", DIGEST, 0, "takes busybox:latest"),
        (
            "ARG A_IMAGE=a:1\nFROM ${A_IMAGE}\n",
            "no such manifest",
            1,
            "digest of a:1 cannot be found: no such manifest",
        ),
        ("ARG A_IMAGE=a:1\nFROM ${A_IMAGE}\n", "latest", 0, "digest of a:1 cannot be found"),
    ],
)
def test_an_image_without_a_digest_ends_the_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dockerfile: str, answer: str, status: int, said: str
) -> None:
    docker(tmp_path, monkeypatch, answer, status)
    with pytest.raises(release.Trouble, match=said):
        release.bases(dockerfile)


def test_the_images_of_a_release_are_built_from_the_recorded_bases() -> None:
    workflow = (ROOT / ".github/workflows/release.yml").read_text()
    assert ".ci/release.py bases | tee base-images.txt" in workflow
    (build,) = re.findall(r"docker buildx build .+", workflow)
    assert '"${bases[@]}"' in build
    assert re.search(r"gh release create .+ base-images\.txt", workflow)
