#!/usr/bin/env python3
"""Draws random changes to a pure package and says which of them its tests notice: .ci/mutation_sample.py arbiter 60 1

For what mutmut leaves out (properties, constants, min in place of max, dropped statements), and for the arbiter, whose
tests in virtual time are too slow for each of mutmut's changes. Arguments: the package, how many changes to draw, the
seed. Each change is tried in a copy of the code: first with the package's fast tests, then with all its other tests.
A change that the slow tests do not notice within their limit counts as survived, so the figure is a lower bound. Fast
tests that do not end within theirs count as noticed. Survivors in tests/equivalent_mutants.yaml do not count. Exit
status 1 where less than 90 % were noticed.
"""

import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import yaml

ROOT = Path(__file__).resolve().parent.parent
WORKERS = 2
FAST_LIMIT, SLOW_LIMIT = 90.0, 100.0
"""Seconds for the fast tests (some seconds on a machine that does nothing else) and for each change's other tests."""
SLOW = {
    "arbiter": [
        "test_interactive.py", "test_parts.py", "test_co_run.py", "test_any_order.py", "test_weights.py",
        "test_time_slices_over_time.py",
    ],
}  # fmt: skip
"""Tests of seconds and more, the quickest first. All others of the package's folder are fast."""
WANTED = 0.9

COMPARISONS = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "/", ast.Div: "*", ast.FloorDiv: "*", ast.Mod: "+"}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


Part = ast.expr | ast.stmt
"""What a change replaces."""


def changes(tree: ast.AST) -> Iterator[tuple[Part, str]]:
    """Pairs of a node and the source that replaces it."""
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
        elif (
            isinstance(node, ast.AugAssign)
            or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
            or (isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute))
        ):
            yield node, "pass"


def mutable(tree: ast.Module) -> ast.Module:
    """The tree without imports, annotations, docstrings and texts with values in them."""

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
    """Every change to a file: the node, its code, what it becomes, and the whole changed file."""
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
    """The lines of a node of parsed text, the first line being 1."""
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def enclosing(tree: ast.AST, lines: range, prefix: str = "") -> str | None:
    """Name of the outermost function whose body holds the lines."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef) and (found := enclosing(node, lines, f"{prefix}{node.name}.")):
            return found
        if isinstance(node, ast.FunctionDef) and node.body[0].lineno <= lines[0] and lines[-1] in lines_of(node):
            return prefix + node.name
    return None


def equivalent() -> set[tuple[str, str, str]]:
    """Place, code and change of each listed change that has no effect."""
    listed = yaml.safe_load((ROOT / "tests" / "equivalent_mutants.yaml").read_text()) or []
    return {(one["in"], one["code"], one["change"]) for one in listed}


def place(path: Path, line: int, code: str) -> str:
    """Package, module, and function if there is one, as in the list of equivalent changes."""
    lines = range(line, line + code.count("\n") + 1)
    function = enclosing(ast.parse(path.read_text()), lines)
    return f"{path.parent.name}.{path.stem}" + (f".{function}" if function else "")


def drawn(package: str, number: int, seed: int) -> list[tuple[Path, int, str, str, str]]:
    """Random changes: file, line, code, what it becomes, and the whole changed file."""
    found = [
        (path.relative_to(ROOT), node.lineno, old, new, changed)
        for path in sorted((ROOT / "gpushare_spawner" / package).glob("*.py"))
        for node, old, new, changed in changes_of(path)
    ]
    return random.Random(seed).sample(found, min(number, len(found)))


def passes(folder: str, tests: list[str], limit: float) -> bool | None:
    """Whether the tests pass in that copy; None: they take longer than the limit."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": folder}
    with tempfile.TemporaryFile() as output:
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=limit
            )
        except subprocess.TimeoutExpired:
            return None
        if done.returncode not in (0, 1, 2):
            output.seek(0)
            raise RuntimeError(output.read().decode(errors="replace")[-2000:])
        return done.returncode == 0


def main() -> int:
    package, number, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    folder = ROOT / "tests" / package
    slow = [f"tests/{package}/{name}" for name in SLOW.get(package, [])]
    files = [str(file.relative_to(ROOT)) for file in sorted(folder.glob("test_*.py"))]
    fast = [file for file in files if file not in slow]
    with tempfile.TemporaryDirectory(prefix="mutation-") as scratch:
        copies: SimpleQueue[str] = SimpleQueue()
        for worker in range(WORKERS):
            copy = Path(scratch, str(worker))
            ignored = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(ROOT / "gpushare_spawner", copy / "gpushare_spawner", ignore=ignored)
            shutil.copytree(ROOT / "tests", copy / "tests", ignore=ignored)
            shutil.copy(ROOT / "pyproject.toml", copy)
            copies.put(str(copy))
        if not passes(str(Path(scratch, "0")), fast, FAST_LIMIT):
            raise RuntimeError("the fast tests fail, or take too long, without any change")

        def attempt(change: tuple[Path, int, str, str, str]) -> str:
            path, _, _, _, text = change
            copy = copies.get()
            changed = Path(copy, path)
            before = changed.read_text()
            try:
                changed.write_text(text)
                if not passes(copy, fast, FAST_LIMIT):
                    return "noticed by fast tests"
                result = passes(copy, slow, SLOW_LIMIT) if slow else True
                return "noticed by slow tests" if result is False else "SURVIVED" + ("" if result else " so far")
            finally:
                changed.write_text(before)
                copies.put(copy)

        sample, known = drawn(package, number, seed), equivalent()
        by_file: dict[str, list[int]] = {}
        with ThreadPoolExecutor(WORKERS) as workers:
            for (file, line, old, new, _), result in zip(sample, workers.map(attempt, sample), strict=True):
                if not result.startswith("noticed") and (place(ROOT / file, line, old), old, new) in known:
                    print(f"equivalent: {file}:{line}\n  - {old}\n  + {new}", flush=True)
                    continue
                print(f"{result}: {file}:{line}\n  - {old}\n  + {new}", flush=True)
                counts = by_file.setdefault(file.name, [0, 0])
                counts[0] += result.startswith("noticed")
                counts[1] += 1
    for name, (noticed, of) in sorted(by_file.items()):
        print(f"{name}: {noticed} of {of}")
    noticed, of = (sum(column) for column in zip(*by_file.values(), strict=True))
    print(f"{package}: {noticed} of {of} drawn changes were noticed ({100 * noticed / of:.1f} %), seed {seed}")
    return int(noticed < WANTED * of)


if __name__ == "__main__":
    sys.exit(main())
