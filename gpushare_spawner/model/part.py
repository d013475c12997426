"""Base classes of our pydantic models: parts of files that admins write, and parts of messages between processes."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from typing import Any

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler
from pydantic_core import CoreSchema


class FilePart(BaseModel):
    """A part of a file. In the JSON Schema the text below a field is the field's description."""

    # A misspelt field must be an error, not a setting without effect.
    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        # pydantic's `use_attribute_docstrings` reads the sources when a class is made: 0.1 s of each hub's start
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
    """A part of a message or record. Unknown fields are ignored: a newer version can write more than this one knows."""

    model_config = ConfigDict(extra="ignore", frozen=True)
