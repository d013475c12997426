"""Numbers without a unit where a unit is usual: valid, and often not what was meant (`memory.limit: 24`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, BeforeValidator

from gpushare_spawner.model.quantity import parse_bytes, parse_percent_or_bytes, parse_seconds
from gpushare_spawner.templates.problems import Problem
from gpushare_spawner.wording.amounts import duration, memory

_ADVICE: dict[Callable[[Any], Any], str] = {
    parse_bytes: "write a unit, like {number}Gi, if you mean another amount",
    parse_percent_or_bytes: "write a unit, like {number}Gi or {number}%, if you mean another amount",
    parse_seconds: "write a unit, like {number}m, if you mean another time",
}


def bare_numbers(model: type[BaseModel], file: Path) -> Iterator[Problem]:
    """Yield a warning for each number without a unit in a valid file. An unreadable file has none."""
    try:
        root = yaml.compose(file.read_text(encoding="utf-8-sig"), Loader=yaml.BaseLoader)
    except (OSError, ValueError, yaml.YAMLError):
        return
    yield from _of_model(model, root, file.name, ())


def _of_model(model: type[BaseModel], node: Any, file: str, path: tuple[str, ...]) -> Iterator[Problem]:
    if not isinstance(node, yaml.MappingNode):
        return
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    for key, value in node.value:
        field = fields.get(str(key.value))
        if field is None:
            continue
        where = (*path, str(key.value))
        kinds = [field.annotation, *field.metadata]
        yield from _of_value(kinds, value, file, where)


def _of_value(kinds: list[Any], node: Any, file: str, path: tuple[str, ...]) -> Iterator[Problem]:
    parts = list(_parts(kinds))
    if isinstance(node, yaml.ScalarNode):
        parser: Callable[[Any], Any] | None = next(
            (part.func for part in parts if isinstance(part, BeforeValidator) and part.func in _ADVICE), None
        )
        if parser is not None and re.fullmatch(r"\d+(\.\d+)?", node.value) and float(node.value):
            number = float(node.value)
            amount = f"{number:,.10g} s" + (f" ({duration(number)})" if number >= 60 else "")
            if parser is not parse_seconds:
                amount = f"{number:,.15g} bytes" + (f" ({memory(int(number))})" if number >= 2**20 else "")
            advice = _ADVICE[parser].format(number=node.value)
            yield Problem(file, node.start_mark.line + 1, ".".join(path), f"{node.value} means {amount}", advice)
        return
    for model in [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]:
        if not isinstance(node, yaml.MappingNode):
            continue
        if any(str(key.value) in model.model_fields for key, _ in node.value):
            yield from _of_model(model, node, file, path)
            continue
        # a mapping by names of the admin's choice
        for key, value in node.value:
            yield from _of_model(model, value, file, (*path, str(key.value)))


def _parts(kinds: list[Any]) -> Iterator[Any]:
    for kind in kinds:
        yield kind
        yield from _parts(list(get_args(kind)))
