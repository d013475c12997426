"""The workflows run only what they name by commit, with no more rights than their jobs need."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.y*ml"))
WRITES_NEED = {
    # a right: what a job that has it must do
    "packages": r"docker buildx|helm push",
    "attestations": r"actions/attest-build-provenance@",
    "id-token": r"actions/attest-build-provenance@|pypa/gh-action-pypi-publish@",
    "contents": r"gh release create",
}


def load(path: Path) -> dict[str, Any]:
    workflow: dict[str, Any] = yaml.safe_load(path.read_text())
    return workflow


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_action_is_pinned_to_a_commit_with_its_version_beside_it(path: Path) -> None:
    uses = re.findall(r"uses: (.+)", path.read_text())
    assert uses
    assert [one for one in uses if not re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", one)] == []


def test_one_action_has_one_commit_in_all_workflows() -> None:
    pins: dict[str, set[str]] = {}
    for path in WORKFLOWS:
        for name, pin in re.findall(r"uses: (\S+)@(.+)", path.read_text()):
            pins.setdefault(name, set()).add(pin)
    assert {name: found for name, found in pins.items() if len(found) > 1} == {}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_job_may_write_only_what_it_writes(path: Path) -> None:
    workflow = load(path)
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        steps = yaml.safe_dump(job["steps"])
        for right, level in job.get("permissions", {}).items():
            assert level == "read" or re.search(WRITES_NEED[right], steps), f"{name}: {right}"


def test_a_release_publishes_only_after_everything_is_built() -> None:
    jobs = load(ROOT / ".github" / "workflows" / "release.yml")["jobs"]
    assert set(jobs["publish"]["needs"]) == {"packages", "images", "chart"}
    built = {f"gpushare-{target}" for target in jobs["images"]["strategy"]["matrix"]["target"]}
    named = set(re.findall(r"AS (hub|agent)\b", (ROOT / "Dockerfile").read_text()))
    assert built == {f"gpushare-{target}" for target in named}


def test_the_images_build_has_every_file_that_the_wheels_take() -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    wanted = {source.split("/")[0] for part in ("force-include", "shared-data") for source in wheel.get(part, {})}
    stage = (ROOT / "Dockerfile").read_text().partition("AS wheel")[2].partition(" AS hub\n")[0]
    copied = {word for line in re.findall(r"^COPY (.+)$", stage, flags=re.MULTILINE) for word in line.split()[:-1]}
    assert wanted <= copied
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!{name}" for name in copied} <= set(ignored)
