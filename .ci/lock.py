#!/usr/bin/env python3
"""Writes .ci/locks: the exact versions, with hashes, of what a release is built with and what demo and tests install.

    make lock

Needs uv (from PyPI) and the index. The locks are for every Python from 3.11 on and both machines. The first line of
each says what it was made from: make_venv.py uses a lock only while it fits pyproject.toml.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import subprocess
import tempfile

from locks import BUILD, EXTRAS, LOCKS, ROOT, build_requirements, first_line


def main() -> int:
    """Write all of them; 1 where uv cannot."""
    LOCKS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        build = Path(folder) / "build.in"
        build.write_text("\n".join(build_requirements()) + "\n")
        for extra in (BUILD, *EXTRAS):
            sources = [str(build)] if extra == BUILD else ["pyproject.toml", str(build), "--extra", extra]
            target = LOCKS / f"{extra}.txt"
            command = ["uv", "pip", "compile", *sources, "--universal", "--python-version", "3.11", "--no-annotate"]
            # with extras: pip does not match a pinned name with a requirement of its extra where it replaces a version
            command += [
                "--no-strip-extras",
                "--generate-hashes",
                "--no-header",
                "--upgrade",
                "--quiet",
                "--output-file",
                str(target),
            ]
            done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT)
            if done.returncode:
                return 1
            target.write_text(first_line(extra) + target.read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
