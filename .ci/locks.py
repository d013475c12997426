"""The locks of .ci/locks: which there are, and whether one fits pyproject.toml. Without any package."""

import hashlib
import json
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / ".ci" / "locks"
BUILD = "build"
EXTRAS = ("demo", "dev")


def build_requirements() -> list[str]:
    """What builds the wheel, also an editable one."""
    return [*project()["build-system"]["requires"], "editables"]


def first_line(extra: str) -> str:
    """The line that a lock of this extra begins with while it fits pyproject.toml."""
    made_from = [build_requirements()]
    if extra != BUILD:
        needs = project()["project"]
        made_from += [needs["requires-python"], needs["dependencies"], needs["optional-dependencies"]]
    digest = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()
    return f"# make lock; requirements {digest[:16]}\n"


def fitting(extra: str) -> Path | None:
    """The lock of this extra, or None where there is none or pyproject.toml has changed since."""
    path = LOCKS / f"{extra}.txt"
    try:
        with path.open() as file:
            return path if file.readline() == first_line(extra) else None
    except FileNotFoundError:
        return None


def project() -> dict[str, Any]:
    """pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())
