"""The file `idle.yaml` beside the templates: idle actions for all of them."""

from __future__ import annotations

import logging
from pathlib import Path

from gpushare_spawner.model.idle_policy import IdlePolicy
from gpushare_spawner.templates.optional_file import OptionalFile
from gpushare_spawner.templates.parser import IDLE_POLICY

IDLE_FILE = "idle.yaml"
"""Its name in the templates' folder. The name is reserved: a template in it is read as idle actions for all."""


def idle_file(folder: str | Path, log: logging.Logger | None = None) -> OptionalFile[IdlePolicy]:
    """Return the file of this folder of templates."""
    kept = "the last valid idle policy stays in force"
    return OptionalFile(IDLE_POLICY, Path(folder) / IDLE_FILE, "Idle policy", kept, log)
