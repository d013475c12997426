"""Pages of the hub that we extend: the one of a spawn that is pending says whether the spawn waits for a GPU."""

from __future__ import annotations

from pathlib import Path

FOLDER = str(Path(__file__).parent)
"""For ``c.JupyterHub.template_paths``."""
