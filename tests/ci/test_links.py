"""Links between the pages lead somewhere, also those of comments and of the README, which no site builder checks."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
TEXT = {".py", ".c", ".h", ".yaml", ".yml", ".toml", ".md", ".txt", ".tpl", ".service", ".ipynb"}
MENTION = re.compile(r"\b(?<!tests/)docs/[\w/-]+\.(?:md|svg|png|py)\b")


def links(page: Path) -> list[tuple[str, str]]:
    """Target and anchor of each link to a file or within the page. What stands in code is no link."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    return [(target, anchor) for target, anchor in LINK.findall(text) if not re.match(r"[a-z]+:", target)]


def anchors(page: Path) -> set[str]:
    """What GitHub and the site call the page's headings."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ +(.+?) *$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_file_leads_to_one(page: Path) -> None:
    assert [target for target, _ in links(page) if target and not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_anchor_is_a_heading(page: Path) -> None:
    wrong = []
    for target, anchor in links(page):
        other = page.parent / target if target else page
        # headings that the site generates are checked when it is built
        if anchor and other.suffix == ".md" and "{gpushare-" not in other.read_text() and anchor not in anchors(other):
            wrong.append(f"{target}#{anchor}")
    assert wrong == []


def test_every_page_that_a_source_file_names_exists() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout: git does not say which files belong to it")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    wrong = []
    for name in filter(None, files.split("\0")):
        path = ROOT / name
        if path.suffix in TEXT and path.exists():
            wrong += [f"{name}: {page}" for page in MENTION.findall(path.read_text()) if not (ROOT / page).exists()]
    assert wrong == []
