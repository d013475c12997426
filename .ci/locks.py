#!/usr/bin/env python3
"""The locks of .ci/locks: exact versions, with hashes, of what builds a release and of what demo and tests install.

    make lock

writes them, with uv (from PyPI) and the index, for every Python from 3.11 on and both machines. The first line of a
lock says what it was made from: make_venv.py uses it only while it fits pyproject.toml. To read them needs no package.
"""

import hashlib
import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / ".ci" / "locks"
BUILD = "build"
EXTRAS = ("demo", "dev")
COMPILE = (
    *("uv", "pip", "compile", "-", "--universal", "--python-version", "3.11", "--generate-hashes", "--upgrade"),
    # with extras: pip does not match a pinned name with a requirement of its extra where it replaces a version
    *("--no-strip-extras", "--no-annotate", "--no-header", "--quiet", "--output-file"),
)


def build_requirements() -> list[str]:
    """Return what builds the wheel, also an editable one."""
    return [*project()["build-system"]["requires"], "editables"]


def first_line(extra: str) -> str:
    """Return the line that a lock of this extra begins with while it fits pyproject.toml."""
    made_from = [build_requirements()]
    if extra != BUILD:
        needs = project()["project"]
        made_from += [needs["requires-python"], needs["dependencies"], needs["optional-dependencies"]]
    digest = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()
    return f"# make lock; requirements {digest[:16]}\n"


def fitting(extra: str) -> Path | None:
    """Return the lock of this extra, or None where there is none or pyproject.toml has changed since."""
    path = LOCKS / f"{extra}.txt"
    try:
        with path.open() as file:
            return path if file.readline() == first_line(extra) else None
    except FileNotFoundError:
        return None


def project() -> dict[str, Any]:
    """Return pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def main() -> int:
    """Write all locks; 1 where uv cannot."""
    requirements = "\n".join(build_requirements())
    for extra in (BUILD, *EXTRAS):
        target = LOCKS / f"{extra}.txt"
        sources = [] if extra == BUILD else ["pyproject.toml", "--extra", extra]
        command = [sys.executable, "-m", *COMPILE, str(target), *sources]
        if subprocess.run(command, cwd=ROOT, input=requirements, text=True).returncode:
            return 1
        target.write_text(first_line(extra) + target.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
