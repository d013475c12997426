#!/usr/bin/env python3
"""Makes every change of mutation_sample.py to modules of a package: .ci/mutation_all.py arbiter [schedule roster]

Code in functions is exchanged in a forked process that has collected the tests already, and only the tests that reach
the changed lines run, so that most changes take some hundredths of a second. For other code (constants, defaults)
pytest starts anew. The package's fast tests run, not those that mutation_sample.py calls slow, so the figures are lower
bounds. Changes in tests/equivalent_mutants.yaml do not count. Exit status 1 where less than 90 % of a module's changes
are noticed.
"""

import ast
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import coverage
import mutation_sample
import pytest
from _pytest.runner import runtestprotocol
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
WORKERS = 2
FORKED_LIMIT, STARTED_LIMIT = 20, 90
"""Seconds for a change's tests, of CPU time in a fork and of the clock where pytest starts anew. Tests that do not end
within them have noticed it."""
SURVIVED, NOTICED, UNREACHED = 0, 1, 5
START_WITH_CHANGE = """
import importlib.machinery as machinery, pytest, sys
path, changed, tests = sys.argv[1], open(sys.argv[2]).read(), sys.argv[3:]
unchanged = machinery.SourceFileLoader.get_code
machinery.SourceFileLoader.get_code = lambda loader, name: (
    compile(changed, path, "exec", dont_inherit=True) if loader.path == path else unchanged(loader, name)
)
sys.exit(pytest.main(["-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]))
"""


@dataclass
class Change:
    module: str
    """With its package: arbiter.schedule."""
    path: Path
    lines: range
    old: str
    new: str
    text: str
    """The whole changed file."""
    function: str | None
    """The outermost function whose body is changed; None: the code runs at import."""

    @property
    def place(self) -> str:
        return f"{self.module}.{self.function}" if self.function else self.module

    def told(self, what: str) -> str:
        return f"{what}: {self.place}, line {self.lines[0]}\n  - {self.old}\n  + {self.new}"

    def reached_by(self, contexts: dict[str, dict[int, list[str]]]) -> set[int]:
        """The tests that run one of the lines."""
        of_file = contexts.get(self.module, {})
        return {int(test) for line in self.lines for test in of_file.get(line, []) if test}


def every_change(package: str, modules: list[str]) -> list[Change]:
    found = []
    for module in modules:
        path = ROOT / "gpushare_spawner" / package / f"{module}.py"
        tree = ast.parse(path.read_text())
        for node, old, new, text in mutation_sample.changes_of(path):
            lines = mutation_sample.lines_of(node)
            found.append(
                Change(f"{package}.{module}", path, lines, old, new, text, mutation_sample.enclosing(tree, lines))
            )
    return found


def code_of(source: CodeType, function: str) -> CodeType:
    """The function's code in a compiled module."""
    return next(
        found
        for const in source.co_consts
        if isinstance(const, CodeType)
        for found in (const if const.co_qualname == function else None, code_of_or_none(const, function))
        if found is not None
    )


def code_of_or_none(source: CodeType, function: str) -> CodeType | None:
    try:
        return code_of(source, function)
    except StopIteration:
        return None


def function_of(change: Change) -> FunctionType:
    """The function as it was imported, without what stands around it."""
    found: Any = importlib.import_module(f"gpushare_spawner.{change.module}")
    for name in str(change.function).split("."):
        found = vars(found)[name]
        found = getattr(found, "fget", None) or getattr(found, "__func__", None) or found
    function: FunctionType = found
    return function


class InForks:
    """pytest's plug-in: runs the tests once, and then those that matter for each change in a fork of its own."""

    def __init__(self, changes: list[Change]) -> None:
        self.results: dict[int, int] = {}
        self._changes = changes

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        seconds, contexts = self._unchanged(session.items)
        running: dict[int, int] = {}
        for number, change in enumerate(self._changes):
            if change.function is None:
                continue
            tests = sorted(change.reached_by(contexts), key=seconds.__getitem__)
            if not tests:
                self.results[number] = UNREACHED
                continue
            if len(running) == WORKERS:
                self._wait(running)
            child = os.fork()
            if not child:
                attempt_in_fork(change, [session.items[test] for test in tests])
            running[child] = number
        while running:
            self._wait(running)
        return True

    def _unchanged(self, items: list[pytest.Item]) -> tuple[list[float], dict[str, dict[int, list[str]]]]:
        """How long each test takes, and which tests run which lines."""
        paths = {change.module: str(change.path) for change in self._changes}
        watch = coverage.Coverage(data_file=None, include=list(paths.values()), config_file=False)
        seconds = []
        watch.start()
        for number, item in enumerate(items):
            watch.switch_context(str(number))
            start = time.monotonic()
            for report in runtestprotocol(item, nextitem=None, log=False):
                if report.failed:
                    raise RuntimeError(f"{item.nodeid} fails without any change: {report.longreprtext}")
            seconds.append(time.monotonic() - start)
        watch.stop()
        data = watch.get_data()
        return seconds, {module: data.contexts_by_lineno(path) for module, path in paths.items()}

    def _wait(self, running: dict[int, int]) -> None:
        child, status = os.wait()
        number = running.pop(child)
        self.results[number] = SURVIVED if status == 0 else NOTICED
        if status == 0:
            print(f"{self._changes[number].told('survived')}\n({number} of {len(self._changes)} tried)", flush=True)


def attempt_in_fork(change: Change, items: list[pytest.Item]) -> None:
    """Never returns; exit status 0 if no test fails."""
    status = NOTICED
    try:
        signal.setitimer(signal.ITIMER_PROF, FORKED_LIMIT)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        compiled = compile(change.text, str(change.path), "exec", dont_inherit=True)
        function_of(change).__code__ = code_of(compiled, str(change.function))
        if not any(report.failed for item in items for report in runtestprotocol(item, nextitem=None, log=False)):
            status = SURVIVED
    finally:
        os._exit(status)


def attempt_from_start(change: Change, tests: list[str]) -> int:
    module = change.module.rsplit(".", 1)[1]
    first = sorted(tests, key=lambda test: (module not in test, "virtual_gpu" in Path(test).read_text(), test))
    with tempfile.NamedTemporaryFile("w", suffix=".py") as changed:
        changed.write(change.text)
        changed.flush()
        command = [sys.executable, "-c", START_WITH_CHANGE, str(change.path), changed.name, *first]
        try:
            done = subprocess.run(
                command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=STARTED_LIMIT
            )
        except subprocess.TimeoutExpired:
            return NOTICED
        return NOTICED if done.returncode else SURVIVED


def main() -> int:
    package, *modules = sys.argv[1:]
    folder = ROOT / "gpushare_spawner" / package
    modules = modules or sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
    changes = every_change(package, modules)
    tests = [
        str(path)
        for path in sorted((ROOT / "tests" / package).glob("test_*.py"))
        if path.name not in mutation_sample.SLOW.get(package, [])
    ]
    start = time.monotonic()
    checks = list(HealthCheck)  # a test that is slow on a busy machine notices nothing
    settings.register_profile(
        "repeatable", database=None, derandomize=True, deadline=None, suppress_health_check=checks
    )
    settings.load_profile("repeatable")
    plugin = InForks(changes)
    status = pytest.main(["-q", "-s", "-p", "no:cacheprovider", *tests], plugins=[plugin])
    if not plugin.results and any(change.function for change in changes):
        return int(status) or 1
    at_import = [number for number, change in enumerate(changes) if change.function is None]
    with ThreadPoolExecutor(WORKERS) as workers:
        found = workers.map(lambda number: attempt_from_start(changes[number], tests), at_import)
        plugin.results |= dict(zip(at_import, found, strict=True))
    return report(changes, plugin.results, time.monotonic() - start)


def report(changes: list[Change], results: dict[int, int], seconds: float) -> int:
    """Print the survivors and the figures by module; 1 where a module is below what is wanted."""
    known = mutation_sample.equivalent()
    counts: dict[str, list[int]] = {}
    missed = []
    for number, change in enumerate(changes):
        noticed, of, equivalent = counts.setdefault(change.module, [0, 0, 0])
        if results[number] == NOTICED:
            counts[change.module] = [noticed + 1, of + 1, equivalent]
        elif (change.place, change.old, change.new) in known:
            counts[change.module] = [noticed, of, equivalent + 1]
        else:
            counts[change.module] = [noticed, of + 1, equivalent]
            missed.append(change.told("no test reaches it" if results[number] == UNREACHED else "survived"))
    print("\nNot noticed, and not listed as equivalent:", *missed, sep="\n")
    counts["all"] = [sum(column) for column in zip(*counts.values(), strict=True)]
    for module, (noticed, of, equivalent) in counts.items():
        print(f"{module}: {noticed} of {of} ({100 * noticed / of:.1f} %), {equivalent} more are equivalent")
    print(f"{seconds:.0f} s")
    return int(any(noticed < mutation_sample.WANTED * of for noticed, of, _ in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
