#!/usr/bin/env python3
"""Runs the mutation tester over pure packages: .ci/mutation.py placement quota idle arbiter

mutmut makes small changes to the code, one at a time, and runs the tests that reach the changed function. A change that
no test notices survives: a test is missing, or the change is equivalent to the code. Equivalent ones stand in
tests/equivalent_mutants.yaml, each with its reason; a survivor that stands there does not count. Exit status 1 where
less than 90 % of a package's changes are noticed.
"""

import re
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
MUTMUT = Path(sys.executable).parent / "mutmut"
EQUIVALENT = ROOT / "tests" / "equivalent_mutants.yaml"
PACKAGES = ("placement", "quota", "idle", "arbiter")
WANTED = 90.0
"""Percent of the changes that tests have to notice."""
NOTICED = ("killed", "timeout", "suspicious", "segfault", "caught by type check")


def main() -> int:
    packages = sys.argv[1:]
    if not packages or not set(packages) <= set(PACKAGES):
        print(f"gpushare: mutation testing is for the packages {', '.join(PACKAGES)}: not {packages}", file=sys.stderr)
        return 2
    done = subprocess.run([MUTMUT, "run", *(f"gpushare_spawner.{package}.*" for package in packages)], cwd=ROOT)
    if done.returncode:
        return done.returncode
    equivalent = yaml.safe_load(EQUIVALENT.read_text()) or []
    return max(report(package, equivalent) for package in packages)


def report(package: str, equivalent: list[dict[str, str]]) -> int:
    """Print what survived in a package; 0 if enough was noticed."""
    listed = subprocess.run([MUTMUT, "results", "--all", "true"], cwd=ROOT, capture_output=True, text=True, check=True)
    statuses = dict(re.findall(rf"^\s*(gpushare_spawner\.{package}\.\S+): (.+)$", listed.stdout, re.MULTILINE))
    noticed = sum(status in NOTICED for status in statuses.values())
    survivors = {name: difference(name) for name, status in statuses.items() if status not in NOTICED}
    known = {(one["in"], one["code"], one["change"]) for one in equivalent}
    missed = {name: change for name, change in survivors.items() if (place(name), *change) not in known}
    counted = noticed + len(missed)
    percent = 100.0 * noticed / counted if counted else 100.0
    for name, (code, change) in missed.items():
        print(f"\n{name}: {statuses[name]}\n  - {code}\n  + {change}")
    print(
        f"\n{package}: {noticed} of {counted} changes were noticed ({percent:.1f} %), "
        f"{len(survivors) - len(missed)} more are equivalent to the code"
    )
    return int(percent < WANTED)


def place(name: str) -> str:
    """Module and function of a mutant: placement.room.Room.lent_gpu."""
    where = name.removeprefix("gpushare_spawner.").rsplit("__mutmut_", 1)[0]
    return where.replace("xǁ", "").replace("ǁ", ".").replace(".x_", ".", 1)


def difference(name: str) -> tuple[str, str]:
    """The code that a mutant changes, and what it makes of it: the lines, joined."""
    shown = subprocess.run([MUTMUT, "show", name], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = [line for line in shown.splitlines() if not line.startswith(("---", "+++"))]
    before, after = ([line[1:].strip() for line in lines if line.startswith(sign)] for sign in "-+")
    return " ".join(before), " ".join(after)


if __name__ == "__main__":
    sys.exit(main())
