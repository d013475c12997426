"""Charts and values as the tests look at them."""

from __future__ import annotations

import copy
import os
from functools import cache
from pathlib import Path
from typing import Any

import helm_python
import yaml

ROOT = Path(__file__).parents[2]
VALUES = ROOT / "helm-values"
AGENT_CHART = VALUES / "gpushare-agent"


def z2jh_folder() -> Path:
    """Where values.yaml and values.schema.yaml of zero-to-jupyterhub are: $GPUSHARE_Z2JH, or beside the repository."""
    return Path(os.environ.get("GPUSHARE_Z2JH") or ROOT.parent / "shared/data/z2jh")


def render(values: dict[str, Any], name: str = "gpushare", namespace: str = "jhub") -> list[dict[str, Any]]:
    """All objects of the agent's chart with these values."""
    return objects(_agent_chart().render(values, name=name, namespace=namespace))


def notes(values: dict[str, Any]) -> str:
    """What helm says after the installation."""
    text: str = _agent_chart().render(values, name="gpushare", namespace="jhub")["gpushare-agent/templates/NOTES.txt"]
    return text


@cache
def _agent_chart() -> Any:
    return helm_python.Chart.load(AGENT_CHART)


def load(path: Path) -> Any:
    return yaml.load(path.read_text(), yaml.CSafeLoader)


def merged(base: dict[str, Any], *more: dict[str, Any]) -> dict[str, Any]:
    """As helm merges values: objects are joined, everything else is replaced."""
    result = copy.deepcopy(base)
    for values in more:
        for key, value in values.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both else copy.deepcopy(value)
    return result


def objects(rendered: dict[str, str]) -> list[dict[str, Any]]:
    """All objects of all rendered templates."""
    manifests = [text for name, text in rendered.items() if not name.endswith("NOTES.txt")]
    # the C parser of the same library: ten times as fast
    return [item for text in manifests for item in yaml.load_all(text, yaml.CSafeLoader) if item]


def one(items: list[dict[str, Any]], kind: str, name: str = "") -> dict[str, Any]:
    """The only object of this kind (and name)."""
    (found,) = [item for item in items if item["kind"] == kind and name in ("", item["metadata"]["name"])]
    return found
