"""The tables of docs/guides/kubernetes-troubleshooting.md quote what the parts say: word for word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import gpushare_spawner

ROOT = Path(__file__).parents[2]
PARTS = ("agent", "form", "spawn", "hub", "service")


def quoted() -> list[str]:
    """The texts in the tables' first columns that one of our parts says."""
    page = (ROOT / "docs" / "guides" / "kubernetes-troubleshooting.md").read_text()
    rows = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| ")]
    ours = [row for row in rows if row.partition(":")[0] in PARTS]
    return [text for row in ours for text in re.findall(r"`([^`]+)`", row)]


@pytest.fixture(scope="module")
def sources() -> str:
    """All of our Python, with the strings that are written on several lines in one piece."""
    files = sorted(Path(gpushare_spawner.__file__).parent.rglob("*.py"))
    text = "\n".join(file.read_text() for file in files)
    return re.sub(r'"\s*\n\s*f?"', "", text)


def test_there_is_something_to_look_up() -> None:
    assert len(quoted()) >= 10


@pytest.mark.parametrize("text", quoted())
def test_the_page_quotes_what_is_said(text: str, sources: str) -> None:
    for part in text.split("…"):
        # a sentence's last stop may be the caller's
        assert part.strip(" .:") in sources, part
