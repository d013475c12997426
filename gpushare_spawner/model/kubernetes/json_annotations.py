"""Annotations that are JSON of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

_Value = TypeVar("_Value")


def read_json(annotations: Mapping[str, str], name: str, kind: TypeAdapter[_Value], otherwise: _Value) -> _Value:
    """Return what an annotation says; ``otherwise`` where it is absent. Raises ValueError, which names it."""
    text = annotations.get(name)
    if text is None:
        return otherwise
    try:
        return kind.validate_json(text)
    except ValidationError as error:
        raise ValueError(f"the annotation {name} is {text!r}: {first_problem(error)}") from None


def first_problem(error: ValidationError) -> str:
    """Return the field that is wrong, and why: "until: Input should be a finite number"."""
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}"
