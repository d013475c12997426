#!/usr/bin/env python3
"""Makes small changes to pure packages and reports those that no test notices.

    .ci/mutation.py placement idle               every change to two packages
    .ci/mutation.py arbiter.schedule quota.order every change to two modules
    .ci/mutation.py arbiter --sample 60 --seed 1 60 changes drawn at random

Code in functions is exchanged in a forked process that has collected the tests already, and only the tests that reach
the changed lines run, so that most changes take some hundredths of a second. For other code (constants, defaults)
pytest starts anew. The fast tests of the package run; for a sample also its slow tests, on what the fast ones have not
noticed. Without them the figures are lower bounds. Changes in tests/equivalent_mutants.yaml do not count. The exit
status is 1 where the tests notice less than 90 % of the changes to a package.
"""

import argparse
import ast
import importlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import coverage
import pytest
import yaml
from _pytest.runner import runtestprotocol
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
CODE, TESTS = ROOT / "gpushare_spawner", ROOT / "tests"
WORKERS = 2
FORKED_LIMIT, STARTED_LIMIT, SLOW_LIMIT = 20, 90, 100
"""Seconds for the tests of a change: of CPU time in a fork, of the clock where pytest starts anew, and for slow tests.
Fast tests that do not end within them have noticed the change; slow tests have not."""
WANTED = 0.9
SLOW = {
    "arbiter": [
        "test_interactive.py", "test_parts.py", "test_co_run.py", "test_any_order.py", "test_weights.py",
        "test_time_slices_over_time.py",
    ],
}  # fmt: skip
"""Tests of seconds and more, the quickest first. All others of the package's folder are fast."""

COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "+"}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}

START_WITH_CHANGE = """
import importlib.machinery as machinery, pytest, sys
path, changed, tests = sys.argv[1], open(sys.argv[2]).read(), sys.argv[3:]
unchanged = machinery.SourceFileLoader.get_code
machinery.SourceFileLoader.get_code = lambda loader, name: (
    compile(changed, path, "exec", dont_inherit=True) if loader.path == path else unchanged(loader, name)
)
sys.exit(pytest.main(["-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]))
"""


Part = ast.expr | ast.stmt
"""What a change replaces."""


def changes(tree: ast.AST) -> Iterator[tuple[Part, str]]:
    """Yield pairs of a node and the source that replaces it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
            left, right = ast.unparse(node.left), ast.unparse(node.comparators[0])
            yield node, f"({left} {COMPARISONS[type(node.ops[0])]} {right})"
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            yield node, f"(({ast.unparse(node.left)}) {OPERATORS[type(node.op)]} ({ast.unparse(node.right)}))"
        elif isinstance(node, ast.BoolOp):
            word = " or " if isinstance(node.op, ast.And) else " and "
            yield node, "(" + word.join(f"({ast.unparse(value)})" for value in node.values) + ")"
        elif isinstance(node, ast.UnaryOp):
            yield node, f"({ast.unparse(node.operand)})"
        elif isinstance(node, ast.Name) and node.id in NAMES:
            yield node, NAMES[node.id]
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
            yield node, str(not node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            yield node, repr(node.value * 2 or type(node.value)(1))
        elif isinstance(node, (ast.If, ast.IfExp)):
            yield node.test, f"(not ({ast.unparse(node.test)}))"
        elif isinstance(node, ast.Call):
            for argument in node.args:
                if not isinstance(argument, (ast.Starred, ast.Constant)):
                    yield argument, "None"
        elif (
            isinstance(node, ast.AugAssign)
            or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
            or (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute))
        ):
            yield node, "pass"


def mutable(tree: ast.Module) -> ast.Module:
    """Return the tree without imports, annotations, docstrings and texts with values in them."""

    class Strip(ast.NodeTransformer):
        def visit_Raise(self, node: ast.Raise) -> None:
            return None

        def visit_Import(self, node: ast.AST) -> None:
            return None

        visit_ImportFrom = visit_JoinedStr = visit_Import

        def visit_arg(self, node: ast.arg) -> ast.arg:
            node.annotation = None
            return node

        def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
            node.returns = None
            return self.generic_visit(node)

        def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
            node.annotation = ast.Name("Annotation")
            return self.generic_visit(node)

    stripped: ast.Module = Strip().visit(tree)
    return stripped


def changes_of(path: Path) -> Iterator[tuple[Part, str, str, str]]:
    """Yield every change to a file: the node, its code, what it becomes, and the whole changed file."""
    text = path.read_text()
    source = text.encode()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node, new in changes(mutable(ast.parse(text))):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[lines_of(node)[-1] - 1] + (node.end_col_offset or 0)
        old = source[begin:end].decode()
        changed = (source[:begin] + new.encode() + source[end:]).decode()
        yield node, " ".join(old.split()), new, changed


def lines_of(node: Part) -> range:
    """Return the lines of a node of parsed text, the first line being 1."""
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def enclosing(tree: ast.AST, lines: range, prefix: str = "") -> str | None:
    """Return the name of the outermost function whose body holds the lines."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef) and (found := enclosing(node, lines, f"{prefix}{node.name}.")):
            return found
        if isinstance(node, ast.FunctionDef) and node.body[0].lineno <= lines[0] and lines[-1] in lines_of(node):
            return prefix + node.name
    return None


class Result(Enum):
    """What became of a change."""

    NOTICED = "noticed"
    SURVIVED = "survived"
    UNREACHED = "no test reaches it"


@dataclass
class Change:
    """One change to one module."""

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
    result: Result = Result.SURVIVED

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    @property
    def place(self) -> str:
        return f"{self.module}.{self.function}" if self.function else self.module

    def __str__(self) -> str:
        return f"{self.result.value}: {self.place}, line {self.lines[0]}\n  - {self.old}\n  + {self.new}"

    def reached_by(self, contexts: dict[str, dict[int, list[str]]]) -> set[int]:
        """Return the tests that run one of the lines."""
        of_file = contexts.get(self.module, {})
        return {int(test) for line in self.lines for test in of_file.get(line, []) if test}


def changes_of_targets(targets: list[str]) -> list[Change]:
    """Return every change to these packages and modules. Raises SystemExit for a name that is neither."""
    found = []
    for target in targets:
        package, _, module = target.partition(".")
        paths = sorted((CODE / package).glob(f"{module or '*'}.py"))
        if not paths:
            raise SystemExit(f"gpushare: {target!r} is no package of gpushare_spawner and no module of one")
        for path in paths:
            tree = ast.parse(path.read_text())
            for node, old, new, text in changes_of(path):
                lines = lines_of(node)
                name = package if path.stem == "__init__" else f"{package}.{path.stem}"
                found.append(Change(name, path, lines, old, new, text, enclosing(tree, lines)))
    return found


def tests_of(package: str, slow: bool) -> list[str]:
    """Return the test files of a package, the fast or the slow ones."""
    if slow:
        return [str(TESTS / package / name) for name in SLOW.get(package, [])]
    return [
        str(path) for path in sorted((TESTS / package).rglob("test_*.py")) if path.name not in SLOW.get(package, [])
    ]


def code_of(source: CodeType, function: str) -> CodeType | None:
    """Return the function's code in a compiled module."""
    for const in source.co_consts:
        if isinstance(const, CodeType):
            found = const if const.co_qualname == function else code_of(const, function)
            if found is not None:
                return found
    return None


def function_of(change: Change) -> FunctionType:
    """Return the function as it was imported, without what stands around it."""
    found: Any = importlib.import_module(f"gpushare_spawner.{change.module}")
    for name in str(change.function).split("."):
        found = vars(found)[name]
        found = getattr(found, "fget", None) or getattr(found, "__func__", None) or found
    function: FunctionType = found
    return function


class InForks:
    """pytest's plug-in: runs the tests once, and then those that matter for each change in a fork of its own."""

    def __init__(self, changes: list[Change]) -> None:
        self._changes = changes
        self.ready = False
        """Whether all tests have passed without any change."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        seconds, contexts = self._unchanged(session.items)
        self.ready = True
        running: dict[int, Change] = {}
        for change in self._changes:
            tests = sorted(change.reached_by(contexts), key=seconds.__getitem__)
            if not tests:
                change.result = Result.UNREACHED
                continue
            if len(running) == WORKERS:
                self._wait(running)
            child = os.fork()
            if not child:
                attempt_in_fork(change, [session.items[test] for test in tests])
            running[child] = change
        while running:
            self._wait(running)
        return True

    def _unchanged(self, items: list[pytest.Item]) -> tuple[list[float], dict[str, dict[int, list[str]]]]:
        """Return how long each test takes, and which tests run which lines."""
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

    def _wait(self, running: dict[int, Change]) -> None:
        child, status = os.wait()
        running.pop(child).result = Result.NOTICED if status else Result.SURVIVED


def attempt_in_fork(change: Change, items: list[pytest.Item]) -> None:
    """Run the tests and end the process: exit status 0 if no test fails."""
    status = 1
    try:
        signal.setitimer(signal.ITIMER_PROF, FORKED_LIMIT)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        compiled = compile(change.text, str(change.path), "exec", dont_inherit=True)
        code = code_of(compiled, str(change.function))
        assert code is not None
        function_of(change).__code__ = code
        if not any(report.failed for item in items for report in runtestprotocol(item, nextitem=None, log=False)):
            status = 0
    finally:
        os._exit(status)


def attempt_from_start(change: Change, slow: bool = False) -> Result:
    """Run the package's tests in a process that imports the changed module."""
    tests = tests_of(change.package, slow)
    if not slow:
        module = change.path.stem
        tests.sort(key=lambda test: (module not in test, "virtual_gpu" in Path(test).read_text(), test))
    with tempfile.NamedTemporaryFile("w", suffix=".py") as changed:
        changed.write(change.text)
        changed.flush()
        command = [sys.executable, "-c", START_WITH_CHANGE, str(change.path), changed.name, *tests]
        try:
            limit = SLOW_LIMIT if slow else STARTED_LIMIT
            done = subprocess.run(
                command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=limit
            )
        except subprocess.TimeoutExpired:
            return Result.SURVIVED if slow else Result.NOTICED
        return Result.NOTICED if done.returncode else Result.SURVIVED


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="+", metavar="PACKAGE[.MODULE]")
    parser.add_argument("--sample", type=int, help="how many changes to draw; default: every change")
    parser.add_argument("--seed", type=int, default=1, help="of the sample; default: %(default)s")
    options = parser.parse_args()
    start = time.monotonic()
    changes = changes_of_targets(options.targets)
    if options.sample is not None:
        changes = random.Random(options.seed).sample(changes, min(options.sample, len(changes)))
    checks = list(HealthCheck)  # a test that is slow on a busy machine notices nothing
    settings.register_profile(
        "repeatable", database=None, derandomize=True, deadline=None, suppress_health_check=checks
    )
    settings.load_profile("repeatable")
    packages = sorted({change.package for change in changes})
    tests = [test for package in packages for test in tests_of(package, slow=False)]
    plugin = InForks([change for change in changes if change.function is not None])
    status = pytest.main(["-q", "-s", "-p", "no:cacheprovider", *tests], plugins=[plugin])
    if not plugin.ready:
        return int(status) or 1
    try_anew([change for change in changes if change.function is None], slow=False)
    if options.sample is not None:
        survivors = [change for change in changes if change.result is not Result.NOTICED]
        try_anew([change for change in survivors if change.package in SLOW], slow=True)
    print(f"\n{time.monotonic() - start:.0f} s")
    return report(changes)


def try_anew(changes: list[Change], slow: bool) -> None:
    """Try each of these changes in a process of its own."""
    with ThreadPoolExecutor(WORKERS) as workers:
        results = workers.map(lambda change: attempt_from_start(change, slow), changes)
        for change, result in zip(changes, results, strict=True):
            change.result = result


def report(changes: list[Change]) -> int:
    """Print the survivors and the figures of each module. Return 1 where a package is below what is wanted."""
    listed = yaml.safe_load((TESTS / "equivalent_mutants.yaml").read_text())
    known = {(entry["in"], entry["code"], entry["change"]) for entry in listed}
    noticed, counted, equivalent = Counter[str](), Counter[str](), Counter[str]()
    print("Not noticed, and not listed as equivalent:")
    for change in changes:
        if change.result is not Result.NOTICED and (change.place, change.old, change.new) in known:
            equivalent.update((change.package, change.module))
            continue
        counted.update((change.package, change.module))
        if change.result is Result.NOTICED:
            noticed.update((change.package, change.module))
        else:
            print(change)
    for name in sorted(counted):
        percent = 100 * noticed[name] / counted[name]
        print(f"{name}: {noticed[name]} of {counted[name]} ({percent:.1f} %), {equivalent[name]} more are equivalent")
    packages = {change.package for change in changes}
    return int(any(noticed[package] < WANTED * counted[package] for package in packages))


if __name__ == "__main__":
    sys.exit(main())
