"""One word for one thing: the words that the glossary has replaced are in no file of the project."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "gpushare_spawner", "packages", "tests", "docs", "benchmarks", "templates", "helm-values", "jupyterhub_config.d",
    "systemd", ".github",
)  # fmt: skip
KINDS = {
    ".py",
    ".c",
    ".h",
    ".js",
    ".html",
    ".css",
    ".md",
    ".yaml",
    ".yml",
    ".toml",
    ".ipynb",
    ".service",
    ".txt",
    ".map",
}
REPLACED = {
    "wish": "placement request",
    "shelves": "capacity index",
    "outlook": "snapshot",
    "step down": "idle action",
    "deed": "idle action",
    "shrunk": "downgraded",
    "lent out": "released; lent",
    "whole share": "full share",
    "next in line": "first in queue",
    "waiting line": "queue",
    "unarbitrated": "without the agent",
    "announcement": "notice",
    "the agent is away": "the agent is unavailable",
    "config fragment": "config file",
}
ALLOWED = {
    # a plugin of JupyterLab
    ("announcement", "@jupyterlab/apputils-extension:announcements"),
    # the parameter of cuMemAddressReserve
    ("wish", "CUdeviceptr wish"),
}


def texts() -> Iterator[tuple[Path, str]]:
    """All files that people read, without this one and without what is generated."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            hidden = any(part in ("_build", "__pycache__", "node_modules") for part in path.parts)
            if path.suffix in KINDS and not hidden and path != Path(__file__):
                yield path, path.read_text()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile", ROOT / "Dockerfile"):
        yield path, path.read_text()


def written_as(word: str) -> str:
    """A pattern for a word in prose and inside identifiers: whole share, whole_share, WholeShare."""
    return (
        r"(?:(?<![a-z])|(?<=[a-z])(?=[A-Z]))" + r"[\s_-]?".join(f"(?i:{part})" for part in word.split()) + "(?![a-z])"
    )


def test_replaced_words_are_gone() -> None:
    patterns = {word: re.compile(written_as(word)) for word in REPLACED}
    found = []
    for path, text in texts():
        folded = text.lower()
        # most files have no trace of a word: that is quick to see
        suspects = [word for word in patterns if all(part in folded for part in word.split())]
        for number, line in enumerate(text.splitlines() if suspects else (), 1):
            for word in suspects:
                if patterns[word].search(line) and not any(word == one and said in line for one, said in ALLOWED):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {word!r}; the glossary has {REPLACED[word]!r}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text", ["a wish", "wish_list", "WISH", "MyWish(1)", "whole_share", "the whole\u00a0share", "WholeShare"]
)
def test_a_word_is_found_in_prose_and_in_identifiers(text: str) -> None:
    assert any(re.search(written_as(word), text) for word in REPLACED)


@pytest.mark.parametrize("text", ["wished", "swish", "indeed", "a share of the whole"])
def test_longer_words_are_other_words(text: str) -> None:
    assert not any(re.search(written_as(word), text) for word in REPLACED)
