"""The file `layers.yaml` beside the templates: which sharing layer the GPUs of which nodes are shared by."""

from __future__ import annotations

import logging
from pathlib import Path

from gpushare_spawner.model.layers import LayersFile
from gpushare_spawner.templates.optional_file import OptionalFile
from gpushare_spawner.templates.parser import LAYERS

LAYERS_FILE = "layers.yaml"
"""Its name in the templates' folder. The name is reserved: a template in it is read as layers."""


def layers_file(folder: str | Path, log: logging.Logger | None = None) -> OptionalFile[LayersFile]:
    """Return the file of this folder of templates."""
    kept = "the last valid layers stay in force"
    return OptionalFile(LAYERS, Path(folder) / LAYERS_FILE, "Layers", kept, log)
