"""The maps of the layout, in CONTRIBUTING.md and in docs/explanation/architecture.md, name what is there."""

from __future__ import annotations

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
