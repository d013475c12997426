"""The JSON Schema of a template file, for editors."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from gpushare_spawner.model.template import Template

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def template_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a template file, with a description of each field.

    The schema has each field and its type. Rules over several fields, like the order of the idle actions, are only in
    the check of the file.
    """
    schema = Template.model_json_schema(mode="validation")
    parts = [schema, *schema.get("$defs", {}).values()]
    for part in parts:
        for described in part.get("properties", {}).values():
            described.pop("title", None)  # the field's name again, in capitals
    return {"$schema": DIALECT, **schema, "title": "Compute template", "description": _sentence(Template)}


def _sentence(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").partition(". ")[0] + "."
