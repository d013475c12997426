"""model/part.py, and that no other regular expression of the package meets texts with Python's `re`."""

from __future__ import annotations

import ast
import functools
import re
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

import gpushare_spawner
from gpushare_spawner.model.part import check_pattern, matches_start, matches_whole

PACKAGE = Path(gpushare_spawner.__file__).parent
SECONDS = 5.0
"""CPU time that a match may take, on a slow machine. Python's `re` needs more than the age of the universe."""
EXPONENTIAL = [
    "(a+)+",
    "(a|a)*",
    "(a|aa)+",
    "([a-z]+)*",
    r"(\w+\s?)*",
    "(.*a){20}",
    "^(([a-z])+.)+[A-Z]([a-z])+$",
    "(a?){50}a{50}",
]


@pytest.mark.parametrize("pattern", EXPONENTIAL)
def test_a_pattern_that_explodes_in_python_takes_linear_time(pattern: str) -> None:
    check_pattern(pattern)
    began = time.process_time()
    assert not matches_whole(pattern, "a" * 998 + "!\n")
    assert time.process_time() - began < SECONDS


def test_the_largest_repetitions_that_are_accepted_take_less_than_a_second() -> None:
    pattern = "(?:.{0,100}){100}"
    check_pattern(pattern)
    began = time.process_time()
    assert not matches_whole(pattern, "a" * 999 + "\n")
    assert time.process_time() - began < SECONDS
    with pytest.raises(ValueError, match="size limit"):
        check_pattern(r"(?:\w{0,400}){400}")


def test_the_whole_text_or_its_start_must_match() -> None:
    assert matches_whole("mine/|yours/", "yours/")
    assert not matches_whole("mine/", "mine/x")
    assert not matches_whole("mine/", "mine/\n")
    assert matches_start("^mine/|yours", "mine/x")
    assert not matches_start("mine/", "not mine/")


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"(?=a)a", "look-around, including look-ahead and look-behind, is not supported"),
        (r"(a)\1", "backreferences are not supported"),
        ("[a-z", "unclosed character class"),
        ("a)|(b", "unopened group"),
        (r"a\Z", "unrecognized escape sequence"),
    ],
)
def test_an_unsupported_pattern_is_refused_with_the_reason_and_what_would_be_right(pattern: str, reason: str) -> None:
    with pytest.raises(ValueError, match="without look-around and backreferences") as refused:
        check_pattern(pattern)
    assert f"({reason})" in str(refused.value)


def test_patterns_of_gpu_models_take_polynomial_time() -> None:
    began = time.process_time()
    assert not fnmatchcase("a" * 200, "*a" * 100 + "b")
    assert time.process_time() - began < SECONDS


@functools.cache
def calls_of_re() -> tuple[tuple[str, ast.expr, dict[str, Any]], ...]:
    """Return each call of a function of `re`: its place, its pattern, and the module's constants."""
    calls = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name.endswith(("_pb2.py", "_pb2_grpc.py")) or "node_modules" in path.parts:
            continue
        tree = ast.parse(path.read_text())
        constants: dict[str, Any] = {}
        for statement in tree.body:
            if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                constants[statement.targets[0].id] = statement.value
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "re"
                and node.func.attr != "escape"
            ):
                calls.append((f"{path.relative_to(PACKAGE)}:{node.lineno}", node.args[0], constants))
    return tuple(calls)


def written(node: ast.expr, constants: dict[str, Any]) -> str | None:
    """Return the text of a pattern that the source code has as a whole; None for any other."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.Name) and node.id in constants:
        return written(constants[node.id], constants)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [written(node.left, constants), written(node.right, constants)]
    elif isinstance(node, ast.JoinedStr):
        parts = [written(one.value if isinstance(one, ast.FormattedValue) else one, constants) for one in node.values]
    else:
        return None
    return None if None in parts else "".join(filter(None, parts))


COMPUTED = {"wording/spawn_failures.py": "a table of the module; reasons of Kubernetes' scheduler"}
"""Module -> what its computed patterns are made of."""


def test_python_matches_only_patterns_that_stand_in_the_source_code() -> None:
    places = {place: written(node, constants) for place, node, constants in calls_of_re()}
    assert len(places) > 20
    assert {place.partition(":")[0] for place, text in places.items() if text is None} == set(COMPUTED)


def test_no_pattern_in_the_source_code_explodes() -> None:
    assert exploding("(0+)+") is not None
    texts = {place: written(node, constants) for place, node, constants in calls_of_re()}
    assert not {place: text for place, text in texts.items() if text is not None and exploding(text) is not None}


def exploding(pattern: str) -> str | None:
    """Return a text of 25 repetitions that the pattern needs more than 50 ms for, if one is found."""
    compiled = re.compile(pattern)
    letters = ["0", "a", "A", " ", ".", "-", ",", ":", "1h", "1 ", "a.", "a-", ", 1", "a@", "/", "."]
    for letter in letters:
        for end in ("\0", "\n\0", "0\0", "a\0"):
            text = letter * 25 + end
            began = time.process_time()
            compiled.fullmatch(text)
            if time.process_time() - began > 0.05:
                return text
    return None
