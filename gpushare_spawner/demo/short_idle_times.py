"""The shipped templates with idle times so short that the demo shows all idle actions in five minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ALL_WORK = {"min_use": 0}
"""All GPU work counts as use: the demo's cells are small."""
SHORT = {"downgrade_after": "1m", "release_after": "2m", "stop_after": "30m", "warn_before": "20s"}


def write_demo_templates(shipped: Path, into: Path) -> None:
    """Write each template of the one folder into the other, with short idle times. Raises OSError.

    Other templates in the folder are removed. An invalid template is copied unchanged, so that the hub reports it.
    """
    into.mkdir(parents=True, exist_ok=True)
    for stale in into.glob("*.y*ml"):
        stale.unlink()
    for path in sorted(shipped.glob("*.y*ml")):
        text = path.read_text()
        try:
            template = yaml.safe_load(text)
        except yaml.YAMLError:
            template = None
        if isinstance(template, dict):
            text = yaml.safe_dump(shortened(template), sort_keys=False, allow_unicode=True)
        (into / path.name).write_text(text)


def shortened(template: dict[str, Any]) -> dict[str, Any]:
    """Return the template with short times for the idle actions that it has. All GPU work counts as use."""
    idle = template.get("idle")
    if not isinstance(idle, dict):
        return template
    return {
        **template,
        "idle": {**idle, **ALL_WORK, **{step: SHORT[step] for step in SHORT if step in idle or step == "warn_before"}},
    }
