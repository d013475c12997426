"""Problems of a template file, of quotas or of an idle policy, in words for its admin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from logging import Logger
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gpushare_spawner.model.quota import NAME_TAKEN
from gpushare_spawner.model.template import IDLE_ORDER, LAYER_CANNOT
from gpushare_spawner.wording.amounts import duration


@dataclass(frozen=True)
class Problem:
    """One problem. ``str()`` gives one line: file, line, field, what is wrong, and what would be right."""

    file: str
    line: int | None
    """Counted from 1; None: the whole file."""
    field: str
    """With dots, like ``gpu.fraction``; empty: the whole file."""
    what: str
    advice: str = ""

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        parts = [place, self.field, self.what] if self.field else [place, self.what]
        return _one_line(": ".join(parts) + (f"; {self.advice}" if self.advice else ""))


def log_problems(log: Logger, what: str, path: Path, before: Sequence[Problem], now: Sequence[Problem]) -> None:
    """Log the problems that are new, and the end of all. ``what``: "Template", as each line begins; ``path``: where."""
    for problem in now:
        if problem not in before:
            log.error("%s %s", what, problem)
    if before and not now:
        log.info("%s: all problems are solved", path)


def problems_of(
    error: ValidationError, root: type[BaseModel], file: str, lines: Mapping[tuple[str | int, ...], int]
) -> Iterator[Problem]:
    """Yield a problem for each field that pydantic rejects. ``root``: the file's model; ``lines``: of each field."""
    for details in error.errors(include_url=False, include_context=True):
        path = _path(details, root)
        what, advice = _words(details, path, root)
        yield Problem(file, line_of(path, lines), ".".join(map(str, path)), what, advice)


def line_of(path: tuple[str | int, ...], lines: Mapping[tuple[str | int, ...], int]) -> int | None:
    """Return the line of a field, or of the nearest field around it that the file has; None: of none."""
    for length in range(len(path), -1, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return None


def _one_line(text: str) -> str:
    """Return the text with line breaks and control characters as escapes: a field's name can be any text."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _path(details: ErrorDetails, root: type[BaseModel]) -> tuple[str | int, ...]:
    if details["type"] == NAME_TAKEN:
        context = details.get("ctx", {})
        return ("groups", context["department"], "teams", context["team"])
    if details["type"] == LAYER_CANNOT:
        return tuple(details.get("ctx", {})["field"].split("."))
    # the name of a mapping's entry that is wrong itself
    where = details["loc"][:-1] if details["loc"][-1:] == ("[key]",) else details["loc"]
    # A rule over several parts of a file fails at its root; its message begins with the part that it is about.
    part, separator, _ = details["msg"].removeprefix("Value error, ").partition(": ")
    if not where and separator and part in root.model_fields:
        return (part,)
    return where


def _model_at(path: Sequence[str | int], root: type[BaseModel]) -> type[BaseModel] | None:
    """Return the model whose fields are at this path of a file; None within free-form parts and mappings."""
    at: Any = root
    for name in path:
        if _is_model(at) and isinstance(name, int):
            # an entry of a list, whose type stands for the list already
            continue
        if _is_model(at):
            found = at.model_fields.get(str(name))
            at = found and found.annotation
        else:
            # a mapping by name: the values' type
            at = get_args(at)[1] if get_origin(at) is dict else None
        if not _is_model(at) and get_origin(at) is not dict:
            at = next(filter(_is_model, get_args(at)), None)
    return at if _is_model(at) else None


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _words(details: ErrorDetails, path: tuple[str | int, ...], root: type[BaseModel]) -> tuple[str, str]:
    """Return what is wrong, and what would be right."""
    model = _model_at(path[:-1], root)
    given, limits = _shown(details["input"]), details.get("ctx", {})
    known = list(model.model_fields) if model else []
    match details["type"]:
        case "missing":
            return "is missing", _example(str(path[-1]))
        case "extra_forbidden":
            return f"unknown field{_nearest(str(path[-1]), known)}", ""
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
            names = ", ".join(inner.model_fields) if inner else ""
            return f"must have fields, not {given}", f"its fields are {names}" if names else ""
        case kind if kind == IDLE_ORDER:
            first, second = (
                f"{limits[name]} ({duration(limits[seconds])})"
                for name, seconds in (("first", "earlier"), ("second", "later"))
            )
            return f"{second} must be more than {first}", ""
        case kind if kind == NAME_TAKEN:
            return f"{limits['team']} is {limits['first']} already", "give each JupyterHub group one quota"
        case kind if kind == LAYER_CANNOT:
            return limits["what"], limits["advice"]
        case "value_error":
            message = details["msg"].removeprefix("Value error, ").removeprefix(f"{path[-1]}: " if path else "")
            what, _, advice = message.partition(": ")
            return what, advice
        case _:
            return details["msg"][:1].lower() + details["msg"][1:], ""


def _nearest(name: str, known: list[str]) -> str:
    close = get_close_matches(name.lower().replace("-", "_"), known, n=1)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known fields are {', '.join(known)}" if known else ""


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
