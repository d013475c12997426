"""The JSON Schemas of a template file and of the files beside templates, for editors."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from gpushare_spawner.model.idle_policy import IdlePolicy
from gpushare_spawner.model.layers import LayersFile
from gpushare_spawner.model.quota import Quotas
from gpushare_spawner.model.template import Template

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def template_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a template file, with a description of each field.

    The schema has each field and its type. Rules over several fields, like the order of the idle actions, are only in
    the check of the file.
    """
    return file_schema(Template, "Compute template")


def quota_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the quota file; see `template_schema`."""
    return file_schema(Quotas, "Quotas")


def idle_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the file `idle.yaml`; see `template_schema`."""
    return file_schema(IdlePolicy, "Idle policy")


def layers_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of the file `layers.yaml`; see `template_schema`."""
    return file_schema(LayersFile, "Layers")


def file_schema(model: type[BaseModel], title: str) -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a file; see `template_schema`."""
    schema = model.model_json_schema(mode="validation")
    parts = [schema, *schema.get("$defs", {}).values()]
    for part in parts:
        for described in part.get("properties", {}).values():
            described.pop("title", None)  # the field's name again, in capitals
    return {"$schema": DIALECT, **schema, "title": title, "description": _sentence(model)}


def _sentence(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").partition(". ")[0] + "."
