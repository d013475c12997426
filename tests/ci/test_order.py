"""The order in which test files run, and the script that measures it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests import conftest
from tests.conftest import ROOT, SLOWEST_FIRST


@dataclass
class Item:
    """A test, as far as its order goes."""

    path: Path
    name: str


def test_slow_files_come_first_and_the_tests_of_a_file_keep_their_order() -> None:
    first, second = (ROOT / name for name in SLOWEST_FIRST[:2])
    other = ROOT / "tests" / "test_cli.py"
    items: list[Any] = [Item(other, "a"), Item(second, "b"), Item(first, "d"), Item(other, "c"), Item(first, "a")]
    conftest.pytest_collection_modifyitems(items)
    assert [(item.path, item.name) for item in items] == [
        (first, "d"), (first, "a"), (second, "b"), (other, "a"), (other, "c"),
    ]  # fmt: skip


def test_every_slow_file_exists_and_stands_there_once() -> None:
    assert [name for name in SLOWEST_FIRST if not (ROOT / name).is_file()] == []
    assert len(set(SLOWEST_FIRST)) == len(SLOWEST_FIRST)


def test_make_test_keeps_that_order() -> None:
    """pytest-xdist sorts files by their number of tests unless it is told not to."""
    for name in ("Makefile", ".github/workflows/test.yaml"):
        lines = [line for line in (ROOT / name).read_text().splitlines() if "--dist loadfile" in line]
        assert lines
        assert all("--no-loadscope-reorder" in line for line in lines), name


def test_times_of_a_report_are_added_by_file(tmp_path: Path) -> None:
    cases = [("tests.test_cli", 4), ("tests.test_cli", 3.5), ("tests.test_shipped", 30), ("tests.ci.test_order", 1)]
    lines = [f'<testcase classname="{name}" time="{seconds}"/>' for name, seconds in cases]
    (tmp_path / "report.xml").write_text(f"<testsuites>{''.join(lines)}</testsuites>")
    command = [sys.executable, str(ROOT / ".ci" / "test_times.py"), str(tmp_path / "report.xml")]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [line.split() for line in said.splitlines()] == [
        ["30.0", "tests/test_shipped.py"],
        ["7.5", "tests/test_cli.py"],
    ]
