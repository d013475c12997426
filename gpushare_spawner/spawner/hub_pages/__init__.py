"""Pages of the hub that we extend: they say whether a spawn waits for a GPU, and why a server was stopped."""

from __future__ import annotations

from pathlib import Path

FOLDER = str(Path(__file__).parent)
"""For ``c.JupyterHub.template_paths``."""
