#!/usr/bin/env python3
"""Runs a pytest command under coverage, its subprocesses too, and prints a table of lines and branches by package.

    .ci/coverage_table.py .venv/bin/python -m pytest tests/idle

Processes that a test kills report nothing, so the figures are lower bounds. The exit status is pytest's.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = """
[run]
branch = true
parallel = true
patch = subprocess
sigterm = true
source = {source}
data_file = {folder}/data
"""


def main() -> int:
    """Run the command, then print the table."""
    with tempfile.TemporaryDirectory(prefix="coverage-") as folder:
        settings, result = Path(folder, "settings"), Path(folder, "result.json")
        settings.write_text(SETTINGS.format(source=ROOT / "gpushare_spawner", folder=folder))
        run = [sys.executable, "-m", "coverage"]
        environment = os.environ | {"COVERAGE_RCFILE": str(settings)}
        words = sys.argv[1:]
        module = words.index("-m")
        status = subprocess.run([*run, "run", *words[module:]], cwd=ROOT, env=environment).returncode
        for command in (["combine", "--quiet"], ["json", "--quiet", "-o", str(result)]):
            subprocess.run([*run, *command], cwd=ROOT, env=environment, check=True)
        print_table(json.loads(result.read_text())["files"])
    return status


def print_table(files: dict[str, dict[str, dict[str, int]]]) -> None:
    """Print the covered part of the lines and branches of each package."""
    packages: dict[str, Counter[str]] = {}
    for name, file in files.items():
        parts = Path(name).relative_to("gpushare_spawner").parts
        for package in (parts[0] if len(parts) > 1 else "(top)", "all"):
            packages.setdefault(package, Counter()).update(file["summary"])
    print("| package | lines | covered | branches | covered |\n|---|---|---|---|---|")
    for package, sums in sorted(packages.items(), key=lambda item: (item[0] == "all", item[0])):
        lines, branches = sums["num_statements"], sums["num_branches"]
        print(
            f"| {package} | {lines:,} | {100 * sums['covered_lines'] / max(lines, 1):.0f} % "
            f"| {branches:,} | {100 * sums['covered_branches'] / max(branches, 1):.0f} % |"
        )


if __name__ == "__main__":
    sys.exit(main())
