"""The diagrams of the documentation are those that docs/diagrams/draw.py draws."""

from __future__ import annotations

import importlib.util
import xml.etree.ElementTree as xml
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "diagrams"


@pytest.fixture(scope="module")
def draw() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_diagrams", FOLDER / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_file_is_what_draw_writes(draw: ModuleType) -> None:
    drawn = {f"{diagram.name}.svg": diagram.svg() for diagram in (make() for make in draw.DIAGRAMS)}
    assert drawn == {path.name: path.read_text() for path in FOLDER.glob("*.svg")}, "run docs/diagrams/draw.py"


def test_each_diagram_is_shown_on_a_page_with_a_text_for_those_who_do_not_see_it(draw: ModuleType) -> None:
    pages = "\n".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    for make in draw.DIAGRAMS:
        name = make().name
        assert f"diagrams/{name}.svg)" in pages, name
        assert f"[](../diagrams/{name}.svg)" not in pages, name


def test_each_diagram_names_itself_and_loads_nothing(draw: ModuleType) -> None:
    for path in FOLDER.glob("*.svg"):
        picture = xml.fromstring(path.read_text())
        assert picture.findtext("{http://www.w3.org/2000/svg}title")
        assert "href" not in path.read_text()
        assert "url(" not in path.read_text()
