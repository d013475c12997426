"""Problems of a template file or a reserved file, worded for its admin.

`bare_numbers` warns about numbers without a unit, which are valid but often a mistake (`memory.limit: 24`). The files
are parsed by `templates.parser`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from logging import Logger
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from gpushare_spawner.model.quantity import parse_bytes, parse_percent_or_bytes, parse_seconds
from gpushare_spawner.model.quota import NAME_TAKEN
from gpushare_spawner.model.template import IDLE_ORDER, LAYER_CANNOT
from gpushare_spawner.wording.amounts import duration, memory, printable

FieldPath = tuple[str | int, ...]
"""The path of a field in a file: names of fields and positions in lists."""


@dataclass(frozen=True)
class Problem:
    """One problem of a file. ``str()`` returns one line: file, line, field, problem and advice."""

    file: str
    line: int | None
    """Counted from 1; None if the problem concerns the whole file."""
    field: str
    """The field's path with dots, such as ``gpu.fraction``; empty: the whole file."""
    what: str
    advice: str = ""

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        parts = [place, self.field, self.what] if self.field else [place, self.what]
        # a field name can be any text
        return printable(": ".join(parts) + (f"; {self.advice}" if self.advice else ""))


def log_problems(log: Logger, path: Path, before: Sequence[str], now: Sequence[str]) -> None:
    """Log new problems, and the end of all problems of the file or folder ``path``."""
    for problem in now:
        if problem not in before:
            log.error("%s", problem)
    if before and not now:
        log.info("%s: all problems are resolved", path)


def problems_of(
    error: ValidationError, root: type[BaseModel], file: str, lines: Mapping[FieldPath, int]
) -> Iterator[Problem]:
    """Yield a problem for each field that pydantic rejects. ``root``: the file's model; ``lines``: field lines."""
    for details in error.errors(include_url=False, include_context=True):
        path = _path(details, root)
        what, advice = _words(details, path, root)
        yield Problem(file, line_of(path, lines), ".".join(map(str, path)), what, advice)


def line_of(path: FieldPath, lines: Mapping[FieldPath, int]) -> int | None:
    """Return the line of a field, or of the nearest enclosing field in the file; None if there is none."""
    for length in range(len(path), -1, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return None


def _path(details: ErrorDetails, root: type[BaseModel]) -> FieldPath:
    if details["type"] == NAME_TAKEN:
        path: FieldPath = details.get("ctx", {})["path"]
        return path
    if details["type"] == LAYER_CANNOT:
        return tuple(details.get("ctx", {})["field"].split("."))
    # the error is in the name of a mapping's entry
    where = details["loc"][:-1] if details["loc"][-1:] == ("[key]",) else details["loc"]
    part, _ = _part_and_message(details, where, root)
    return (*where, *part)


def _part_and_message(details: ErrorDetails, where: FieldPath, root: type[BaseModel]) -> tuple[tuple[str, ...], str]:
    """Return the part of the model at ``where`` that begins a message, like ``memory.engine: ...``, and the rest.

    A rule that involves several parts of a model fails at the model. Its message begins with the invalid part.
    """
    message = details["msg"].removeprefix("Value error, ")
    start, separator, rest = message.partition(": ")
    part = tuple(start.split("."))
    model = _model_at(where, root)
    is_field = model is not None and part[0] in _fields(model)
    return (part, rest) if separator and is_field else ((), message)


def _fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a model by their names in a file."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _model_at(path: Sequence[str | int], root: type[BaseModel]) -> type[BaseModel] | None:
    """Return the model of the fields at a path in a file; None within free-form parts and mappings."""
    at: Any = root
    for name in path:
        if _is_model(at) and isinstance(name, int):
            # an entry of a list: `at` is already the type of the entries
            continue
        if _is_model(at):
            field = _fields(at).get(str(name))
            at = field and field.annotation
        else:
            # a mapping by name: continue with the type of its values
            at = get_args(at)[1] if get_origin(at) is dict else None
        if not _is_model(at) and get_origin(at) is not dict:
            at = next(filter(_is_model, get_args(at)), None)
    return at if _is_model(at) else None


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _words(details: ErrorDetails, path: FieldPath, root: type[BaseModel]) -> tuple[str, str]:
    """Return the problem and the advice."""
    model = _model_at(path[:-1], root)
    given, limits = _shown(details["input"]), details.get("ctx", {})
    fields = list(_fields(model)) if model else []
    match details["type"]:
        case "missing":
            return "is missing", _example(str(path[-1]))
        case "extra_forbidden":
            return f"unknown field{_nearest(str(path[-1]), fields)}", ""
        case "string_type":
            return f"must be text, not {given}", f'put it in quotes: "{given}"' if _simple(details["input"]) else ""
        case "string_pattern_mismatch" if path == ("name",):
            return (
                f"'{given}' is not a valid name",
                "use at most 63 lower case letters, digits and dashes, like quarter-gpu",
            )
        case "string_too_short":
            return "is empty", "write a value, or remove the field"
        case "string_too_long":
            return f"has {len(details['input'])} characters", f"use at most {limits.get('max_length')}"
        case "float_type" | "float_parsing":
            return f"must be a number, not {given}", "write a number without quotes, like 1.5"
        case "int_type" | "int_parsing" | "int_from_float":
            quoted = f'"{given}"' if isinstance(details["input"], str) else given
            return f"must be a whole number, not {quoted}", "write a number without quotes, like 1"
        case "greater_than_equal":
            return f"{given} is too small", f"write at least {limits.get('ge')}"
        case "less_than_equal":
            return f"{given} is too large", f"write at most {limits.get('le')}"
        case "bool_type" | "bool_parsing":
            return f"must be true or false, not {given}", ""
        case "tuple_type" | "list_type":
            return f"must be a list, not {given}", f"write [{given}]" if _simple(
                details["input"]
            ) else "write [one, two]"
        case "dict_type":
            return f"must have fields, not {given}", "write  field: value  lines below it"
        case "model_type" | "model_attributes_type":
            inner = _model_at(path, root)
            names = ", ".join(_fields(inner)) if inner else ""
            return f"must have fields, not {given}", f"its fields are {names}" if names else ""
        case kind if kind == IDLE_ORDER:
            first, second = (
                f"{limits[name]} ({duration(limits[seconds])})"
                for name, seconds in (("first", "earlier"), ("second", "later"))
            )
            return f"{second} must be more than {first}", ""
        case kind if kind == NAME_TAKEN:
            which = "JupyterHub group" if limits["kind"] == "group" else "user"
            return f"{limits['name']} is {limits['first']} already", f"give each {which} one quota"
        case kind if kind == LAYER_CANNOT:
            return limits["what"], limits["advice"]
        case "value_error":
            _, message = _part_and_message(details, details["loc"], root)
            what, _, advice = message.partition(": ")
            # in a message with advice after a semicolon, the advice can contain a colon
            return (message, "") if ";" in what else (what, advice)
        case "enum" | "literal_error":
            values = re.findall("'([^']*)'", str(limits.get("expected")))
            close = _close(str(details["input"]), values)
            return f"must be {_either(values)}, not {given}", f"did you mean '{close}'?" if close else ""
        case _:
            return details["msg"][:1].lower() + details["msg"][1:], ""


def _either(values: Sequence[str]) -> str:
    return " or ".join([*filter(None, [", ".join(values[:-1])]), *values[-1:]])


def _nearest(name: str, fields: list[str]) -> str:
    close = _close(name, fields)
    if close:
        return f"; did you mean '{close}'?"
    return f"; known fields are {', '.join(fields)}" if fields else ""


def _close(name: str, names: Sequence[str]) -> str | None:
    """Return the name nearest to a misspelled name; None if there is none. Dashes count as underscores."""
    by_spelling = {_spelling(candidate): candidate for candidate in names}
    close = get_close_matches(_spelling(name), by_spelling, n=1)
    return by_spelling[close[0]] if close else None


def _spelling(name: str) -> str:
    return name.lower().replace("-", "_")


def _example(name: str) -> str:
    examples = {"name": "name: quarter-gpu", "display_name": "display_name: 0.25 GPU"}
    return f"add a line like  {examples[name]}" if name in examples else ""


def _shown(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, dict):
        return "a mapping of fields"
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _simple(value: Any) -> bool:
    return isinstance(value, str | int | float)


_ADVICE: dict[Callable[[Any], Any], str] = {
    parse_bytes: "write a unit, like {number}Gi, if you mean another amount",
    parse_percent_or_bytes: "write a unit, like {number}Gi or {number}%, if you mean another amount",
    parse_seconds: "write a unit, like {number}m, if you mean another time",
}


def bare_numbers(
    root: type[BaseModel], file: str, numbers: Mapping[FieldPath, str], lines: Mapping[FieldPath, int]
) -> Iterator[Problem]:
    """Yield a warning for each number without a unit. ``numbers``: the texts of all numbers of a valid file."""
    for path, text in numbers.items():
        model = _model_at(path[:-1], root)
        field = _fields(model).get(str(path[-1])) if model is not None else None
        parts = _parts([field.annotation, *field.metadata]) if field is not None else iter(())
        parser: Callable[[Any], Any] | None = next(
            (part.func for part in parts if isinstance(part, BeforeValidator) and part.func in _ADVICE), None
        )
        number = float(text)
        if parser is None or not number:
            continue
        amount = f"{number:,.10g} s" + (f" ({duration(number)})" if number >= 60 else "")
        if parser is not parse_seconds:
            amount = f"{number:,.15g} bytes" + (f" ({memory(int(number))})" if number >= 2**20 else "")
        advice = _ADVICE[parser].format(number=f"{number:.15g}")
        yield Problem(file, lines[path], ".".join(map(str, path)), f"{text} means {amount}", advice)


def _parts(kinds: list[Any]) -> Iterator[Any]:
    for kind in kinds:
        yield kind
        yield from _parts(list(get_args(kind)))
