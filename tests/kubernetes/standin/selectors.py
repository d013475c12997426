"""Label and field selectors, as in a list's or a watch's query."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from .errors import bad_request
from .kinds import Kind

Matches = Callable[[dict[str, Any]], bool]

_KEY = r"[A-Za-z0-9](?:[A-Za-z0-9_./-]*[A-Za-z0-9])?"
_SET = re.compile(rf"^({_KEY})\s+(in|notin)\s+\(([^()]*)\)$")
_EQUAL = re.compile(rf"^({_KEY})\s*(==|=|!=)\s*([A-Za-z0-9_.-]*)$")
_EXISTS = re.compile(rf"^(!?)\s*({_KEY})$")


def selector(kind: Kind, labels: str, fields: str) -> Matches:
    """What both selectors choose. Raises ApiError 400 for one that is not understood."""
    tests = [*_label_tests(labels), *_field_tests(kind, fields)]
    return lambda item: all(test(item) for test in tests)


def selected_name(fields: str) -> str | None:
    """The name that a field selector pins, which makes a list a request for one name (for access rules)."""
    found = re.search(r"(?:^|,)\s*metadata\.name\s*==?\s*([^,\s]+)", fields)
    return found[1] if found else None


def _label_tests(text: str) -> list[Matches]:
    tests = []
    # commas within the brackets of a set do not separate
    for part in filter(None, (part.strip() for part in re.split(r",(?![^()]*\))", text))):
        if found := _SET.match(part):
            tests.append(_set_test(found[1], found[2] == "in", {value.strip() for value in found[3].split(",")}))
        elif found := _EQUAL.match(part):
            tests.append(_equal_test(found[1], found[2] != "!=", found[3]))
        elif found := _EXISTS.match(part):
            tests.append(_exists_test(found[2], not found[1]))
        else:
            raise bad_request(f"unable to parse requirement: {part!r}")
    return tests


def _labels(item: dict[str, Any]) -> dict[str, str]:
    return item["metadata"].get("labels") or {}


def _set_test(key: str, wanted: bool, values: set[str]) -> Matches:
    # 'notin' also holds for an object without the label
    return lambda item: (_labels(item).get(key) in values) is wanted


def _equal_test(key: str, wanted: bool, value: str) -> Matches:
    return lambda item: (_labels(item).get(key) == value) is wanted


def _exists_test(key: str, wanted: bool) -> Matches:
    return lambda item: (key in _labels(item)) is wanted


def _field_tests(kind: Kind, text: str) -> list[Matches]:
    tests = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        found = re.match(r"^([^=!]+?)\s*(==|=|!=)\s*(.*)$", part)
        if not found:
            raise bad_request(f"invalid field selector: {part!r}")
        path, operator, value = found.groups()
        if path not in kind.fields:
            raise bad_request(f'field label not supported: "{path}"')
        tests.append(_field_test(tuple(path.split(".")), operator != "!=", value))
    return tests


def _field_test(path: tuple[str, ...], wanted: bool, value: str) -> Matches:
    def test(item: dict[str, Any]) -> bool:
        found: Any = item
        for step in path:
            found = (found or {}).get(step) if isinstance(found, dict) else None
        if path == ("source",):
            found = (found or {}).get("component") if isinstance(found, dict) else found
        said = "" if found is None else str(found).lower() if isinstance(found, bool) else str(found)
        return (said == value) is wanted

    return test
