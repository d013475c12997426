"""The maps of the layout, in CONTRIBUTING.md and in docs/explanation/architecture.md, name what is there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "gpushare_spawner"
# a path of the repository, as the prose writes it: with a slash or a file's ending, in one word
PATH = re.compile(r"`((?:[\w.-]+/)+[\w.-]*|[\w.-]+\.(?:py|md|toml|yaml|yml))`")
# what commands make, and the prefix of labels
NO_FILES = ("build/", "dist/", "gpushare-spawner.io/")


def exists(written: str) -> bool:
    """Whether a path is there: from the root, or from a part that the prose is about."""
    bases = (ROOT, PACKAGE, ROOT / "docs", ROOT / "packages/gpushare-simgpu", ROOT / "tests/kubernetes")
    return any((base / written).exists() for base in bases)


def test_contributing_names_files_that_are_there() -> None:
    named = PATH.findall((ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 15
    assert [path for path in named if not path.startswith(NO_FILES) and not exists(path)] == []


def test_the_map_of_the_code_has_each_package_and_nothing_else() -> None:
    text = (ROOT / "docs/explanation/architecture.md").read_text()
    tree = re.search(r"```\n(gpushare_spawner/\n.*?)```", text, flags=re.DOTALL)
    assert tree is not None
    lines = tree[1].splitlines()[1:]
    inside = {line.split()[0].rstrip("/") for line in lines if line.startswith("  ")}
    beside = {line.split()[0].rstrip("/") for line in lines if not line.startswith(" ")}
    packages = {folder.name for folder in PACKAGE.iterdir() if (folder / "__init__.py").is_file()}
    assert packages - inside == set()
    assert [name for name in inside if not (PACKAGE / name).exists()] == []
    assert [name for name in beside if not (ROOT / name).is_dir()] == []
    # the folders that a line's words name
    for line in lines:
        name, *words = line.split()
        base = PACKAGE / name if line.startswith(" ") else ROOT / name
        named = [word.strip("(,:;") for word in words if re.fullmatch(r"[(]?[a-z_]+/[,:;]?", word)]
        assert [folder for folder in named if not (base / folder).is_dir()] == [], name


WALK = re.compile(r"`([\w/.]+\.(?:py|[ch]))::(?:\w+\.)?(\w+)`")


def defined_in(path: Path) -> set[str]:
    """Names of functions that a source defines, in Python with those of its classes, in C with its macros."""
    text = path.read_text()
    if path.suffix == ".py":
        tree = ast.walk(ast.parse(text))
        return {node.name for node in tree if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    heads = [line for line in text.splitlines() if re.match("[a-z]|#define ", line) and not line.endswith(";")]
    return {name for head in heads for name in re.findall(r"(\w+)\(", head)}


def test_the_walks_name_functions_that_are_there_and_say_what_is_wrong() -> None:
    text = (ROOT / "docs/explanation/architecture.md").read_text()
    walks = text.partition("## Three walks")[2].partition("\n## ")[0].split("\n### ")[1:]
    assert [len(WALK.findall(walk)) >= 8 for walk in walks] == [True] * 3
    wrong = []
    for file, name in WALK.findall("\n".join(walks)):
        path = PACKAGE / file
        if not path.is_file():
            wrong.append(f"{file}::{name}: there is no such file; correct the walk in docs/explanation/architecture.md")
        elif name not in defined_in(path):
            wrong.append(f"{file} defines no {name}; correct the walk in docs/explanation/architecture.md")
    assert wrong == [], "\n".join(wrong)


def test_a_walk_to_a_missing_function_is_noticed() -> None:
    assert "decide" in defined_in(PACKAGE / "idle/policy.py")
    assert "decides" not in defined_in(PACKAGE / "idle/policy.py")
    assert "gate_wait" in defined_in(PACKAGE / "native/preload/gate/gate.c")
    assert "membarrier_of_nobody" not in defined_in(PACKAGE / "native/preload/gate/gate.c")
