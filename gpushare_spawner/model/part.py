"""Base classes of our pydantic models: parts of admins' files, and parts of messages between processes.

The module also checks texts: that admins' regular expressions match in linear time, and that text has no hidden or
reordering characters.

The hub matches admins' patterns against users' texts in its event loop. Python's `re` backtracks: "(a+)+" and 30
letters block the hub for minutes. pydantic contains the Rust crate `regex`: its time is at most proportional to the
product of both lengths. It has no look-around and no backreferences
(https://docs.rs/regex/latest/regex/#untrusted-input).
"""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
import unicodedata
from functools import lru_cache
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    StringConstraints,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import CoreSchema, SchemaError


class FilePart(BaseModel):
    """A part of a file. In the JSON Schema, the docstring of a field is its description."""

    # A misspelled field must be an error, not a setting without effect.
    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        # pydantic's `use_attribute_docstrings` reads the sources when a class is created: 0.1 s of each hub's start
        schema = handler(core_schema)
        fields = handler.resolve_ref_schema(schema).get("properties", {})
        for base in reversed(cls.__mro__):
            if issubclass(base, FilePart) and base is not FilePart:
                for name, text in _field_texts(base).items():
                    fields[cls.model_fields[name].alias or name].setdefault("description", text)
        return schema


def _field_texts(cls: type) -> dict[str, str]:
    """Return the string below each field in the class's source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    texts = {}
    for line, after in itertools.pairwise(tree.body):
        match line, after:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = inspect.cleandoc(text)
    return texts


class MessagePart(BaseModel):
    """A part of a message or record. Unknown fields are ignored, because a newer version can write additional ones."""

    model_config = ConfigDict(extra="ignore", frozen=True)


def faults(error: ValidationError, whole: str) -> list[str]:
    """Return the faults of a message or record, each with the path of its field; ``whole`` names the message itself."""
    return [f"{'.'.join(map(str, part['loc'])) or whole}: {part['msg']}" for part in error.errors(include_url=False)]


MAX_PATTERN = 1000
"""Maximum characters of a pattern. Repetitions are limited by the 10 MiB that `regex` allows for a compiled pattern."""
_LINEAR = ConfigDict(regex_engine="rust-regex")
_ADVICE = "use a pattern that is matched in linear time, without look-around and backreferences"


def matches_whole(pattern: str, text: str) -> bool:
    """Return whether the pattern matches the whole text, as in the `pattern` attribute of an HTML field.

    Raises ValueError for a pattern that is not supported.
    """
    return _matches(rf"^(?:{pattern})\z", text)


def matches_start(pattern: str, text: str) -> bool:
    """Return whether the pattern matches the text from its start, as in KubeSpawner.

    Raises ValueError for a pattern that is not supported.
    """
    return _matches(rf"^(?:{pattern})", text)


def check_pattern(pattern: str) -> str:
    """Return the pattern. Raises ValueError, with the reason and advice, if the pattern is not supported."""
    _compiled(pattern)
    _compiled(rf"^(?:{pattern})\z")
    return pattern


TextPattern = Annotated[str, Field(max_length=MAX_PATTERN), AfterValidator(check_pattern)]
"""A regular expression in an admin's file."""


def _matches(pattern: str, text: str) -> bool:
    try:
        _compiled(pattern).validate_python(text)
    except ValidationError:
        return False
    return True


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> TypeAdapter[str]:
    try:
        return TypeAdapter(Annotated[str, StringConstraints(pattern=pattern)], config=_LINEAR)
    except SchemaError as error:
        # the message shows the pattern on several lines; the last line is the reason
        reason = str(error).strip().splitlines()[-1].strip().removeprefix("error: ").removeprefix("SchemaError: ")
        raise ValueError(f"the pattern is not supported ({reason.rstrip('.')}): {_ADVICE}") from None


_DIRECTIONS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Bidirectional controls (Unicode Standard Annex 9): they can make "0.25" look like "52.0"."""
_HIDDEN = frozenset({"Cc", "Cs", "Zl", "Zp"})
"""Unicode categories of control characters like escape, surrogates, and line and paragraph separators."""


def _shown(text: str, allowed: str) -> str:
    for letter in text:
        if letter in _DIRECTIONS or (unicodedata.category(letter) in _HIDDEN and letter not in allowed):
            raise ValueError(
                f"the character U+{ord(letter):04X} is not shown, or changes how other text is shown: remove it"
            )
    return text


SHOWN_LINE = AfterValidator(lambda text: _shown(text, ""))
"""Validator for one line of text."""

ShownLine = Annotated[str, SHOWN_LINE]
"""One line of text."""

SHOWN_TEXT = AfterValidator(lambda text: _shown(text, "\n\r\t"))
"""Validator for text that can have several lines."""
