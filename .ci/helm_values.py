#!/usr/bin/env python3
"""Writes into helm-values/ what comes from elsewhere: make helm-values

The files of jupyterhub_config.d/ into jupyterhub.yaml, and the schema of compute templates into the agent's chart.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gpushare_spawner.templates.command import schema_of

ROOT = Path(__file__).resolve().parent.parent
HUB_VALUES = ROOT / "helm-values" / "jupyterhub.yaml"
CHART_SCHEMA = ROOT / "helm-values" / "gpushare-agent" / "values.schema.json"
INDENT = " " * 8


def main() -> None:
    for file, text in written().items():
        file.write_text(text)


def written() -> dict[Path, str]:
    """The files and what they should say now."""
    return {
        HUB_VALUES: with_config_files(HUB_VALUES.read_text()),
        CHART_SCHEMA: with_templates(CHART_SCHEMA.read_text()),
    }


def with_config_files(values: str) -> str:
    """The values with the texts of jupyterhub_config.d/ as they are now."""
    lines: list[str] = []
    skipping = False
    for line in values.splitlines():
        if skipping and (not line or line.startswith(INDENT)):
            continue
        skipping = False
        lines.append(line)
        if line.strip() == "stringData: |":
            name = lines[-2].rpartition("/")[2]
            text = (ROOT / "jupyterhub_config.d" / name).read_text()
            lines += [INDENT + part if part else "" for part in text.splitlines()]
            skipping = True
        elif line == "proxy:":
            lines.insert(-1, "")
    return "\n".join(lines) + "\n"


def with_templates(schema: str) -> str:
    """The chart's schema with those of a compute template and of the files beside templates as they are now."""
    values = json.loads(schema)
    template = schema_of("template")
    beside = {"Quotas": schema_of("quotas"), "IdlePolicy": schema_of("idle"), "Layers": schema_of("layers")}
    beside["PlacementPins"] = schema_of("placement")
    parts = {"Template": template, **beside}
    for schema_of_file in (template, *beside.values()):
        schema_of_file.pop("$schema")
        parts |= schema_of_file.pop("$defs")
    # the key in the values is the name of a template that has none
    template["required"].remove("name")
    values["definitions"] = {name: _in_draft_7(part) for name, part in sorted(parts.items())}
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def _in_draft_7(part: Any) -> Any:
    """References lead elsewhere there; and defaults, which helm does not look at, are left out."""
    if isinstance(part, list):
        return [_in_draft_7(item) for item in part]
    if not isinstance(part, dict):
        return part
    if "$ref" in part:
        return {"$ref": part["$ref"].replace("#/$defs/", "#/definitions/")}
    if "anyOf" in part:
        part = _one_branch(part)
    # a field may be called "default" too: then what is under it is a schema
    return {
        key: _in_draft_7(value)
        for key, value in part.items()
        if key != "default" or (isinstance(value, dict) and not {"type", "$ref"}.isdisjoint(value))
    }


def _one_branch(part: dict[str, Any]) -> dict[str, Any]:
    """Return the schema without `anyOf`: helm reports an error for each of its branches, and the last one is null's.

    The branches differ by the type of the value, and each keyword but `enum` applies to values of one type only.
    """
    types_of_any = [branch.get("type") for branch in part["anyOf"] if "enum" not in branch]
    # names of some values of a type whose other values are allowed too
    branches = [branch for branch in part["anyOf"] if "enum" not in branch or branch["type"] not in types_of_any]
    kept = {key: value for key, value in part.items() if key != "anyOf"}
    null = {"type": "null"}
    if any("$ref" in branch for branch in branches):
        (other,) = [branch for branch in branches if "$ref" in branch]
        (typed,) = [branch for branch in branches if "$ref" not in branch]
        then = {} if typed == null else {"then": typed}
        return {**kept, "if": {"type": typed["type"]}, **then, "else": other}
    joined: dict[str, Any] = {"type": [branch["type"] for branch in branches]}
    for branch in branches:
        joined |= {key: value for key, value in branch.items() if key not in ("type", "title")}
    if null in branches and "enum" in joined:
        joined["enum"] = [*joined["enum"], None]
    return {**kept, **joined}


if __name__ == "__main__":
    main()
