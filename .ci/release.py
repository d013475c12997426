#!/usr/bin/env python3
"""Checks and builds a release.

    python3 .ci/release.py check TAG     every place must name the version of the tag, and the changelog have a section
    python3 .ci/release.py build DIR     the sdist, and wheels of both packages for each machine, into an empty folder
    python3 .ci/release.py notes TAG     the tag's section of the changelog
    python3 .ci/release.py bases         each base image of the Dockerfile with the digest of its tag now, as build
                                         arguments: NAME=image:tag@sha256:...

build needs what .ci/locks/build.txt lists, and the npm registry. The same commit gives the same bytes on every machine:
times in the archives are those of the commit, or of $SOURCE_DATE_EPOCH.
"""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MACHINES = ("x86_64", "aarch64")
PLACES = {
    # file: what stands around the version
    "pyproject.toml": r'^version = "(.+)"$',
    "packages/gpushare-simgpu/pyproject.toml": r'^version = "(.+)"$',
    "gpushare_spawner/__init__.py": r'^__version__ = "(.+)"$',
    "gpushare_spawner/notebook/lab/package.json": r'"version": "(.+)"',
    "helm-values/gpushare-agent/Chart.yaml": r'^(?:version|appVersion): "?([^"\n]+)"?$',
    "helm-values/jupyterhub.yaml": r'^    tag: "(.+)"$',
    "helm-values/extra-packages.yaml": r"gpushare-spawner==(\S+)",
}
NUMBERS = {
    # the version as major*10000 + minor*100 + patch, in HELLO
    "gpushare_spawner/native/preload/platform/frames.h": r"LIBRARY_VERSION\s+(\d+)",
    "gpushare_spawner/notebook/client.py": r"^LIBRARY_VERSION = (\d+)",
}
VERSION = re.compile(r"v(\d+)\.(\d+)\.(\d+)")


class Trouble(Exception):
    """Why there is no release, in sentences for people."""


def main(arguments: list[str]) -> int:
    """Run one of the commands; 1 with a sentence where something is wrong."""
    try:
        match arguments:
            case ["check", tag]:
                check(tag, ROOT)
            case ["build", folder]:
                build(Path(folder).absolute())
            case ["notes", tag]:
                print(notes(tag, ROOT))
            case ["bases"]:
                print("\n".join(bases((ROOT / "Dockerfile").read_text())))
            case _:
                print(__doc__, file=sys.stderr)
                return 2
    except Trouble as trouble:
        print(f"gpushare: {trouble}", file=sys.stderr)
        return 1
    return 0


def check(tag: str, root: Path) -> None:
    """Raise Trouble with every place that names another version than the tag."""
    match = VERSION.fullmatch(tag)
    if not match:
        raise Trouble(f"{tag!r} is not the tag of a release; write one like v1.2.3")
    version, number = tag[1:], sum(int(part) * 100**place for place, part in enumerate(reversed(match.groups())))
    wrong = [
        f"{name}: {found}, and the tag says {wanted}"
        for places, wanted in ((PLACES, version), (NUMBERS, str(number)))
        for name, pattern in places.items()
        for found in re.findall(pattern, (root / name).read_text(), flags=re.MULTILINE) or ["no version"]
        if found != wanted
    ]
    if wrong:
        raise Trouble("the version differs:\n  " + "\n  ".join(wrong))
    notes(tag, root)


def notes(tag: str, root: Path) -> str:
    """The text of the changelog for this tag. Raises Trouble where there is none."""
    text = (root / "CHANGELOG.md").read_text()
    section = re.search(
        rf"^## \[{re.escape(tag[1:])}\].*?$(.*?)(?=^## \[|^\[|\Z)", text, flags=re.MULTILINE | re.DOTALL
    )
    if section is None or not section[1].strip():
        raise Trouble(f"CHANGELOG.md has no section '## [{tag[1:]}]'; rename 'Unreleased' and give the date")
    return section[1].strip()


def build(folder: Path) -> None:
    """Build sdist and wheels. Raises Trouble."""
    if folder.exists() and any(folder.iterdir()):
        raise Trouble(f"{folder} is not empty")
    environment = {**os.environ, "SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH") or commit_time()}
    builder = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    run([*builder, "--target", "sdist"], ROOT, environment)
    # wheels come from the sdist: so it is complete, and the checkout keeps the libraries of this machine
    with tempfile.TemporaryDirectory() as unpacked:
        with tarfile.open(next(folder.glob("*.tar.gz"))) as sdist:
            sdist.extractall(unpacked, filter="data")
        for machine in MACHINES:
            sources = next(Path(unpacked).iterdir())
            for package in (sources, sources / "packages" / "gpushare-simgpu"):
                run([*builder, "--target", "wheel"], package, {**environment, "GPUSHARE_MACHINE": machine})
    for path in sorted(folder.iterdir()):
        print(path.name)


def bases(dockerfile: str) -> list[str]:
    """The base images of a Dockerfile (its text), each with its digest. Asks the registries through docker. Raises
    Trouble."""
    named = re.findall(r"^ARG (\w+_IMAGE)=(\S+)$", dockerfile, flags=re.MULTILINE)
    stages = re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, flags=re.MULTILINE)
    allowed = {*stages, *(f"${{{name}}}" for name, _ in named)}
    if other := [image for image in re.findall(r"^FROM (\S+)", dockerfile, flags=re.MULTILINE) if image not in allowed]:
        raise Trouble(f"the Dockerfile takes {', '.join(other)}: name it in an ARG ..._IMAGE, so that it gets a digest")
    found = []
    for name, image in named:
        command = ["docker", "buildx", "imagetools", "inspect", image, "--format", "{{json .Manifest.Digest}}"]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            raise Trouble("docker is not installed: it asks the registries for the digests") from None
        digest = done.stdout.strip().strip('"')
        if done.returncode or not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
            raise Trouble(f"the digest of {image} cannot be found: {done.stderr.strip() or done.stdout.strip()}")
        found.append(f"{name}={image}@{digest}")
    return found


def commit_time() -> str:
    """Seconds since the epoch of the commit that is checked out. Raises Trouble."""
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%ct"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Trouble("this is no checkout, so the time of the commit is not known: set SOURCE_DATE_EPOCH")
    return done.stdout.strip()


def run(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Raises Trouble with what the command said."""
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise Trouble(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
